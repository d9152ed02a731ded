"""Files that nobody should write: refused in one message, or told key by key; no key goes without a word."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from protwin.shared.basics.errors import FileError, PlanError, ProtwinError
from protwin.shared.foreign.asked_run import Reading, Split
from protwin.shared.foreign.files import read_content, read_run
from protwin.shared.schema.workload import Compiled
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

yaml = pytest.importorskip("yaml")
MODEL = "base_model: llama-3-8b\n"
PADDED = {"base_model": "a", "pad_to_sequence_len": True, "flash_attention": True}
"""An axolotl file of which nothing is left out."""


def read(folder: Path, name: str, text: str | bytes) -> Reading:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_run(read_content(path), path)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "[training]\nseq_len = " + "9" * 5000, "no TOML"),
        ("a.toml", "a = " + "[" * 5000 + "]" * 5000, "no TOML"),
        ("a.json", '{"a": ' + "[" * 300 + "]" * 300 + "}", "more than 100 deep"),
        ("a.json", "[" * 100_000, "no JSON"),
        ("a.yml", "a: " + "[" * 3000 + "]" * 3000, "no YAML"),
        ("a.yml", MODEL + "a: &a [*a]\n", "more than 100 deep"),
        ("a.yml", MODEL + "#" * 2**20, "1 MiB at most"),
        ("a.json", '{"zero_optimization": {"stage": 3, "stage": 1}}', "'stage' is stated more than once"),
        ("a.yml", MODEL + "micro_batch_size: 4\nmicro_batch_size: 1\n", "'micro_batch_size' is stated more than once"),
        ("a.yml", MODEL + "fsdp_config:\n  a: 1\n  a: 1\n", "'a' is stated more than once"),
        ("a.yml", MODEL + "deepspeed: deep.json\n", "deep.json, which deepspeed names, is no JSON"),
        ("a.yml", MODEL + "deepspeed: twice.json\n", "'stage' is stated more than once"),
        ("a.yml", b"\xff\xfe\x00", "no UTF-8"),
        ("a.yml", "", "holds nothing"),
        ("a.yml", MODEL + "plugins: 3\n", "plugins is 3, where a list of classes"),
        ("a.yml", MODEL + "dp_shard_size: 4\n", "nothing says how ranks have parts"),
        ("a.yml", MODEL + "adapter: lora\nlora_r: 8\nlora_dropout: 5\n", "lora_dropout is 5, where a part from 0 to 1"),
        ("a.yml", MODEL + "gradient_checkpointing: true\ngradient_checkpointing_kwargs: true\n", "a section of keys"),
        ("a.json", json.dumps({"zero_optimization": {"stage": "auto"}}), 'stage is "auto"'),
        ("a.json", json.dumps({"zero_optimization": "auto", "train_batch_size": 8}), "a section of keys belongs"),
        ("a.json", '{"zero_optimization": {"stage": 3, "offload_param": {"device": "auto"}}}', 'device is "auto"'),
        ("a.yml", "distributed_type: FSDP\nnum_processes: 8\n", "a configuration of Accelerate"),
    ],
)
def test_one_message_says_what_is_wrong(tmp_path: Path, name: str, text: str | bytes, words: str) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "twice.json").write_text('{"zero_optimization": {"stage": 3, "stage": 1}}')
    with pytest.raises((FileError, PlanError)) as caught:
        read(tmp_path, name, text)
    assert words in str(caught.value)


def test_what_an_anchor_adds_is_no_key_that_is_there_twice(tmp_path: Path) -> None:
    text = "datasets: &one {micro_batch_size: 2, sequence_len: 64}\n<<: *one\nmicro_batch_size: 3\n"
    run = read(tmp_path, "a.yml", MODEL + text).run
    assert (run.batch_size, run.sequence_length) == (3, 64)


def test_keys_that_json_cannot_have_are_told(tmp_path: Path) -> None:
    text = MODEL + "mine:\n  2024-01-01: [{!!binary aGVsbG8=: x}]\n"
    (unknown,) = read(tmp_path, "a.yml", text).unknown
    assert (unknown.key, "2024-01-01" in unknown.value, "hello" in unknown.value) == ("mine", True, True)


@pytest.mark.parametrize(
    ("name", "content", "left_out"),
    [
        ("a.json", {"optim": "sgd", "torch_compile_mode": "max-autotune"}, ["torch_compile_mode"]),
        ("a.json", {"optim": "sgd", "max_length": 64, "loss_type": "dft"}, ["loss_type"]),
        ("a.json", {"optim": "sgd", "model_init_kwargs": {"attn_implementation": "eager"}}, ["model_init_kwargs"]),
        ("a.json", {"optim": "sgd", "model_init_kwargs": {"quantization_config": {"a": 1}}}, ["model_init_kwargs"]),
        (
            "a.json",
            {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1e9}},
            ["zero_optimization.stage3_param_persistence_threshold"],
        ),
        ("a.json", {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1e5}}, []),
        (
            "a.json",
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}},
            ["zero_optimization.offload_optimizer.pin_memory"],
        ),
        (
            "a.json",
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}, "aio": {"queue_depth": 1}},
            ["aio"],
        ),
        ("a.json", {"zero_optimization": {"stage": 3}, "aio": {"queue_depth": 1}}, []),
        (
            "a.yml",
            PADDED | {"adapter": "lora", "lora_r": 8, "lora_o_kernel": False, "peft_autocast_adapter_dtype": False},
            ["peft"],
        ),
        ("a.yml", PADDED | {"overrides_of_model_config": {"num_hidden_layers": 4}}, ["overrides_of_model"]),
        ("a.yml", PADDED | {"torch_compile": True, "torch_compile_backend": "inductor"}, []),
        (
            "a.toml",
            {
                "model": {"converters": ["float8"]},
                "compile": {"enable": True},
                "float8": {"filter_fqns": ["output", "wk"]},
                "training": {},
            },
            ["float8.filter_fqns"],
        ),
    ],
)
def test_what_changes_time_or_memory_is_named(
    tmp_path: Path, name: str, content: dict[str, Any], left_out: list[str]
) -> None:
    write = {".json": json.dumps, ".yml": yaml.safe_dump, ".toml": tomli_w.dumps}[Path(name).suffix]
    reading = read(tmp_path, name, write(content))
    named = [note.key for note in reading.left_out]
    assert len(named) == len(left_out)
    assert all(key.startswith(start) for key, start in zip(named, left_out, strict=True))


def test_degrees_of_axolotl_are_all_ranks_or_a_group_of_them(tmp_path: Path) -> None:
    shared = MODEL + "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n"
    found = {}
    for degrees in ("dp_shard_size: 4", "dp_replicate_size: 2", "dp_shard_size: 4\ndp_replicate_size: 2"):
        run = read(tmp_path, "a.yml", shared + degrees).run
        found[degrees] = (run.split, run.shard_ranks, run.replicas)
    assert list(found.values()) == [
        (Split.PARAMETERS, 4, 1),
        (Split.PARAMETERS, None, 2),
        (Split.PARAMETERS, 4, 2),
    ]
    alone = read(tmp_path, "a.yml", MODEL + "dp_replicate_size: 2\n").run
    assert (alone.split, alone.num_ranks) == (Split.NOTHING, 2)


def test_compilation_is_on_where_a_mode_or_auto_asks_for_it(tmp_path: Path) -> None:
    assert read(tmp_path, "a.yml", MODEL + "torch_compile: auto\n").run.compiled is Compiled.MODEL
    assert read(tmp_path, "a.json", '{"optim": "sgd", "torch_compile_backend": "inductor"}').run.compiled is not None
    assert read(tmp_path, "a.json", '{"optim": "sgd"}').run.compiled is None


def _leaves(content: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def _is_told(key: str, told: set[str]) -> bool:
    parts = key.replace("fsdp_config.fsdp_", "fsdp_config.").split(".")
    return any(".".join(parts[:number]) in told for number in range(1, len(parts) + 1))


@pytest.mark.parametrize("seed", range(40))
def test_no_key_goes_without_a_word(tmp_path: Path, seed: int) -> None:
    """Of drawn files, with drawn values of some keys: whatever is no mistake is in one of the lists."""
    rng = random.Random(seed)
    files = [
        deepspeed(deepspeed_run(rng), rng),
        training_arguments(training_run(rng)),
        axolotl(axolotl_run(rng), rng),
        torchtitan(torchtitan_run(rng), is_old=rng.random() < 0.5),
    ]
    for content in files:
        for key in [one for one in content if rng.random() < 0.2]:
            content[key] = rng.choice([None, False, "auto", 3, [1, [2]], {"new": 1}, 2.5, ""])
        content["of_mine"] = rng.choice([1, {"a": [1]}, "x"])
        try:
            reading = read_run(content, tmp_path / "file")
        except ProtwinError:
            continue
        lists = (reading.understood, reading.left_out, reading.unknown)
        told = {note.key for notes in lists for note in notes} | set(reading.without_effect)
        assert [key for key in _leaves(content) if not _is_told(key, told)] == []
