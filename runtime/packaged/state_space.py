"""Mamba-2's state space (SSD) of mamba-ssm, chunk by chunk, alone and together with its convolution and output map.

[Note: State spaces in chunks]
Within each chunk the scan is attention without a softmax, whose scores all heads of a group share.  The state at the
end of every chunk is formed by itself, and states are handed on by a kernel that does nothing else (Dao, Gu, arXiv
2405.21060).  Backward forms states and scores again.  The fused call keeps what the first map of a layer gives and the
scan's result; what the convolution gives, and the normalized result, are formed again too.
Source: ops/triton/ssd_combined.py and its neighbours of mamba-ssm 2.3.
"""

from __future__ import annotations

from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch.nn import functional

from .causal_convolution import convolved, convolved_backward
from .launching import chunks, launch

_PROCESSORS: Final = 148
"""Of the device: sums over the heads of a group are split among so many (B200; fewer need less memory)."""
_STATE_BLOCK: Final = 64
"""Elements of a state that are handed on by one program; each writes a sum for every chunk."""
_ROWS: Final = 32
"""Rows of a chunk's scores that one program takes; each writes sums of its columns."""


class _Sizes(NamedTuple):
    """Of one call."""

    samples: int
    length: int
    heads: int
    width: int
    """Channels of a head."""
    groups: int
    states: int
    """States of a channel."""
    size: int
    """Tokens of a chunk."""

    @property
    def steps(self) -> int:
        """Chunks of a sequence."""
        return chunks(self.length, self.size)

    @property
    def of_chunks(self) -> tuple[int, int, int, int]:
        """The shape of what there is one of for every token of a head, chunk by chunk."""
        return self.samples, self.heads, self.steps, self.size

    @property
    def splits(self) -> int:
        """Parts that the heads of a group are split into where their gradients are added up."""
        ratio = self.heads // self.groups
        together = max(min(chunks(self.samples * self.steps * self.heads, _PROCESSORS), ratio), 1)
        return chunks(ratio, together)

    def flops(self, *, by_group: bool = False, rows: int, columns: int, inner: int) -> int:
        """Of a product for every chunk and head, or group."""
        number = self.samples * self.steps * (self.groups if by_group else self.heads)
        return 2 * number * rows * columns * inner


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """The scan of ``x`` (samples, length, heads, width), and the last states if they are asked for.

    ``dt``: (samples, length, heads); ``A``, ``D``, ``dt_bias``: of each head; ``B``, ``C``: (samples, length, groups,
    states); ``z``: a gate as large as ``x``.
    """
    found = _ChunkScan.apply(  # type: ignore[no-untyped-call]
        x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states
    )
    return found if return_final_states else found[0]


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    rmsnorm_weight: torch.Tensor | None = None,
    outproj_weight: torch.Tensor | None = None,
    outproj_bias: torch.Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    **_: Any,
) -> Any:
    """All of a Mamba-2 layer behind its first map: convolution, scan, gated norm and output map.

    ``zxbcdt``: (samples, length, gates, channels and time steps side by side).
    """
    width = D.shape[1] if D.dim() > 1 else headdim
    found = _FusedLayer.apply(  # type: ignore[no-untyped-call]
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states, rmsnorm_weight,
        outproj_weight, outproj_bias, width, ngroups,
    )  # fmt: skip
    return found if return_final_states else found[0]


def _of_call(x: torch.Tensor, groups: torch.Tensor, size: int) -> _Sizes:
    samples, length, heads, width = x.shape
    return _Sizes(samples, length, heads, width, groups.shape[2], groups.shape[3], size)


