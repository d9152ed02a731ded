"""Quantized parts of a model that cannot be trained with: refused by name, before anything moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from ...shared.basics.errors import WorkloadError
from ...shared.phases.quantization import QuantizedType
from .layers import QuantizedLayer, quantization_of

_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)


def check_layers(model: nn.Module, layers: Sequence[QuantizedLayer]) -> None:
    """Raise WorkloadError if ``layers`` or other quantized parts of ``model`` cannot be trained with."""
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.startswith("bitsandbytes.") and kind.__name__.startswith(("Embedding4", "Embedding8")):
            raise WorkloadError(
                f"{name} is a {kind.__name__}: quantized embeddings are not placed in chunks. Leave embeddings in 16 "
                f"bit, as transformers does (llm_int8_skip_modules)."
            )
        for own, parameter in module._parameters.items():
            if parameter is not None and kind.__module__ and _is_other_subclass(parameter):
                raise WorkloadError(
                    f"{name}.{own} is a {type(parameter).__name__} of {type(parameter).__module__}: tensors that wrap "
                    f"others cannot be packed into chunks. Quantize with bitsandbytes (protwin.runtime.quantize)."
                )
    for layer in layers:
        _check_layer(layer)


def _is_other_subclass(parameter: nn.Parameter) -> bool:
    """Whether it is a tensor that wraps others, such as torchao's."""
    with torch._C.DisableTorchFunctionSubclass():  # a parameter that is away says what it is, too
        own = parameter.data
    return hasattr(type(own), "__tensor_flatten__") or hasattr(type(parameter), "__tensor_flatten__")


def _check_layer(layer: QuantizedLayer) -> None:
    module, name = layer.module, layer.name
    if layer.quantization.type.is_grouped:
        trained = next((own for own, p in module.named_parameters() if p.requires_grad), None)
        if trained is not None:
            raise WorkloadError(
                f"{name}.{trained} belongs to a weight packed as {layer.quantization.words} and requires a gradient. "
                f"Set requires_grad_(False), and train adapters beside it."
            )
        return
    weight = module.weight
    if layer.quantization.type is QuantizedType.INT8:
        if module.state.has_fp16_weights:
            raise WorkloadError(
                f"{name} is a Linear8bitLt with has_fp16_weights=True: it trains a weight that it quantizes anew in "
                f"every forward. A quantized weight cannot be trained: make it with has_fp16_weights=False and train "
                f"adapters beside it, or use an ordinary linear map."
            )
        if weight.dtype is not torch.int8:
            raise WorkloadError(f"{name} is not quantized yet: its weight is {weight.dtype}. {_move(weight)}")
        if getattr(weight, "CB", None) is not None:
            module.init_8bit_state()
        return
    if getattr(weight, "quant_state", None) is None and module.quant_state is None:
        raise WorkloadError(f"{name} is not quantized yet: its weight is {weight.dtype}. {_move(weight)}")
    if weight.requires_grad:
        raise WorkloadError(
            f"{name}.weight is quantized to {layer.quantization.words} and requires a gradient, but bitsandbytes gives "
            f"packed weights none. Set requires_grad_(False), and train adapters beside it."
        )
    state = module.quant_state if getattr(weight, "quant_state", None) is None else weight.quant_state
    if getattr(state, "packing_format_for_cpu", False):
        raise WorkloadError(
            f"{name}.weight is packed for inference on this CPU. Load or quantize the model again: it is repacked when "
            f"it runs in evaluation mode."
        )
    if layer.quantization.double and state.state2.blocksize != 256:
        raise WorkloadError(
            f"{name}: scales are quantized themselves in blocks of {state.state2.blocksize}, but bitsandbytes "
            f"multiplies with blocks of 256 alone. Quantize the model again."
        )
    if module.compute_dtype is not None and module.compute_dtype not in _FLOATS:
        raise WorkloadError(
            f"{name} computes in {module.compute_dtype}; it must be float16, bfloat16 or float32 (compute_dtype)."
        )
    if module.bias is not None and module.compute_dtype not in (None, module.bias.dtype):
        raise WorkloadError(
            f"{name} computes in {module.compute_dtype} (bnb_4bit_compute_dtype) but its bias is {module.bias.dtype}, "
            f"which its forward would convert in place. Give both one element type."
        )


def _move(weight: torch.Tensor) -> str:
    return f"bitsandbytes quantizes when a model is moved: call model.to({str(weight.device)!r})."


def refuse_quantized(model: nn.Module, what: str, remedy: str) -> None:
    """Raise WorkloadError if ``model`` has quantized linear maps, which ``what`` cannot have."""
    for name, module in model.named_modules():
        found = quantization_of(module)
        if found is not None:
            raise WorkloadError(f"{name} is quantized to {found.words}, but {what}. {remedy}")
