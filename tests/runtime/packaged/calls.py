"""Calls of packages' kernels on fake tensors, and what they hold: asked of the packages' own Python, and of ours."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HALF, FULL = torch.bfloat16, torch.float32


class Held(NamedTuple):
    """Of one call and its backward."""

    kept_bytes: int
    """After forward, beside the arguments."""
    forward_bytes: int
    """At most in forward."""
    backward_bytes: int
    """At most in backward."""
    gradients: list[list[Any]]
    """Shapes and element types, by argument."""


class _Alive(TorchDispatchMode):
    """Bytes of storages that operations made."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in given}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._sizes:
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                self._sizes[key] = size
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, key)
        return made

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def held(call: Callable[..., Any], arguments: Callable[[], Mapping[str, Any]]) -> Held:
    """What ``call`` of ``arguments``, tensors among them, holds."""
    with FakeTensorMode():
        given = arguments()
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        storages = [tensor.untyped_storage() for tensor in tensors.values()]
        alive = _Alive(list(tensors.values()))
        with alive:
            made = call(**given)
            results = [tensor for tensor in (made if isinstance(made, tuple) else (made,)) if tensor is not None]
            kept, forward = alive.now, alive.most
            alive.most = alive.now
            torch.autograd.backward(results, [torch.empty_like(result) for result in results])
        assert storages
        gradients = [
            [name, list(tensor.grad.shape), str(tensor.grad.dtype)]
            for name, tensor in tensors.items()
            if tensor.grad is not None
        ]
        return Held(kept, forward, alive.most, gradients)


def _new(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype).requires_grad_()


def _delta_rule(sizes: tuple[int, ...], has_state: bool, *, is_kimi: bool = False) -> Mapping[str, Any]:
    samples, length, key_heads, heads, keys, values = sizes
    mixed = torch.empty(samples, length, 2 * key_heads * keys + heads * values, dtype=HALF)
    parts = torch.split(mixed, [key_heads * keys, key_heads * keys, heads * values], dim=-1)
    query, key = (part.unflatten(-1, (key_heads, keys)).detach().requires_grad_() for part in parts[:2])
    value = parts[2].unflatten(-1, (heads, values)).detach().requires_grad_()
    given: dict[str, Any] = {"q": query, "k": key, "v": value, "use_qk_l2norm_in_kernel": True}
    given["beta"] = _new(samples, length, heads)
    if is_kimi:
        given |= {"g": _new(samples, length, heads, keys), "use_gate_in_kernel": True}
        given |= {"A_log": _new(heads, dtype=FULL), "dt_bias": _new(heads * keys, dtype=FULL)}
    else:
        given["g"] = _new(samples, length, heads, dtype=FULL)
    if has_state:
        given |= {"initial_state": _new(samples, heads, keys, values, dtype=FULL), "output_final_state": True}
    return given


def _scan(sizes: tuple[int, ...], dtype: torch.dtype, has_gate: bool) -> Mapping[str, Any]:
    samples, length, heads, width, groups, states, chunk = sizes
    given: dict[str, Any] = {
        "x": _new(samples, length, heads, width, dtype=dtype),
        "dt": _new(samples, length, heads, dtype=dtype),
        "A": _new(heads, dtype=FULL),
        "B": _new(samples, length, groups, states, dtype=dtype),
        "C": _new(samples, length, groups, states, dtype=dtype),
        "chunk_size": chunk,
        "D": _new(heads, dtype=dtype),
        "dt_bias": _new(heads, dtype=dtype),
    }
    return given | ({"z": _new(*given["x"].shape, dtype=dtype)} if has_gate else {})


def _layer(sizes: tuple[int, ...], dtype: torch.dtype, has_norm: bool, has_map: bool) -> Mapping[str, Any]:
    samples, length, heads, width, groups, states, chunk = sizes
    channels = heads * width + 2 * groups * states
    given: dict[str, Any] = {
        "zxbcdt": _new(samples, length, heads * width + channels + heads, dtype=dtype),
        "conv1d_weight": _new(channels, 4, dtype=dtype),
        "conv1d_bias": _new(channels, dtype=dtype),
        "dt_bias": _new(heads, dtype=dtype),
        "A": _new(heads, dtype=FULL),
        "D": _new(heads, dtype=dtype),
        "chunk_size": chunk,
        "headdim": width,
        "ngroups": groups,
        "norm_before_gate": False,
    }
    given |= {"rmsnorm_weight": _new(heads * width, dtype=dtype)} if has_norm else {}
    return given | ({"outproj_weight": _new(40, heads * width, dtype=dtype)} if has_map else {})


