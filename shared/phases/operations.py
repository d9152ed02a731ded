"""Element types, and the operations of a phase."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Final, Protocol

from pydantic import Field, NonNegativeInt, PositiveInt

from ..basics.documents import FrozenModel

MAX_BYTES: Final = 2**60
_FLOPS_PER_BYTE: Final = 10
"""Weighs an operation's arithmetic against its traffic when its share of a phase's time is estimated: the order of the
machine balance of CPUs and GPUs alike outside tensor cores."""
_OPERATION_OVERHEAD: Final = 20_000
"""Bytes that an operation of no size counts for, for the same purpose."""
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
SignedBytes = Annotated[int, Field(ge=-MAX_BYTES, le=MAX_BYTES)]


class DType(StrEnum):
    """Element types of parameters and compute, by their torch names."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"

    @classmethod
    def _missing_(cls, value: object) -> DType | None:
        """The type that people call so: ``bf16``, ``fp32``, ``half``, ``torch.float16``, in any case."""
        if not isinstance(value, str):
            return None
        name = value.strip().casefold().removeprefix("torch.")
        return cls._value2member_map_.get(_USUAL_NAMES.get(name, name))  # type: ignore[return-value]

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self]


_USUAL_NAMES: Final = {
    "bf16": "bfloat16",
    "double": "float64",
    "f16": "float16",
    "f32": "float32",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "half": "float16",
    "single": "float32",
}

_ITEM_BYTES: Final[dict[DType, int]] = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.BFLOAT16: 2,
    DType.FLOAT16: 2,
    DType.FLOAT8_E4M3FN: 1,
    DType.FLOAT8_E5M2: 1,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.BOOL: 1,
}


class DTypeOrigin(StrEnum):
    """Who chose the element type of the weights."""

    ASKED = "asked"
    """The user, by ``--dtype``."""
    PUBLISHED = "published"
    """Whoever published the model."""
    DEVICE = "device"
    """The device: another one than published, which its matrix units compute in."""


class Float8(StrEnum):
    """How matrix products of linear maps are computed in float8, and how their operands are scaled."""

    TENSORWISE = "tensorwise"
    """By the largest element of each operand, found anew each time (torchao)."""
    ROWWISE = "rowwise"
    """By the largest of each row (torchao)."""
    DELAYED = "delayed"
    """By the largest elements of steps before (Transformer Engine)."""


class Float8Gather(StrEnum):
    """Who finds the scale of a weight that FSDP2 gathers in float8 (torchao's ``enable_fsdp_float8_all_gather``)."""

    PRECOMPUTED = "precomputed"
    """The step, of all weights at once (``precompute_float8_dynamic_scale_for_fsdp``)."""
    DYNAMIC = "dynamic"
    """Every gather, of its weights one by one."""


class Compiled(StrEnum):
    """What torch.compile has compiled."""

    BLOCKS = "blocks"
    """Every block by itself."""
    BLOCKS_AND_LOSS = "blocks-and-loss"
    """Every block by itself, and what lies behind the last one: torchtitan's own choice."""
    MODEL = "model"
    """The whole model, its loss included."""


class KernelPackage(StrEnum):
    """Packages whose kernels models of transformers call where they are installed, by pip's names of them."""

    FLASH_LINEAR_ATTENTION = "flash-linear-attention"
    """The gated delta rule, and Kimi's."""
    MAMBA_SSM = "mamba-ssm"
    """Selective scans, and state spaces in chunks."""
    CAUSAL_CONV1D = "causal-conv1d"
    """Short convolutions of channels."""


class InWords(Protocol):
    """What says itself how it is computed (``PackedProducts``)."""

    @property
    def words(self) -> str:
        """The words."""


def lowering_words(
    compiled: Compiled | None,
    float8: Float8 | None,
    products: InWords | None = None,
    *,
    gather: Float8Gather | None = None,
) -> str | None:
    """What is computed otherwise than this package's runtime does, in words; None where nothing is.

    ``products``: those with packed weights.
    """
    words = [] if compiled is None else [f"{compiled} compiled by torch.compile"]
    words += [] if float8 is None else [f"linear maps of blocks in float8, scaled {float8}"]
    words += [] if gather is None else [f"their weights gathered in float8 with {gather} scales"]
    words += [] if products is None else [products.words]
    return ", ".join(words) or None


def left_out_words(packages: Sequence[str], model_name: str) -> str | None:
    """What ``Workload.kernels_left_out`` means for a prediction; None where there are none."""
    if not packages:
        return None
    known = [package for package in packages if package in frozenset(KernelPackage)]
    asked = " ".join(f"--kernels {package}" for package in known)
    those = "its" if len(packages) == 1 else "their"
    less = f"With {those} kernels training takes less time and memory"
    less += f": add {asked} if the machine that trains has them." if known else ", how much less is not known."
    return (
        f"{model_name} is predicted by the operations of its reference in PyTorch, which it runs where "
        f"{' and '.join(packages)} {'is' if len(packages) == 1 else 'are'} not installed. {less}"
    )


def lowering_notes(
    compiled: Compiled | None,
    float8: Float8 | None,
    products: InWords | None = None,
    *,
    gather: Float8Gather | None = None,
) -> tuple[str, ...]:
    """The same as a record or an answer has it, with what becomes of such plans here; none where nothing is."""
    words = lowering_words(compiled, float8, products, gather=gather)
    return () if words is None else (f"{words} (no plan of which is carried out here)",)


class OperationClass(StrEnum):
    """Operations whose cost follows the same law."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    NORMALIZATION = "normalization"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    EMBEDDING = "embedding"


class Operation(FrozenModel):
    """Operations of one kind and size within a phase."""

    name: str
    """The ATen operator."""
    operation_class: OperationClass
    dtype: DType
    flops: NonNegativeInt
    """Floating-point operations of one call (a multiply-add is two)."""
    bytes_moved: Bytes
    """Bytes read plus bytes written by one call, each tensor once."""
    count: PositiveInt = 1
    shape: tuple[NonNegativeInt, ...] = ()
    """Of a matrix product (batch, m, n, k): batch products of m x k by k x n; of attention (batch * heads, queries,
    keys, width of a head); of a convolution (groups, places, channels made of each, what each is made of, 1 where
    channels lie last in memory); of a recurrent layer (layers * directions, steps, samples, gates, state); () where it
    is not known or does not matter."""

    @property
    def weight(self) -> int:
        """What all calls take of a phase's time, beside those of other operations."""
        return self.count * (self.flops + _FLOPS_PER_BYTE * (self.bytes_moved + _OPERATION_OVERHEAD))
