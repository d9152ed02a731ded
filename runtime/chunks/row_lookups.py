"""Embeddings whose rows are looked up on the host: rows come to the device, and gradients of rows leave it.

[Note: Lookups without a table]
While a plan that looks rows up is carried out, an embedding's weight has a class that torch asks before every operation
(``__torch_function__``), whether its chunk is on the device or not.  In the prologue's forward, its lookups read rows
where the weight has its home.  An autograd function gives them to the model, and takes their gradients.  Whoever else
has the weight on the device, such as a tied head, uses it there as ever.

[Note: Sums of gradients of rows]
Of several equal rows the gradients are added up by the operator that torch's own backward calls, in the order of the
lookup, and the sums are added to the gradient of the whole table.  These are the additions of a backward that makes the
gradient of the whole table, in its order, but for zeros that it adds to all other rows.  So on the CPU the bits are the
same, signs of zeros aside.  On CUDA that operator adds in float32 and in an order of its own; the sums here are in
float32 too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import ScheduleError
from ..devices.device import TrainingDevice
from ..model.parameters import asks_for_facts
from .absent_parameters import NAME, refuse_values
from .chunk import DeviceChunk

_TABLE: Final = "_protwin_table"
_LOOKUPS: Final = (nn.functional.embedding, torch.embedding)


@dataclass(frozen=True, slots=True, eq=False)
class RowGradients:
    """Gradients of the rows that one lookup gave."""

    place: int
    """Of the table among its chunk's trainable parameters."""
    indices: torch.Tensor
    """(N,) on the host."""
    padding_index: int
    """Rows of this index have no gradient; below 0: all have."""
    values: torch.Tensor
    """(N, width)"""

    def with_values(self, values: torch.Tensor) -> RowGradients:
        """The same gradients elsewhere."""
        return RowGradients(self.place, self.indices, self.padding_index, values)

    def sums(self, *, is_wide: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(U,) the rows of the table that were looked up, ascending, and (U, width) the sum of the gradients of each.

        See [Note: Sums of gradients of rows].  ``is_wide``: summed in float32.
        """
        found, numbers = self.indices.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        padding = (found == self.padding_index).nonzero()
        skipped = int(padding[0]) if len(padding) else -1
        values = self.values.float() if is_wide else self.values
        sums = torch.ops.aten.embedding_dense_backward(values, numbers, len(found), skipped, False)
        return found, sums.to(self.values.dtype)


def _like(rows: torch.Tensor, device: TrainingDevice) -> torch.Tensor:
    """Host memory for ``rows`` that copies read and write."""
    return device.host_buffer(rows.numel() * rows.element_size()).view(rows.dtype).view(rows.shape)


def _joined(sums: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of several lookups of one table, added up in their order."""
    if len(sums) == 1:
        return sums[0]
    found = torch.cat([rows for rows, _ in sums]).unique()  # type: ignore[no-untyped-call]
    total = sums[0][1].new_zeros(len(found), sums[0][1].shape[1])
    for rows, values in sums:
        total.index_add_(0, torch.searchsorted(found, rows), values)
    return found, total


class LookedUpRows:
    """All embeddings of a training whose rows are looked up, and whether they are now."""

    def __init__(self, device: TrainingDevice) -> None:
        self.is_in_prologue = False
        """Whether the prologue's forward runs, as a task of the schedule."""
        self.is_evaluating = False
        """Whether the model runs forward alone: then rows of tables that are away are looked up."""
        self.moved_bytes = 0
        """Rows that have come to the device."""
        self.chunks: dict[int, LookedUpChunk] = {}
        """By the chunk's id."""
        self._device = device

    def take_over(self, chunk: DeviceChunk, num_rows: Sequence[int]) -> None:
        """Look rows of all members of ``chunk`` up, so many of each in every forward."""
        self.chunks[chunk.chunk.id] = LookedUpChunk(chunk, num_rows, self, self._device)

    def holds_all_of(self, module: nn.Module) -> bool:
        """Whether ``module`` is an embedding whose rows are looked up."""
        own = list(module.parameters(recurse=False))
        return isinstance(module, nn.Embedding) and all(_TABLE in parameter.__dict__ for parameter in own)

    def forget(self) -> None:
        """Drop the gradients that nobody has taken."""
        self.is_in_prologue = False
        for chunk in self.chunks.values():
            chunk.waiting.clear()

    def close(self) -> None:
        """Give parameters their own class again.  Idempotent."""
        for chunk in self.chunks.values():
            chunk.close()
        self.chunks.clear()


class LookedUpChunk:
    """The tables of one chunk."""

    def __init__(self, chunk: DeviceChunk, num_rows: Sequence[int], rows: LookedUpRows, device: TrainingDevice) -> None:
        self.device_chunk = chunk
        self.waiting: list[RowGradients] = []
        """Gradients on the device, from the prologue's backward to ``TransferLanes.send``."""
        self._device = device
        self._homes = chunk.values()
        self._tables: list[_Table] = []
        trainable = {id(parameter): place for place, parameter in enumerate(chunk.trainable)}
        for (name, parameter), count in zip(chunk.named_parameters(), num_rows, strict=True):
            staging = _like(torch.empty(count, parameter.shape[1], dtype=parameter.dtype, device="meta"), device)
            if device.ledger is not None:
                device.ledger.ignore([staging])
            place = trainable.get(id(parameter))
            table = _Table(name, parameter, self, rows, self._homes[name], staging, place, device)
            self._tables.append(table)
            _dress(parameter, table)
        self._arrival_of = {
            table.place: _like(table.staging, device) for table in self._tables if table.place is not None
        }

    def take(self) -> list[RowGradients]:
        """The gradients that wait on the device; nobody has them afterwards."""
        taken = list(self.waiting)
        self.waiting.clear()
        self.device_chunk.stepped_next.update(self.device_chunk.trainable[rows.place] for rows in taken)
        return taken

    def arrive(self, gradients: Sequence[RowGradients]) -> list[RowGradients]:
        """Copy gradients to the host."""
        found: list[RowGradients] = []
        filled: dict[int, int] = {}
        for rows in gradients:
            begin = filled.get(rows.place, 0)
            filled[rows.place] = begin + len(rows.values)
            place = self._arrival_of[rows.place][begin : filled[rows.place]]
            if len(place) < len(rows.values):
                # A batch of another shape than the plan's.
                place = torch.empty_like(rows.values, device="cpu")
            self._device.copy(place, rows.values, to_device=False)
            found.append(rows.with_values(place))
        return found

    def add(
        self, gradients: Sequence[RowGradients], staged: Sequence[bool], arrived: Sequence[bool] | None
    ) -> list[bool]:
        """Add a micro-batch's gradients of rows, and what has ``arrived`` of it beside them, to what is ``staged``.

        Both say for which parameters there is a gradient, as the result does; ``arrived`` is None for the first
        micro-batch, whose own are staged.
        """
        chunk, is_wide = self.device_chunk, self._device.torch_device.type == "cuda"
        found = list(staged)
        for place, whole in enumerate(chunk.staged):
            sums = [rows.sums(is_wide=is_wide) for rows in gradients if rows.place == place]
            has_arrived = arrived is not None and arrived[place]
            if has_arrived:
                whole = chunk.arrived[place]
            elif arrived is not None and staged[place] and sums:
                # The sum of a micro-batch comes before the sum over micro-batches.
                sums = [_joined(sums)]
            elif sums and not staged[place]:
                whole.zero_()
            for rows, values in sums:
                whole.index_add_(0, rows, values)
            if has_arrived:
                chunk.accumulate_one(place, is_staged=staged[place])
            found[place] |= has_arrived or bool(sums)
        return found

    def close(self) -> None:
        """The tables' own classes again."""
        for table in self._tables:
            _undress(table.parameter)


@dataclass(slots=True, eq=False)
class _Table:
    name: str
    parameter: nn.Parameter
    chunk: LookedUpChunk
    rows: LookedUpRows
    home: torch.Tensor
    """(vocabulary, width) on the host."""
    staging: torch.Tensor
    """(rows, width) on the host, for rows on their way to the device."""
    place: int | None
    """Among the chunk's trainable parameters."""
    device: TrainingDevice
    copied: Any = None
    """The event behind the last copy from ``staging``."""

    @property
    def is_away(self) -> bool:
        return not self.chunk.device_chunk.is_shown

    @property
    def is_looked_up(self) -> bool:
        return self.rows.is_in_prologue or (self.rows.is_evaluating and self.is_away)

    def look_up(
        self,
        input: torch.Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> torch.Tensor:
        """``torch.nn.functional.embedding`` without its weight."""
        if max_norm is not None or scale_grad_by_freq or sparse:
            raise ScheduleError(
                f"{self.name} was looked up with max_norm, scale_grad_by_freq or sparse, as it was not when the model "
                f"was traced: rows alone do not do. Trace the model again."
            )
        padding_index = -1 if padding_idx is None else padding_idx % self.home.shape[0]
        with torch.no_grad():
            rows = self._on_device(input)
        if self.place is None or not torch.is_grad_enabled():
            return rows
        if self.parameter._backward_hooks:
            raise ScheduleError(
                f"{self.name} has hooks on its gradient, but the plan looks its rows up on the host, where no hook is "
                f"called. Remove the hooks, or make a plan without looks_up_rows."
            )
        anchor = torch.empty(0, device=rows.device, requires_grad=True)
        given: torch.Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
            anchor, rows, self, input.detach(), padding_index
        )
        return given

    def _on_device(self, indices: torch.Tensor) -> torch.Tensor:
        on_host = indices.detach().cpu().reshape(-1)
        if self.copied is not None:
            self.device.synchronize_event(self.copied)
        staging = self.staging[: len(on_host)]
        if len(staging) < len(on_host):
            # A batch of another shape than the plan's.
            staging = torch.empty(len(on_host), self.home.shape[1], dtype=self.home.dtype)
        torch.index_select(self.home, 0, on_host, out=staging)
        rows = torch.empty((*indices.shape, self.home.shape[1]), dtype=self.home.dtype, device=indices.device)
        self.device.copy(rows.view_as(staging), staging, to_device=True)
        self.copied = self.device.record_event()
        self.rows.moved_bytes += staging.numel() * staging.element_size()
        return rows

    def receive(self, indices: torch.Tensor, padding_index: int, gradient: torch.Tensor) -> None:
        """The gradient of what one lookup gave."""
        assert self.place is not None
        values = gradient.clone(memory_format=torch.contiguous_format).view(-1, gradient.shape[-1])
        self.chunk.waiting.append(RowGradients(self.place, indices.cpu().reshape(-1), padding_index, values))


class _Lookup(torch.autograd.Function):
    """Gives rows that have come from the host, and takes their gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, rows: torch.Tensor, table: _Table, indices: torch.Tensor, padding_index: int
    ) -> torch.Tensor:
        """``anchor`` is a leaf that wants a gradient, so that autograd asks for the rows'."""
        ctx.table, ctx.padding_index = table, padding_index
        ctx.save_for_backward(indices)
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None, None, None]:
        """No input has a gradient."""
        (indices,) = ctx.saved_tensors
        ctx.table.receive(indices, ctx.padding_index, gradients[0])
        return None, None, None, None, None


