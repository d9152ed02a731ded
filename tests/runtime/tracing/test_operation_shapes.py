"""Shapes of traced products and attention: against torch's own FLOP counts, and factors of known sizes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from protwin.runtime.tracing.operations import describe_operation
from protwin.shared.schema.workload import Operation, OperationClass


class _Seen(TorchDispatchMode):
    """What a call does."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        described = describe_operation(func, args, kwargs or {}, result)
        if described is not None:
            self.operations.append(described)
        return result


def seen(call: Callable[[], object]) -> list[Operation]:
    with _Seen() as mode:
        call()
    return mode.operations


def ones(*shape: int, requires_grad: bool = False) -> torch.Tensor:
    return torch.ones(shape, requires_grad=requires_grad)


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda: ones(2, 3) @ ones(3, 5), (1, 2, 5, 3)),
        (lambda: torch.addmm(ones(5), ones(2, 3), ones(3, 5)), (1, 2, 5, 3)),
        (lambda: torch.bmm(ones(7, 2, 3), ones(7, 3, 5)), (7, 2, 5, 3)),
        (lambda: torch.baddbmm(ones(7, 2, 5), ones(7, 2, 3), ones(7, 3, 5)), (7, 2, 5, 3)),
        (lambda: ones(2, 3) @ ones(3), (1, 2, 1, 3)),
        (lambda: torch.nn.functional.linear(ones(4, 2, 3), ones(5, 3)), (1, 8, 5, 3)),
        (lambda: torch.einsum("bij,bjk->bik", ones(7, 2, 3), ones(7, 3, 5)), (7, 2, 5, 3)),
    ],
)
def test_products(call: Callable[[], object], shape: tuple[int, ...]) -> None:
    (product,) = [o for o in seen(call) if o.operation_class is OperationClass.MATMUL]
    assert product.shape == shape
    batch, m, n, k = shape
    assert product.flops == 2 * batch * m * n * k


def test_backward_products_have_the_sizes_of_their_own() -> None:
    weight, x = ones(5, 3, requires_grad=True), ones(8, 3, requires_grad=True)
    loss = torch.nn.functional.linear(x, weight).sum()
    shapes = {o.shape for o in seen(loss.backward) if o.operation_class is OperationClass.MATMUL}
    assert shapes == {(1, 8, 3, 5), (1, 5, 3, 8)}


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    query = ones(2, 4, 16, 8, requires_grad=True)
    key, value = (ones(2, 4, 32 if not causal else 16, 8, requires_grad=True) for _ in range(2))
    found: list[torch.Tensor] = []
    (forward,) = [
        o
        for o in seen(lambda: found.append(scaled_dot_product_attention(query, key, value, is_causal=causal)))
        if o.operation_class is OperationClass.ATTENTION
    ]
    (backward,) = [o for o in seen(found[0].sum().backward) if o.operation_class is OperationClass.ATTENTION]
    assert forward.shape == backward.shape == (8, 16, 16 if causal else 32, 8)
    heads, queries, keys, width = forward.shape
    share = 2 if causal else 1
    assert forward.flops == 4 * heads * queries * keys * width // share
    assert backward.flops == 10 * heads * queries * keys * width // share
    assert backward.name.endswith("_backward")  # sim/operations/kernels.py tells the two apart by it


CONVOLUTIONS = st.fixed_dictionaries(
    {
        "dims": st.integers(1, 3),
        "groups": st.sampled_from([1, 2, 3, 6]),
        "per_group": st.integers(1, 3),
        "made_per_group": st.integers(1, 3),
        "kernel": st.integers(1, 3),
        "stride": st.integers(1, 2),
        "dilation": st.integers(1, 2),
        "transposed": st.booleans(),
        "is_last": st.booleans(),
    }
)


@given(CONVOLUTIONS)
@settings(max_examples=60, deadline=None)
def test_a_convolution_is_a_product_for_each_group(drawn: dict[str, Any]) -> None:
    """Groups multiply as so many convolutions without groups do, which torch's formula counts."""
    dims, groups, is_last = drawn["dims"], drawn["groups"], drawn["is_last"] and drawn["dims"] == 2

    def run(number: int) -> tuple[int, Operation, Operation]:
        kind = getattr(nn, f"Conv{'Transpose' if drawn['transposed'] else ''}{dims}d")
        sizes = (number * drawn["per_group"], number * drawn["made_per_group"], drawn["kernel"])
        module = kind(*sizes, stride=drawn["stride"], dilation=drawn["dilation"], groups=number)
        given = torch.randn(2, sizes[0], *(7,) * dims)
        given = (given.to(memory_format=torch.channels_last) if is_last else given).requires_grad_()
        with FlopCounterMode(display=False) as counted:
            made = module(given)
            made.sum().backward()
        (forward,) = [o for o in seen(lambda: module(given)) if o.name == "convolution"]
        (backward,) = [o for o in seen(lambda: module(given).sum().backward()) if o.name == "convolution_backward"]
        return counted.get_total_flops(), forward, backward

    alone_flops, *_ = run(1)
    _, forward, backward = run(groups)
    assert forward.flops + backward.flops == groups * alone_flops
    assert forward.shape == backward.shape
    *product, laid_last = forward.shape
    assert forward.flops == 2 * prod(product)
    assert product[0] == groups
    assert backward.flops == 2 * forward.flops
    assert laid_last == (is_last and groups * drawn["per_group"] > 1)


def test_only_gradients_that_are_wanted_are_multiplied() -> None:
    module = nn.Conv2d(4, 6, 3)
    (backward,) = [
        o for o in seen(lambda: module(ones(2, 4, 7, 7)).sum().backward()) if "backward" in o.name and o.shape
    ]
    assert backward.flops == 2 * prod(backward.shape[:4])


def test_what_multiplies_no_matrices_has_no_shape() -> None:
    assert {o.shape for o in seen(lambda: (ones(2, 3) * 2).sum())} == {()}
    assert {o.shape for o in seen(lambda: torch.dot(ones(3), ones(3)))} == {()}
