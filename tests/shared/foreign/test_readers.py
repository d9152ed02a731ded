"""Runs drawn by seed, written as each tool writes them, are read back; real files of the tools are read whole."""

from __future__ import annotations

import dataclasses
import json
import random
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from protwin.shared.basics.errors import FileError, PlanError
from protwin.shared.foreign.asked_run import AskedRun, Place, Precision, Split, Tool
from protwin.shared.foreign.axolotl import read_axolotl
from protwin.shared.foreign.axolotl_keys import AXOLOTL_KEYS
from protwin.shared.foreign.deepspeed import read_deepspeed
from protwin.shared.foreign.deepspeed_keys import DEEPSPEED_KEYS
from protwin.shared.foreign.files import read_content, read_run
from protwin.shared.foreign.fsdp import FSDP_KEYS
from protwin.shared.foreign.keys import KeyTable
from protwin.shared.foreign.torchtitan_keys import TORCHTITAN_KEYS
from protwin.shared.foreign.training_arguments import read_training_arguments
from protwin.shared.foreign.training_arguments_keys import TRAINING_ARGUMENTS_KEYS
from protwin.shared.phases.tiling import LossHead
from protwin.shared.schema.hardware import AttentionKernel
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.workload import Compiled
from tests.proof_size import some_quick
from tests.shared.foreign.recorded_keys import AXOLOTL, DEEPSPEED, TORCHTITAN
from tests.shared.foreign.writers import (
    axolotl,
    axolotl_run,
    deepspeed,
    deepspeed_run,
    torchtitan,
    torchtitan_run,
    training_arguments,
    training_run,
)

HERE = Path("file.json")


@pytest.mark.parametrize("seed", range(60))
def test_a_deepspeed_configuration_is_read_back(seed: int) -> None:
    rng = random.Random(seed)
    run = deepspeed_run(rng)
    reading = read_deepspeed(deepspeed(run, rng))
    assert reading.run == run
    assert (reading.left_out, reading.unknown) == ((), ())


@pytest.mark.parametrize("seed", range(60))
def test_training_arguments_that_few_fields_are_written_of_are_read_back(seed: int) -> None:
    run = training_run(random.Random(seed))
    reading = read_training_arguments(training_arguments(run))
    assert reading.run == run
    assert (reading.left_out, reading.unknown) == ((), ())


@some_quick("seed", range(6), quick=1)
def test_training_arguments_as_transformers_writes_them_are_read_back(seed: int, tmp_path: Path) -> None:
    """The oracle is transformers itself, which fills in every other field."""
    transformers = pytest.importorskip("transformers")
    run = training_run(random.Random(seed + 100))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = transformers.TrainingArguments(str(tmp_path), use_cpu=True, **training_arguments(run))
    (tmp_path / "args.json").write_text(made.to_json_string())
    reading = read_run(read_content(tmp_path / "args.json"), tmp_path / "args.json")
    assert reading.tool is Tool.TRAINING_ARGUMENTS
    assert reading.run == run
    assert [note.key for note in reading.left_out] == ["use_cpu"]
    assert reading.unknown == ()


@pytest.mark.parametrize("seed", range(60))
def test_a_file_of_torchtitan_is_read_back_in_both_layouts(seed: int) -> None:
    run = torchtitan_run(random.Random(seed))
    for is_old in (True, False):
        written = tomllib.loads(tomli_w.dumps(torchtitan(run, is_old=is_old)))
        reading = read_run(written, HERE)
        assert (reading.tool, reading.run) == (Tool.TORCHTITAN, run)
        assert (reading.left_out, reading.unknown) == ((), ())


@pytest.mark.parametrize("seed", range(60))
def test_an_axolotl_configuration_is_read_back(seed: int) -> None:
    rng = random.Random(seed)
    run = axolotl_run(rng)
    reading = read_run(axolotl(run, rng), HERE)
    assert (reading.tool, reading.run) == (Tool.AXOLOTL, run)
    assert (reading.left_out, reading.unknown) == ((), ())


@pytest.mark.parametrize(
    ("table", "keys"),
    [(DEEPSPEED_KEYS, DEEPSPEED), (TORCHTITAN_KEYS, TORCHTITAN), (AXOLOTL_KEYS, AXOLOTL)],
    ids=("deepspeed", "torchtitan", "axolotl"),
)
def test_every_key_that_was_recorded_of_a_tool_is_in_one_of_the_tables(table: KeyTable, keys: list[str]) -> None:
    missing = [key for key in keys if not table.knows(key)]
    assert missing == [], f"not in the table of {table.tool}: {missing}"