def _sums(sizes: _Sizes, time_steps: torch.Tensor, *weights: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of decays within chunks, and time steps as they count."""
    steps, sums = (time_steps.new_empty(sizes.of_chunks, dtype=torch.float32) for _ in ("dt", "dA"))
    launch("chunk_cumsum_fwd", (time_steps, *weights), (steps, sums))
    return sums, steps


def _states(
    sizes: _Sizes,
    keys: torch.Tensor,
    x: torch.Tensor,
    steps: torch.Tensor,
    sums: torch.Tensor,
    initial: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """States before every chunk, and the last ones."""
    shape = (sizes.samples, sizes.steps, sizes.heads, sizes.width, sizes.states)
    of_chunks = x.new_empty(shape, dtype=torch.float32)
    flops = sizes.flops(rows=sizes.width, columns=sizes.states, inner=sizes.size)
    launch("chunk_state_fwd", (keys, x, steps, sums), (of_chunks,), flops=flops)
    passed = x.new_empty(shape, dtype=dtype)
    last = x.new_empty(sizes.samples, sizes.heads, sizes.width, sizes.states, dtype=torch.float32)
    launch("state_passing_fwd", (of_chunks, sums, initial), (passed, last), steps=sizes.steps)
    return passed, last


def _scores(sizes: _Sizes, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Of every chunk and group, in float32."""
    scores = keys.new_empty(sizes.samples, sizes.steps, sizes.groups, sizes.size, sizes.size, dtype=torch.float32)
    flops = sizes.flops(by_group=True, rows=sizes.size, columns=sizes.size, inner=sizes.states)
    launch("bmm_chunk_fwd", (queries, keys), (scores,), flops=flops)
    return scores


def _scan(
    size: int,
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    skip: torch.Tensor | None,
    gate: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """The result, the same before the gate, sums of decays, the last states, and what callers hold besides."""
    sizes = _of_call(x, keys, size)
    sums, steps = _sums(sizes, dt, decay, dt_bias)
    states, last = _states(sizes, keys, x, steps, sums, initial, queries.dtype)
    scores = _scores(sizes, queries, keys)
    result = x.new_empty(x.shape)
    plain = result if gate is None else x.new_empty(x.shape)
    launch(
        "chunk_scan_fwd",
        (scores, x, steps, sums, queries, states, skip, gate),
        (result,) if gate is None else (result, plain),
        flops=sizes.flops(rows=sizes.size, columns=sizes.width, inner=sizes.size + sizes.states),
    )
    return result, plain, sums, last, (steps, states)


class _Gradients(NamedTuple):
    """Of a scan."""

    x: torch.Tensor
    dt: torch.Tensor
    decay: torch.Tensor
    keys: torch.Tensor
    queries: torch.Tensor
    skip: torch.Tensor | None
    gate: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial: torch.Tensor | None


def _scan_backward(
    gradient: torch.Tensor,
    size: int,
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    plain: torch.Tensor,
    skip: torch.Tensor | None,
    gate: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial: torch.Tensor | None,
    of_last: torch.Tensor | None,
    into: tuple[torch.Tensor, ...] = (),
    forms_again: bool = False,
) -> _Gradients:
    """``into``: where gradients of ``x``, time steps, keys, queries and the gate go, instead of new tensors.

    ``forms_again``: whether the gated result is formed once more.
    """
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    sizes = _of_call(x, keys, size)
    empty = into or tuple(torch.empty_like(tensor) for tensor in (x, dt, keys, queries))
    of_x, of_dt, of_keys, of_queries = empty[:4]
    dt = dt.clone()
    sums, steps = _sums(sizes, dt, decay, dt_bias)
    scores = _scores(sizes, queries, keys)
    states, _ = _states(sizes, keys, x, steps, sums, initial, torch.float32)
    of_gate = of_gated_skip = None
    if gate is not None:
        of_gate = into[4] if into else torch.empty_like(gate)
        of_gated_skip = None if skip is None else torch.empty_like(skip)
        again = torch.empty_like(x) if forms_again else None
        of_plain = torch.empty_like(gradient)
        made = (of_gate, of_plain) if again is None else (of_gate, of_plain, again)
        launch("chunk_scan_bwd_dz", (x, gate, plain, gradient, skip), made)
        gradient = of_plain
    by_state = sizes.flops(rows=sizes.size, columns=sizes.width, inner=sizes.states)
    within = sizes.flops(rows=sizes.size, columns=sizes.size, inner=sizes.width)
    of_states = torch.empty_like(states)
    launch("chunk_scan_bwd_dstates", (queries, sums, gradient), (of_states,), flops=by_state)
    of_states, of_ends, of_initial, states = _passed_backward(sizes, of_states, states, sums, initial, of_last, x.dtype)
    of_steps = torch.empty_like(steps)
    given: tuple[torch.Tensor, ...] = (x, scores, gradient, steps, sums, keys, of_states)
    of_skip = _inputs_backward(sizes, given, of_x, of_steps, skip, flops=within + by_state)
    of_sums_next, of_sums_before = torch.empty_like(sums), torch.empty_like(sums)
    wide: tuple[int, ...] = (sizes.samples, sizes.length, sizes.splits, sizes.groups, sizes.states)
    given = (x, of_states, keys, steps, sums)
    added_keys = _of_group("chunk_state_bwd_db", given, wide, of_sums_next, flops=by_state)
    given = (gradient, states, queries, sums)
    added_queries = _of_group("chunk_scan_bwd_dc", given, wide, of_sums_before, flops=by_state)
    given = (x, gradient, steps, sums)
    wide = (sizes.samples, sizes.steps, sizes.splits, sizes.groups, sizes.size, sizes.size)
    of_scores = _of_group("chunk_scan_bwd_dcb", given, wide, None, flops=within)
    of_group = sizes.flops(by_group=True, rows=sizes.size, columns=sizes.states, inner=sizes.size)
    launch("bmm_chunk_bwd", (queries, of_scores, added_keys), (of_keys,), flops=of_group)
    launch("bmm_chunk_bwd", (keys, of_scores, added_queries), (of_queries,), flops=of_group)
    of_sums_before[..., -1] += of_ends
    of_sums_before = of_sums_before.flip([-1]).cumsum(dim=-1).flip([-1])
    of_sums = _decays_backward(sizes, (x, gradient, steps, sums, scores), flops=within)
    of_sums += of_sums_next + of_sums_before
    of_decay = torch.empty_like(decay, dtype=torch.float32)
    of_bias = None if dt_bias is None else torch.empty_like(dt_bias, dtype=torch.float32)
    written = [of_dt, of_decay] if of_bias is None else [of_dt, of_decay, of_bias]
    launch("chunk_cumsum_bwd", (of_sums, of_steps, dt, decay, dt_bias), written)
    of_skip = of_skip if of_gated_skip is None else of_gated_skip
    return _Gradients(of_x, of_dt, of_decay, of_keys, of_queries, of_skip, of_gate, of_bias, of_initial)


def _passed_backward(
    sizes: _Sizes,
    gradient: torch.Tensor,
    states: torch.Tensor,
    sums: torch.Tensor,
    initial: torch.Tensor | None,
    of_last: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Gradients of the states of chunks, of the decays over whole chunks, and of the first states; and the states.

    Gradients and states are in ``dtype``, in which they are multiplied.
    """
    passed = torch.empty_like(gradient, dtype=dtype)
    narrow = states if dtype is states.dtype else torch.empty_like(states, dtype=dtype)
    of_initial = None if initial is None else torch.empty_like(passed[:, 0])
    of_ends = sums.new_empty(*sizes.of_chunks[:3], chunks(sizes.width * sizes.states, _STATE_BLOCK))
    made = [passed, of_ends] if narrow is states else [passed, of_ends, narrow]
    launch("state_passing_bwd", (gradient, states, sums, of_last), made, steps=sizes.steps)
    return passed, of_ends.sum(-1), of_initial, narrow


def _inputs_backward(
    sizes: _Sizes,
    reads: tuple[torch.Tensor, ...],
    of_x: torch.Tensor,
    of_steps: torch.Tensor,
    skip: torch.Tensor | None,
    *,
    flops: int,
) -> torch.Tensor | None:
    """Writes gradients of the inputs and time steps; gives that of the weights of the skip."""
    if skip is None:
        launch("chunk_scan_chunk_state_bwd_dx", reads, (of_x, of_steps), flops=flops)
        return None
    rows, columns = chunks(sizes.size, _ROWS), skip.shape[1] if skip.dim() > 1 else 1
    parts = skip.new_zeros(rows, sizes.samples, sizes.steps, sizes.heads, columns, dtype=torch.float32)
    launch("chunk_scan_chunk_state_bwd_dx", (*reads, skip), (of_x, of_steps, parts), flops=flops)
    found = parts.sum((0, 1, 2))
    return (found if skip.dim() > 1 else found.sum(-1)).to(skip.dtype)


def _of_group(
    kernel: str, reads: tuple[torch.Tensor, ...], shape: tuple[int, ...], of_sums: torch.Tensor | None, *, flops: int
) -> torch.Tensor:
    """A gradient of what heads of a group share: programs add up the heads that they take, the rest is added here."""
    parts = reads[0].new_empty(shape, dtype=torch.float32)
    launch(kernel, reads, (parts,) if of_sums is None else (parts, of_sums), flops=flops)
    return parts.sum(2)


def _decays_backward(sizes: _Sizes, reads: tuple[torch.Tensor, ...], *, flops: int) -> torch.Tensor:
    """The gradient of sums of decays by the scores that they are part of."""
    rows = chunks(sizes.size, _ROWS)
    parts = reads[0].new_empty(*sizes.of_chunks[:3], rows, sizes.size, dtype=torch.float32)
    launch("chunk_scan_bwd_ddAcs_stable", reads, (parts,), flops=flops)
    return parts.sum(3)


class _ChunkScan(torch.autograd.Function):
    """See [Note: State spaces in chunks]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dt: torch.Tensor,
        decay: torch.Tensor,
        keys: torch.Tensor,
        queries: torch.Tensor,
        size: int,
        skip: torch.Tensor | None,
        gate: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        initial: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result, plain, sums, last, _ = _scan(size, x, dt, decay, keys, queries, skip, gate, dt_bias, initial)
        ctx.save_for_backward(plain, x, dt, sums, decay, keys, queries, skip, gate, dt_bias, initial)
        ctx.size = size
        ctx.set_materialize_grads(False)
        return result, last

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, of_last: torch.Tensor | None) -> Any:
        plain, x, dt, _, decay, keys, queries, skip, gate, dt_bias, initial = ctx.saved_tensors
        found = _scan_backward(
            gradient, ctx.size, x, dt, decay, keys, queries, plain, skip, gate, dt_bias, initial, of_last
        )
        return (
            found.x, found.dt, found.decay, found.keys, found.queries, None, found.skip, found.gate, found.dt_bias,
            found.initial,
        )  # fmt: skip


class _FusedLayer(torch.autograd.Function):
    """See [Note: State spaces in chunks]."""

    @staticmethod
    def forward(
        ctx: Any,
        first: torch.Tensor,
        filters: torch.Tensor,
        filter_bias: torch.Tensor | None,
        dt_bias: torch.Tensor,
        decay: torch.Tensor,
        skip: torch.Tensor,
        size: int,
        initial: torch.Tensor | None,
        norm: torch.Tensor | None,
        last_weight: torch.Tensor | None,
        last_bias: torch.Tensor | None,
        width: int,
        groups: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = _Parts(first, filters, skip.shape[0], width, groups)
        x, keys, queries = parts.convolved(filter_bias)
        gate = parts.gate if norm is None else None
        held = _scan(size, x, parts.dt, decay, keys, queries, skip, gate, dt_bias, initial)
        result, plain, _, last, _ = held
        result, inverse = result.flatten(2), None
        if norm is not None:
            result, inverse = _gated_norm(plain.flatten(2), norm, parts.gate.flatten(2), groups)
        ctx.save_for_backward(
            first, filters, filter_bias, plain, decay, skip, dt_bias, initial, norm, inverse, last_weight, last_bias
        )
        ctx.size, ctx.width, ctx.groups = size, width, groups
        ctx.set_materialize_grads(False)
        if last_weight is not None:
            result = functional.linear(result, last_weight, last_bias)
        return result, last

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, of_last: torch.Tensor | None) -> Any:
        (
            first, filters, filter_bias, plain, decay, skip, dt_bias, initial, norm, inverse, last_weight, last_bias
        ) = ctx.saved_tensors  # fmt: skip
        parts = _Parts(first, filters, skip.shape[0], ctx.width, ctx.groups)
        again = None if last_weight is None else torch.empty_like(plain.flatten(2))
        x, keys, queries = parts.convolved(filter_bias)
        of_first = torch.empty_like(first)
        given = _Parts(of_first, filters, skip.shape[0], ctx.width, ctx.groups)
        of_channels = torch.empty_like(parts.channels)
        into_x, into_keys, into_queries = given.split(of_channels)
        of_result = gradient
        if last_weight is not None:
            gradient = functional.linear(gradient, last_weight.t())
        of_norm, before = None, gradient
        if norm is not None:
            gradient, of_norm = _gated_norm_backward(gradient, plain.flatten(2), norm, inverse, parts.gate, again)
        found = _scan_backward(
            gradient.view(x.shape), ctx.size, x, parts.dt, decay, keys, queries, plain, skip,
            parts.gate if norm is None else None, dt_bias, initial, of_last,
            into=(into_x, given.dt, into_keys, into_queries, given.gate), forms_again=again is not None,
        )  # fmt: skip
        del before  # held until here
        of_weight = of_bias = None
        if last_weight is not None and again is not None:
            of_weight = torch.einsum("bso,bsd->od", of_result, again)
            of_bias = None if last_bias is None else of_result.sum(dim=(0, 1))
        of_conv = given.channels.transpose(1, 2)
        _, of_filters, of_filter_bias = convolved_backward(
            parts.channels.transpose(1, 2), filters, filter_bias, of_channels.transpose(1, 2), of_conv
        )
        return (
            of_first, of_filters, of_filter_bias, found.dt_bias, found.decay, found.skip, None, found.initial, of_norm,
            of_weight, of_bias, None, None,
        )  # fmt: skip


class _Parts:
    """What the first map of a layer gives: a gate, the channels of the convolution, and time steps, side by side."""

    def __init__(self, first: torch.Tensor, filters: torch.Tensor, heads: int, width: int, groups: int) -> None:
        channels = filters.shape[0]
        inner = heads * width
        unused = first.shape[-1] - inner - channels - heads
        _, gate, self.channels, self.dt = torch.split(first, [unused, inner, channels, heads], dim=-1)
        self._filters, self._groups, self._sizes = filters, groups, (inner, (channels - inner) // 2)
        self._heads = (heads, width)
        self.gate = _in_heads(gate, self._heads)

    def convolved(self, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What is scanned, keys and queries."""
        return self.split(convolved(self.channels.transpose(1, 2), self._filters, bias).transpose(1, 2))

    def split(self, channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same of other channels."""
        inner, of_groups = self._sizes
        x, keys, queries = torch.split(channels, [inner, of_groups, of_groups], dim=-1)
        by_group = (self._groups, of_groups // self._groups)
        return _in_heads(x, self._heads), _in_heads(keys, by_group), _in_heads(queries, by_group)


def _in_heads(tensor: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
    """Its channels as (heads, width)."""
    return tensor.view(*tensor.shape[:2], *sizes)


def _gated_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of mean square 1, times the gate, and one over the root that each group of a row had."""
    result = torch.empty_like(x)
    inverse = x.new_empty(groups * prod(x.shape[:-1]), dtype=torch.float32)
    launch("layer_norm_gated_fwd", (x, weight, gate), (result, inverse))
    return result, inverse


def _gated_norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    inverse: torch.Tensor,
    gate: torch.Tensor,
    again: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``x`` and of the weight; that of the gate goes into the gradient of the layer's first map."""
    of_x = torch.empty_like(x)
    of_rows = weight.new_empty(_PROCESSORS, weight.numel(), dtype=torch.float32)
    made = [of_x, of_rows] if again is None else [of_x, of_rows, again]
    launch("layer_norm_gated_bwd", (gradient, x, weight, inverse, gate), made)
    return of_x, of_rows.sum(0).to(weight.dtype)
