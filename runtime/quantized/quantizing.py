"""Packing the linear maps of a model, one after the other: by bitsandbytes' own kernels, or in GPTQ's layout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

import torch
from pydantic import ValidationError
from torch import nn

from ...shared.basics.errors import WorkloadError
from ...shared.basics.extras import install_command
from ...shared.basics.suggestions import did_you_mean
from ...shared.phases.quantization import (
    NESTED_BLOCKSIZE,
    NUM_CODES,
    NUM_NESTED_CODES,
    Quantization,
    QuantizedType,
)
from ..model.memory_overlaps import overlap_of
from .gptq import GptqLinear
from .layers import quantization_of

_CPU_KERNELS: Final = "bitsandbytes.backends.cpu.ops"
_COMPUTED: Final = (torch.float16, torch.bfloat16, torch.float32)


def quantize(
    model: nn.Module,
    to: str = "nf4",
    *,
    double: bool = False,
    blocksize: int | None = None,
    compute_dtype: torch.dtype | None = None,
    skip: Sequence[str] = (),
    head: bool = False,
) -> list[str]:
    """Pack the weights of ``model``'s linear maps, in place and one after the other; gives the maps' paths.

    ``to`` is ``"nf4"``, ``"fp4"`` or ``"int8"``, by bitsandbytes; or ``"gptq"`` or ``"gptq-8bit"``, in the layout of
    GPTQ, each weight rounded to the nearest value.  ``double``: scales of 4-bit blocks of bitsandbytes are quantized
    themselves; ``blocksize``: scalars that share a scale, 64 by default, of GPTQ 128.  ``compute_dtype``: the element
    type that its 4-bit weights are unpacked to, by default that of the weight.  All linear maps are packed but those
    whose paths, or ends of them, are in ``skip``, and the one that gives the model's outputs, unless ``head`` asks for
    it.  Packed weights are frozen: put adapters beside them, by ``add_lora`` or PEFT.  A model on the meta device stays
    there, for ``trace``; ``load_quantized`` fills one.  Raises WorkloadError, with nothing packed, if it makes no sense
    for the model.
    """
    how = quantization(to, double=double, blocksize=blocksize)
    chosen = chosen_maps(model, how, skip=skip, compute_dtype=compute_dtype, head=head)
    for path in chosen:
        pack(model, path, how, compute_dtype)
    return chosen


def quantization(to: str, *, double: bool = False, blocksize: int | None = None) -> Quantization:
    """How weights are packed, as it is asked for.  Raises WorkloadError if nothing is packed so."""
    try:
        kind = QuantizedType(to)
    except ValueError:
        raise WorkloadError(
            f"weights are to be quantized to {to!r}. {did_you_mean(str(to), list(QuantizedType))}"
        ) from None
    if kind.blocksizes:
        blocksize = kind.usual_blocksize if blocksize is None else blocksize
        if blocksize not in kind.blocksizes:
            whose = f"{kind} takes groups of" if kind.is_grouped else "bitsandbytes has kernels for"
            raise WorkloadError(f"blocksize is {blocksize}; {whose} {', '.join(map(str, kind.blocksizes))}.")
    try:
        return Quantization(type=kind, double=double, blocksize=blocksize)
    except ValidationError as error:
        raise WorkloadError(f"{error.errors()[0]['msg'].removeprefix('Value error, ')}. Leave them out.") from None


def chosen_maps(
    model: nn.Module,
    how: Quantization,
    *,
    skip: Sequence[str],
    compute_dtype: torch.dtype | None,
    head: bool = False,
) -> list[str]:
    """The paths of the linear maps that ``quantize`` packs.  Raises WorkloadError if it cannot."""
    if not how.type.is_grouped:
        _bitsandbytes()
    packed = next(((path, found) for path, m in model.named_modules() if (found := quantization_of(m))), None)
    if packed is not None:
        raise WorkloadError(f"{packed[0]} is quantized to {packed[1].words} already. Load the model again.")
    maps: dict[str, nn.Linear] = {
        path: module for path, module in model.named_modules() if type(module) is nn.Linear and path
    }
    adapters = next((path for path in maps if ".lora_" in f".{path}"), None)
    if adapters is not None:
        raise WorkloadError(
            f"{adapters} is part of an adapter, which is trained. Quantize the model first, and adapt it then."
        )
    for name in skip:
        if not any(_is_named(path, name) for path in maps):
            ends = dict.fromkeys(path.rpartition(".")[2] for path in maps)
            raise WorkloadError(
                f"no linear map is called {name!r}, which is not to be quantized. {did_you_mean(name, ends)}"
            )
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    shared = _shared_weights(model)
    if head:
        _check_head(model, outputs, maps, shared)
    chosen = [
        path
        for path, module in maps.items()
        if (head or module is not outputs)
        and id(module.weight) not in shared
        and not any(_is_named(path, name) for name in skip)
    ]
    if not chosen:
        raise WorkloadError(
            f"{type(model).__name__} has no linear maps (torch.nn.Linear) beside its head, so that there is nothing to "
            f"quantize."
        )
    _check_types(model, {path: maps[path] for path in chosen}, how, compute_dtype)
    return chosen


def _check_head(model: nn.Module, outputs: Any, maps: Mapping[str, nn.Linear], shared: set[int]) -> None:
    """Raise WorkloadError if ``outputs``, the model's head, cannot be packed."""
    path = next((path for path, module in maps.items() if module is outputs), None)
    if path is None:
        raise WorkloadError(
            f"the head of {type(model).__name__} is to be packed too (head, --quantize-head), but no linear map gives "
            f"its outputs. Leave it out."
        )
    if id(maps[path].weight) in shared:
        raise WorkloadError(
            f"{path} is to be packed too (head, --quantize-head), but its weight is the embedding's, which is looked "
            f"up. Leave it out."
        )


