"""What blocks return beside their output, attention weights for one, is accounted for in every mixture of modes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, CpuOutOfMemoryError, carry_out, trace
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.layout.travelling_inputs import input_bytes
from protwin.shared.observed.observed_inputs import ObservedInput
from protwin.shared.phases.shared_inputs import SharedInput
from protwin.shared.schema.plan import ActivationMode, Plan, mode_counts
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.verify import verify_schedule
from tests.runtime.training.attending import Attending

KEEP, CHECKPOINT, SWAP = ActivationMode.KEEP, ActivationMode.CHECKPOINT, ActivationMode.SWAP
OFFLOAD_INPUT, SELECTIVE = ActivationMode.OFFLOAD_INPUT, ActivationMode.SELECTIVE
SAMPLES, TOKENS, WIDTH = 2, 24, 8
WEIGHTS_BYTES = SAMPLES * TOKENS * TOKENS * 4


class Stack(nn.Module):
    """Holds all that a block returned until the next one has returned."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attending(WIDTH) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        for layer in self.layers:
            outputs = layer(x)
            x = outputs[0]
        return x.square().mean()


def batch() -> torch.Tensor:
    return torch.randn(SAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def traced(model: nn.Module) -> Workload:
    return trace(model, batch(), loss=lambda output, _: output, repeats=0)


def train(workload: Workload, *modes: ActivationMode) -> None:
    """Two steps of two micro-batches, in the memory that is guaranteed to be enough."""
    num_chunks = len(layout_of(workload, 2**20).chunks)
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=2**20,
        n_persist=num_chunks,
        n_buffer=0,
        activation_modes=modes,
        micro_batches=2,
        **mode_counts(modes),
    )
    schedule = compile_schedule(plan, workload)
    verify_schedule(schedule, plan, workload)
    model, device = Stack(), CpuDevice(guaranteed_device_peak(schedule).size_bytes)
    with carry_out(model, plan, workload, device=device) as training:
        for _ in range(2):
            for _ in range(2):
                model(batch()).backward()
            training.step()


@pytest.mark.parametrize(
    "modes",
    [
        (KEEP, CHECKPOINT, KEEP, CHECKPOINT),
        (SWAP, CHECKPOINT, CHECKPOINT, KEEP),
        (KEEP, OFFLOAD_INPUT, SWAP, OFFLOAD_INPUT),
        (SWAP, SELECTIVE, KEEP, SELECTIVE),
    ],
)
def test_no_mixture_takes_more_than_is_guaranteed(modes: tuple[ActivationMode, ...]) -> None:
    train(traced(Stack()), *modes)


def test_blocks_that_stand_for_others_have_what_each_returns() -> None:
    with torch.device("meta"):
        empty = Stack(6)
    found = traced(empty)
    assert found.shared_inputs == traced(Stack(6)).shared_inputs
    returned = [
        SharedInput(size_bytes=WEIGHTS_BYTES, let_go_by=block, kept_by=(block - 1,), freed_in_kept=(block - 1,))
        for block in range(1, 6)
    ]
    assert [shared for shared in found.shared_inputs if shared.is_returned] == returned
    output_bytes = SAMPLES * TOKENS * WIDTH * 4
    assert input_bytes(found) == [0, *[output_bytes] * 5]


def test_the_wrong_variant_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: what no block is given is left to the phases."""
    depends = ObservedInput.depends_on_modes
    monkeypatch.setattr(
        ObservedInput, "depends_on_modes", lambda given, stands_for: bool(given.blocks) and depends(given, stands_for)
    )
    with pytest.raises(CpuOutOfMemoryError):
        train(traced(Stack()), KEEP, KEEP, CHECKPOINT, CHECKPOINT)
