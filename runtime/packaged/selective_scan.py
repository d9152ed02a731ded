"""Mamba's selective scan of mamba-ssm, alone and together with a layer's convolution and maps.

[Note: Selective scans]
One kernel each way goes through the sequence with all states of a channel in registers: for every token, channel and
state an exponential and some multiply-adds on the vector units.  Kept are what it reads and the states at every 2,048
tokens.  The fused call of a layer keeps what the first map gives and not what the convolution and the time steps are,
which backward forms again.
Source: ops/selective_scan_interface.py and csrc/selective_scan/selective_scan.cpp of mamba-ssm 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.nn import functional

from .causal_convolution import convolved, convolved_backward
from .launching import chunks, launch

_SPAN: Final = 2048
"""Tokens after which states are kept."""
_EXPONENTIAL: Final = 16
"""Vector FLOPs that take as long as an exponential: 16 of these a clock and multiprocessor, and 128 multiply-adds (CUDA
C++ Programming Guide, arithmetic instructions, compute capability 8.0 and 9.0)."""
_FORWARD_FLOPS: Final = _EXPONENTIAL + 6
"""Of a token, channel and state: the decay, the state that is decayed and added to, and its part of the result."""
_BACKWARD_FLOPS: Final = 2 * _EXPONENTIAL + 24
"""The same again, and the gradients of four operands."""


def selective_scan_fn(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """The scan of ``u`` (samples, channels, length), and the last states if they are asked for.

    ``delta``: time steps as large; ``A``: (channels, states); ``B``, ``C``: (samples, states, length) or with groups
    before the states; ``z``: a gate as large as ``u``.
    """
    found = _SelectiveScan.apply(u, delta, A, B, C, D, z, delta_bias)  # type: ignore[no-untyped-call]
    return found if return_last_state else found[0]


def mamba_inner_fn(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    delta_proj_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    A: torch.Tensor,
    B: torch.Tensor | None = None,
    C: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    b_rms_weight: torch.Tensor | None = None,
    c_rms_weight: torch.Tensor | None = None,
    dt_rms_weight: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """All of a Mamba layer behind its first map: ``xz`` is (samples, channels and gates, length)."""
    assert B is None, "layers make their own"
    assert C is None, "layers make their own"
    found: torch.Tensor = _FusedLayer.apply(  # type: ignore[no-untyped-call]
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, D,
        delta_bias, (b_rms_weight, c_rms_weight, dt_rms_weight),
    )  # fmt: skip
    return found


def _last_contiguous(*tensors: torch.Tensor | None) -> list[Any]:
    return [tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def _scanned(
    u: torch.Tensor, delta: torch.Tensor, decay: torch.Tensor, keys: torch.Tensor, *others: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The result before the gate, the states that are kept, and the result.

    ``others``: queries, skip, gate and the bias of time steps.
    """
    gate = others[2]
    samples, channels, length = u.shape
    gated = None if gate is None else torch.empty_like(gate)
    result = torch.empty_like(delta)
    states = u.new_empty(samples, channels, chunks(length, _SPAN), 2 * decay.shape[1], dtype=decay.dtype)
    made = [result, states] if gated is None else [result, states, gated]
    launch(
        "selective_scan_fwd",
        (u, delta, decay, keys, *others),
        made,
        vector_flops=_FORWARD_FLOPS * u.numel() * decay.shape[1],
    )
    return result, states, gated


class _Gradients(NamedTuple):
    """Of a scan."""

    u: torch.Tensor
    delta: torch.Tensor
    decay: torch.Tensor
    keys: torch.Tensor
    queries: torch.Tensor
    skip: torch.Tensor | None
    gate: torch.Tensor | None
    delta_bias: torch.Tensor | None


