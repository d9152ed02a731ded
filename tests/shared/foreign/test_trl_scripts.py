"""Files of TRL's scripts, drawn from what they should be read as: ModelConfig beside TrainingArguments."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from protwin.shared.basics.errors import PlanError
from protwin.shared.foreign.asked_run import Checkpointing, Precision, Tool
from protwin.shared.foreign.files import read_run
from protwin.shared.foreign.training_arguments import read_training_arguments
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
        if is_narrow and not uses_peft:
            # AdamW steps bfloat16 weights themselves; float16 ones, or under another type's autocast, no plan has.
            if dtype == "bfloat16" and computed != "fp16":
                precision = Precision.PURE_BFLOAT16
            else:
                left_out.add(dtype_key)
        reading = read_run(content, FILE)
        run = reading.run
        assert (run.lora, run.quantized, run.precision) == (lora, quantized, precision), content
        assert run.is_as_published == (dtype == "auto" and quantized is None), content
        assert (reading.tool is Tool.TRL) == bool({"use_peft", "loss_type"} & content.keys()), content
        assert (run.model, run.attention_kernel) == ("gpt2", KERNELS[kernel]), content
        assert {note.key for note in reading.left_out} == left_out, content


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"use_peft": False, "load_in_8bit": True}, "nothing is trained without an adapter"),
        ({"lora_target_modules": ["q_proj", ".*_proj"]}, "patterns in lists are not read"),
    ],
)
def test_what_is_no_training_or_no_list_of_maps_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        read_run({"model_name_or_path": "gpt2", "use_peft": True} | more, FILE)


def test_the_trainer_of_trl_recomputes_and_has_a_length_unless_it_is_told_otherwise() -> None:
    assert read_training_arguments({"max_length": None}).run.sequence_length is None, "nothing is cut off"
    run = read_training_arguments({"packing": True}).run
    assert (run.sequence_length, run.is_packed, run.checkpointing) == (1024, True, Checkpointing.FULL)
    assert run.precision is Precision.AUTOCAST_BFLOAT16
    run = read_training_arguments({"max_length": 4096, "gradient_checkpointing": False, "bf16": False}).run
    assert (run.sequence_length, run.is_packed, run.checkpointing) == (4096, False, Checkpointing.NONE)
    assert run.precision is Precision.FLOAT32


def test_a_script_of_trl_names_its_model_and_its_adapters() -> None:
    """Fields of ModelConfig beside those of SFTConfig, with TRL's own defaults where the file is silent."""
    content: dict[str, Any] = {"model_name_or_path": "mistralai/Mistral-7B-v0.1", "use_peft": True, "bf16": True}
    run = read_run(content, Path("sft.yaml")).run
    assert run.lora == LoraOptions(rank=16, targets=("q_proj", "v_proj"), dropout=0.05)
    assert (run.model, run.quantized) == (content["model_name_or_path"], None)
    assert run.precision is Precision.AUTOCAST_BFLOAT16
    more = {"lora_r": 64, "lora_target_modules": "all-linear", "load_in_4bit": True, "use_bnb_nested_quant": True}
    packed = read_run(content | more, Path("sft.yaml")).run
    assert packed.lora == LoraOptions(rank=64, dropout=0.05)
    assert packed.quantized == QuantizationOptions(how=Quantization(type=QuantizedType.NF4, double=True))
    assert packed.precision is Precision.MIXED_BFLOAT16
    narrow = read_run(content | {"dtype": "bfloat16"}, Path("sft.yaml"))
    assert (narrow.run.precision, narrow.left_out) == (Precision.MIXED_BFLOAT16, ())
    assert read_run(content | {"use_peft": False, "lora_r": 64}, Path("sft.yaml")).run.lora is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"use_peft": False, "load_in_4bit": True}, "nothing is trained without an adapter"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "both true"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}, "Choose from nf4, fp4"),
        ({"lora_dropout": 1.5}, "a part from 0 to 1"),
        ({"lora_r": 0}, "lora_r"),
        ({"dtype": "float99"}, "Choose from auto, float32, bfloat16, float16"),
        ({"dtype": ["bfloat16"]}, "Choose from auto, float32, bfloat16, float16"),
        ({"use_peft": "ja"}, 'yaml: use_peft is "ja", where true or false belongs. Write one.$'),
        ({"loss_type": "sigmoid"}, "Choose from nll, dft, chunked_nll"),
        ({"beta": 0.1}, "another Trainer"),
        ({"num_generations": 8, "use_vllm": True}, "another Trainer"),
    ],
)
def test_what_adapters_of_trl_cannot_be_is_one_message(more: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        read_run({"model_name_or_path": "gpt2", "use_peft": True} | more, Path("sft.yaml"))


def test_keys_of_adapters_make_a_file_one_of_trl_whose_defaults_it_then_has() -> None:
    """TRL's scripts recompute blocks, compute in bfloat16, and cut rows at 1,024 tokens, as SFTConfig has it."""
    reading = read_run({"model_name_or_path": "gpt2", "use_peft": True}, Path("sft.yaml"))
    run = reading.run
    assert (run.sequence_length, run.checkpointing) == (1024, Checkpointing.FULL)
    assert run.precision is Precision.AUTOCAST_BFLOAT16
    assumed = {note.key: note.value for note in reading.assumed}
    shown = {"max_length": "1024", "gradient_checkpointing": "true", "bf16": "true"}
    assert {key: assumed.get(key) for key in shown} == shown
    silent = read_run({"model_name_or_path": "gpt2", "use_peft": True, "fp16": True}, Path("sft.yaml"))
    assert "bf16" not in {note.key for note in silent.assumed}
    plain = read_run({"model_name_or_path": "gpt2", "dataset_name": "text"}, Path("run_clm.yaml"))
    assert (plain.run.sequence_length, plain.run.checkpointing) == (None, Checkpointing.NONE)
    assert not {"bf16", "gradient_checkpointing"} & {note.key for note in plain.assumed}


@pytest.mark.parametrize(
    ("more", "precision", "left_out"),
    [
        ({"dtype": "bfloat16"}, Precision.MIXED_BFLOAT16, set()),
        ({"torch_dtype": "float16"}, Precision.MIXED_FLOAT16, set()),
        ({"dtype": "float32"}, Precision.FLOAT32, set()),
        ({"dtype": "auto"}, Precision.FLOAT32, set()),
        ({"dtype": "auto", "use_peft": False}, Precision.FLOAT32, set()),
        ({"dtype": "bfloat16", "use_peft": False}, Precision.PURE_BFLOAT16, set()),
        ({"model_init_kwargs": {"dtype": "bfloat16"}, "use_peft": False}, Precision.PURE_BFLOAT16, set()),
        ({"dtype": "bfloat16", "use_peft": False, "bf16": True}, Precision.PURE_BFLOAT16, set()),
        # accelerate casts what FSDP trains to float32 where FSDP mixes types, and leaves it where it does not.
        ({"dtype": "bfloat16", "use_peft": False, "bf16": True, "fsdp": "full_shard"}, OF_TYPE["bfloat16"], set()),
        ({"dtype": "bfloat16", "use_peft": False, "fsdp": "full_shard"}, Precision.PURE_BFLOAT16, set()),
        # DeepSpeed makes float32 masters of whatever it is given.
        (
            {"dtype": "bfloat16", "use_peft": False, "bf16": True, "deepspeed": {"bf16": {"enabled": True}}},
            OF_TYPE["bfloat16"],
            set(),
        ),
        (
            {"dtype": "bfloat16", "use_peft": False, "deepspeed": {"zero_optimization": {"stage": 2}}},
            Precision.FLOAT32,
            {"dtype"},
        ),
        ({"dtype": "bfloat16", "use_peft": False, "fp16": True}, Precision.AUTOCAST_FLOAT16, {"dtype"}),
        ({"dtype": "float16", "use_peft": False}, Precision.FLOAT32, {"dtype"}),
    ],
)
def test_the_type_that_a_base_is_loaded_in(more: dict[str, Any], precision: Precision, left_out: set[str]) -> None:
    """Without autocast, products of a frozen base compute in the type of its weights."""
    reading = read_run({"model_name_or_path": "gpt2", "use_peft": True, "bf16": False} | more, Path("sft.yaml"))
    assert reading.run.precision is precision
    assert {note.key for note in reading.left_out} == left_out


def test_a_file_that_may_be_of_trl_or_of_run_clm_is_whose_the_user_says() -> None:
    """Both have a model and a data set in the file, and other values where it is silent."""
    content = {"model_name_or_path": "gpt2", "dataset_name": "text"}
    plain, trl = read_run(content, FILE), read_run(content, FILE, Tool.TRL)
    assert (plain.tool, plain.could_be, plain.run.checkpointing) == (
        Tool.TRAINING_ARGUMENTS,
        Tool.TRL,
        Checkpointing.NONE,
    )
    assert (trl.tool, trl.could_be, trl.run.checkpointing, trl.run.sequence_length) == (
        Tool.TRL,
        None,
        Checkpointing.FULL,
        1024,
    )
    assert read_run(content | {"use_peft": True}, FILE) == read_run(content | {"use_peft": True}, FILE, Tool.TRL)
    assert read_run(content, FILE, Tool.TRAINING_ARGUMENTS).could_be is None
    assert read_run({"output_dir": "x"}, FILE).could_be is None


def test_keys_that_are_refused_for_one_reason_are_told_with_it_once() -> None:
    content = {"model_name_or_path": "gpt2", "beta": 0.1, "max_prompt_length": 64, "use_vllm": True, "tp_size": 2}
    with pytest.raises(PlanError) as caught:
        read_run(content, FILE)
    told = str(caught.value)
    assert "beta is 0.1, max_prompt_length is 64 and use_vllm is true: another Trainer" in told
    assert (told.count("another Trainer"), told.count("tp_size is 2: no plan splits layers")) == (1, 1)


@pytest.mark.parametrize("key", ["block_size", "max_seq_length"])
@pytest.mark.parametrize("seed", range(5))
def test_the_row_of_a_script_of_transformers_is_the_one_of_its_data_arguments(key: str, seed: int) -> None:
    """Of ``run_clm.py`` and ``run_mlm.py``, whose DataTrainingArguments have no other length."""
    draw = random.Random(seed)
    length = draw.randint(1, 10**6)
    others = ("validation_split_percentage", "preprocessing_num_workers", "dataset_config_name", "train_file", "token")
    beside = dict.fromkeys(draw.sample(others, draw.randint(1, 4)), 5)
    content = {"model_name_or_path": "gpt2", "output_dir": "x", key: length} | beside
    reading = read_run(content, Path("clm.json"))
    assert reading.run.sequence_length == length
    assert (reading.tool, reading.could_be) == (Tool.TRAINING_ARGUMENTS, None)
    assert (reading.run.checkpointing, reading.run.precision) == (Checkpointing.NONE, Precision.FLOAT32)
    assert not reading.unknown
    assert not reading.left_out
    with pytest.raises(PlanError, match=f"{key} is -1"):
        read_run(content | {key: -1}, Path("clm.json"))


def test_the_row_of_scripts_of_transformers_is_none_of_trl() -> None:
    content = {"model_name_or_path": "gpt2", "block_size": 512}
    reading = read_run(content, FILE, Tool.TRL)
    assert reading.run.sequence_length == 1024
    assert [note.key for note in reading.unknown] == ["block_size"]
    old = read_run({"model_name_or_path": "gpt2", "max_seq_length": 512}, FILE)
    assert (old.tool, old.run.sequence_length, old.run.checkpointing) == (Tool.TRL, 512, Checkpointing.FULL)


def test_other_sizes_than_the_named_model_are_told() -> None:
    content = {"model_name_or_path": "gpt2", "block_size": 512, "config_overrides": "n_embd=1024"}
    assert [note.key for note in read_run(content, FILE).left_out] == ["config_overrides"]
