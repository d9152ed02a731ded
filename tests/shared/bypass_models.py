"""A small workload of bypass distillation made by hand, for expectations that are worked out by hand."""

from __future__ import annotations

from typing import Any

from protwin.shared.phases.distillation import Distillation
from protwin.shared.schema.plan import Plan, TrainingMethod
from protwin.shared.schema.workload import Block, BlockProfile, OuterSection, Parameter, Phase, Uses, Workload
from tests.shared.small_models import OUTPUT_BYTES, SAVED_BYTES, chain, parameter, phase

LOSS_BYTES = 4_000
ELEMENTS = 1_000
GRADIENT_BYTES = 4 * ELEMENTS


def pairs(num_pairs: int) -> Workload:
    """A teacher and a student of one parameter per block: one chunk per block, and one for the embedding.

    A student's block saves 10 000 bytes, its loss 4 000; blocks hand 1 000 on.
    """
    nothing = Phase()
    teacher = phase(OUTPUT_BYTES, peak_bytes=4_000)
    freed_bytes = OUTPUT_BYTES + SAVED_BYTES + LOSS_BYTES + OUTPUT_BYTES
    parameters: list[Parameter] = [
        parameter("teacher.embedding", ELEMENTS, None, trainable=False).model_copy(
            update={
                "uses": Uses(forward=(OuterSection.PROLOGUE,), backward=(), gradient=OuterSection.PROLOGUE),
            }
        )
    ]
    for pair in range(num_pairs):
        parameters.append(parameter(f"teacher.{pair}", ELEMENTS, 2 * pair, trainable=False))
        parameters.append(parameter(f"student.{pair}", ELEMENTS, 2 * pair + 1))
    names = [f"{model}.layers.{pair}" for pair in range(num_pairs) for model in ("teacher", "student")]
    fields = {name: getattr(chain(1), name) for name in Workload.model_fields}
    fields |= {
        "parameters": tuple(parameters),
        "blocks": tuple(Block(name=name, profile=number % 2) for number, name in enumerate(names)),
        "profiles": (
            BlockProfile(
                output_bytes=OUTPUT_BYTES,
                forward=teacher,
                backward=nothing,
                checkpoint_forward=teacher,
                recompute=nothing,
                checkpoint_backward=nothing,
            ),
            BlockProfile(
                output_bytes=OUTPUT_BYTES,
                forward=phase(OUTPUT_BYTES + SAVED_BYTES),
                backward=phase(GRADIENT_BYTES - freed_bytes, peak_bytes=2_000),
                checkpoint_forward=nothing,
                recompute=nothing,
                checkpoint_backward=nothing,
            ),
        ),
        "prologue_forward": phase(OUTPUT_BYTES),
        "epilogue_forward": nothing,
        "epilogue_backward": nothing,
        "prologue_backward": nothing,
        "distillation": Distillation(losses=(nothing, phase(LOSS_BYTES)), loss="mse"),
    }
    return Workload(**fields)


def bypass_plan(workload: Workload, **knobs: object) -> Plan:
    """Everything offloaded, one buffer, one chunk per block."""
    fields: dict[str, Any] = {"n_persist": 0, "n_buffer": 1, "chunk_bytes": 4_096} | knobs
    return Plan(workload_id=workload.identity, method=TrainingMethod.BYPASS, **fields)