def _selective(sizes: tuple[int, ...], dtype: torch.dtype, has_gate: bool) -> Mapping[str, Any]:
    samples, channels, length, states = sizes
    u, delta = (torch.empty(samples, length, channels, dtype=dtype).transpose(1, 2).requires_grad_() for _ in "ud")
    given: dict[str, Any] = {"u": u, "delta": delta, "A": _new(channels, states, dtype=FULL)}
    given |= {name: _new(samples, states, length, dtype=dtype) for name in ("B", "C")}
    given |= {"D": _new(channels, dtype=FULL), "delta_bias": _new(channels, dtype=FULL)}
    return given | ({"z": _new(samples, channels, length, dtype=dtype)} if has_gate else {})


def _inner(sizes: tuple[int, ...], dtype: torch.dtype, has_norms: bool) -> Mapping[str, Any]:
    samples, channels, length, states = sizes
    rank = 4
    given: dict[str, Any] = {
        "xz": torch.empty(samples, length, 2 * channels, dtype=dtype).transpose(1, 2).requires_grad_(),
        "conv1d_weight": _new(channels, 1, 4, dtype=dtype),
        "conv1d_bias": _new(channels, dtype=dtype),
        "x_proj_weight": _new(rank + 2 * states, channels, dtype=dtype),
        "delta_proj_weight": _new(channels, rank, dtype=dtype),
        "out_proj_weight": _new(24, channels, dtype=dtype),
        "out_proj_bias": None,
        "A": _new(channels, states, dtype=FULL),
        "D": _new(channels, dtype=FULL),
        "delta_bias": _new(channels, dtype=FULL),
    }
    if has_norms:
        sized = {"b_rms_weight": states, "c_rms_weight": states, "dt_rms_weight": channels}
        given |= {name: torch.empty(size, dtype=dtype) for name, size in sized.items()}
    return given


def _convolution(is_last: bool, has_bias: bool) -> Mapping[str, Any]:
    x = torch.empty(2, 100, 64, dtype=HALF).transpose(1, 2) if is_last else torch.empty(2, 64, 100, dtype=HALF)
    given: dict[str, Any] = {"x": x.requires_grad_(), "weight": _new(64, 4), "activation": "silu"}
    return given | ({"bias": _new(64)} if has_bias else {})


_RULE_SIZES: Final = ((1, 256, 4, 4, 128, 128), (2, 200, 2, 8, 64, 128), (1, 130, 3, 3, 256, 192))
_SPACE_SIZES: Final = ((2, 256, 8, 64, 1, 128, 256), (1, 300, 4, 64, 2, 64, 128), (1, 1024, 24, 64, 8, 128, 128))
_SCAN_SIZES: Final = ((2, 128, 100, 16), (1, 64, 5000, 16))


def cases() -> dict[str, tuple[str, Callable[[], Mapping[str, Any]]]]:
    """By their names: the function of the package, and what it is given."""
    found: dict[str, tuple[str, Callable[[], Mapping[str, Any]]]] = {}

    def add(function: str, make: Callable[..., Mapping[str, Any]], *settings: Any, **named: Any) -> None:
        words = " ".join(str(setting).removeprefix("torch.") for setting in settings)
        found[f"{function} {words}"] = (function, lambda: make(*settings, **named))

    for has_state in (False, True):
        for sizes in _RULE_SIZES:
            add("chunk_gated_delta_rule", _delta_rule, sizes, has_state)
            add("chunk_kda", _delta_rule, sizes, has_state, is_kimi=True)
    for dtype in (HALF, FULL):
        for flag in (False, True):
            for shape in _SPACE_SIZES:
                add("mamba_chunk_scan_combined", _scan, shape, dtype, flag)
                for has_map in (False, True):
                    add("mamba_split_conv1d_scan_combined", _layer, shape, dtype, flag, has_map)
            for widths in _SCAN_SIZES:
                add("selective_scan_fn", _selective, widths, dtype, flag)
                add("mamba_inner_fn", _inner, widths, dtype, flag)
    for is_last in (False, True):
        for has_bias in (False, True):
            add("causal_conv1d_fn", _convolution, is_last, has_bias)
    return found
