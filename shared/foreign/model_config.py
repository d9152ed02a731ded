"""TRL's ModelConfig, which its scripts take in one file with TrainingArguments: the model, its adapters, its types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..phases.quantization import LATEST_RELEASE, PackedProducts, Quantization, QuantizedType
from ..schema.hardware import AttentionKernel
from ..schema.training_options import LoraOptions, QuantizationOptions
from .asked_run import Precision
from .keys import Walk, attention_of, one_of, shown
from .targets import lora_targets

_RANK: Final = 16
_DROPOUT: Final = 0.05
_OF_ADAPTERS: Final = ("lora_r", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "use_dora")
_FOUR_BITS: Final = {"nf4": QuantizedType.NF4, "fp4": QuantizedType.FP4}
_BESIDE_ADAPTERS: Final = {
    Precision.AUTOCAST_BFLOAT16: Precision.MIXED_BFLOAT16,
    Precision.AUTOCAST_FLOAT16: Precision.MIXED_FLOAT16,
}
"""Of a frozen base that is loaded in 16 bits, so that nothing is cast where products read it."""
_NARROW: Final = {"bfloat16": Precision.MIXED_BFLOAT16, "float16": Precision.MIXED_FLOAT16}
_AS_PUBLISHED: Final = "auto"
_TYPES: Final = (_AS_PUBLISHED, "float32", *_NARROW)
_LOADED_IN: Final = ("dtype", "torch_dtype")
_INIT: Final = "model_init_kwargs"
_OF_INIT: Final = (*_LOADED_IN, "attn_implementation", "use_cache", "trust_remote_code", "revision")
"""What ``from_pretrained`` is told that is answered, or takes neither time nor memory in a step."""


def read_model_config(walk: Walk) -> dict[str, Any]:
    """Which model it is, how it is packed, what computes its attention, and its adapters: fields of a run."""
    found = _of_from_pretrained(walk)
    if walk.has("model_name_or_path"):
        found["model"] = walk.text("model_name_or_path")
        walk.means("model_name_or_path", "which model")
    if walk.has("attn_implementation"):
        key = "attn_implementation"
        found["attention_kernel"] = attention_of(walk, key, walk.value(key))
    elif walk.flag("use_flash_attention_2"):
        found["attention_kernel"] = AttentionKernel.FLASH_2
        walk.means("use_flash_attention_2", f"attention is computed by {AttentionKernel.FLASH_2}")
    is_4bit, is_8bit = bool(walk.flag("load_in_4bit")), bool(walk.flag("load_in_8bit"))
    if walk.flag("use_peft"):
        return found | _adapters(walk) | _packed(walk, is_4bit=is_4bit, is_8bit=is_8bit)
    if is_4bit or is_8bit:
        walk.contradict(
            "the base is packed (load_in_4bit, load_in_8bit), so that nothing is trained without an adapter. Write "
            "use_peft: true."
        )
    for key in _OF_ADAPTERS:
        walk.means(key, "nothing, as use_peft is not true")
    return found


def _of_from_pretrained(walk: Walk) -> dict[str, Any]:
    """What a Trainer of TRL that is given a name passes on: what computes attention."""
    init = walk.value(_INIT)
    if not init:
        return {}
    if not isinstance(init, Mapping):
        walk.refuse(_INIT, "a section of keys")
        return {}
    if others := [name for name in init if name not in _OF_INIT]:
        walk.leaves_out(_INIT, f"{', '.join(map(str, others))} may change time and memory; not in the answer")
    kernel = attention_of(walk, _INIT, init.get("attn_implementation"))
    return {} if kernel is None else {"attention_kernel": kernel}


def _adapters(walk: Walk) -> dict[str, Any]:
    walk.means("use_peft", "low-rank matrices are trained beside linear maps")
    rank, dropout = walk.number("lora_r", _RANK), walk.real("lora_dropout", _DROPOUT) or 0.0
    if dropout > 1:
        walk.refuse("lora_dropout", "a part from 0 to 1")
    walk.means("lora_r", "their rank", usually=_RANK)
    walk.means("lora_dropout", "part that is dropped of what they read", usually=_DROPOUT)
    walk.means("use_dora", "whether magnitudes are trained too")
    if walk.value("lora_modules_to_save"):
        walk.leaves_out("lora_modules_to_save", "modules are trained whole beside adapters: more memory and time")
    targets, uses_dora = lora_targets(walk), bool(walk.flag("use_dora"))
    if rank is None:
        return {}
    return {"lora": LoraOptions(rank=rank, targets=targets, dropout=min(dropout, 0.999), use_dora=uses_dora)}


def _packed(walk: Walk, *, is_4bit: bool, is_8bit: bool) -> dict[str, Any]:
    """How the base is packed."""
    if is_4bit and is_8bit:
        walk.contradict("load_in_4bit and load_in_8bit are both true. Choose one.")
    if is_8bit:
        walk.means("load_in_8bit", "the base is packed in 8 bits, whose maps keep their inputs until backward")
        how = Quantization(type=QuantizedType.INT8)
        return {"quantized": QuantizationOptions(how=how, products=PackedProducts(release=LATEST_RELEASE))}
    if not is_4bit:
        return {}
    packed: QuantizedType | None = one_of(
        walk, "bnb_4bit_quant_type", _FOUR_BITS, walk.text("bnb_4bit_quant_type", "nf4")
    )
    walk.means("load_in_4bit", "the base is packed in 4 bits")
    walk.means("bnb_4bit_quant_type", "which ones", usually="nf4")
    walk.means("use_bnb_nested_quant", "whether its scales are packed too")
    if packed is None:
        return {}
    return {
        "quantized": QuantizationOptions(how=Quantization(type=packed, double=bool(walk.flag("use_bnb_nested_quant"))))
    }


def read_weights(walk: Walk, precision: Precision, *, is_adapted: bool, is_packed: bool, has_masters: bool) -> Any:
    """The fields of a run for the type that its weights are loaded in: element types, or that they are as published.

    ``precision`` is of weights in float32; ``has_masters``: whether DeepSpeed makes float32 ones of any weights.
    """
    if is_packed:
        precision = _BESIDE_ADAPTERS.get(precision, precision)
    found: dict[str, Any] = {"precision": precision}
    for key, loaded in _loaded_in(walk):
        if key != _INIT and loaded not in _TYPES:
            walk.contradict(f"{key} is {shown(loaded)}. Choose from {', '.join(_TYPES)}.")
        elif has_masters and precision is Precision.FLOAT32 and not is_adapted and loaded != "float32":
            walk.leaves_out(key, "weights are loaded in 16 bits, with float32 masters; in the answer in float32")
        elif loaded == _AS_PUBLISHED:
            walk.means(key, "weights are loaded in the type that they are published in")
            found |= {} if is_packed else {"is_as_published": True}
        elif loaded not in _TYPES or (how := as_loaded(precision, loaded, is_adapted=is_adapted)) is None:
            walk.leaves_out(key, f"weights are loaded in {loaded}; in the answer masters are float32")
        else:
            found["precision"] = how
            own = ", and stepped themselves, without masters" if how is Precision.PURE_BFLOAT16 else ""
            walk.means(key, f"the element type that weights are loaded in{own}")
        return found
    return found


def _loaded_in(walk: Walk) -> list[tuple[str, Any]]:
    """Keys that say the element type that weights are loaded in, the one that counts first."""
    init = walk.value(_INIT)
    nested = [init.get(key) for key in _LOADED_IN] if isinstance(init, Mapping) else []
    said = [(key, walk.value(key)) for key in _LOADED_IN] + [(_INIT, loaded) for loaded in nested]
    return [(key, loaded) for key, loaded in said if loaded is not None]


def as_loaded(precision: Precision, loaded: str, *, is_adapted: bool) -> Precision | None:
    """Element types of a training of ``precision`` whose weights are loaded in ``loaded``; None: no plan has them.

    Products of a frozen base compute in its type where nothing is cast to another.  Weights that are trained in
    bfloat16 are stepped themselves, also under autocast; FSDP casts them to float32 first where it mixes types
    (accelerate), so that masters are float32.  No optimizer steps float16 weights: their gradients are not scaled back.
    """
    if loaded not in _NARROW:
        return precision
    if is_adapted:
        if precision is Precision.FLOAT32:
            return _NARROW[loaded]
        return _BESIDE_ADAPTERS.get(precision, precision)
    if precision in (Precision.MIXED_BFLOAT16, Precision.MIXED_FLOAT16):
        return precision
    is_brain = loaded == "bfloat16" and precision in (Precision.FLOAT32, Precision.AUTOCAST_BFLOAT16)
    return Precision.PURE_BFLOAT16 if is_brain else None
