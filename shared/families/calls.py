"""Calls of operators with polynomials in the place of their figures."""

from __future__ import annotations

from typing import Any, Protocol

from pydantic import SerializerFunctionWrapHandler, model_serializer

from ..basics.documents import FrozenModel
from ..observed.observation import OperatorCall
from ..phases.activation_modes import FUSED_DROPOUT
from ..schema.workload import DType, OperationClass

Number = int
"""Index of a polynomial within its piece."""


class Numbers(Protocol):
    """Values of polynomials, by index."""

    def __getitem__(self, number: Number, /) -> int: ...


class FamilyCall(FrozenModel):
    """``OperatorCall`` with polynomials in place of numbers."""

    name: str
    operation_class: OperationClass
    dtype: DType
    flops: Number
    reads: tuple[tuple[int, Number], ...]
    """(storage, bytes)."""
    writes: tuple[Number, ...]
    shape: tuple[Number, ...] = ()
    is_changed: bool = False
    """A file has the field where it is true."""

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if not self.is_changed:
            fields.pop("is_changed", None)
        return fields


def call_at(call: FamilyCall, numbers: Numbers) -> OperatorCall:
    """A call with the values of its polynomials."""
    return OperatorCall(
        name=call.name,
        operation_class=call.operation_class,
        dtype=call.dtype,
        flops=numbers[call.flops],
        reads=tuple((storage, numbers[size]) for storage, size in call.reads),
        writes_bytes=tuple(numbers[size] for size in call.writes),
        shape=tuple(numbers[dim] for dim in call.shape),
        draws=call.name in FUSED_DROPOUT,
        is_changed=call.is_changed,
    )