@pytest.mark.parametrize(("package", "name"), [("transformers", "TrainingArguments"), ("trl", "SFTConfig")])
def test_every_field_of_the_installed_tool_is_in_one_of_the_tables(package: str, name: str) -> None:
    """A newer version may have more: these are to be added to ``training_arguments_keys.py``."""
    fields = [field.name for field in dataclasses.fields(getattr(pytest.importorskip(package), name))]
    missing = [field for field in fields if not TRAINING_ARGUMENTS_KEYS.knows(field)]
    assert missing == [], f"not in shared/foreign/training_arguments_keys.py: {missing}"


@pytest.mark.parametrize(
    "table", [DEEPSPEED_KEYS, TRAINING_ARGUMENTS_KEYS, FSDP_KEYS, TORCHTITAN_KEYS, AXOLOTL_KEYS], ids=range(5)
)
def test_a_key_is_in_one_part_of_its_table_and_has_a_reason(table: KeyTable) -> None:
    parts = [table.read, set(table.left_out), set(table.contradicts), table.without_effect]
    assert sum(map(len, parts)) == len(frozenset().union(*parts))
    for why in [*(one.why for one in table.left_out.values()), *(one.why for one in table.contradicts.values())]:
        assert len(why.split()) > 2


# -- particular files --------------------------------------------------------------------------------------------------


def test_auto_is_taken_from_training_arguments() -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    auto = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    content = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 5,
        "max_grad_norm": 0.5,
        "bf16": True,
        "optim": "adafactor",
        "deepspeed": {**auto, "bf16": {"enabled": "auto"}, "zero_optimization": zero},
    }
    run = read_training_arguments(content).run
    assert (run.batch_size, run.micro_batches, run.max_gradient_norm) == (3, 5, 0.5)
    assert (run.precision, run.optimizer) == (Precision.MIXED_BFLOAT16, Optimizer.ADAFACTOR)
    assert (run.split, run.parameters_on, run.optimizer_on) == (Split.PARAMETERS, Place.HOST, Place.HOST)


def test_sections_are_read_of_files_that_are_named(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    run = read_training_arguments({"output_dir": "out", "deepspeed": "zero.json"}, folder=tmp_path).run
    assert run.split is Split.GRADIENTS
    with pytest.raises(FileError, match=r"deepspeed is \"other\.json\", and there is no file"):
        read_training_arguments({"deepspeed": "other.json"}, folder=tmp_path)


def test_a_dict_of_training_arguments_with_sections_beside_it() -> None:
    nested = {"training_args": {"fsdp": "hybrid_shard auto_wrap", "bf16": True}, "fsdp_config": {"fsdp_version": 1}}
    run = read_run(nested, HERE).run
    assert (run.split, run.shards_within_node, run.precision) == (Split.PARAMETERS, True, Precision.MIXED_BFLOAT16)


@pytest.mark.parametrize(
    ("config", "split", "is_hybrid"),
    [
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, Split.PARAMETERS, False),
        ({"fsdp_sharding_strategy": 2}, Split.GRADIENTS, False),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, Split.NOTHING, False),
        ({"reshard_after_forward": "hybrid_shard_zero2", "version": 1}, Split.GRADIENTS, True),
        ({"reshard_after_forward": "true"}, Split.PARAMETERS, False),
        ({}, Split.PARAMETERS, False),
    ],
)
def test_strategies_of_fsdp(config: dict[str, Any], split: Split, is_hybrid: bool) -> None:
    run = read_training_arguments({"fsdp": True, "fsdp_config": config}).run
    assert (run.split, run.shards_within_node) == (split, is_hybrid)


