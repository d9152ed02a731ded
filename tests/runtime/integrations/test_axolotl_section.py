"""The section of an axolotl file: what it asks for, and what in the rest of the file contradicts a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from protwin.runtime.integrations.axolotl_section import (
    OPTIMIZERS,
    PLUGIN,
    PlanArgs,
    PlanSection,
    contradictions,
    meanings,
    section_of,
)
from protwin.runtime.integrations.made_optimizer import NAMES
from protwin.runtime.planning.request import PlanRequest

ROOT = Path(__file__).parents[3]


class Host(BaseModel):
    """What stands for the rest of a file; axolotl's own is tried where it is installed."""

    plugins: list[str] = []
    deepspeed: str | None = None


class Merged(Host, PlanArgs):
    """As axolotl puts both together."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deepspeed": "zero3.json"}, "deepspeed asks for DeepSpeed, but the plan alone decides"),
        ({"fsdp": ["full_shard"]}, "fsdp asks for FSDP"),
        ({"fsdp_config": {"reshard_after_forward": True}}, "fsdp_config asks for FSDP"),
        (
            {"gradient_checkpointing": True},
            r"gradient_checkpointing is set, .* \(n_checkpoint\)",
        ),
        ({"gradient_checkpointing": "offload"}, "gradient_checkpointing is set"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: 2 is tensor parallelism by axolotl"),
        ({"context_parallel_size": 4}, "context_parallel_size: 4 is context parallelism"),
        ({"sequence_parallel_degree": 2}, "sequence_parallel_degree: 2 is sequence parallelism"),
        ({"dp_shard_size": 2}, "dp_shard_size: 2"),
        ({"activation_offloading": True}, "activation_offloading is set"),
        ({"torch_compile": True}, "torch_compile is set"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"fp16": True}, "fp16 scales gradients"),
        ({"optimizer": "lion_8bit"}, "optimizer: lion_8bit is one that no plan accounts for"),
        ({"rl": "dpo"}, "rl trains by another Trainer"),
        ({"protwin": {"budgte": 3}}, r"protwin\.budgte is no key of the section\. Choose from budget"),
        ({"protwin": {"budget": "20 apples"}}, r"protwin.*20 apples"),
        ({"protwin": {"budget": -1}}, "budget is -1; it must be positive"),
        ({"protwin": {"modes": ["zero3"]}}, r"protwin\.modes\.0"),
        ({"protwin": {"plan": "p.json", "knobs": {"n_persist": 1}}}, "plan: p.json is carried out as it is, and knobs"),
        ({"protwin": {"plan": "p.json", "modes": ["ddp"]}}, "and modes would be for a search"),
        ({"protwin": 3}, "protwin: 3 is no section"),
    ],
    ids=str,
)
def test_what_contradicts_a_plan_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Merged.model_validate({"plugins": [PLUGIN]} | changes)
    if "protwin" not in changes:
        # Without the plugin the rest of the file is nobody's affair here.
        Merged.model_validate(changes)


def test_everything_that_contradicts_is_said_at_once() -> None:
    found = contradictions({"deepspeed": "a", "gradient_checkpointing": True, "optimizer": "muon", "fp16": True})
    assert len(found) == 4
    harmless = {"tensor_parallel_size": 1, "gradient_checkpointing": False, "optimizer": OPTIMIZERS[0], "fp16": False}
    assert contradictions(harmless) == []


def test_keys_become_a_request() -> None:
    keys = {"budget": "3GiB", "host_budget": 10**9, "knobs": {"n_persist": [1, 2]}, "modes": ["ddp"], "blocks": "x.*"}
    section = section_of({"protwin": keys})
    assert section.request == {
        "budget_bytes": "3GiB",
        "host_budget_bytes": 10**9,
        "knobs": {"n_persist": [1, 2]},
        "modes": ["ddp"],
        "blocks": "x.*",
    }
    assert PlanRequest(**section.request).budget_bytes == 3 * 2**30
    assert section_of({}) == section_of({"protwin": None}) == PlanSection()
    assert PlanSection().request == {}


def test_the_examples_go_together_with_a_plan() -> None:
    yaml = pytest.importorskip("yaml")
    files = sorted((ROOT / "examples" / "axolotl").glob("*.yml"))
    assert len(files) == 2
    for file in files:
        configuration = yaml.safe_load(file.read_text())
        assert configuration["plugins"] == [PLUGIN]
        assert contradictions(configuration) == []
        PlanRequest(**section_of(configuration).request)


def test_every_key_has_a_meaning_and_optimizers_are_those_of_the_trainer() -> None:
    assert OPTIMIZERS == NAMES
    assert all(meaning for _, _, meaning in meanings(PlanSection()))
    told = {name: value for name, value, _ in meanings(PlanSection(knobs={"n_persist": 1}, budget="1GiB"))}
    assert (told["knobs"], told["budget"], told["plan"]) == ("n_persist 1", "1GiB", "–")