# -- classes of parameters -------------------------------------------------------------------------------------------


def _dress(parameter: nn.Parameter, table: _Table) -> None:
    original = getattr(type(parameter), "_protwin_original", type(parameter))
    parameter.__class__ = _looked_up_class(original)
    parameter.__dict__[_TABLE] = table
    parameter.__dict__[NAME] = table.name


def _undress(parameter: nn.Parameter) -> None:
    if _TABLE in parameter.__dict__:
        parameter.__class__ = type(parameter)._protwin_beneath  # type: ignore[attr-defined]
        for name in (_TABLE, NAME):
            parameter.__dict__.pop(name, None)


@lru_cache
def _looked_up_class(original: type[nn.Parameter]) -> type[nn.Parameter]:
    body = {"__torch_function__": classmethod(_answer), "_protwin_beneath": original}
    return type(original.__name__, (original,), body)


def _answer(cls: type, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """What torch asks; see [Note: Lookups without a table]."""
    given = dict(kwargs or {})
    if function in _LOOKUPS:
        weight, rest = _arguments_of(function, args, given)
        table = weight.__dict__.get(_TABLE)
        if table is not None and table.is_looked_up:
            return table.look_up(**rest)
    if not asks_for_facts(function) and any(
        _TABLE in found.__dict__ and found.__dict__[_TABLE].is_away
        for value in (*args, *given.values())
        for found in (value if isinstance(value, list | tuple) else (value,))
        if isinstance(found, nn.Parameter)
    ):
        return refuse_values(cls, function, types, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **given)


def _arguments_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[nn.Parameter, dict[str, Any]]:
    """The weight, and what else ``look_up`` is given."""
    names = ["input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"]
    if function is torch.embedding:
        names = ["weight", "input", "padding_idx", "scale_grad_by_freq", "sparse"]
        kwargs = {"input" if name == "indices" else name: value for name, value in kwargs.items()}
    found = {**dict(zip(names, args, strict=False)), **kwargs}
    if function is torch.embedding and found.get("padding_idx") == -1:
        found["padding_idx"] = None
    return found.pop("weight"), found