def _check_types(
    model: nn.Module, maps: Mapping[str, nn.Linear], how: Quantization, compute_dtype: torch.dtype | None
) -> None:
    if compute_dtype is not None and how.type is QuantizedType.INT8:
        raise WorkloadError(f"compute_dtype is {compute_dtype}, but int8 computes in that of its input. Leave it out.")
    if compute_dtype is not None and how.type.is_grouped:
        raise WorkloadError(
            f"compute_dtype is {compute_dtype}, but {how.type} computes in that of the weight. Leave it out."
        )
    if compute_dtype is not None and compute_dtype not in _COMPUTED:
        raise WorkloadError(f"compute_dtype is {compute_dtype}; it must be float16, bfloat16 or float32.")
    wrong = overlap_of(model)
    if wrong is not None:
        raise WorkloadError(wrong)
    for path, module in maps.items():
        own = module.weight.dtype
        how.check_sizes(path, module.in_features, module.out_features)
        if own not in _COMPUTED:
            raise WorkloadError(f"{path}.weight is {own}; what is quantized must be float16, bfloat16 or float32.")
        if compute_dtype is not None and {own, compute_dtype} == {torch.float16, torch.bfloat16}:
            raise WorkloadError(
                f"compute_dtype is {compute_dtype} but {path} is {own}: activations would be converted to and fro in "
                f"every linear map. Give both one element type."
            )
        if module.bias is not None and compute_dtype not in (None, module.bias.dtype):
            raise WorkloadError(
                f"compute_dtype is {compute_dtype} but the bias of {path} is {module.bias.dtype}, which bitsandbytes "
                f"would convert in every forward. Give both one element type."
            )


