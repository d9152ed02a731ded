"""Bypass runs of a small teacher, in a folder of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from protwin.runtime import CpuDevice
from protwin.runtime.bypass.data import BypassData
from protwin.runtime.bypass.run import BypassRun
from protwin.runtime.bypass.teacher import TeacherFolder
from protwin.runtime.distillation.configurations import distillation_of_configuration
from protwin.runtime.runs.run_settings import RunSettings
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import DType, Workload
from protwin.shared.students.student import Student
from tests.runtime.distillation.cases import quiet

LENGTH: Final = 8
SAMPLES: Final = 2
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
STUDENT: Final = Student.model_validate(
    {"initialization": {"ffn": "prune"}, "all": {"intermediate_size": 24}, "block": {"1": {"num_key_value_heads": 1}}}
)


def save_teacher(folder: Path) -> None:
    """A Llama of two blocks, in the Hugging Face form."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        with quiet():
            LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)


@lru_cache
def data() -> BypassData:
    """Random tokens: 20 sequences to train on, 4 to validate on."""
    tokens = np.random.default_rng(3).integers(0, 64, 24 * LENGTH).astype(np.int32)
    return BypassData.held_out(tokens, 4 * LENGTH)


@lru_cache
def workload_of(student_json: str, teacher: Path) -> Workload:
    opened = TeacherFolder.opened(teacher)
    with quiet():
        return distillation_of_configuration(
            opened.stored,
            student=Student.from_mapping(json.loads(student_json), origin="a student"),
            name=opened.name,
            batch_size=SAMPLES,
            sequence_length=LENGTH,
        )


def settings_of(teacher: Path | TeacherFolder, **changed: Any) -> RunSettings:
    """Twelve steps of three micro-batches, validated and saved every few of them."""
    opened = TeacherFolder.opened(teacher) if isinstance(teacher, Path) else teacher
    fields: dict[str, Any] = {
        "teacher_weights": opened.fingerprint(),
        "teacher_configuration": opened.configuration,
        "student": STUDENT,
        "dtype": DType.FLOAT32,
        "data": data().fingerprint(LENGTH),
        "statistics_batches": 2,
        "sequence_length": LENGTH,
        "micro_batch_size": SAMPLES,
        "micro_batches": 3,
        "num_tokens": 12 * 3 * SAMPLES * LENGTH,
        "learning_rate": 1e-2,
        "validate_every": 4,
        "validation_batches": 2,
        "save_every": 3,
        "log_every": 5,
    }
    return RunSettings(**(fields | changed))


def plan_of(workload: Workload, settings: RunSettings, **changed: Any) -> Plan:
    fields: dict[str, Any] = {
        "workload_id": workload.identity,
        "method": "bypass",
        "chunk_bytes": 4096,
        "n_persist": 1,
        "n_buffer": 8,
        "prefetch_depth": 2,
        "micro_batches": settings.micro_batches,
        "max_gradient_norm": settings.max_gradient_norm,
    }
    return Plan(**(fields | changed))


def run_of(path: Path, teacher: Path | TeacherFolder, settings: RunSettings | None = None, **changed: Any) -> BypassRun:
    asked = settings or settings_of(teacher)
    workload = changed.get("workload")
    if isinstance(teacher, Path):
        workload, teacher = workload_of(asked.student.to_json(), teacher), TeacherFolder.opened(teacher)
    assert workload is not None
    fields: dict[str, Any] = {
        "path": path,
        "settings": asked,
        "teacher": teacher,
        "data": data(),
        "workload": workload,
        "plan": lambda: plan_of(workload, asked),
        "device": CpuDevice,
    }
    return BypassRun(**(fields | changed))


def carry_out(run: BypassRun, tell: Callable[[str], None] = lambda line: None) -> Path:
    return run.carry_out(tell, lambda done, total: None)
