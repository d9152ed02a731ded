"""Files of tools that are not read are refused by name, although they share keys with those that are."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from protwin.shared.basics.errors import PlanError
from protwin.shared.foreign import files
from protwin.shared.foreign.asked_run import Tool
from protwin.shared.foreign.axolotl_keys import AXOLOTL_KEYS
from protwin.shared.foreign.deepspeed import read_deepspeed
from protwin.shared.foreign.deepspeed_keys import DEEPSPEED_KEYS
from protwin.shared.foreign.files import read_run
from protwin.shared.foreign.torchtitan_keys import TORCHTITAN_KEYS
from protwin.shared.foreign.training_arguments import read_training_arguments
from protwin.shared.foreign.training_arguments_keys import TRAINING_ARGUMENTS_KEYS
from protwin.shared.schema.hardware import AttentionKernel
from tests.shared.foreign.writers import deepspeed, deepspeed_run

HERE = Path("file.yaml")
TABLES = (DEEPSPEED_KEYS, TRAINING_ARGUMENTS_KEYS, TORCHTITAN_KEYS, AXOLOTL_KEYS)


@pytest.mark.parametrize(
    ("tool", "content"),
    [
        (
            "LLaMA-Factory",
            {"model_name_or_path": "a", "stage": "sft", "finetuning_type": "lora", "lora_target": "all", "bf16": True},
        ),
        ("LLaMA-Factory", {"model_name_or_path": "a", "cutoff_len": 1024, "output_dir": "b"}),
        ("open-instruct", {"model_name_or_path": "a", "max_seq_length": 4096, "use_qlora": True, "output_dir": "b"}),
        ("nanotron", {"data_stages": [], "model": {"dtype": "bfloat16"}, "parallelism": {"dp": 2, "tp": 2}}),
        ("LitGPT", {"checkpoint_dir": "a", "lora_r": 32, "lora_dropout": 0.05, "train": {"micro_batch_size": 1}}),
        ("ms-swift", {"model": "a", "tuner_type": "lora", "output_dir": "b", "per_device_train_batch_size": 1}),
        ("LLM Foundry", {"model": {"name": "mpt_causal_lm"}, "global_train_batch_size": 8, "fsdp_config": {}}),
        ("torchtune", {"model": {"_component_": "torchtune.models.llama3"}, "batch_size": 2, "output_dir": "b"}),
        ("Hydra", {"model": {"_target_": "nemo.Model"}, "training": {}}),
        ("NeMo", {"exp_manager": {}, "model": {"micro_batch_size": 1}}),
    ],
)
def test_it_is_refused_by_name(tool: str, content: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=rf"file\.yaml is a file of {tool} \(by .*which is not read\. Write"):
        read_run(content, HERE)


def test_no_key_of_a_tool_that_is_read_marks_one_that_is_not() -> None:
    marks = [mark for marks in files._NOT_READ.values() for mark in marks]
    assert [mark for mark in marks if any(table.knows(mark) for table in TABLES)] == []


def test_whoever_names_the_tool_is_answered() -> None:
    reading = read_run({"cutoff_len": 8, "output_dir": "b"}, HERE, Tool.TRAINING_ARGUMENTS)
    assert [one.key for one in reading.unknown] == ["cutoff_len"]


def test_keys_at_null_ask_for_nothing() -> None:
    reading = read_run({"base_model": "a", "of_mine": None, "of_yours": 0}, HERE)
    assert [one.key for one in reading.unknown] == ["of_yours"]
    assert "of_mine" in reading.without_effect


@pytest.mark.parametrize("seed", range(20))
def test_keys_of_zero_3_are_taken_without_their_prefix_too(seed: int) -> None:
    """DeepSpeed's fields have the documented names as aliases, and take both (``populate_by_name``)."""
    rng = random.Random(seed)
    content = deepspeed(deepspeed_run(rng), rng)
    zero = content["zero_optimization"]
    more = {"stage3_max_reuse_distance": 5, "stage3_gather_16bit_weights_on_model_save": True}
    long = content | {"zero_optimization": zero | more}
    short = {name.removeprefix("stage3_"): value for name, value in long["zero_optimization"].items()}
    assert read_deepspeed(content | {"zero_optimization": short}) == read_deepspeed(long)
    assert read_deepspeed({"zero_optimization": {"stage": 3, "max_live_parameters": 0}}).run.live_parameters == 0


def test_flash_attention_by_its_older_name() -> None:
    """Of ModelArguments of the alignment handbook before ``attn_implementation``."""
    reading = read_training_arguments({"output_dir": "a", "use_flash_attention_2": True})
    assert (reading.run.attention_kernel, reading.unknown) == (AttentionKernel.FLASH_2, ())


def test_experts_over_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"expert_parallel\.enabled is true.*no plan spreads experts"):
        read_deepspeed({"expert_parallel": {"enabled": True, "autoep_size": 8}, "zero_optimization": {"stage": 1}})
    off = {"expert_parallel": {"enabled": False, "preset_model": "a"}, "zero_optimization": {"stage": 1}}
    assert read_deepspeed(off).unknown == ()
