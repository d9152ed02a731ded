"""Dropout on fake tensors, by itself and in attention: what it saves and does is what CUDA's kernels save and do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from protwin.runtime.fakes.kernels import FakeGroupedProducts, kernels_of_cuda
from protwin.runtime.tracing.operations import describe_operation
from protwin.shared.schema.workload import Operation, OperationClass

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 96, 16
GENERATOR_BYTES = 64
"""The state of the generator that a fused kernel saves, at most."""


class Operations(TorchDispatchMode):
    """Lists what runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = describe_operation(func, args, kwargs or {}, result)
        if operation is not None:
            self.found.append(operation)
        return result


@contextmanager
def fake_operands(dtype: torch.dtype, width: int = WIDTH, groups: int = 1) -> Iterator[list[torch.Tensor]]:
    """Query, key and value."""
    with FakeTensorMode():
        yield [
            torch.empty(BATCH, heads, LENGTH, width, dtype=dtype, requires_grad=True)
            for heads in (HEADS, HEADS // groups, HEADS // groups)
        ]


def attended(operands: list[torch.Tensor], **options: Any) -> tuple[int, list[Operation]]:
    """Bytes that attention saves besides its operands, and what runs forward and backward."""
    saved: dict[int, int] = {}
    own = {tensor.untyped_storage()._cdata for tensor in operands}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with Operations() as operations, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        functional.scaled_dot_product_attention(*operands, **options).sum().backward()
    return sum(saved.values()), operations.found


def attention(operations: list[Operation]) -> list[Operation]:
    return [one for one in operations if one.operation_class is OperationClass.ATTENTION]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_attention_saves_its_output_and_the_sums_of_its_rows(dtype: torch.dtype, is_causal: bool) -> None:
    rows = BATCH * HEADS * LENGTH
    expected_bytes = rows * WIDTH * dtype.itemsize + rows * 4
    with fake_operands(dtype) as operands, kernels_of_cuda():
        saved_bytes, operations = attended(operands, dropout_p=0.1, is_causal=is_causal)
    assert expected_bytes <= saved_bytes <= expected_bytes + GENERATOR_BYTES
    forward, backward = attention(operations)
    products = 2 * rows * LENGTH * WIDTH // (2 if is_causal else 1)
    assert (forward.flops, backward.flops) == (2 * products, 5 * products)
    # The CPU, which has no such kernel, saves the probabilities at least.
    with fake_operands(dtype) as operands:
        saved_bytes, operations = attended(operands, dropout_p=0.1, is_causal=is_causal)
    assert saved_bytes > expected_bytes + rows * LENGTH * dtype.itemsize
    assert not attention(operations)


MEMORY_EFFICIENT = "_scaled_dot_product_efficient_attention"


def mask_of(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """A mask of a kind that models have, for ``fake_operands``."""
    if kind == "bias of positions":  # as T5's: heads lie side by side
        return torch.empty(LENGTH, LENGTH, HEADS, dtype=dtype, requires_grad=True).permute(2, 0, 1)[None]
    if kind == "the same, in order":
        return torch.empty(1, HEADS, LENGTH, LENGTH, dtype=dtype, requires_grad=True)
    return torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool) if kind == "padding" else torch.empty(LENGTH, LENGTH)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize(
    ("kind", "is_fused"),
    [("padding", True), ("a window", True), ("the same, in order", True), ("bias of positions", False)],
)
def test_masks_are_fused_where_cuda_takes_them(kind: str, is_fused: bool, dropout_p: float) -> None:
    """The kernel saves its output, the sums of its rows and the mask; what it does not take falls apart."""
    rows, probabilities_bytes = BATCH * HEADS * LENGTH, BATCH * HEADS * LENGTH**2 * 4
    with fake_operands(torch.float32) as operands, kernels_of_cuda():
        mask = mask_of(kind, torch.float32)
        saved_bytes, operations = attended(operands, attn_mask=mask, dropout_p=dropout_p)
    assert bool(attention(operations)) == is_fused
    if not is_fused:
        assert saved_bytes >= probabilities_bytes
        return
    own_bytes = rows * WIDTH * 4 + rows * 4
    least_bytes = own_bytes + mask.numel() * 4  # in numbers, also where it says what is seen
    assert least_bytes <= saved_bytes <= least_bytes + GENERATOR_BYTES
    if mask.requires_grad:
        assert mask.grad is not None
        assert mask.grad.shape == mask.shape
    names = {one.name for one in attention(operations)}
    assert (MEMORY_EFFICIENT in names) == (dropout_p > 0 or mask.requires_grad)
    # The CPU's own choice saves the probabilities where it is told of dropout or a gradient.
    with fake_operands(torch.float32) as operands:
        saved_bytes, operations = attended(operands, attn_mask=mask_of(kind, torch.float32), dropout_p=dropout_p)
    assert bool(attention(operations)) == (not dropout_p and not mask.requires_grad)


def test_sums_of_rows_and_gradients_of_masks_are_not_padded() -> None:
    """As families need it, which are polynomials of the length: 37 is a multiple of neither 32 nor 16."""
    sums: list[int] = []
    with FakeTensorMode(), FakeGroupedProducts(), kernels_of_cuda():
        operands = [torch.empty(1, HEADS, 37, WIDTH, requires_grad=True) for _ in range(3)]
        mask = torch.empty(1, HEADS, 37, 37, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sums.append(t.numel()), t)[1], lambda t: t):
            functional.scaled_dot_product_attention(*operands, attn_mask=mask).sum().backward()
        assert HEADS * 37 in sums
        assert HEADS * 64 not in sums
        assert mask.grad is not None
        assert mask.grad.untyped_storage().nbytes() == mask.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_narrower_than_queries_are_fused_as_on_cuda(dtype: torch.dtype) -> None:
    """As in multi-head latent attention: the output is as wide as the values."""
    narrow, rows = WIDTH // 2, BATCH * HEADS * LENGTH
    with fake_operands(dtype) as (query, key, value), kernels_of_cuda():
        value = value.detach()[..., :narrow].clone().requires_grad_()
        saved_bytes, operations = attended([query, key, value], is_causal=True)
        assert value.grad is not None
        assert value.grad.shape == value.shape
    forward, backward = attention(operations)
    assert forward.name == MEMORY_EFFICIENT
    assert saved_bytes - GENERATOR_BYTES <= rows * narrow * dtype.itemsize + rows * 4 <= saved_bytes
    assert 2 * forward.flops == 2 * BATCH * HEADS * LENGTH**2 * (WIDTH + narrow)
    assert backward.flops > 2 * forward.flops
    odd = WIDTH - 16 // dtype.itemsize // 2  # not a multiple of 16 bytes
    with fake_operands(dtype) as (query, key, value), kernels_of_cuda():
        _, operations = attended([query, key, value.detach()[..., :odd].clone().requires_grad_()])
    assert not attention(operations)


