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

from ...shared.phases.quantization import NESTED_BLOCKSIZE

_NAMESPACE: Final = "bitsandbytes::"


def parts_of(operator: Any) -> Callable[..., Any] | None:
    """What does the same as ``operator`` by several operations; None if it is one."""
    name = operator.name() if hasattr(operator, "name") else ""
    return _PARTS.get(name) if name.startswith(_NAMESPACE) else None


def _gemm_4bit(*args: Any, **kwargs: Any) -> torch.Tensor:
    operations = torch.ops.bitsandbytes
    names = (argument.name for argument in operations.gemm_4bit.default._schema.arguments)
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    rows, bias, absmax = given["A"], given.get("bias"), given["absmax"]
    if given.get("absmax_8bit") is not None:
        codes, table = given["absmax_8bit"], given["absmax_code"]
        scales = operations.dequantize_blockwise.default(codes, absmax, table, NESTED_BLOCKSIZE, torch.float32)
        absmax = scales + given["absmax_offset"]
        del scales
    weight = operations.dequantize_4bit.default(
        given["B"], absmax, given["blocksize"], given["quant_type"], given["shapeB"], rows.dtype
    )
    # What torch's linear does with a dense weight, operation for operation.
    flat = rows.reshape(-1, rows.shape[-1])
    made = torch.mm(flat, weight.t()) if bias is None else torch.addmm(bias, flat, weight.t())
    return made.view(*rows.shape[:-1], weight.shape[0])


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
