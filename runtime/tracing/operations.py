"""What an ATen operation costs: its class, its floating-point operations, the bytes it moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from ...shared.observed.observation import OperatorCall
from ...shared.phases.activation_modes import ATTENTION
from ...shared.schema.workload import DType, Operation, OperationClass
from ..fakes.recurrent import RECURRENT, recurrent_flops, recurrent_shape
from ..hooks.selective import draws_dropout
from ..model.nested_tensors import tensors_in
from ..packaged.launching import LAUNCH

_ENDS: Final = ("cum_seq_q", "cu_seqlens_q")
"""What kernels call the ends of samples, cumulative and from 0 on."""
_LONGEST: Final = ("max_q", "max_seqlen_q")
_MATMUL: Final = ("mm", "addmm", "bmm", "baddbmm", "dot", "mv", "convolution", "conv2d", "linear", "_grouped_mm")
_NORMALIZATION: Final = ("layer_norm", "rms_norm", "batch_norm", "group_norm")
_EMBEDDING: Final = ("embedding", "index_select", "gather", "scatter", "index", "index_put", "index_add")
_REDUCTION: Final = (
    *("sum", "mean", "softmax", "nll_loss", "cross_entropy", "amax", "max", "min", "var", "norm", "logsumexp"),
    "argmax",
)
_CONVOLUTIONS: Final = ("convolution", "convolution_backward")
_FACTORS: Final = {"mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}
"""Where the arguments of products of two factors begin with them."""


def describe_operation(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Operation | None:
    """The cost of one operation, or None for a view or an allocation, which move nothing."""
    call = observe_call(operator, args, kwargs, result)
    return call.operation() if call is not None else None


def observe_call(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> OperatorCall | None:
    """The figures that one operation's cost follows from, or None for a view or an allocation, which move nothing."""
    if operator.is_view:
        return None
    if operator is LAUNCH:
        return _launched(*args)
    name = operator._schema.name.removeprefix("aten::").removeprefix(_OWN)
    outputs, inputs = list(tensors_in(result)), list(tensors_in((args, kwargs)))
    if operator._schema.name.startswith(_OWN):
        inputs, more = _own_tensors(operator, args, kwargs)
        outputs += more
    if not outputs and not inputs:
        return None
    made = {t.untyped_storage()._cdata for t in outputs}
    given = {t.untyped_storage()._cdata for t in inputs}
    is_alias = made <= given and not operator._schema.is_mutable
    if is_alias or name.startswith(("empty", "new_empty", "detach")):
        return None
    dtype = next((t.dtype for t in (*outputs, *inputs) if t.is_floating_point()), (outputs or inputs)[0].dtype)
    operation_class = classify(name)
    numbers: dict[int, int] = {}
    return OperatorCall(
        name=name,
        operation_class=operation_class,
        dtype=DType(str(dtype).removeprefix("torch."))
        if str(dtype).removeprefix("torch.") in _DTYPES
        else DType.FLOAT32,
        flops=_flops(operator, name, operation_class, args, kwargs, result, outputs),
        reads=tuple((numbers.setdefault(t.untyped_storage()._cdata, len(numbers)), _bytes(t)) for t in inputs),
        writes_bytes=tuple(_bytes(t) for t in outputs),
        shape=_shape(operator, name, operation_class, args, kwargs, outputs),
        draws=_draws(operator, name, operation_class, args, kwargs),
    )


