"""What a teacher's FFNs do on given batches: how large their channels are, and how much weight experts get."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...shared.basics.errors import WorkloadError
from ...shared.students.families import Family, family_of
from .building import blocks_of
from .ffn_parts import down_projection

_UNREAD = ("labels",)
"""Parts of a batch that the trunk of a model does not take."""


@dataclass(frozen=True, slots=True)
class ActivationStatistics:
    """Means over all tokens that are no padding, on the host in float64."""

    num_tokens: int
    channels: Mapping[int, torch.Tensor]
    """By block: mean absolute input of the down projection, (width,); with experts (experts, width), of each over the
    tokens that it was given."""
    experts: Mapping[int, torch.Tensor]
    """By block with experts: mean weight that the router gave each, (experts,)."""


@torch.no_grad()
def activation_statistics(teacher: Any, batches: Iterable[Mapping[str, Any]]) -> ActivationStatistics:
    """Run the trunk of ``teacher``, in evaluation mode, on ``batches``, each the keyword arguments of its forward.

    Tokens whose ``attention_mask`` (batch, sequence) is 0 do not count.  Raises WorkloadError if no students are made
    of the teacher's family, or if there are no tokens.
    """
    family = family_of(teacher.config.to_dict(), type(teacher).__name__)
    found = {number: _Sums() for number, _ in enumerate(blocks_of(teacher, family))}
    mask: list[torch.Tensor | None] = [None]
    with _observing(teacher, family, found, lambda: mask[0]), _in_evaluation(teacher):
        for batch in batches:
            mask[0] = _mask(batch)
            # Without its head, whose output nobody reads.
            teacher.base_model(**{name: value for name, value in batch.items() if name not in _UNREAD})
    num_tokens = max((sums.num_tokens for sums in found.values()), default=0)
    if not num_tokens:
        raise WorkloadError("activation statistics need tokens, but no batch holds any. Pass at least one batch.")
    return ActivationStatistics(
        num_tokens,
        channels={number: sums.channel_means() for number, sums in found.items()},
        experts={number: sums.weights / sums.num_tokens for number, sums in found.items() if sums.weights is not None},
    )


@dataclass(slots=True)
class _Sums:
    """Of one block."""

    num_tokens: int = 0
    channels: Any = 0.0
    weights: Any = None
    given: Any = field(default=None)
    """Tokens that each expert was given, (experts,)."""

    def channel_means(self) -> torch.Tensor:
        counted = self.num_tokens if self.given is None else self.given.clamp(min=1)[:, None]
        means: torch.Tensor = self.channels / counted
        return means.cpu()

    def add_tokens(self, activations: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Of (..., width) inputs of one down projection."""
        rows = _counted(activations.flatten(0, -2), mask)
        self.num_tokens += len(rows)
        self.channels = self.channels + rows.double().abs().sum(dim=0)

    def add_routed(self, experts: Any, mask: torch.Tensor | None, *given: torch.Tensor) -> None:
        """Of the inputs of experts: tokens (n, hidden), the experts that each goes to and their weights, (n, top)."""
        tokens, chosen, weights = (_counted(one.flatten(0, -2), mask) for one in given)
        num_experts, _, width = experts.down_proj.shape
        if self.weights is None:
            self.weights = torch.zeros(num_experts, dtype=torch.float64)
            self.given = torch.zeros(num_experts, dtype=torch.float64)
            self.channels = torch.zeros(num_experts, width, dtype=torch.float64)
        self.num_tokens += len(tokens)
        for number in range(num_experts):
            is_given = chosen == number
            rows = tokens[is_given.any(dim=-1)]
            self.weights[number] += weights[is_given].double().sum().cpu()
            self.given[number] += len(rows)
            if len(rows):
                gate, up = nn.functional.linear(rows, experts.gate_up_proj[number]).chunk(2, dim=-1)
                self.channels[number] += (experts.act_fn(gate) * up).double().abs().sum(dim=0).cpu()


def _mask(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Which tokens count, (batch * sequence,); None: all."""
    mask = batch.get("attention_mask")
    return mask.flatten().bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def _counted(rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return rows if mask is None else rows[mask]


@contextmanager
def _observing(
    teacher: nn.Module, family: Family, found: Mapping[int, _Sums], mask: Callable[[], torch.Tensor | None]
) -> Iterator[None]:
    handles = []
    for number, block in enumerate(blocks_of(teacher, family)):
        ffn, sums = getattr(block, family.ffn), found[number]
        experts = getattr(ffn, "experts", None)
        if experts is None:

            def observe(_: nn.Module, inputs: tuple[Any, ...], sums: _Sums = sums) -> None:
                sums.add_tokens(inputs[0], mask())

            handles.append(down_projection(ffn).register_forward_pre_hook(observe))
        else:

            def observe_routed(part: nn.Module, inputs: tuple[Any, ...], sums: _Sums = sums) -> None:
                sums.add_routed(part, mask(), *inputs)

            handles.append(experts.register_forward_pre_hook(observe_routed))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _in_evaluation(teacher: Any) -> Iterator[None]:
    """Without dropout and caches of keys and values."""
    training = {module for module in teacher.modules() if module.training}
    uses_cache = getattr(teacher.config, "use_cache", None)
    teacher.eval()
    if uses_cache is not None:
        teacher.config.use_cache = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
        if uses_cache is not None:
            teacher.config.use_cache = uses_cache
