"""Shapes of traced products and attention: against torch's own FLOP counts, and factors of known sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

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


def test_what_multiplies_no_matrices_has_no_shape() -> None:
    assert {o.shape for o in seen(lambda: (ones(2, 3) * 2).sum())} == {()}
    assert {o.shape for o in seen(lambda: torch.dot(ones(3), ones(3)))} == {()}