def _scanned_backward(
    gradient: torch.Tensor,
    u: torch.Tensor,
    delta: torch.Tensor,
    decay: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    skip: torch.Tensor | None,
    gate: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    kept: tuple[torch.Tensor | None, ...],
    of_gate: torch.Tensor | None = None,
    again: torch.Tensor | None = None,
) -> _Gradients:
    """``kept``: states, and the result before the gate; ``again``: where the result is formed once more."""
    if gate is not None and of_gate is None:
        of_gate = torch.empty_like(gate)
    of_u, of_delta = torch.empty_like(u), torch.empty_like(delta)
    of_decay = torch.zeros_like(decay)
    of_keys, of_queries = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (keys, queries))
    of_skip, of_bias = (None if tensor is None else torch.zeros_like(tensor) for tensor in (skip, delta_bias))
    made = (of_u, of_delta, of_decay, of_keys, of_queries, of_skip, of_gate, of_bias, again)
    reads = (u, delta, decay, keys, queries, skip, gate, delta_bias, gradient, *kept)
    written = [tensor for tensor in made if tensor is not None]
    launch("selective_scan_bwd", reads, written, vector_flops=_BACKWARD_FLOPS * u.numel() * decay.shape[1])
    return _Gradients(
        of_u, of_delta, of_decay, of_keys.to(keys.dtype), of_queries.to(queries.dtype), of_skip, of_gate, of_bias
    )


class _SelectiveScan(torch.autograd.Function):
    """See [Note: Selective scans]."""

    @staticmethod
    def forward(
        ctx: Any,
        u: torch.Tensor,
        delta: torch.Tensor,
        decay: torch.Tensor,
        keys: torch.Tensor,
        queries: torch.Tensor,
        skip: torch.Tensor | None,
        gate: torch.Tensor | None,
        delta_bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        u, delta, keys, queries, skip, gate = _last_contiguous(u, delta, keys, queries, skip, gate)
        ctx.have_groups = tuple(part.dim() == 4 for part in (keys, queries))
        keys, queries = (part.unsqueeze(1) if part.dim() == 3 else part for part in (keys, queries))
        result, states, gated = _scanned(u, delta, decay, keys, queries, skip, gate, delta_bias)
        kept = result if gate is not None else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(u, delta, decay, keys, queries, skip, gate, delta_bias, states, kept)
        return result if gated is None else gated, states[:, :, -1, 1::2]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor | None) -> Any:
        *given, states, kept = ctx.saved_tensors
        (gradient,) = _last_contiguous(gradient)
        u, delta, decay, keys, queries, skip, gate, delta_bias = given
        found = _scanned_backward(gradient, u, delta, decay, keys, queries, skip, gate, delta_bias, (states, kept))
        of_keys, of_queries = (
            part if has_groups else part.squeeze(1)
            for part, has_groups in zip((found.keys, found.queries), ctx.have_groups, strict=True)
        )
        return tuple(found._replace(keys=of_keys, queries=of_queries))


