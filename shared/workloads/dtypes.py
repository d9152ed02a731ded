"""The element type that a model is trained in, where nobody names one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..basics.errors import WorkloadError
from ..catalogue.rotary import rotary_tokens
from ..schema.hardware import Device, DeviceKind
from ..schema.workload import DType, DTypeOrigin, Workload

TRAINABLE: Final = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
_NARROW: Final = (DType.BFLOAT16, DType.FLOAT16)
"""What training of today computes in, the type with float32's range first: it needs no scaling of the loss."""


@dataclass(frozen=True, slots=True)
class ChosenDType:
    """The element type of the weights, and who chose it."""

    dtype: DType
    origin: DTypeOrigin
    published: DType | None
    """The configuration's own, float32 where it names none; None for one that no file of ours can name."""

    def note_in(self, workload: Workload, configuration: Mapping[str, Any]) -> Workload:
        """``workload``, which says where its element type comes from, and what its rotary positions were made for."""
        noted = {"published_dtype": self.published, "dtype_origin": self.origin}
        return workload.model_copy(update={**noted, "rotary_tokens": rotary_tokens(configuration)})


def choose_dtype(published: str | None, asked: str | None, device: Device | None) -> ChosenDType:
    """The element type to train in.

    That which is asked for; else the published one if it has 16 bits and the device computes in it; else the first of
    bfloat16 and float16 that the device computes in, with float32 masters; else float32.  Without a device, and on the
    CPU as a device, whose rates vary from one probe to the next, it is the published one.  A configuration that names
    none counts as float32, as transformers has it.

    Raises WorkloadError if nothing can be trained in ``asked``, or, without it, in the published type.
    """
    own = DType.FLOAT32 if published is None else next((dtype for dtype in DType if dtype == published), None)
    if asked is not None:
        wanted = next((dtype for dtype in TRAINABLE if dtype is _called(asked)), None)
        if wanted is None:
            raise WorkloadError(f"dtype {asked!r} cannot be trained; use {', '.join(TRAINABLE)}.")
        return ChosenDType(wanted, DTypeOrigin.ASKED, own)
    if own not in TRAINABLE:
        raise WorkloadError(f"dtype {published!r} cannot be trained; use {', '.join(TRAINABLE)}.")
    if device is None or device.kind is DeviceKind.CPU or (own in _NARROW and computes_in(device, own)):
        chosen = own
    else:
        chosen = next((dtype for dtype in _NARROW if computes_in(device, dtype)), DType.FLOAT32)
    return ChosenDType(chosen, DTypeOrigin.PUBLISHED if chosen is own else DTypeOrigin.DEVICE, own)


def _called(name: str) -> DType | None:
    """The element type that people call ``name``; None for what is none."""
    try:
        return DType(name)
    except ValueError:
        return None


def computes_in(device: Device, dtype: DType) -> bool:
    """Whether the device states a rate of its own for products of ``dtype``, no lower than for float32."""
    rate = device.peak_flop_per_s.get(dtype)
    return rate is not None and rate >= device.peak_flop_per_s.get(DType.FLOAT32, 0.0)
