"""Adapters that no plan can be made for, by name."""

from __future__ import annotations

from typing import Final

from torch import nn

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
    for module in model.modules():
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