class _FusedLayer(torch.autograd.Function):
    """See [Note: Selective scans]."""

    @staticmethod
    def forward(
        ctx: Any,
        first: torch.Tensor,
        filters: torch.Tensor,
        filter_bias: torch.Tensor | None,
        inner_weight: torch.Tensor,
        delta_weight: torch.Tensor,
        last_weight: torch.Tensor,
        last_bias: torch.Tensor | None,
        decay: torch.Tensor,
        skip: torch.Tensor | None,
        delta_bias: torch.Tensor | None,
        norms: tuple[torch.Tensor | None, ...],
    ) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            inner_weight, delta_weight, last_weight = (
                weight.to(dtype) for weight in (inner_weight, delta_weight, last_weight)
            )
            last_bias = None if last_bias is None else last_bias.to(dtype)
        (first,) = _last_contiguous(first)
        filters = filters.squeeze(1)
        x, gate = first.chunk(2, dim=1)
        through = convolved(x, filters, filter_bias)
        mapped = functional.linear(through.transpose(1, 2).reshape(-1, x.shape[1]), inner_weight)
        delta = _time_steps(mapped, delta_weight, x.shape[0])
        states, rank = decay.shape[1], delta_weight.shape[1]
        keys, queries = (
            part.view(*x.shape[::2], -1).transpose(1, 2).unsqueeze(1).contiguous()
            for part in (mapped[:, rank : rank + states], mapped[:, -states:])
        )
        mixed = [keys, queries, delta]
        del keys, queries, delta
        _normalize(mixed, norms)
        keys, queries, delta = mixed
        result, kept, gated = _scanned(through, delta, decay, keys, queries, skip, gate, delta_bias)
        assert gated is not None
        ctx.save_for_backward(
            first, filters, filter_bias, mapped, inner_weight, delta_weight, last_weight, decay, keys, queries, skip,
            delta_bias, kept, result, *norms,
        )  # fmt: skip
        ctx.has_last_bias = last_bias is not None
        del through, delta, mixed
        return functional.linear(gated.transpose(1, 2), last_weight, last_bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (
            first, filters, filter_bias, mapped, inner_weight, delta_weight, last_weight, decay, keys, queries, skip,
            delta_bias, kept, result, *norms,
        ) = ctx.saved_tensors  # fmt: skip
        x, gate = first.chunk(2, dim=1)
        samples, rank, states = x.shape[0], delta_weight.shape[1], decay.shape[1]
        (gradient,) = _last_contiguous(gradient)
        through = convolved(x, filters, filter_bias)
        mixed = [keys, queries, _time_steps(mapped, delta_weight, samples)]
        _normalize(mixed, norms)
        keys, queries, delta = mixed
        of_first = torch.empty_like(first)
        of_x, of_gate = of_first.chunk(2, dim=1)
        flat = gradient.flatten(0, 1).t()
        of_result = _by_samples(last_weight.t() @ flat, samples)
        again = torch.empty_like(result)
        found = _scanned_backward(
            of_result, through, delta, decay, keys, queries, skip, gate, delta_bias, (kept, result), of_gate, again
        )
        of_last = torch.einsum("eB,dB->ed", flat, again.transpose(0, 1).flatten(1))
        of_last_bias = gradient.sum(dim=(0, 1)) if ctx.has_last_bias else None
        of_mapped = torch.empty_like(mapped)
        of_through, of_delta, of_decay, of_keys, of_queries, of_skip, _, of_delta_bias = found
        del found
        of_keys = of_keys.squeeze(1).transpose(1, 2).reshape(-1, states).contiguous()
        of_mapped[:, rank : rank + states] = of_keys
        del of_keys
        of_queries = of_queries.squeeze(1).transpose(1, 2).reshape(-1, states).contiguous()
        of_mapped[:, -states:] = of_queries
        del of_queries
        of_delta = of_delta.transpose(0, 1).flatten(1)
        of_delta_weight = torch.einsum("dB,Br->dr", of_delta, mapped[:, :rank])
        of_mapped[:, :rank] = torch.einsum("dB,dr->Br", of_delta, delta_weight)
        of_through = of_through.transpose(0, 1).flatten(1)
        of_inner = torch.einsum("Br,Bd->rd", of_mapped, through.transpose(1, 2).reshape(-1, x.shape[1]))
        torch.addmm(of_through, inner_weight.t(), of_mapped.t(), out=of_through)
        of_through = _by_samples(of_through, samples)
        _, of_filters, of_filter_bias = convolved_backward(x, filters, filter_bias, of_through, of_x)
        return (
            of_first, of_filters.unsqueeze(1), of_filter_bias, of_inner, of_delta_weight, of_last, of_last_bias,
            of_decay, of_skip, of_delta_bias, None,
        )  # fmt: skip


def _time_steps(mapped: torch.Tensor, weight: torch.Tensor, samples: int) -> torch.Tensor:
    """(samples, channels, length), the length side by side within the channels of all samples."""
    return _by_samples(weight @ mapped[:, : weight.shape[1]].t(), samples)


def _by_samples(tensor: torch.Tensor, samples: int) -> torch.Tensor:
    """(channels, tokens of all samples) as (samples, channels, length)."""
    return tensor.view(tensor.shape[0], samples, -1).transpose(0, 1)


def _normalize(tensors: list[torch.Tensor], weights: Sequence[torch.Tensor | None]) -> None:
    """In their places, rows of mean square 1 of those that have a weight for them; rows lie across the length."""
    for number, weight in enumerate(weights):
        if weight is None:
            continue
        tensors[number] = tensors[number].transpose(-1, -2).contiguous()
        result = torch.empty_like(tensors[number])
        launch("layer_norm_fwd", (tensors[number], weight), (result,))
        tensors[number] = result
        del result
        tensors[number] = tensors[number].transpose(-1, -2).contiguous()
