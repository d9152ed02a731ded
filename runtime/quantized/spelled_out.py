"""Products with packed weights, one operation after the other.

[Note: Products that unpack]
bitsandbytes has one operation for the product with a packed weight.  Within it the weight is unpacked and multiplied
by, on CUDA and the CPU alike (``_gemm_4bit_default_impl`` in its backends), so that the weight lies there in 16 bit for
a moment; only few rows take a kernel that unpacks as it multiplies, on CUDA.  Nobody who watches operations would see
that weight, or what unpacking it costs.  So whoever watches runs the parts in the place of the whole: the same kernels
in the same order, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

_NAMESPACE: Final = "bitsandbytes::"
_NESTED_BLOCKSIZE: Final = 256


def parts_of(operator: Any) -> Callable[..., Any] | None:
    """What does the same as ``operator`` by several operations; None if it is one."""
    name = operator.name() if hasattr(operator, "name") else ""
    return _PARTS.get(name) if name.startswith(_NAMESPACE) else None


def _gemm_4bit(
    a: torch.Tensor, packed: torch.Tensor, shape: Any, *state: Any, bias: torch.Tensor | None = None, **nested: Any
) -> torch.Tensor:
    """``state``: scales, size of blocks and type; ``nested``: of scales that are quantized themselves."""
    operations = torch.ops.bitsandbytes
    absmax, blocksize, quant_type = state
    if nested.get("absmax_8bit") is not None:
        codes, table = nested["absmax_8bit"], nested["absmax_code"]
        scales = operations.dequantize_blockwise.default(codes, absmax, table, _NESTED_BLOCKSIZE, torch.float32)
        absmax = scales + nested["absmax_offset"]
        del scales
    weight = operations.dequantize_4bit.default(packed, absmax, blocksize, quant_type, shape, a.dtype)
    # What torch's linear does with a dense weight, operation for operation.
    rows = a.reshape(-1, a.shape[-1])
    made = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return made.view(*a.shape[:-1], weight.shape[0])


def _int8_scaled_mm(
    a: torch.Tensor,
    packed: torch.Tensor,
    row_scales: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    operations = torch.ops.bitsandbytes
    whole = operations.int8_linear_matmul.default(a, packed)
    made: torch.Tensor = operations.int8_mm_dequant.default(
        whole, row_scales, scales, dtype=dtype or torch.float16, bias=bias
    )
    return made


_PARTS: Final[dict[str, Callable[..., Any]]] = {
    "bitsandbytes::gemm_4bit": _gemm_4bit,
    "bitsandbytes::int8_scaled_mm": _int8_scaled_mm,
}
