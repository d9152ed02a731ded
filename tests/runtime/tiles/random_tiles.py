"""Families trained in tiles by random plans, beside the plain loop of whole tensors, in the memory of the account."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from protwin.runtime import trace
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.workload import Workload
from tests.runtime.accounts import BAR, carried_out, error_frac, measured_peak_bytes
from tests.runtime.eager_lanes import eager_peak
from tests.runtime.equality import random_plans
from tests.runtime.models import Batch, Case, frozen
from tests.runtime.tiles.small_families import WORDS, small

NAMED: Final = ("llama", "gpt2", "gemma2", "mixtral")
"""Families that other tests know too."""
UNNAMED: Final = ("qwen3", "olmo2", "gpt_neox", "phi", "stablelm", "starcoder2", "ernie4_5_moe", "opt")
"""Families that none does."""
TILES: Final = (2, 3, 7)
LENGTH, SAMPLES, NUM_STEPS = 11, 3, 2
TOLERANCE: Final = 1e-6
"""Of weights, relative to what steps may have changed them by and to their size: one rounding of 6e-8 for each of some
hundred terms that are added in another order, of either sign, in each of so many steps."""
RATE: Final = 0.2


def weighted(logits: Any, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    """A loss to which every token adds by its own weight: gradients that were a mean of tiles' would be others."""
    flat, wanted = logits.float()[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    by_token = functional.cross_entropy(flat, wanted, reduction="none")
    return (by_token * torch.linspace(0.1, 2.0, len(by_token))).sum() / len(by_token)


def batches(steps: int) -> list[Batch]:
    """Three samples each, whose labels do not all count."""
    generator = torch.Generator().manual_seed(7)
    found: list[Batch] = []
    for _ in range(steps):
        tokens = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator)
        labels = tokens.clone()
        labels[0, 2:6] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


class TiledCase(Case):
    """A family, traced with every number of tiles that it can have."""

    @cached_property
    def workload(self) -> Workload:
        asked = partial(trace, self.build(), self.batches[0], repeats=0, loss_tiles=TILES)
        try:
            return asked(mlp_tiles=TILES)
        except WorkloadError:
            # Its blocks call their layers one by one, or are no blocks of an MLP.
            return asked()

    @property
    def mlp_tiles(self) -> tuple[int, ...]:
        """Numbers that plans may have."""
        return (1, *(tiling.mlp_tiles for tiling in self.workload.tilings))


@lru_cache
def case_of(family: str) -> TiledCase:
    """With a loss of weighted tokens in every other family, and a frozen part where that is more than a name."""

    def build() -> nn.Module:
        model: Any = small(family).train()
        if len(family) % 2:
            model.loss_function = weighted
        return frozen(model, *([n for n, _ in model.named_parameters() if "norm" in n or "ln_" in n][:2] or ["none"]))

    make: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=RATE, momentum=0.9, fused=True)
    return TiledCase(build, batches(NUM_STEPS), make_optimizer=make)


def plans_of(family: str, number: int, seed: int) -> list[Plan]:
    """Random plans of one rank with tiles of MLPs, of the loss, or both."""
    case = case_of(family)
    found = []
    for place, plan in enumerate(random_plans(case.workload, number, seed, Optimizer.SGD, has_disk=False)):
        of_mlp = case.mlp_tiles[(place + seed) % len(case.mlp_tiles)]
        of_loss = (1, *TILES)[(place // 2 + seed + 1) % 4]
        if of_mlp == of_loss == 1:
            of_loss = TILES[place % 3]
        found.append(plan.model_copy(update={"mlp_tiles": of_mlp, "loss_tiles": of_loss}))
    assert all(plan.parallel is ParallelMode.SINGLE for plan in found)
    return found


def difference(family: str, plan: Plan) -> tuple[float, float]:
    """Of losses and of weights from the plain loop's, relative, on a device of just the guaranteed memory."""
    case = case_of(family)
    losses, weights = carried_out(case, plan)
    plain = case.plain_with(plan.micro_batches, plan.max_gradient_norm)
    expected, before = plain.weights[-1], plain.weights[0]
    of_losses = max(abs(one / other - 1) for one, other in zip(losses, plain.losses, strict=True))
    moved = max(float((value - before[key]).norm()) for key, value in expected.items())
    assert moved > 1e-2, "steps that show nothing"
    of_weights = max(
        float((weights[key] - value).norm()) / max(float(value.norm()), moved) for key, value in expected.items()
    )
    return of_losses, of_weights


def peak_error_frac(family: str, plan: Plan) -> float:
    """How far the measured peak is outside of the schedule's own account."""
    case = case_of(family)
    return error_frac(measured_peak_bytes(case, plan), eager_peak(compile_schedule(plan, case.workload)))


def check(family: str, plan: Plan) -> tuple[float, float, float]:
    """Raise AssertionError unless a training in tiles is what it should be; the three errors."""
    of_losses, of_weights = difference(family, plan)
    assert of_losses <= TOLERANCE * len(case_of(family).plain_with(plan.micro_batches, None).losses), of_losses
    assert of_weights <= TOLERANCE * NUM_STEPS, of_weights
    of_peak = peak_error_frac(family, plan)
    assert abs(of_peak) <= BAR, of_peak
    return of_losses, of_weights, of_peak
