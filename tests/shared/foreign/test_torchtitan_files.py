"""Files of torchtitan: what they compile, what they narrow, and what they cannot ask for."""

from __future__ import annotations

from typing import Any

import pytest

from protwin.shared.basics.errors import PlanError
from protwin.shared.foreign.asked_run import Reading
from protwin.shared.foreign.torchtitan import read_torchtitan
from protwin.shared.schema.workload import Compiled, Float8, Float8Gather


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"parallelism": {"tensor_parallel_degree": 8}}, "parallelism.tensor_parallel_degree is 8: no plan splits"),
        ({"experimental": {"pipeline_parallel_degree": 4}}, "experimental.pipeline_parallel_degree is 4"),
        ({"parallelism": {"context_parallel_degree": 2}}, "parallelism.context_parallel_degree is 2"),
        ({"activation_checkpoint": {"mode": "most"}}, "none, full, selective"),
        ({"activation_checkpoint": {"selective_ac_option": "0"}}, '"op", or a whole number from 1'),
        ({"training": {"seq_len": "long"}}, "training.seq_len is"),
        ({"training": {"dtype": "float8"}}, "float32, bfloat16"),
        ({"optimizer": {"name": "Muon"}}, 'optimizer.name is "Muon"'),
        (
            {
                "training": {"enable_cpu_offload": True},
                "parallelism": {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 2},
            },
            "FSDP alone offloads",
        ),
        ({"fault_tolerance": {"enable": True}}, "fault_tolerance.enable is true"),
    ],
    ids=str,
)
def test_what_a_file_of_torchtitan_cannot_ask_for_is_one_message(content: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_torchtitan(content)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("components", "compiled"),
    [
        (None, Compiled.BLOCKS_AND_LOSS),
        (["loss", "model"], Compiled.BLOCKS_AND_LOSS),
        ("model,loss", Compiled.BLOCKS_AND_LOSS),
        (["model"], Compiled.BLOCKS),
        (["loss"], None),
        ([], None),
    ],
)
def test_torchtitan_compiles_the_parts_that_are_named(components: list[str] | str | None, compiled: object) -> None:
    section = {"enable": True} | ({} if components is None else {"components": components})
    reading = read_torchtitan({"compile": section})
    assert reading.run.compiled is compiled
    assert [note.key for note in reading.left_out] == (["compile.components"] if components == ["loss"] else [])
    assert read_torchtitan({"compile": section | {"enable": False}}).run.compiled is None


@pytest.mark.parametrize("components", [["modell"], 5, {"model": True}])
def test_other_parts_than_torchtitan_has_are_refused(components: object) -> None:
    with pytest.raises(PlanError, match=r"compile\.components is .* where a list of model and loss belongs"):
        read_torchtitan({"compile": {"enable": True, "components": components}})


def test_what_torchtitan_compiles_and_narrows_is_read() -> None:
    both = {"compile": {"enable": True}, "model": {"converters": ["float8"]}}
    reading = read_torchtitan(both)
    assert (reading.run.compiled, reading.run.float8) == (Compiled.BLOCKS_AND_LOSS, Float8.TENSORWISE)
    assert not {"compile.enable", "model.converters"} & {note.key for note in reading.left_out}
    by_rows = read_torchtitan(both | {"float8": {"recipe_name": "rowwise"}}).run
    assert by_rows.float8 is Float8.ROWWISE
    older = read_torchtitan({"training": {"compile": True}, "float8": {"enable_float8_linear": True}}).run
    assert (older.compiled, older.float8) == (Compiled.BLOCKS, Float8.TENSORWISE)
    assert older.float8_gather is None


@pytest.mark.parametrize("section", ["float8", "quantize.linear.float8"])
def test_gathers_of_torchtitan_in_float8_are_read(section: str) -> None:
    both = {"compile": {"enable": True}, "model": {"converters": [section]}}

    def read(more: dict[str, Any], **others: Any) -> Reading:
        for name in reversed(section.split(".")):
            more = {name: more}
        return read_torchtitan(both | more | others)

    asked = {"enable_fsdp_float8_all_gather": True}
    ahead = asked | {"precompute_float8_dynamic_scale_for_fsdp": True}
    assert read(ahead).run.float8_gather is Float8Gather.PRECOMPUTED
    assert {f"{section}.{key}" for key in ahead} <= {note.key for note in read(ahead).understood}
    assert read(asked).run.float8_gather is Float8Gather.DYNAMIC
    assert read({"precompute_float8_dynamic_scale_for_fsdp": True}).run.float8_gather is None
    replicas = {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 8}
    assert read(ahead, parallelism=replicas).run.float8_gather is None
    with pytest.raises(PlanError, match=r"enable_fsdp_float8_all_gather is true, but products are scaled rowwise"):
        read(asked | {"recipe_name": "rowwise"})


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({"model": {"converters": ["float8"]}}, id="nothing is compiled"),
        pytest.param({"compile": {"enable": True}, "model": {"converters": ["mx"]}}, id="another type"),
        pytest.param(
            {
                "compile": {"enable": True},
                "model": {"converters": ["float8"]},
                "float8": {"recipe_name": "rowwise_with_gw_hp"},
            },
            id="another recipe",
        ),
    ],
)
def test_narrow_products_that_are_not_predicted_are_named(content: dict[str, Any]) -> None:
    reading = read_torchtitan(content)
    assert reading.run.float8 is None
    assert "model.converters" in {note.key for note in reading.left_out}


def test_a_flavor_of_attention_and_a_model_that_is_none_of_the_catalogue() -> None:
    reading = read_torchtitan({"model": {"name": "llama3", "flavor": "8B_flex"}})
    assert reading.run.model == "llama-3.1-8b"
    assert "model.flavor" in {note.key for note in reading.left_out}
    assert read_torchtitan({"model": {"name": "llama4", "flavor": "17bx16e"}}).run.model == "llama4/17bx16e"
