"""The factorised map gives what the dense one gives, forward and backward, and autograd keeps no more than it needs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from protwin.runtime.osft.factorisation import factorise
from protwin.runtime.osft.linear import OrthogonalLinear
from protwin.shared.basics.errors import ProtwinError
from protwin.shared.factors.sizes import num_frozen

LEADING = [(), (3,), (2, 3), (0,), (2, 0, 3), (0, 4), (1, 1, 1, 2)]


def made(num_out: int, num_in: int, frozen: int, *, has_bias: bool, dtype: torch.dtype = torch.float32) -> Any:
    """A factorised map with factors that are no decomposition any more, as in the middle of training."""
    generator = torch.Generator().manual_seed(num_out * 31 + num_in)
    dense = torch.randn(num_out, num_in, generator=generator).to(dtype)
    bias = nn.Parameter(torch.randn(num_out, generator=generator).to(dtype)) if has_bias else None
    module = OrthogonalLinear(factorise(dense, frozen), bias)
    with torch.no_grad():
        for factor in (module.u_low, module.s_low, module.v_low):
            factor.add_(torch.randn(factor.shape, generator=generator).to(dtype), alpha=0.1)
    return module


def dense_gradients(module: OrthogonalLinear, x: torch.Tensor, upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    """y and all gradients in float64, by the dense weight and the derivatives of its entries, without autograd.

    dW = sum of outer products of upstream and x; dU = dW V^T diag(S), dS = diag(U^T dW V^T), dV = diag(S) U^T dW.
    """
    f = {name: factor.detach().double() for name, factor in module.factors.named().items()}
    dense = f["u_high"] @ torch.diag(f["s_high"]) @ f["v_high"] + f["u_low"] @ torch.diag(f["s_low"]) @ f["v_low"]
    rows, above = x.double().reshape(-1, x.shape[-1]), upstream.double().reshape(-1, dense.shape[0])
    d_weight = torch.einsum("tn,tm->nm", above, rows)
    y = torch.einsum("tm,nm->tn", rows, dense)
    found = {
        "x": torch.einsum("tn,nm->tm", above, dense).reshape(x.shape),
        "u_low": d_weight @ f["v_low"].T @ torch.diag(f["s_low"]),
        "s_low": torch.diagonal(f["u_low"].T @ d_weight @ f["v_low"].T),
        "v_low": torch.diag(f["s_low"]) @ f["u_low"].T @ d_weight,
    }
    if module.bias is not None:
        y = y + module.bias.detach().double()
        found["bias"] = above.sum(0)
    return {"y": y.reshape(upstream.shape), **found}


def own_gradients(module: OrthogonalLinear, x: torch.Tensor, upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(upstream.to(y.dtype))
    found = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    return {"y": y.detach(), "x": x.grad, **found}


def farthest(own: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference, of each tensor as a part of its norm."""
    assert own.keys() == expected.keys()
    errors = []
    for name, value in expected.items():
        assert own[name].shape == value.shape
        errors.append(float((own[name].double() - value).norm() / max(1e-30, float(value.norm()))))
    return max(error if value.numel() else 0.0 for error, value in zip(errors, expected.values(), strict=True))


@given(
    st.integers(1, 9), st.integers(1, 9), st.floats(0, 1), st.booleans(), st.sampled_from(LEADING), st.integers(0, 99)
)
@settings(max_examples=60)
def test_it_and_all_gradients_are_those_of_the_dense_map(
    num_out: int, num_in: int, ratio: float, has_bias: bool, leading: tuple[int, ...], seed: int
) -> None:
    module = made(num_out, num_in, num_frozen(num_out, num_in, ratio), has_bias=has_bias, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, num_in, generator=generator, dtype=torch.float64)
    upstream = torch.randn(*leading, num_out, generator=generator, dtype=torch.float64)
    assert farthest(own_gradients(module, x, upstream), dense_gradients(module, x, upstream)) <= 1e-10
    assert all(p.grad is None for p in (module.u_high, module.s_high, module.v_high) if p is not None)


@pytest.mark.parametrize("frozen", [0, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_right_as_its_type(dtype: torch.dtype, frozen: int) -> None:
    module = made(24, 16, frozen, has_bias=True, dtype=dtype)
    x, upstream = torch.randn(5, 6, 16).to(dtype), torch.randn(5, 6, 24).to(dtype)
    own, expected = own_gradients(module, x, upstream), dense_gradients(module, x, upstream)
    assert own["y"].dtype == dtype
    assert farthest(own, expected) <= 8 * torch.finfo(dtype).eps * math.sqrt(16)


@pytest.mark.parametrize("frozen", [0, 7])
def test_under_autocast_it_computes_as_other_linear_maps_do(frozen: int) -> None:
    """In bfloat16, from float32 factors, with float32 gradients."""
    module = made(24, 16, frozen, has_bias=True)
    x, upstream = torch.randn(5, 6, 16), torch.randn(5, 6, 24)
    saved: list[torch.Tensor] = []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        y = module(x)
        assert y.dtype == nn.Linear(16, 24)(x).dtype == torch.bfloat16
    own = own_gradients_under_autocast(module, x, upstream)
    assert farthest(own, dense_gradients(module, x, upstream)) <= 8 * torch.finfo(torch.bfloat16).eps * 4
    assert own["u_low"].dtype == torch.float32
    # Nothing of (tokens, r) is kept wider than it is computed.
    assert {tensor.dtype for tensor in saved if 30 in tensor.shape} == {torch.bfloat16}


def own_gradients_under_autocast(
    module: OrthogonalLinear, x: torch.Tensor, upstream: torch.Tensor
) -> dict[str, torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return own_gradients(module, x, upstream)


def test_adding_in_place_would_not_be_cast() -> None:
    """Why the sum is no ``addmm_``: autocast leaves its operands as they are."""
    low, u = torch.randn(3, 2), torch.randn(4, 2)
    with torch.autocast("cpu", torch.bfloat16):
        high = nn.functional.linear(torch.randn(3, 5), torch.randn(4, 5))
        assert torch.addmm(high, low, u.t()).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="same dtype"):
            high.addmm_(low, u.t())


@pytest.mark.parametrize("frozen", [0, 5])
def test_autograd_keeps_the_input_and_two_products_of_the_trained_rank(frozen: int) -> None:
    module = made(24, 16, frozen, has_bias=True)
    x = torch.randn(5, 6, 16, requires_grad=True)
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(x)
    tokens, trained = 30, 16 - frozen
    assert sorted(kept.values()) == sorted([4 * tokens * 16, 4 * tokens * trained, 4 * tokens * trained])


def test_the_weight_tells_its_shape_and_cannot_be_computed_with() -> None:
    module = made(24, 16, 5, has_bias=False, dtype=torch.bfloat16)
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    assert (weight.shape, weight.dtype, weight.device) == ((24, 16), torch.bfloat16, module.u_low.device)
    assert (weight.size(0), weight.numel(), weight.requires_grad) == (24, 384, False)
    assert "weight" not in dict(module.named_parameters())
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    for compute in (lambda: nn.functional.linear(x, weight), lambda: weight.sum(), lambda: weight.T, weight.float):
        with pytest.raises(ProtwinError, match="Leave this map out of the targets"):
            compute()
