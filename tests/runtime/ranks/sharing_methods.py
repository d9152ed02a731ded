"""Training methods, element types and heads whose ranks share sequences, beside one rank with whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, Final

import torch
from torch import nn

from protwin.runtime import CpuDevice, LossScaling, Training, add_lora, carry_out, make_orthogonal, trace
from protwin.runtime.optimizers.loss_scaling import LossScaler
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.models import Batch, Case, Masters, PlainResult, llama, one_group, snapshot, uncached
from tests.runtime.packed import positions_of
from tests.runtime.ranks.beside_ddp import in_default_group
from tests.runtime.ranks.sharing import wrongly

STEPS: Final = 3
RANKS: Final = 2
LENGTHS: Final = (5, 12, 7)
MAX_NORM: Final = 0.5
MLP_TILES, LOSS_TILES = 2, 3
SCALING: Final = LossScaling(initial_scale=2.0**19)
"""So high that the first step overflows."""
sgd = partial(torch.optim.SGD, lr=0.2, momentum=0.9, fused=True)


def batches(*, is_packed: bool = False) -> list[Batch]:
    """Two samples of 24 tokens; labels are ignored in other numbers on each half."""
    generator = torch.Generator().manual_seed(3)
    found: list[Batch] = []
    for number in range(STEPS):
        tokens = torch.randint(3, 64, (2, sum(LENGTHS)), generator=generator)
        labels = tokens.clone()
        labels[0, 2 : 9 + number] = -100
        packing = {"position_ids": positions_of(LENGTHS).expand(2, -1)} if is_packed else {}
        found.append({"input_ids": tokens, "labels": labels, **packing})
    return found


def _itself(model: nn.Module) -> nn.Module:
    return model


def _orthogonal(model: nn.Module) -> nn.Module:
    make_orthogonal(model, unfreeze_rank_ratio=0.4)
    return model


def _adapted(model: nn.Module) -> nn.Module:
    """Both matrices of a pair matter from the first step on."""
    add_lora(model, rank=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def _built(how: Callable[[nn.Module], nn.Module], dtype: torch.dtype, **changes: Any) -> nn.Module:
    return how(llama(num_layers=2, **changes).to(dtype))


def _case(
    how: Callable[[nn.Module], nn.Module], dtype: torch.dtype, *, is_packed: bool = False, **changes: Any
) -> Case:
    return Case(partial(_built, how, dtype, **changes), batches(is_packed=is_packed), make_optimizer=sgd)


CASES: Final[dict[str, Callable[[], Case]]] = {
    "osft": partial(_case, _orthogonal, torch.float32),
    "lora": partial(_case, _adapted, torch.float32),
    "tied": partial(_case, _itself, torch.float32, tie_word_embeddings=True),
    "packed": partial(_case, _itself, torch.float32, is_packed=True),
    "float16": partial(_case, _itself, torch.float16),
}


@lru_cache
def case_of(name: str) -> Case:
    return CASES[name]()


@lru_cache
def traced(name: str, *, is_tiled: bool) -> Workload:
    case = case_of(name)
    tiles: dict[str, Any] = {"mlp_tiles": [MLP_TILES], "loss_tiles": [LOSS_TILES]} if is_tiled else {}
    return trace(case.build(), case.batches[0], repeats=0, sequence_ranks=RANKS, **tiles)


@dataclass(frozen=True)
class Outcome:
    """What a rank has, beside one rank with whole sequences that gives up the same steps."""

    loss_error: float
    """The largest relative one."""
    weight_error: float
    """The largest one of a weight, as a part of the largest weight of its tensor."""
    moved: float
    """As far as training moves a weight, in the same measure."""
    skipped: list[bool]
    """Of every step, whether it was given up, since a gradient had overflowed."""


def _scale_of(training: Training) -> float:
    scaler = training.loss_scaler
    assert scaler is None or isinstance(scaler, LossScaler)
    return 1.0 if scaler is None else scaler.scale


@in_default_group
def outcome(rank: int, name: str, plan: Plan, workload: Workload, wrong: str | None = None) -> Outcome:
    """On a device of just the memory that is guaranteed to be enough."""
    case, scaling = case_of(name), SCALING if name == "float16" else None
    budget = guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes
    model, losses, scales = case.build(), [], []
    with (
        wrongly(wrong),
        carry_out(
            model,
            plan,
            workload,
            optimizer=case.make_optimizer,
            parameter_groups=case.groups(model),
            # A scaled loss is a scalar beside the loss.
            device=CpuDevice(budget_bytes=budget + (4 if scaling else 0)),
            loss_scaling=scaling,
        ) as training,
    ):
        for batch in case.batches:
            loss = case.loss(model, batch)
            losses.append(loss.item())
            (loss if scaling is None else training.scale(loss)).backward()
            del loss
            scales.append(_scale_of(training))
            training.step()
        scales.append(_scale_of(training))
    skipped = [after < before for before, after in pairwise(scales)]
    plain = case.plain_with(1, MAX_NORM) if scaling is None else scaled_plainly(case, skipped)
    # A rank that gave whole weights up has them on the meta device.
    found = {key: value for key, value in snapshot(model).items() if not value.is_meta}
    by_loss = [abs(one / other - 1) for one, other in zip(losses, plain.losses, strict=True)]
    moved = distance(plain.weights[0], plain.weights[-1])
    return Outcome(max(by_loss), distance(found, plain.weights[-1]), moved, skipped)


def scaled_plainly(case: Case, skipped: Sequence[bool]) -> PlainResult:
    """One rank by torch's own scaler, over float32 masters: unscale, then limit the norm, then step.

    Its scale is so low that nothing overflows.  A gradient of ranks is that of their own tokens, times the ranks, and
    overflows sooner.
    """
    model = uncached(case.build())
    masters = Masters(model)
    optimizer = sgd(masters.groups(one_group(model)))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses, weights = [], [snapshot(model)]
    for batch, is_skipped in zip(case.batches, skipped, strict=True):
        loss = case.loss(model, batch)
        losses.append(loss.item())
        if is_skipped:
            continue
        scaler.scale(loss).backward()
        masters.take_gradients()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([master for _, master in masters._pairs], MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        masters.give_weights()
    assert scaler.get_scale() == 2.0**12, "nothing overflows"
    return PlainResult(losses, [*weights, snapshot(model)])


def distance(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest of a weight, as a part of the largest weight of its tensor."""
    return max(
        float((value.double() - expected[key].double()).abs().max() / expected[key].double().abs().max())
        for key, value in found.items()
    )