def test_kernels_differ_in_where_they_are_told_to_be_causal() -> None:
    """The fifth argument of the memory-efficient kernel says whether it keeps sums of rows."""
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    products = 2 * BATCH * HEADS * LENGTH * LENGTH * WIDTH
    for is_causal in (False, True):
        with fake_operands(torch.float32) as operands, Operations() as operations:
            operator(*operands, None, True, 0.1, is_causal)[0].sum().backward()
        forward, backward = attention(operations.found)
        whole = products // (2 if is_causal else 1)
        assert (forward.flops, backward.flops) == (2 * whole, 5 * whole)


def test_groups_of_heads_stay_fused_where_cuda_can() -> None:
    for dtype, is_fused in ((torch.bfloat16, True), (torch.float32, False)):
        with fake_operands(dtype, groups=2) as operands, kernels_of_cuda():
            _, operations = attended(operands, dropout_p=0.1, enable_gqa=True)
        assert bool(attention(operations)) == is_fused


def test_odd_widths_are_padded() -> None:
    with fake_operands(torch.bfloat16, width=12) as operands, kernels_of_cuda():
        result = functional.scaled_dot_product_attention(*operands, dropout_p=0.1)
        _, operations = attended(operands, dropout_p=0.1)
    assert result.shape == (BATCH, HEADS, LENGTH, 12)
    assert attention(operations)[0].shape[-1] == 16


