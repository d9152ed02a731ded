"""Quantization states as parameters, while protwin traces or trains a model ([Note: Parts of a packed weight])."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from torch import nn

from ...shared.basics.arguments import shown
from ...shared.basics.errors import WorkloadError
from ...shared.phases.parameters import Parameter
from ...shared.phases.quantization import QuantizedType
from . import eight_bit, releases
from .checks import check_layers
from .gptq import PACKED, STATE_NAMES
from .layers import QuantizedLayer, quantized_layers

products_of = releases.products_of
_P = ParamSpec("_P")
_T = TypeVar("_T")
_KEEPS_TABLES: Final = ("weight_code", "weight_nested_code", "weight_offset")
"""Values that no training changes: several linear maps may share one table, and are to share it again."""
_REPACKS: Final = "support_avx512bf16_for_cpu"
"""Whether bitsandbytes packs a weight anew for inference on this CPU, in other memory."""


@contextmanager
def states_as_parameters(model: nn.Module) -> Iterator[None]:
    """Within the block, the tensors of every quantization state of ``model`` are frozen parameters beside its weight.

    Packed weights are ordinary parameters meanwhile.  Afterwards everything is as it was, with the values and in the
    places that the parameters have by then.  Does nothing within such a block.  Raises WorkloadError, with nothing
    changed, if a quantized part of the model cannot be trained with.
    """
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"model is {shown(model)}; it must be an nn.Module.")
    found = list(quantized_layers(model))
    layers = [layer for layer in found if not layer.quantization.type.is_grouped]
    if any(_is_registered(layer) for layer in layers):
        yield
        return
    check_layers(model, found)
    with ExitStack() as undo:
        for layer in layers:
            undo.callback(_register(layer))
        yield


def with_states(function: Callable[Concatenate[nn.Module, _P], _T]) -> Callable[Concatenate[nn.Module, _P], _T]:
    """``function`` of a model, within ``states_as_parameters`` of it."""

    @wraps(function)
    def within(model: nn.Module, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with states_as_parameters(model):
            return function(model, *args, **kwargs)

    return within


def relink(model: nn.Module) -> None:
    """Let the states of a copy of a model, made within such a block, refer to the copy's own parameters."""
    for layer in quantized_layers(model):
        if _is_registered(layer):
            _link(layer)


def described(model: nn.Module, parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """``parameters`` with how they are packed, and how many scalars of the model they stand for."""
    packed: dict[str, dict[str, Any]] = {}
    for layer in quantized_layers(model):
        outputs, inputs = layer.shape
        prefix = f"{layer.name}." if layer.name else ""
        if layer.quantization.type.is_grouped:
            own = {f"{prefix}{name}": {"num_scalars": 0} for name in STATE_NAMES}
            packed |= own | {f"{prefix}{PACKED}": {"quantized": layer.quantization, "num_scalars": outputs * inputs}}
            continue
        if not _is_registered(layer):
            continue
        packed[f"{prefix}weight"] = {"quantized": layer.quantization, "num_scalars": outputs * inputs}
        packed |= {f"{prefix}{slot.name}": {"num_scalars": 0} for slot in layer.slots}
    if not packed:
        return tuple(parameters)
    return tuple(p.model_copy(update=packed[p.name]) if p.name in packed else p for p in parameters)


def _is_registered(layer: QuantizedLayer) -> bool:
    return bool({"weight_absmax", "weight_scale"} & layer.module._parameters.keys())


def _register(layer: QuantizedLayer) -> Callable[[], None]:
    """Let the state's tensors be parameters; gives what undoes it."""
    module, weight = layer.module, layer.module.weight
    if getattr(weight, "quant_state", None) is not None:
        module.quant_state = weight.quant_state
    slots, kind, repacks = layer.slots, type(weight), getattr(module, _REPACKS, False)
    tables = {slot.name: slot.tensor for slot in slots if slot.name in _KEEPS_TABLES}
    # Before it is an ordinary parameter: only its own class knows the layout of its own object.
    weight.__class__ = nn.Parameter
    for slot in slots:
        values = slot.tensor
        own = values.clone() if slot.name in tables else values
        module._parameters[slot.name] = nn.Parameter(own.detach(), requires_grad=False)
    if hasattr(module, _REPACKS):
        setattr(module, _REPACKS, False)
    _link(layer)

    def undo() -> None:
        for slot in slots:
            values = module._parameters.pop(slot.name).data
            table = tables.get(slot.name)
            setattr(slot.owner, slot.attribute, values if table is None or table.device != values.device else table)
        if layer.quantization.type is QuantizedType.INT8:
            module.state.CB = weight.data
            eight_bit.remove(module)
        else:
            releases.remove(module)
        if hasattr(module, _REPACKS):
            setattr(module, _REPACKS, repacks)
        weight.__class__ = kind

    return undo


def _link(layer: QuantizedLayer) -> None:
    """Let the state refer to the module's parameters."""
    module, weight = layer.module, layer.module.weight
    if layer.quantization.type is QuantizedType.INT8:
        # The weight itself, and no other view of its memory: it follows it wherever its chunk puts it.
        weight.__dict__.update(CB=None, SCB=None, has_fp16_weights=False)
        module.state.CB, module.state.SCB = weight, module._parameters["weight_scale"]
        eight_bit.install(module)
        releases.install(module)
        return
    weight.__dict__.update(quant_state=module.quant_state, bnb_quantized=True)
    for slot in layer.slots:
        setattr(slot.owner, slot.attribute, module._parameters[slot.name])
    releases.install(module)
