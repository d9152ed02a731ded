"""Adapters that no plan can be made for, by name."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from ...shared.phases.quantization import QuantizedType
from ..quantized.layers import quantization_of
from .peft_parts import is_of

_WHY: Final = {
    "PREFIX_TUNING": (
        "prefix tuning",
        "hands keys and values to the blocks in a cache, which a recomputation would extend a second time",
    ),
    "CARTRIDGE": (
        "a cartridge",
        "hands keys and values to the blocks in a cache, which a recomputation would extend a second time",
    ),
    "SHIRA": ("SHiRA", "makes sparse tensors in every forward, whose memory nobody can tell"),
    "XLORA": ("X-LoRA", "runs the model twice in every forward, the first time for the weights of its experts"),
}
"""By PEFT's types: what it is called, and what it does."""


def refused_adapter(model: nn.Module) -> str | None:
    """Why no plan can be made for an adapter of ``model``; None if one can be for all."""
    for path, module in model.named_modules():
        if is_of(module, "LoraLayer") and (packed := _four_bits_beside_dora(module)) is not None:
            return (
                f"DoRA of PEFT (use_dora) takes norms of the whole weight of {path} in every step, but that weight is "
                f"packed as {packed} in a chunk that the plan moves. Leave use_dora out, or load the model unpacked."
            )
        if is_of(module, "PeftModel", "BaseTuner"):
            configured = module.__dict__.get("peft_config") or module.__dict__.get("_peft_config")
            found = [getattr(each, "peft_type", None) for each in (configured or {}).values()]
            for kind in [str(getattr(each, "value", each)) for each in found]:
                if kind in _WHY:
                    name, why = _WHY[kind]
                    return (
                        f"the model is adapted by {name} of PEFT, which {why}. Train it without a plan, or adapt the "
                        f"model in another way (LoraConfig; PromptTuningConfig for prompts)."
                    )
    return None


def _four_bits_beside_dora(layer: Any) -> str | None:
    """How the weight is packed that an active DoRA of ``layer`` unpacks; None if none does, or none is."""
    if not any(layer.use_dora.get(name, False) for name in layer.active_adapters):
        return None
    found = quantization_of(layer.get_base_layer())
    return None if found is None or found.type is QuantizedType.INT8 else str(found.type)
