"""Fidelity of bypass distillation: a teacher and its student, predicted beside measured, by plans that came by chance.

Three pairs of models of different families on the CPU as a device; two have links throttled to 2 GB/s and 1 GB/s, so
that transfers matter.  Residencies, chunk sizes, windows, micro-batches and limits of the norm come by chance, with
teacher and student partly on the host.  Beside these plans run what the search picks, within a budget and without one,
and a plain loop that has both models whole on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from protwin.calibration.fitting.pair_subject import PairSubject
from protwin.calibration.validation.fidelity import Fidelity
from protwin.calibration.validation.validate import Trial, validate
from protwin.runtime.data.byte_text import byte_batches, python_reference
from protwin.runtime.devices.cpu_device import CpuDevice
from protwin.runtime.devices.probe import probe_hardware
from protwin.runtime.model.configurations import build_model
from protwin.shared.basics.progress import OnProgress
from protwin.shared.schema.record import Record
from protwin.shared.students.student import BlockOverrides, Student, Subblock

BATCH: Final = {"batch_size": 2, "sequence_length": 128}
ENDS: Final = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
LLAMA: Final[dict[str, Any]] = ENDS | {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 704,
    "max_position_embeddings": 256,
}
GPT2: Final[dict[str, Any]] = ENDS | {
    "model_type": "gpt2",
    "n_embd": 256,
    "n_layer": 6,
    "n_head": 4,
    "n_positions": 256,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
QWEN3: Final[dict[str, Any]] = LLAMA | {
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
}
SLOW_LINKS: Final = {"host_to_device_bytes_per_s": 2e9, "device_to_host_bytes_per_s": 1e9}
PAIRS: Final[dict[str, tuple[dict[str, Any], Student, Callable[[], CpuDevice]]]] = {
    "bypass-llama": (
        LLAMA,
        Student(all=BlockOverrides(intermediate_size=352), block={"2": BlockOverrides(ffn=Subblock.ABSENT)}),
        CpuDevice,
    ),
    "bypass-gpt2": (GPT2, Student(all=BlockOverrides(intermediate_size=512)), partial(CpuDevice, **SLOW_LINKS)),
    "bypass-qwen3": (
        QWEN3,
        Student(all=BlockOverrides(num_key_value_heads=1, intermediate_size=512)),
        partial(CpuDevice, **SLOW_LINKS),
    ),
}
"""Teacher, student and device by name."""


def fidelity_of_bypass(
    name: str, trial: Trial, on_progress: OnProgress | None = None
) -> tuple[Fidelity, dict[str, Record]]:
    """What is found for the pair ``name`` of ``PAIRS``."""
    configuration, student, make_device = PAIRS[name]
    torch.manual_seed(0)
    teacher = build_model(configuration, name, torch.float32, device="cpu")
    batch = next(byte_batches(python_reference(), **BATCH, num_batches=1))
    hardware = probe_hardware(seconds=4.0, device=make_device())
    subject = PairSubject.of(
        teacher,
        student,
        batch,
        name=name,
        hardware=hardware,
        make_device=make_device,
        make_optimizer=partial(torch.optim.AdamW, lr=1e-4, fused=True),
    )
    return validate(subject, trial, on_progress=on_progress)
