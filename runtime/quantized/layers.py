"""The quantized linear maps of a model, as bitsandbytes makes them, and the tensors that unpack their weights.

[Note: Parts of a packed weight]
A packed weight is of no use without its quantization state: scales of blocks (absmax), the scales of these where they
are quantized themselves, the table of values (code).  bitsandbytes keeps that state in Python objects beside the
weight, where no walk over parameters finds it.  While protwin traces or trains a model, each of these tensors is a
frozen parameter of its linear map (``weight_absmax`` beside ``weight``), and the object refers to that parameter: so it
lies in the weight's chunk or in the next of the same section, travels with it and is counted with it.  Outside,
everything is as bitsandbytes made it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from ...shared.phases.quantization import Quantization, QuantizedType
from .gptq import GptqLinear

_MODULES: Final = "bitsandbytes.nn"
_EIGHT_BIT: Final = "weight_scale"


@dataclass(frozen=True, slots=True)
class StateSlot:
    """A tensor of a quantization state, and where bitsandbytes looks for it."""

    name: str
    """Of the parameter that it is meanwhile, within its linear map."""
    owner: Any
    attribute: str

    @property
    def tensor(self) -> torch.Tensor:
        """What is there now."""
        found = getattr(self.owner, self.attribute)
        assert isinstance(found, torch.Tensor)
        return found


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A linear map with a packed weight."""

    name: str
    module: Any
    quantization: Quantization

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight that is packed: (outputs, inputs)."""
        return self.module.out_features, self.module.in_features

    @property
    def slots(self) -> tuple[StateSlot, ...]:
        """The tensors of the state that lie in objects beside the weight, in order."""
        if self.quantization.type.is_grouped:
            return ()
        if self.quantization.type is QuantizedType.INT8:
            return (StateSlot(_EIGHT_BIT, self.module.state, "SCB"),)
        state = getattr(self.module.weight, "quant_state", None) or self.module.quant_state
        found = [StateSlot("weight_absmax", state, "absmax"), StateSlot("weight_code", state, "code")]
        if state.state2 is not None:
            found += [
                StateSlot("weight_offset", state, "offset"),
                StateSlot("weight_nested_absmax", state.state2, "absmax"),
                StateSlot("weight_nested_code", state.state2, "code"),
            ]
        return tuple(found)


def quantized_layers(model: nn.Module) -> Iterator[QuantizedLayer]:
    """The quantized linear maps of ``model``, each once."""
    for name, module in model.named_modules():
        found = quantization_of(module)
        if found is not None:
            yield QuantizedLayer(name, module, found)


def quantization_of(module: nn.Module) -> Quantization | None:
    """How the weight of a linear map is packed; None if it is not."""
    if isinstance(module, GptqLinear):
        return module.how
    modules = sys.modules.get(_MODULES)
    if modules is None:
        return None
    if isinstance(module, modules.Linear4bit):
        state = getattr(module.weight, "quant_state", None) or module.quant_state
        if state is None:
            weight = module.weight
            return Quantization(
                type=QuantizedType(weight.quant_type), double=weight.compress_statistics, blocksize=weight.blocksize
            )
        return Quantization(type=QuantizedType(state.quant_type), double=state.nested, blocksize=state.blocksize)
    if isinstance(module, modules.Linear8bitLt):
        return Quantization(type=QuantizedType.INT8)
    return None