def _launched(
    kernel: str,
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
    flops: int,
    vector_flops: int,
    steps: int,
) -> OperatorCall:
    """A kernel of a package; see ``launch``.  It multiplies in the narrowest type that it reads."""
    dtypes = [tensor.dtype for tensor in (*reads, *writes) if tensor.is_floating_point()]
    numbers: dict[int, int] = {}
    return OperatorCall(
        name=kernel,
        operation_class=OperationClass.MATMUL if flops or steps else OperationClass.ELEMENTWISE,
        dtype=DType(str(min(dtypes, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")),
        flops=flops or vector_flops,
        reads=tuple((numbers.setdefault(t.untyped_storage()._cdata, len(numbers)), _bytes(t)) for t in reads),
        writes_bytes=tuple(_bytes(t) for t in writes),
        shape=(steps,),
        draws=False,
    )


def _draws(
    operator: Any, name: str, operation_class: OperationClass, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """``OperatorCall.draws``.  A backward forms the same numbers again, and leaves the generator where it is."""
    is_forward = operation_class is OperationClass.ATTENTION and not name.endswith("_backward")
    return is_forward and draws_dropout(operator, args, kwargs)


_DTYPES: Final = frozenset(DType)
_OWN: Final = "protwin::"
"""Operators of this package."""
_SCRATCH: Final = "scratch"
"""What its operators call memory that stays within a cache, so that it costs no traffic."""


def _own_tensors(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of one of our own operators: the tensors that it reads, and those that it overwrites."""
    given = {name: value for name, value in _named(operator, args, kwargs).items() if name != _SCRATCH}
    written = [argument.name for argument in operator._schema.arguments if argument.is_write]
    return list(tensors_in(given)), [given[name] for name in written if name in given]


def classify(name: str) -> OperationClass:
    """The class of an ATen operator by its name without overload."""
    base = name.rstrip("_")
    if any(mark in base for mark in ATTENTION):
        return OperationClass.ATTENTION
    stem = base.removeprefix("_").removesuffix("_backward").removesuffix("_dense")
    if (
        base in RECURRENT
        or stem in _MATMUL
        or any(stem.endswith(suffix) for suffix in ("convolution", "_mm", "conv2d"))
    ):
        return OperationClass.MATMUL
    if any(mark in base for mark in _NORMALIZATION):
        return OperationClass.NORMALIZATION
    if stem in _EMBEDDING or stem.startswith("embedding"):
        return OperationClass.EMBEDDING
    if any(stem == mark or stem.startswith(f"{mark}_") or stem.endswith(f"_{mark}") for mark in _REDUCTION):
        return OperationClass.REDUCTION
    return OperationClass.ELEMENTWISE


def _flops(
    operator: Any,
    name: str,
    operation_class: OperationClass,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    outputs: list[torch.Tensor],
) -> int:
    """Floating-point operations of one call.

    Matrix products by torch's own formulas; attention by its two products (five in backward, which forms the
    probabilities again), halved under a causal mask, and within samples where their ends are told; otherwise one per
    output element.
    """
    if operation_class is OperationClass.ATTENTION:
        return _attention_flops(operator, name, args, kwargs)
    if name == "_grouped_mm":
        return _grouped_flops(args[0], args[1])
    if name == "convolution_backward":
        return _convolution_gradient_flops(_named(operator, args, kwargs))
    if name in RECURRENT:
        return recurrent_flops(name, _named(operator, args, kwargs))
    formula = flop_registry.get(operator.overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if operation_class is OperationClass.MATMUL and len(args) >= 2:
        shared = args[0].shape[-1] if isinstance(args[0], torch.Tensor) and args[0].dim() else 1
        return 2 * int(shared) * sum(t.numel() for t in outputs[:1])
    return sum(t.numel() for t in outputs[:1])


def _shape(
    operator: Any,
    name: str,
    operation_class: OperationClass,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> tuple[int, ...]:
    """``Operation.shape``.  A group of products of unequal sizes, and what is no matrix product, have none."""
    if operation_class is OperationClass.ATTENTION:
        shift = 1 if name.endswith("_backward") else 0
        query, key = args[shift], args[shift + 1]
        named = _named(operator, args, kwargs)
        if (squares := _packed_squares(named, query)) is not None:
            equal = max(1, round(squares / query.shape[0]))
            return (-(-query.shape[1] * query.shape[0] // equal), equal, equal, query.shape[2])
        return (*_sizes(name, query, key), query.shape[-1])
    if name in _CONVOLUTIONS:
        return _convolution_shape(_named(operator, args, kwargs), outputs)
    if name in RECURRENT:
        return recurrent_shape(_named(operator, args, kwargs))
    if name not in _FACTORS:
        return ()
    first, second = args[_FACTORS[name] : _FACTORS[name] + 2]
    if second.dim() == 1:
        return (1, first.shape[0], 1, first.shape[1])
    return (prod(first.shape[:-2]), first.shape[-2], second.shape[-1], first.shape[-1])


def _convolution_shape(named: Mapping[str, Any], outputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """(groups, places, channels made of each, what each is made of, whether channels lie last).

    The first four are the product that a convolution is.  Of a transposed one the places are those that it is given,
    each of which makes a patch.
    """
    input, weight, groups = named["input"], named["weight"], int(named["groups"])
    placed = input if named["transposed"] else named.get("grad_output", outputs[0])
    is_last = input.dim() > 2 and input.shape[1] > 1 and input.stride(1) == 1
    inner = prod(weight.shape[1:])
    channels = weight.shape[0] // groups
    sizes = (inner, channels) if named["transposed"] else (channels, inner)
    return (groups, placed.shape[0] * prod(placed.shape[2:]), *sizes, int(is_last))


def _convolution_gradient_flops(named: Mapping[str, Any]) -> int:
    """As many as forward for the gradient of the input, and for that of the weight.

    torch's own formula counts the latter for every pair of groups.
    """
    weight, transposed = named["weight"], named["transposed"]
    placed = named["input"] if transposed else named["grad_output"]
    wanted = sum(map(bool, named["output_mask"][:2]))
    return 2 * wanted * int(placed.shape[0] * prod(placed.shape[2:]) * weight.numel())


def _grouped_flops(first: torch.Tensor, second: torch.Tensor) -> int:
    """A product of groups: each row of the first factor, or each group's, meets the columns of one group."""
    groups = first.shape[0] if first.dim() == second.dim() == 3 else 1
    return 2 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1]


def _attention_flops(operator: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    is_backward = name.endswith("_backward")
    shift = 1 if is_backward else 0
    query, key, value = args[shift], args[shift + 1], args[shift + 2]
    widths = (3 * query.shape[-1] + 2 * value.shape[-1]) if is_backward else query.shape[-1] + value.shape[-1]
    named = _named(operator, args, kwargs)
    squares = _packed_squares(named, query)
    pairs = prod(_sizes(name, query, key)) if squares is None else query.shape[1] * squares
    is_causal = named.get("is_causal", named.get("causal", False))
    return int(2 * pairs * widths) // (2 if is_causal else 1)


def _sizes(name: str, query: torch.Tensor, key: torch.Tensor) -> tuple[int, int, int]:
    """(batch * heads, queries, keys).  Flash attention itself, beneath torch's choice of kernels, has heads behind."""
    if "scaled_dot_product" in name or query.dim() != 4:
        return prod(query.shape[:-2]), query.shape[-2], key.shape[-2]
    return query.shape[0] * query.shape[2], query.shape[1], key.shape[1]


def _named(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name: every kernel has its own order of them."""
    return dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | kwargs


def _packed_squares(named: Mapping[str, Any], query: torch.Tensor) -> int | None:
    """Sum of the squares of samples' lengths where a kernel is told them; None where it is not.

    Queries are (tokens, heads, width) then.  Where lengths have no values, all samples count as long as the longest.
    """
    ends = next((named[name] for name in _ENDS if named.get(name) is not None), None)
    if ends is None or query.dim() != 3:
        return None
    known = getattr(ends, "constant", None) if isinstance(ends, FakeTensor) else ends
    if known is None or known.is_meta:
        longest = next((named[name] for name in _LONGEST if named.get(name) is not None), query.shape[0])
        return int(query.shape[0]) * int(longest)
    with unset_fake_temporarily(), _disable_current_modes():
        told: list[int] = known.tolist()
    return sum((end - begin) ** 2 for begin, end in pairwise(told))


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements that are really stored: an expanded dim is read once."""
    elements = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return elements * tensor.element_size()
