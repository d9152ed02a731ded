"""What axolotl makes of keys that a file does not have, and of plugins that it lists; its source is the oracle.

Of axolotl 0.19: ``utils/schemas/validation.py``, ``utils/config/__init__.py``, ``loaders/model.py`` and ``args.py`` of
its integrations.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protwin.shared.catalogue.machines import machine
from protwin.shared.catalogue.models import model_configuration, model_names
from protwin.shared.factors.adapted_maps import chosen_maps
from protwin.shared.foreign.asked_run import Precision
from protwin.shared.foreign.axolotl import read_axolotl
from protwin.shared.foreign.files import read_run
from protwin.shared.foreign.targets import _OF_FAMILIES, usual_targets
from protwin.shared.methods.runtime_profile import Runtime
from protwin.shared.phases.tiling import LossHead
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.training_options import LoraOptions
from protwin.shared.schema.workload import DType
from protwin.sim.as_configured.question import Said, settle

CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
LIGER = "axolotl.integrations.liger.LigerPlugin"
MODEL: dict[str, Any] = {"base_model": "llama-3-8b", "pad_to_sequence_len": True, "flash_attention": True}


def left_out(content: dict[str, Any]) -> list[str]:
    return [note.key for note in read_axolotl(MODEL | content).left_out]


@pytest.mark.parametrize(
    ("content", "head"),
    [
        ({"plugins": [CUT]}, LossHead.CHUNKED),
        ({"plugins": [LIGER, CUT], "cut_cross_entropy": True}, LossHead.CHUNKED),
        ({"plugins": [CUT], "cut_cross_entropy": False}, None),
        ({"plugins": [CUT], "cut_cross_entropy": None}, None),
        ({"cut_cross_entropy": True}, None),
        ({"plugins": [LIGER]}, None),
        ({"plugins": [LIGER], "liger_fused_linear_cross_entropy": True}, LossHead.CHUNKED),
        ({"plugins": [LIGER], "liger_cross_entropy": True}, LossHead.FUSED),
        ({"liger_fused_linear_cross_entropy": True, "liger_cross_entropy": True}, None),
        ({"chunked_cross_entropy": True}, LossHead.CHUNKED),
    ],
    ids=str,
)
def test_losses_are_those_of_plugins_that_are_listed(content: dict[str, Any], head: LossHead | None) -> None:
    assert read_axolotl(MODEL | content).run.loss_head is head


def test_a_key_that_no_plugin_reads_is_said_to_do_nothing() -> None:
    reading = read_axolotl(MODEL | {"liger_rms_norm": True})
    (note,) = [note for note in reading.understood if note.key == "liger_rms_norm"]
    assert note.about == "nothing, as plugins does not list LigerPlugin, which alone reads it"
    assert left_out({"liger_rms_norm": True, "plugins": [LIGER]}) == ["liger_rms_norm"]


@pytest.mark.parametrize(
    ("plugins", "named"),
    [
        (["axolotl.integrations.grokfast.GrokfastPlugin"], "averages of gradients"),
        (["mine.Plugin", CUT], "mine.Plugin may change time and memory"),
        (["axolotl.integrations.swanlab.SwanLabPlugin", CUT, LIGER], None),
    ],
)
def test_plugins_that_change_time_or_memory_are_named(plugins: list[str], named: str | None) -> None:
    notes = [note.about for note in read_axolotl(MODEL | {"plugins": plugins}).left_out]
    assert [named in note for note in notes if named] == [True] * len(notes)
    assert bool(notes) == bool(named)


LORA: dict[str, Any] = {"adapter": "lora", "lora_r": 8}


@pytest.mark.parametrize(
    ("content", "is_named"),
    [
        (LORA, True),
        (LORA | {"adapter": "qlora"}, True),
        (LORA | {"load_in_4bit": True}, True),
        (LORA | {"load_in_8bit": True}, False),
        (LORA | {"trust_remote_code": True}, False),
        (LORA | {"lora_o_kernel": False}, False),
        (LORA | {"lora_o_kernel": True}, True),
        (LORA | {"fsdp_config": {"reshard_after_forward": True}}, False),
        (LORA | {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}, True),
        ({"lora_o_kernel": None}, False),
    ],
    ids=str,
)
def test_kernels_of_adapters_are_on_where_a_file_is_silent(content: dict[str, Any], is_named: bool) -> None:
    assert any(key.endswith("_kernel") for key in left_out(content)) == is_named


@pytest.mark.parametrize(
    ("content", "is_whole"),
    [
        ({}, True),
        ({"gradient_checkpointing_kwargs": None}, True),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, True),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, False),
        ({"gradient_checkpointing_kwargs": {}}, False),
        ({"activation_offloading": True}, False),
        ({"activation_offloading": "hidden_states"}, False),
        ({"activation_offloading": "legacy"}, True),
        ({"gradient_checkpointing": "offload"}, False),
    ],
    ids=str,
)
def test_blocks_are_recomputed_to_their_end_where_a_file_is_silent(content: dict[str, Any], is_whole: bool) -> None:
    run = read_axolotl(MODEL | {"gradient_checkpointing": True} | content).run
    assert run.recomputes_whole == is_whole
    assert run.offloads_inputs == (len(content) == 1 and any("offload" in str(one) for one in content.items()))


def test_what_goes_to_the_host_in_another_way_is_named() -> None:
    recomputed = {"gradient_checkpointing": True}
    assert left_out(recomputed | {"activation_offloading": True}) == []
    assert left_out(recomputed | {"activation_offloading": "disk"}) == ["activation_offloading"]
    adapted = LORA | {"lora_o_kernel": False} | recomputed
    assert left_out(adapted | {"activation_offloading": True}) == ["activation_offloading"]
    assert left_out(adapted | {"activation_offloading": "hidden_states"}) == []


@pytest.mark.parametrize(
    ("content", "runtime"),
    [
        ({"fsdp_config": {"reshard_after_forward": True}}, Runtime.FSDP),
        ({"fsdp": ["full_shard"]}, Runtime.FSDP),
        ({"fsdp_config": {"reshard_after_forward": True}, "fsdp_version": 2}, Runtime.FSDP2),
        ({"fsdp_config": {"fsdp_version": 2}}, Runtime.FSDP2),
        ({"fsdp_config": {"version": 2, "sharding_strategy": "FULL_SHARD"}}, Runtime.FSDP2),
    ],
    ids=str,
)
def test_the_first_fsdp_shards_where_a_file_names_none(content: dict[str, Any], runtime: Runtime) -> None:
    reading = read_axolotl(MODEL | content)
    assert reading.run.runtime is runtime
    assert [note.key for note in reading.assumed if "version" in note.key] == ["fsdp_version"] * (
        runtime is Runtime.FSDP
    )


@pytest.mark.parametrize(
    ("content", "is_named"),
    [
        ({"flash_attention": False}, True),
        ({"flash_attention": None, "attn_implementation": "sdpa"}, True),
        ({"flash_attention": None, "attn_implementation": "flash_attention_3"}, False),
        ({"flash_attention": None, "xformers_attention": True}, False),
        ({"flash_attention": False, "plugins": [CUT]}, False),
        ({"flash_attention": False, "plugins": [LIGER], "liger_fused_linear_cross_entropy": True}, True),
        ({"flash_attention": False, "bf16": False}, False),
        ({"flash_attention": False, "fsdp_config": {"reshard_after_forward": True}}, False),
        (LORA | {"flash_attention": False, "lora_o_kernel": False}, False),
    ],
    ids=str,
)
def test_ends_that_are_widened_for_a_whole_training_are_named(content: dict[str, Any], is_named: bool) -> None:
    found = [note for note in read_axolotl(MODEL | content).left_out if "stepped in float32" in note.about]
    assert bool(found) == is_named


def test_rows_that_nothing_pads_are_named() -> None:
    bare = {name: value for name, value in MODEL.items() if name != "pad_to_sequence_len"}
    assert [note.key for note in read_axolotl(bare).left_out] == ["pad_to_sequence_len"]
    assert read_axolotl(bare | {"sample_packing": True}).left_out == ()


def test_tf32_counts_for_float32_alone() -> None:
    assert left_out({"tf32": True}) == []
    assert left_out({"tf32": True, "bf16": False}) == ["tf32"]


@pytest.mark.parametrize(
    ("content", "on", "dtype"),
    [
        ({}, "t4", DType.FLOAT16),
        ({"bf16": "auto"}, "v100-32gb", DType.FLOAT16),
        ({"bf16": True}, "t4", DType.BFLOAT16),
        ({"bf16": "auto"}, "rtx-4090", DType.BFLOAT16),
        ({"bf16": False}, "t4", DType.FLOAT32),
        (LORA | {"bf16": "auto"}, "t4", DType.FLOAT16),
    ],
    ids=str,
)
def test_a_device_without_bfloat16_computes_in_float16(content: dict[str, Any], on: str, dtype: DType) -> None:
    settled = settle(read_axolotl(MODEL | content), Said(), machine(on), file="a.yml")
    assert settled.dtype is dtype
    assert any("no matrix units for bfloat16" in note for note in settled.notes) == (dtype is DType.FLOAT16)
    named = settle(read_axolotl(MODEL | content), Said(dtype="bfloat16"), machine(on), file="a.yml")
    assert named.dtype is DType.BFLOAT16


def test_the_optimizer_of_the_command_line_stands_in_the_place_of_an_unknown_one() -> None:
    content = MODEL | {"optimizer": "muon"}
    reading = read_run(content, Path("a.yml"), optimizer=Optimizer.ADAMW)
    assert reading.run.optimizer is None
    assert any("in its place" in note.about for note in reading.understood)
    settled = settle(reading, Said(optimizer=Optimizer.LION), machine("rtx-4090"), file="a.yml")
    assert settled.optimizer is Optimizer.LION
    assert read_axolotl(MODEL | {"bf16": True}).run.precision is Precision.PURE_BFLOAT16


# -- maps that are adapted ---------------------------------------------------------------------------------------------

MAPS = {
    **{f"self_attn.{name}_proj": (64, 64) for name in "qkvo"},
    **{f"mlp.{name}_proj": (64, 64) for name in ("gate", "up", "down")},
}


def drawn_pattern(rng: random.Random) -> str:
    """A pattern as files of axolotl have them, of some maps in all blocks."""
    attention = rng.sample("qkvo", rng.randint(1, 4))
    mlp = rng.sample(["gate", "up", "down"], rng.randint(1, 3))
    dot, number = rng.choice([".", r"\."]), rng.choice([r"[\d]+", r"\d+", "[0-9]+"])
    start = rng.choice(["model.", r"model\.", ".*", "(model.)?(text.)?"]) + f"layers{dot}{number}{dot}"
    ends = {
        0: rf"self_attn{dot}({'|'.join(attention)})_proj",
        1: rf"mlp{dot}(?:{'|'.join(mlp)})_proj",
        2: rf"(self_attn{dot}({'|'.join(attention)})_proj|mlp{dot}({'|'.join(mlp)})_proj)",
        3: rf"(mlp|self_attn|cross_attn){dot}({'|'.join([*attention, *mlp])})_proj",
        4: rf"self_attn{dot}[{''.join(attention)}]_proj$",
    }
    return start + ends[rng.randrange(5)]


@pytest.mark.parametrize("seed", range(40))
def test_a_pattern_adapts_the_maps_whose_whole_paths_it_matches(seed: int) -> None:
    """The oracle is PEFT's rule: ``re.fullmatch`` over paths (``check_target_module_exists``)."""
    rng = random.Random(seed)
    pattern = drawn_pattern(rng)
    matched = [path for path in MAPS if all(re.fullmatch(pattern, f"model.layers.{n}.{path}") for n in (0, 31))]
    assert matched, pattern
    lora = read_axolotl(MODEL | LORA | {"lora_target_modules": pattern, "lora_o_kernel": False}).run.lora
    assert lora is not None
    assert chosen_maps(MAPS, rank=8, targets=lora.targets, model_class="Model") == matched, pattern


