"""Distillations that are composed of shipped workloads, beside traces of the same models and students."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from protwin.runtime.distillation.configurations import distillation_of_configuration
from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.basics.errors import PlanError
from protwin.shared.catalogue.models import model_configuration
from protwin.shared.phases.distillation import KeyToLearn
from protwin.shared.schema.plan import Plan, TrainingMethod
from protwin.shared.schema.plan_check import check_plan
from protwin.shared.schema.workload import COMPOSED, OperationClass, Phase, Workload
from protwin.shared.students.student import BlockLoss, BlockOverrides, Student, Subblock
from protwin.shared.workloads.catalogue_pairs import distillation_of_shipped
from tests.proof_size import some_quick

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 512}
SHAPE: dict[str, Any] = {"batch_size": 2, "sequence_length": 96}
WHOLE = (KeyToLearn.SUBBLOCK_ATTENTION, KeyToLearn.SUBBLOCK_FFN)
RELATIVES: dict[str, tuple[str, Student]] = {
    "llama-3.2-1b": ("float32", Student(loss=BlockLoss.COSINE)),
    "qwen3-0.6b": ("bfloat16", Student(keys_to_learn=WHOLE, loss=BlockLoss.MSE)),
    "mistral-7b": ("bfloat16", Student()),
    "mixtral-8x7b": ("bfloat16", Student(loss=BlockLoss.BATCHED_NORMALIZED_MSE)),
}


def configuration(name: str) -> dict[str, Any]:
    return dict(model_configuration(name).config) | SMALL


def composed_of(name: str, student: Student, dtype: str) -> Workload | None:
    described = configuration(name)
    full = workload_of_configuration(described, name=name, dtype=dtype, **SHAPE)
    return distillation_of_shipped(full, student, described, name=name)


def products(phase: Phase) -> int:
    return sum(op.flops * op.count for op in phase.operations if op.operation_class is OperationClass.MATMUL)


@some_quick("name", RELATIVES, quick=1)
def test_a_composed_distillation_is_what_a_trace_sees(name: str) -> None:
    dtype, student = RELATIVES[name]
    composed = composed_of(name, student, dtype)
    assert composed is not None
    traced = distillation_of_configuration(configuration(name), student=student, name=name, dtype=dtype, **SHAPE)
    assert (composed.parameters, composed.batch_shapes) == (traced.parameters, traced.batch_shapes)
    assert [block.name for block in composed.blocks] == [block.name for block in traced.blocks]
    assert composed.identity == traced.composed_identity != traced.identity
    assert composed.model_hash == COMPOSED
    assert composed.distillation is not None
    assert traced.distillation is not None
    hidden_bytes = traced.profile_of(0).output_bytes
    wide_bytes = 4 * hidden_bytes // traced.compute_dtype.item_bytes
    # What a loss keeps of a vector is left out (Note: Work of a block loss).
    of_vectors_bytes = 4 * 4 * SHAPE["batch_size"] * SHAPE["sequence_length"]
    assert 0 <= composed.resident_bytes - traced.resident_bytes <= 16_384
    for block in range(4):
        mine, theirs = composed.profile_of(block), traced.profile_of(block)
        losses = [one.distillation.losses[one.blocks[block].profile] for one in (composed, traced)]
        assert mine.output_bytes == theirs.output_bytes
        assert products(mine.forward) == products(theirs.forward)
        assert products(mine.backward) == products(theirs.backward)
        assert mine.backward.stated_gradient_bytes == theirs.backward.stated_gradient_bytes
        # Upper bounds: a backward that makes its input's gradient holds it, and what that is made of.
        held = [p.forward.net_bytes + loss.net_bytes for p, loss in zip((mine, theirs), losses, strict=True)]
        assert -of_vectors_bytes <= held[0] - held[1] <= 3 * wide_bytes
        tops = [h + p.backward.peak_bytes for h, p in zip(held, (mine, theirs), strict=True)]
        assert -of_vectors_bytes <= tops[0] - tops[1] <= 5 * wide_bytes + 1_024


def test_a_plan_of_either_goes_with_a_trace_and_no_other_students_does() -> None:
    student = Student()
    composed = composed_of("llama-3.2-1b", student, "bfloat16")
    assert composed is not None
    described: dict[str, Any] = {"name": "llama-3.2-1b", "dtype": "bfloat16", **SHAPE}
    traced = distillation_of_configuration(configuration("llama-3.2-1b"), student=student, **described)
    narrow = Student(all=BlockOverrides(intermediate_size=1024))
    other = distillation_of_configuration(configuration("llama-3.2-1b"), student=narrow, **described)
    plan = Plan(workload_id=composed.identity, method=TrainingMethod.BYPASS, chunk_bytes=2**26, n_persist=0, n_buffer=4)
    check_plan(plan, composed)
    check_plan(plan, traced)
    with pytest.raises(PlanError, match="Search a plan for this one"):
        check_plan(plan, other)
    with pytest.raises(PlanError, match="Search a plan for this one"):
        check_plan(plan.model_copy(update={"workload_id": traced.identity}), composed)


@some_quick(
    ("name", "student"),
    [
        ("llama-3.2-1b", Student(all=BlockOverrides(intermediate_size=64))),
        ("llama-3.2-1b", Student(block={"1": BlockOverrides(ffn=Subblock.ABSENT)})),
        ("llama-3.2-1b", Student(keys_to_learn=(KeyToLearn.SUBBLOCK_FFN,))),
        ("gpt2", Student()),
    ],
    ids=["narrower", "without an FFN", "learnt in part", "with dropout"],
    quick=2,
)
def test_what_a_teachers_workload_does_not_tell_is_traced(name: str, student: Student) -> None:
    small = {"n_layer": 2, "vocab_size": 512} if name == "gpt2" else SMALL
    described = dict(model_configuration(name).config) | small
    full = workload_of_configuration(described, name=name, dtype="bfloat16", **SHAPE)
    assert distillation_of_shipped(full, student, described, name=name) is None


def test_no_torch_is_needed() -> None:
    program = (
        "import sys; sys.modules.update(torch=None, transformers=None)\n"
        "from protwin.shared.students.student import Student\n"
        "from protwin.shared.workloads.source import WorkloadRequest, resolve_workload, untraced_workload\n"
        "asked = WorkloadRequest('llama-3-70b', batch_size=3, sequence_length=333, student=Student())\n"
        "found = resolve_workload(asked, warn=exit)\n"
        "again = untraced_workload(asked)\n"
        "assert found == again and found.method == 'bypass' and found.num_blocks == 160\n"
        "sys.exit(found.num_tokens != 3 * 333)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0
