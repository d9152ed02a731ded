"""Files of TRL's scripts, drawn from what they should be read as: ModelConfig beside TrainingArguments."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from protwin.shared.basics.errors import PlanError
from protwin.shared.foreign.asked_run import Precision
from protwin.shared.foreign.files import read_run
from protwin.shared.phases.quantization import LATEST_RELEASE, PackedProducts, Quantization, QuantizedType
from protwin.shared.schema.hardware import AttentionKernel
from protwin.shared.schema.training_options import LoraOptions, QuantizationOptions

FILE = Path("sft.yaml")
TARGETS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "": (None, ("q_proj", "v_proj")),
    "all": ("all-linear", ()),
    "list": (["k_proj", "o_proj"], ("k_proj", "o_proj")),
    "name": ("gate_proj", ("gate_proj",)),
}
PACKED: dict[str, tuple[dict[str, Any], QuantizationOptions | None]] = {
    "": ({}, None),
    "off": ({"load_in_4bit": False}, None),
    "8": (
        {"load_in_8bit": True},
        QuantizationOptions(how=Quantization(type=QuantizedType.INT8), products=PackedProducts(release=LATEST_RELEASE)),
    ),
    "4": ({"load_in_4bit": True}, QuantizationOptions(how=Quantization(type=QuantizedType.NF4))),
    "fp4": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "use_bnb_nested_quant": False},
        QuantizationOptions(how=Quantization(type=QuantizedType.FP4)),
    ),
    "nested": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True},
        QuantizationOptions(how=Quantization(type=QuantizedType.NF4, double=True)),
    ),
}
COMPUTED = {
    "bf16": (Precision.AUTOCAST_BFLOAT16, Precision.MIXED_BFLOAT16),
    "fp16": (Precision.AUTOCAST_FLOAT16, Precision.MIXED_FLOAT16),
}
"""Beside weights in float32, and beside frozen ones in 16 bits."""
OF_TYPE = {"bfloat16": Precision.MIXED_BFLOAT16, "float16": Precision.MIXED_FLOAT16}
KERNELS = {None: None, "sdpa": None, "flash_attention_2": AttentionKernel.FLASH_2, "eager": None}


def _said(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if value is not None}


@pytest.mark.parametrize("seed", range(3))
def test_scripts_are_read_as_they_were_drawn(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        computed, kernel = rng.choice([*COMPUTED, None]), rng.choice([*KERNELS])
        dtype, dtype_key = rng.choice([None, "auto", "float32", *OF_TYPE]), rng.choice(["dtype", "torch_dtype"])
        content: dict[str, Any] = {"model_name_or_path": "gpt2", "bf16": False} | (
            {} if dtype is None else {dtype_key: dtype}
        )
        content |= ({} if computed is None else {computed: True}) | (
            {} if kernel is None else {"attn_implementation": kernel}
        )
        left_out = {"attn_implementation"} if kernel == "eager" else set()
        lora = quantized = None
        if uses_peft := rng.random() < 0.8:
            given, targets = TARGETS[rng.choice([*TARGETS])]
            keys, quantized = PACKED[rng.choice([*PACKED])]
            rank, dropout, dora = (
                rng.choice([None, 4, 64]),
                rng.choice([None, 0.0, 0.1]),
                rng.choice([None, False, True]),
            )
            names = {"lora_r": rank, "lora_dropout": dropout, "use_dora": dora, "lora_target_modules": given}
            content |= {"use_peft": True} | keys | _said(names)
            lora = LoraOptions(
                rank=rank or 16, targets=targets, dropout=0.05 if dropout is None else dropout, use_dora=bool(dora)
            )
            if rng.random() < 0.3:
                content["lora_modules_to_save"] = ["lm_head"]
                left_out.add("lora_modules_to_save")
        is_narrow = dtype in OF_TYPE
        precision = Precision.FLOAT32
        if computed is not None:
            precision = COMPUTED[computed][quantized is not None or (is_narrow and uses_peft)]
        elif dtype in OF_TYPE and uses_peft:
            precision = OF_TYPE[dtype]
        if (dtype == "auto" and quantized is None) or (is_narrow and not uses_peft):
            left_out.add(dtype_key)
        reading = read_run(content, FILE)
        run = reading.run
        assert (run.lora, run.quantized, run.precision) == (lora, quantized, precision), content
        assert (run.model, run.attention_kernel) == ("gpt2", KERNELS[kernel]), content
        assert {note.key for note in reading.left_out} == left_out, content


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"use_peft": False, "load_in_8bit": True}, "nothing is trained without an adapter"),
        ({"lora_target_modules": ["q_proj", ".*_proj"]}, "no list of plain names"),
    ],
)
def test_what_is_no_training_or_no_list_of_maps_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        read_run({"model_name_or_path": "gpt2", "use_peft": True} | more, FILE)