def pack(
    model: nn.Module,
    path: str,
    how: Quantization,
    compute_dtype: torch.dtype | None,
    values: Callable[[], torch.Tensor] | None = None,
) -> None:
    """Put a packed linear map in the place of the one at ``path``.

    ``values``: (outputs, inputs), where the map itself is on the meta device and is not to stay there.
    """
    parent, _, name = path.rpartition(".")
    linear = model.get_submodule(path)
    assert isinstance(linear, nn.Linear)
    weight = linear.weight.detach() if values is None else values()
    if how.type.is_grouped:
        setattr(model.get_submodule(parent), name, GptqLinear.of(linear, how, weight))
        return
    made = _made(linear, how, compute_dtype)
    if weight.is_meta:
        _leave_on_meta(made, how)
    else:
        # bitsandbytes packs a weight when it moves, to where it is too.
        made.weight = _parameter(made, weight, how)
        made.weight = made.weight.to(weight.device)
    made.bias = linear.bias
    made.train(linear.training)
    setattr(model.get_submodule(parent), name, made)


def _made(linear: nn.Linear, how: Quantization, compute_dtype: torch.dtype | None) -> Any:
    """A packed linear map of the same sizes, without a weight."""
    sizes: dict[str, Any] = {"bias": linear.bias is not None, "device": "meta"}
    if how.type is QuantizedType.INT8:
        return _bitsandbytes().Linear8bitLt(linear.in_features, linear.out_features, has_fp16_weights=False, **sizes)
    return _bitsandbytes().Linear4bit(
        linear.in_features,
        linear.out_features,
        compute_dtype=compute_dtype or linear.weight.dtype,
        compress_statistics=how.double,
        quant_type=str(how.type),
        **sizes,
    )


def _parameter(made: Any, data: torch.Tensor, how: Quantization, **state: Any) -> Any:
    if how.type is QuantizedType.INT8:
        return _bitsandbytes().Int8Params(data, requires_grad=False, has_fp16_weights=False, **state)
    return _bitsandbytes().Params4bit(
        data,
        requires_grad=False,
        blocksize=how.blocksize,
        compress_statistics=how.double,
        quant_type=str(how.type),
        module=made,
        **state,
    )


def _leave_on_meta(made: Any, how: Quantization) -> None:
    """Give a map a packed weight and a state of the sizes that bitsandbytes would make, without memory."""
    outputs, inputs = made.out_features, made.in_features

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if how.type is QuantizedType.INT8:
        made.weight = _parameter(made, empty(outputs, inputs, dtype=torch.int8), how)
        made.state.CB, made.state.SCB = made.weight.data, empty(outputs)
        return
    assert how.blocksize is not None
    num_scales = -(-outputs * inputs // how.blocksize)
    kept: dict[str, Any] = {"absmax": empty(num_scales), "code": empty(NUM_CODES)}
    if how.double:
        state2 = _state(
            absmax=empty(-(-num_scales // NESTED_BLOCKSIZE)),
            code=empty(NUM_NESTED_CODES),
            blocksize=NESTED_BLOCKSIZE,
            dtype=torch.float32,
        )
        kept |= {"absmax": empty(num_scales, dtype=torch.uint8), "offset": empty(), "state2": state2}
    state = _state(
        shape=torch.Size((outputs, inputs)),
        dtype=made.compute_dtype,
        blocksize=how.blocksize,
        quant_type=str(how.type),
        **kept,
    )
    packed = empty(-(-outputs * inputs // 2), 1, dtype=torch.uint8)
    made.weight = _parameter(made, packed, how, quant_state=state, bnb_quantized=True)
    made.quant_state = state


def _state(**fields: Any) -> Any:
    return import_module("bitsandbytes.functional").QuantState(**fields)


def _shared_weights(model: nn.Module) -> set[int]:
    """Weights that several modules have."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _is_named(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _bitsandbytes() -> Any:
    """Its modules.  Raises WorkloadError if it is not installed.

    On some CPUs it warns, as it is imported, that a package of kernels for inference is missing: none are run here.
    """
    kernels = logging.getLogger(_CPU_KERNELS)
    level = kernels.level
    kernels.setLevel(logging.ERROR)
    try:
        return import_module("bitsandbytes.nn")
    except ImportError as error:
        raise WorkloadError(
            f"quantizing needs bitsandbytes, which cannot be imported ({error}). Install it: "
            f"{install_command('bitsandbytes')}"
        ) from error
    finally:
        kernels.setLevel(level)