def test_other_attention_is_left_alone() -> None:
    with fake_operands(torch.float32) as operands, kernels_of_cuda():
        _, operations = attended(operands, is_causal=True)
    assert attention(operations)[0].name == "_scaled_dot_product_flash_attention_for_cpu"
    real = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        results.append(functional.scaled_dot_product_attention(*real, dropout_p=0.5))
        with kernels_of_cuda():
            torch.manual_seed(0)
            results.append(functional.scaled_dot_product_attention(*real, dropout_p=0.5))
    assert all(torch.equal(results[0], result) for result in results)
    with fake_operands(torch.float32) as operands:
        _, operations = attended(operands, dropout_p=0.1)
    assert not attention(operations), "nothing of it stays"


# -- norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm_backward"), reason="needs torch 2.9")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch says so
def test_rms_norm_saves_its_input_and_one_number_for_a_row(dtype: torch.dtype, has_weight: bool) -> None:
    sizes: list[int] = []

    def normalized(weight_dtype: torch.dtype) -> tuple[list[str], torch.Tensor, torch.Tensor | None]:
        sizes.clear()
        given = torch.empty(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
        weight = torch.empty(WIDTH, dtype=weight_dtype, requires_grad=True) if has_weight else None
        with Operations() as operations, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            functional.rms_norm(given, (WIDTH,), weight, 1e-6).sum().backward()
        assert given.grad is not None
        assert given.grad.dtype is dtype
        return [one.name for one in operations.found], given.grad, None if weight is None else weight.grad

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel() * tensor.itemsize)
        return tensor

    rows = BATCH * LENGTH
    expected = [rows * WIDTH * dtype.itemsize, *([WIDTH * dtype.itemsize] if has_weight else []), rows * 4]
    with FakeTensorMode(), FakeGroupedProducts(), kernels_of_cuda():
        names, _, of_weight = normalized(dtype)
        assert sizes == expected
        assert [name for name in names if "norm" in name] == ["_fused_rms_norm", "_fused_rms_norm_backward"]
        assert (of_weight is not None) == has_weight
        if has_weight and dtype is torch.bfloat16:
            names, *_ = normalized(torch.float32)
            assert "_fused_rms_norm" not in names, "types differ"
    # The CPU's falls apart, and saves more.
    with FakeTensorMode(), FakeGroupedProducts():
        names, *_ = normalized(dtype)
    assert "_fused_rms_norm" not in names
    assert sum(sizes) > sum(expected) + rows * WIDTH * 4


def test_the_kernel_for_rms_norm_gives_gradients_of_what_is_trained_alone() -> None:
    with FakeTensorMode(), FakeGroupedProducts(), kernels_of_cuda():
        norm = nn.RMSNorm(WIDTH).requires_grad_(requires_grad=False)
        given = torch.empty(BATCH, WIDTH, requires_grad=True)
        norm(given).sum().backward()
        assert given.grad is not None
        assert norm.weight.grad is None
        with torch.no_grad():
            assert norm(given).shape == given.shape


# -- dropout by itself -----------------------------------------------------------------------------------------------

Dropping = Callable[[torch.Tensor], torch.Tensor]