def test_a_pattern_of_some_layers_is_said_to_be_one() -> None:
    some = {"lora_target_modules": r"model\.layers\.(3|7)\.self_attn\.(q|v)_proj", "lora_o_kernel": False}
    assert left_out(LORA | some) == ["lora_target_modules"]


def test_names_may_be_the_ends_of_paths() -> None:
    names = {"lora_target_modules": ["self_attn.q_proj", "mlp.up_proj"]}
    lora = read_axolotl(MODEL | LORA | names).run.lora
    assert lora is not None
    assert chosen_maps(MAPS, rank=8, targets=lora.targets, model_class="M") == ["self_attn.q_proj", "mlp.up_proj"]


def test_maps_that_nobody_names_are_those_that_peft_takes_in_the_family() -> None:
    """By PEFT's own table, of the families of the catalogue and of whatever others this package names."""
    peft = pytest.importorskip("peft.utils.constants")
    table = peft.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    named = {family for families in _OF_FAMILIES.values() for family in families.split()}
    shipped = {str(model_configuration(name).config["model_type"]) for name in model_names()}
    known = sorted(family for family in named | shipped if table.get(family))
    assert set(known) >= named
    assert {family: usual_targets(family) for family in known} == {family: tuple(table[family]) for family in known}


@pytest.mark.parametrize(
    ("model", "targets"), [("gpt2", ("c_attn",)), ("t5-small", ("q", "v")), ("llama-3-8b", ("q_proj", "v_proj"))]
)
def test_adapters_lie_where_peft_puts_them(model: str, targets: tuple[str, ...]) -> None:
    """Such files were refused, for maps that no line of them names."""
    content = MODEL | LORA | {"base_model": model}
    for said, lora in ((Said(), targets), (Said(lora=LoraOptions(rank=4, targets=("fc",))), ("fc",))):
        asked = replace(said, batch_size=1, sequence_length=64)
        settled = settle(read_axolotl(content), asked, machine("a100-80gb"), file="a.yml")
        assert settled.options.lora is not None
        assert settled.options.lora.targets == lora
        is_noted = any("which PEFT takes" in note for note in settled.notes)
        assert is_noted is (said.lora is None and model != "llama-3-8b")
