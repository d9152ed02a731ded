"""What bypass runs compute in, and where their teachers lie meanwhile."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from protwin.runtime.bypass.interruption import Interruption, RunInterruptedError
from protwin.runtime.bypass.teacher import TeacherFolder
from protwin.runtime.distillation.block_losses import block_loss
from protwin.runtime.distillation.configurations import distillation_of_configuration
from protwin.runtime.runs.run_settings import KeptWeights, RunSettings
from protwin.runtime.students.student_model import make_student
from protwin.shared.schema.training_options import TrainingOptions
from protwin.shared.schema.workload import DType, Workload
from protwin.shared.students.student import Student
from tests.proof_size import some_quick
from tests.runtime.bypass.small_runs import LENGTH, SAMPLES, SHAPE, carry_out, data, plan_of, run_of, settings_of
from tests.runtime.distillation.cases import quiet
from tests.runtime.distillation.reference import learn_alone, seen_by_teacher
from tests.runtime.students.teachers import make_teacher

STUDENT = Student.model_validate({"initialization": {"ffn": "truncate"}, "all": {"intermediate_size": 24}})
BLOCKS = ("model.layers.0", "model.layers.1")
STEPS = 2


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> TeacherFolder:
    """Without dropout, in two files."""
    folder = tmp_path_factory.mktemp("models") / "teacher"
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(5)
        made = LlamaForCausalLM(LlamaConfig(**SHAPE | {"attention_dropout": 0.0}))
        made.save_pretrained(folder, max_shard_size="12KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return TeacherFolder.opened(folder)


def workload_of(teacher: TeacherFolder, autocast: DType | None) -> Workload:
    with quiet():
        return distillation_of_configuration(
            teacher.stored,
            student=STUDENT,
            name=teacher.name,
            batch_size=SAMPLES,
            sequence_length=LENGTH,
            options=TrainingOptions(autocast=autocast),
        )


def settings(teacher: TeacherFolder, **changed: Any) -> RunSettings:
    """At one rate, to the last weights."""
    fields: dict[str, Any] = {
        "student": STUDENT,
        "num_tokens": STEPS * 3 * SAMPLES * LENGTH,
        "warmup_frac": 0.0,
        "least_rate_frac": 1.0,
        "kept_weights": KeptWeights.FINAL,
    }
    return settings_of(teacher, **(fields | changed))


def trained(folder: Path, teacher: TeacherFolder, asked: RunSettings) -> dict[str, torch.Tensor]:
    workload = workload_of(teacher, asked.autocast)
    model = carry_out(run_of(folder, teacher, asked, workload=workload, plan=lambda: plan_of(workload, asked)))
    return load_file(model / "model.safetensors")


@some_quick("autocast", [None, DType.BFLOAT16], quick=1)
def test_blocks_of_a_run_learn_what_each_learns_alone(
    tmp_path: Path, teacher: TeacherFolder, autocast: DType | None
) -> None:
    asked = settings(teacher, autocast=autocast)
    plain = teacher.load("float32")
    student = make_student(plain, STUDENT, seed=asked.seed)
    around = partial(torch.autocast, "cpu", dtype=torch.bfloat16, enabled=autocast is not None)
    other_way = partial(torch.autocast, "cpu", dtype=torch.bfloat16, enabled=autocast is None)
    batches = data().source(asked).batches(0)
    steps = [list(islice(batches, 3)) for _ in range(STEPS)]
    rates: dict[str, Any] = {"lr": asked.learning_rate, "betas": asked.betas, "weight_decay": asked.weight_decay}
    optimizer = partial(torch.optim.AdamW, **rates, fused=True)

    def alone(way: Any) -> dict[str, torch.Tensor]:
        with quiet(), way():
            seen = [[seen_by_teacher(plain, BLOCKS, batch) for batch in step] for step in steps]
        own = make_student(plain, STUDENT, seed=asked.seed)
        learnt = learn_alone(own, BLOCKS, seen, block_loss(STUDENT.loss), optimizer, way, asked.max_gradient_norm)
        return {
            f"{name}.{key}": value
            for name, one in zip(BLOCKS, learnt, strict=True)
            for key, value in one.weights.items()
        }

    found, expected, wrong = trained(tmp_path / "run", teacher, asked), alone(around), alone(other_way)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert [name for name in wrong if not torch.equal(found[name], wrong[name])]
    assert [name for name in expected if not torch.equal(found[name], student.state_dict()[name])], "they learn"


def test_a_teacher_is_read_chunk_by_chunk_and_that_changes_no_bit(
    tmp_path: Path, teacher: TeacherFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, begin = settings(teacher), Interruption.__init__

    def stopping(self: Interruption) -> None:
        begin(self)
        self.is_wanted = True

    def refuse(self: TeacherFolder, dtype: str) -> Any:
        raise AssertionError("the teacher is loaded whole")

    with monkeypatch.context() as patched:
        patched.setattr(TeacherFolder, "load", refuse)
        found = trained(tmp_path / "read", teacher, asked)
    with monkeypatch.context() as patched:
        patched.setattr(TeacherFolder, "built", lambda self, dtype: (self.load(dtype), None))
        expected = trained(tmp_path / "whole", teacher, asked)
        # A run that was begun so goes on with chunks that are read.
        patched.setattr(Interruption, "__init__", stopping)
        with pytest.raises(RunInterruptedError):
            trained(tmp_path / "both", teacher, asked)
    both = trained(tmp_path / "both", teacher, asked)
    for other in (found, both):
        assert other.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(other[name], expected[name])] == []


@pytest.mark.parametrize(("family", "is_read"), [("llama", True), ("mixtral", False), ("gpt2", True)])
def test_teachers_whose_files_have_other_tensors_than_the_model_are_loaded_whole(
    tmp_path: Path, family: str, is_read: bool
) -> None:
    """transformers joins the experts of a Mixtral while it loads them."""
    made = make_teacher(family, torch.float32)
    with quiet():
        made.save_pretrained(tmp_path)
    model, weights = TeacherFolder.opened(tmp_path).built("bfloat16")
    assert (weights is not None) is is_read
    assert all(parameter.is_meta is is_read for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.training