def dropped(given: torch.Tensor, drop: Dropping) -> tuple[list[tuple[Any, ...]], list[str], tuple[Any, ...]]:
    """(size, strides, type) of what dropout saves, the operations forward and backward, and (...) of the result."""

    def looks(tensor: torch.Tensor) -> tuple[Any, ...]:
        strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
        return tuple(tensor.shape), strides, tensor.dtype

    saved: list[tuple[Any, ...]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(looks(tensor))
        return tensor

    with Operations() as operations:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            result = drop(given)
        (result * 1).sum().backward()
    assert given.grad is not None
    assert given.grad.dtype == given.dtype
    return saved, [one.name for one in operations.found], looks(result)


def drawn_tensor(draw: random.Random, dtype: torch.dtype) -> torch.Tensor:
    """A leaf of any shape, in any order of its dims."""
    shape = [draw.randrange(1, 6) for _ in range(draw.randrange(1, 5))]
    order = draw.sample(range(len(shape)), len(shape))
    return torch.empty(shape, dtype=dtype).permute(order).detach().requires_grad_()


@pytest.mark.parametrize("seed", range(12))
def test_dropout_is_one_kernel_that_saves_one_byte_for_each_element(seed: int) -> None:
    """As ``torch.native_dropout`` does by itself, with real tensors and autograd's own formula."""
    dtype, rate = random.Random(seed).choice((torch.bfloat16, torch.float16, torch.float32)), 0.05 + 0.07 * seed
    expected = dropped(drawn_tensor(random.Random(seed), dtype), lambda x: torch.native_dropout(x, rate, True)[0])
    ((shape, _, mask_dtype),) = expected[0]
    assert mask_dtype.itemsize == 1
    drops: tuple[Dropping, ...] = (partial(functional.dropout, p=rate), nn.Dropout(rate))
    for drop in drops:
        with FakeTensorMode(), kernels_of_cuda():
            assert dropped(drawn_tensor(random.Random(seed), dtype), drop) == expected
        # The CPU draws, divides and multiplies, and saves noise in the element's own type.
        with FakeTensorMode():
            saved, names, _ = dropped(drawn_tensor(random.Random(seed), dtype), drop)
        assert [(size, of) for size, _, of in saved] == [(shape, dtype)]
        assert names[:3] == ["bernoulli_", "div_", "mul"]


@pytest.mark.parametrize(
    "drop",
    [
        pytest.param(partial(functional.dropout, p=0.0), id="rate 0"),
        pytest.param(partial(functional.dropout, p=1.0), id="rate 1"),
        pytest.param(partial(functional.dropout, p=0.3, training=False), id="evaluation"),
        pytest.param(lambda x: functional.dropout(x * 2, 0.3, inplace=True), id="in place"),
        pytest.param(partial(functional.dropout1d, p=0.3), id="channels"),
        pytest.param(lambda x: functional.dropout2d(x[None], 0.3)[0], id="feature maps"),
        pytest.param(partial(functional.alpha_dropout, p=0.3, training=True), id="SELU's"),
        pytest.param(lambda x: functional.dropout(x[:, :, :0], 0.3).sum() + x, id="no elements"),
    ],
)
def test_what_cuda_does_in_pieces_is_left_in_pieces(drop: Dropping) -> None:
    def given() -> torch.Tensor:
        return torch.empty(2, 3, 8, dtype=torch.bfloat16, requires_grad=True)

    with FakeTensorMode():
        expected = dropped(given(), drop)
        with kernels_of_cuda():
            assert dropped(given(), drop) == expected
    assert "native_dropout" not in expected[1]


def test_nothing_is_copied_where_nothing_is_dropped() -> None:
    with FakeTensorMode(), kernels_of_cuda():
        given = torch.empty(4, requires_grad=True)
        assert functional.dropout(given, 0.0) is given
        assert functional.dropout(given, 0.5, training=False) is given


def test_real_tensors_are_left_alone() -> None:
    real, results = torch.randn(64), []
    for context in (nullcontext, kernels_of_cuda):
        with context():
            torch.manual_seed(0)
            results.append(functional.dropout(real, 0.5))
    assert torch.equal(*results)