def test_fused_losses_make_no_logits() -> None:
    assert read_training_arguments({"use_liger_kernel": True}).run.loss_head is LossHead.CHUNKED
    kernels = {"fused_linear_cross_entropy": False, "cross_entropy": True}
    fused = {"use_liger_kernel": True, "liger_kernel_config": kernels}
    assert read_training_arguments(fused).run.loss_head is LossHead.FUSED
    fused["liger_kernel_config"] = kernels | {"cross_entropy": False}
    assert read_training_arguments(fused).run.loss_head is None


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4, where 0, 1, 2 or 3 belongs"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage is true"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "ZeRO-3 alone does"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "needs stage 1, 2 or 3"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "ssd"}}}, "none, cpu, nvme"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
        ({"train_batch_size": 0}, "train_batch_size is 0, where a whole number from 1 belongs"),
        ({"train_batch_size": [1]}, "train_batch_size is"),
        ({"gradient_clipping": -1}, "gradient_clipping is -1"),
        ({"gradient_clipping": "much"}, "gradient_clipping is"),
        ({"optimizer": {"type": "Muon"}}, 'optimizer.type is "Muon", and no plan knows what it keeps'),
        ({"sequence_parallel_size": 4}, "sequence_parallel_size is 4: "),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size is 2: no plan splits layers"),
        ({"elasticity": {"enabled": True}}, "elasticity.enabled is true"),
        ({"bf16": True}, "bf16 is true, where a section of keys belongs"),
        ({"optimizer": "AdamW"}, 'optimizer is "AdamW", where a section of keys belongs'),
    ],
    ids=str,
)
def test_what_a_deepspeed_configuration_cannot_ask_for_is_one_message(content: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_deepspeed(content)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"bf16": True, "fp16": True}, "bf16 and fp16 are both true"),
        ({"fsdp": True, "deepspeed": {"zero_optimization": {"stage": 2}}}, "fsdp and deepspeed are both asked for"),
        ({"fsdp": "half_shard"}, 'fsdp has "half_shard". Choose from'),
        ({"fsdp": True, "fsdp_config": {"sharding_strategy": "MOST"}}, 'fsdp_config.sharding_strategy is "MOST"'),
        ({"optim": "galore_adamw"}, 'optim is "galore_adamw", and no plan knows'),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is true"),
        ({"deepspeed": 3}, "deepspeed is 3, where a section"),
        (
            {"gradient_accumulation_steps": 2, "deepspeed": {"gradient_accumulation_steps": 4}},
            "gradient_accumulation_steps is 2, but deepspeed.gradient_accumulation_steps is 4",
        ),
        ({"deepspeed": {"bf16": {"enabled": True}}}, "deepspeed.bf16 is enabled, but bf16 is not"),
    ],
    ids=str,
)
def test_what_training_arguments_cannot_ask_for_is_one_message(content: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_training_arguments(content)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"rl": "dpo"}, 'rl is "dpo": it trains by another Trainer'),
        ({"load_in_4bit": True}, "nothing is trained without an adapter"),
        ({"gptq": True}, "nothing is trained without an adapter"),
        ({"gptq": True, "adapter": "qlora", "lora_r": 4}, "gptq says that the base is packed already"),
        ({"gptq": True, "adapter": "lora", "load_in_8bit": True, "lora_r": 4}, "packed already"),
        ({"adapter": "lora"}, "adapter is lora, and has no rank"),
        ({"adapter": "prompt", "lora_r": 4}, "Choose from lora, qlora"),
        ({"adapter": "lora", "lora_r": 4, "lora_target_modules": "layers.*q"}, "not clear what maps"),
        ({"adapter": "lora", "lora_r": 4, "lora_target_modules": "(q|v)_proj["}, "not clear what maps"),
        ({"adapter": "lora", "lora_r": 4, "lora_target_modules": "(?!k)._proj"}, "not clear what maps"),
        ({"adapter": "lora", "lora_r": 4, "lora_target_modules": []}, "no list of names"),
        ({"plugins": ["axolotl.integrations.spectrum.SpectrumPlugin"]}, "it chooses a part of the model"),
        ({"activation_offloading": "legacy"}, "gradient_checkpointing is off"),
        ({"activation_offloading": "tape", "gradient_checkpointing": True}, "activation_offloading is"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"optimizer": "muon"}, 'optimizer is "muon"'),
        ({"bf16": True, "fp16": True}, "bf16 and fp16 are both asked for"),
        ({"batch_size": 5, "micro_batch_size": 2}, "batch_size is 5, which micro_batch_size 2 does not divide"),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}, "fsdp": ["full_shard"]}, "both asked for"),
        ({"unfrozen_parameters": ["^lm_head"]}, "a part of the model alone is trained"),
    ],
    ids=str,
)
def test_what_an_axolotl_configuration_cannot_ask_for_is_one_message(content: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_axolotl({"base_model": "gpt2"} | content)
    assert words in str(caught.value)


def test_what_compilers_and_fused_kernels_spare_is_named() -> None:
    content = {"base_model": "gpt2", "torch_compile": True, "liger_rms_norm": True, "lora_mlp_kernel": False}
    content |= {"pad_to_sequence_len": True, "flash_attention": True}
    assert read_axolotl(content).left_out == (), "no plugin reads the key"
    reading = read_axolotl(content | {"plugins": ["axolotl.integrations.liger.LigerPlugin"]})
    assert [note.key for note in reading.left_out] == ["liger_rms_norm"]
    assert reading.run.compiled is Compiled.MODEL
    assert read_axolotl({"base_model": "gpt2", "torch_compile": False}).run.compiled is None


def test_everything_that_contradicts_is_told_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        read_run({"optim": "lomo", "per_device_train_batch_size": 0, "tp_size": 2}, HERE)
    told = str(caught.value)
    assert told.startswith("file.json: ")
    assert all(words in told for words in ("optim", "per_device_train_batch_size is 0", "tp_size is 2"))


def test_keys_that_change_something_are_named_where_they_are_on_and_unknown_ones_always() -> None:
    reading = read_deepspeed({"wall_clock_breakdown": True, "steps_per_print": 5, "zero_optimisation": {"stage": 3}})
    assert [(note.key, note.value) for note in reading.left_out] == [("wall_clock_breakdown", "true")]
    assert [(one.key, one.value) for one in reading.unknown] == [("zero_optimisation", '{"stage": 3}')]
    assert reading.without_effect == ("steps_per_print",)
    reading = read_deepspeed({"wall_clock_breakdown": False, "zero_optimization": {"overlap_comm": True, "stage": 3}})
    assert (reading.left_out, reading.unknown) == ((), ())


@pytest.mark.parametrize(
    ("zero", "scalars", "has_two"),
    [
        ({"stage": 2}, None, False),
        ({"stage": 2, "reduce_bucket_size": 2e8, "overlap_comm": True}, 200_000_000, True),
        ({"stage": 1, "overlap_comm": True}, None, True),
        ({"stage": 3, "overlap_comm": True, "reduce_bucket_size": 10_000_000}, 10_000_000, False),
        ({"stage": 0, "overlap_comm": True, "reduce_bucket_size": 2e8}, None, False),
        ({"stage": 2, "reduce_bucket_size": 2e8, "overlap_comm": True, "contiguous_gradients": False}, 0, False),
        ({"stage": 3, "contiguous_gradients": False, "offload_optimizer": {"device": "cpu"}}, 0, False),
        # DeepSpeed needs the buffer to copy gradients to the host.
        ({"stage": 2, "contiguous_gradients": False, "offload_optimizer": {"device": "cpu"}}, None, False),
    ],
)
def test_buckets_of_deepspeed(zero: dict[str, Any], scalars: int | None, has_two: bool) -> None:
    reading = read_deepspeed({"zero_optimization": zero})
    assert (reading.run.bucket_scalars, reading.run.has_two_buckets) == (scalars, has_two)
    named = [note.key for note in reading.left_out]
    assert named == (["zero_optimization.contiguous_gradients"] if "contiguous_gradients" in zero else [])


def test_what_does_not_overlap_is_named() -> None:
    reading = read_deepspeed({"zero_optimization": {"stage": 3, "overlap_comm": False}})
    assert [note.key for note in reading.left_out] == ["zero_optimization.overlap_comm"]


@pytest.mark.parametrize(
    ("content", "tool"),
    [
        ({"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 3}, Tool.DEEPSPEED),
        ({"output_dir": "x", "gradient_accumulation_steps": 3}, Tool.TRAINING_ARGUMENTS),
        ({"training_args": {"bf16": True}}, Tool.TRAINING_ARGUMENTS),
    ],
)
def test_a_file_is_known_by_its_keys(content: dict[str, Any], tool: Tool) -> None:
    assert read_run(content, HERE).tool is tool


def test_a_file_that_could_be_two_or_none_is_one_message() -> None:
    with pytest.raises(PlanError, match=r"could be .*\(by steps_per_print\).*--tool deepspeed"):
        read_run({"steps_per_print": 1, "output_dir": "x"}, HERE)
    with pytest.raises(PlanError, match=r"none of the keys .*--tool"):
        read_run({"gradient_accumulation_steps": 1}, HERE)
    assert read_run({"gradient_accumulation_steps": 2}, HERE, Tool.DEEPSPEED).run == AskedRun(
        micro_batches=2,
        max_gradient_norm=0.0,
        precision=Precision.FLOAT32,
        split=Split.NOTHING,
        optimizer_on=Place.DEVICE,
        parameters_on=Place.DEVICE,
    )


@pytest.mark.parametrize(
    ("given", "kernel", "left_out"),
    [
        ("flash_attention_2", AttentionKernel.FLASH_2, False),
        ("flash_attention_3", AttentionKernel.FLASH_3, False),
        ("sdpa", None, False),
        ("eager", None, True),
        (["flash_attention_2"], None, True),
    ],
)
def test_what_computes_attention(given: object, kernel: AttentionKernel | None, left_out: bool) -> None:
    reading = read_training_arguments({"model_init_kwargs": {"attn_implementation": given}, "max_length": 512})
    assert reading.run.attention_kernel is kernel
    assert ("model_init_kwargs" in {note.key for note in reading.left_out}) == left_out
