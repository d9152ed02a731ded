"""Every plan trains on a GPU as the plain loop does, bit for bit, and moves what it says it moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import carry_out
from tests.gpu.subject import (
    CHECKPOINT,
    KEEP,
    SELECTIVE,
    SWAP,
    carried_out,
    differing,
    make_device,
    offloaded_names,
    plan_of,
    train,
    train_plainly,
)
from tests.runtime.models import Case, cases
from tests.runtime.named_inputs import NamedInputBlock
from tests.runtime.weights_seen import weights_seen

pytestmark = pytest.mark.gpu

PLANS: dict[str, dict[str, Any]] = {
    "kept, offloaded": {"modes": [KEEP]},
    "checkpointed, offloaded": {"modes": [CHECKPOINT], "prefetch_depth": 3},
    "swapped, offloaded": {"modes": [SWAP], "prefetch_depth": 1},
    "all modes, half persistent": {"modes": [SWAP, CHECKPOINT, KEEP], "persistent": 0.5},
    "all modes, two micro-batches": {"modes": [SWAP, CHECKPOINT, KEEP], "persistent": 0.3, "micro_batches": 2},
    "everything persistent": {"modes": [CHECKPOINT, KEEP], "persistent": 1.0},
    "results kept, half persistent": {"modes": [SELECTIVE, KEEP], "persistent": 0.5},
    "every second product kept": {"modes": [SELECTIVE], "product_stride": 2, "micro_batches": 2},
}
LIMIT = 1e-6
"""Of the norm.  AdamW evens out how large gradients are, but for those as small as its epsilon."""
NAMES = ("llama", "gpt2 with dropout, tied", "llama in bfloat16", "hand-written, unused parameters")


@pytest.mark.parametrize("plan_name", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_weights_are_the_plain_loops(name: str, plan_name: str) -> None:
    case = cases()[name]
    plan = plan_of(case, **PLANS[plan_name])
    offloaded = offloaded_names(case, plan)
    plain = train_plainly(case, on_host=offloaded, micro_batches=plan.micro_batches)
    run, training = carried_out(case, plan)
    assert run.losses == plain.losses
    assert differing(run.weights[0], plain.weights[-1]) == []
    if offloaded:
        assert training.num_cpu_adam_steps > 0
        assert min(training.bytes_host_to_device, training.bytes_device_to_host) > 0


@pytest.mark.parametrize("plan_name", ["kept, offloaded", "all modes, half persistent"])
def test_with_a_limited_norm_losses_agree_to_the_rounding_of_one_sum(plan_name: str) -> None:
    """Norms of the host's gradients and the device's are added up in another order: relative errors of 2**-23 times
    the square root of some ten thousand gradients, which a few steps with a rate of 1e-2 hardly enlarge."""
    case = cases()["llama"]
    plan = plan_of(case, **PLANS[plan_name], max_gradient_norm=LIMIT)
    plain = train_plainly(case, on_host=offloaded_names(case, plan), max_norm=LIMIT)
    run, _ = carried_out(case, plan)
    torch.testing.assert_close(run.losses, plain.losses, rtol=1e-4, atol=0)
    unlimited = train_plainly(case, on_host=offloaded_names(case, plan))
    assert abs(unlimited.losses[-1] - plain.losses[-1]) > 1e-3 * abs(plain.losses[-1]), "the limit limits nothing"


def test_losses_agree_with_a_loop_that_never_leaves_the_device() -> None:
    case = cases()["llama"]
    plain = train_plainly(case, on_host=set())
    run, _ = carried_out(case, plan_of(case, **PLANS["all modes, half persistent"]))
    torch.testing.assert_close(run.losses, plain.losses, rtol=1e-4, atol=0)


def test_every_forward_reads_the_weights_of_the_last_step() -> None:
    case = cases()["llama"]
    plan = plan_of(case, **PLANS["all modes, half persistent"])
    plain = train_plainly(case, on_host=offloaded_names(case, plan))
    model = case.build()
    with (
        weights_seen(model) as seen,
        carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=make_device()) as training,
    ):
        train(case, plan, training, model)
    assert len(seen) == sum(parameter.block is not None for parameter in case.workload.parameters)
    for name, values in seen.items():
        # Recomputed blocks are seen twice in an iteration, each time with the weights of their forward.
        each = len(values) // len(case.batches)
        for place, value in enumerate(values):
            assert torch.equal(value.cpu(), plain.weights[place // each][name]), (name, place)


class NamedInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 16)
        self.layers = nn.ModuleList(NamedInputBlock() for _ in range(3))
        self.exit = nn.Linear(16, 3)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(points)
        for layer in self.layers:
            hidden = layer(hidden=hidden)
        return self.exit(hidden)


def named_inputs() -> nn.Module:
    torch.manual_seed(0)
    return NamedInputs()


def test_dropout_of_blocks_with_named_inputs_is_recomputed_as_it_was() -> None:
    case = Case(named_inputs, cases()["hand-written, unused parameters"].batches, has_loss=False)
    plan = plan_of(case, [CHECKPOINT], chunk_bytes=2_000)
    plain = train_plainly(case, on_host=offloaded_names(case, plan))
    run, _ = carried_out(case, plan)
    assert run.losses == plain.losses
    assert differing(run.weights[0], plain.weights[-1]) == []
