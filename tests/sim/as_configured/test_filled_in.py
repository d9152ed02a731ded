"""Where a file of DeepSpeed says ``auto``, answers take what transformers fills in, and say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers import AutoConfig, TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from protwin.shared.catalogue.machines import machine
from protwin.shared.catalogue.models import model_configuration
from protwin.shared.foreign.deepspeed import read_deepspeed
from protwin.shared.foreign.training_arguments import read_training_arguments
from protwin.shared.methods.runtime_profile import Runtime
from protwin.shared.schema.optimizer import Optimizer
from protwin.sim.as_configured.configured_plan import ConfiguredPlan, configured_plan
from protwin.sim.as_configured.explain import Asked, explain
from protwin.sim.as_configured.explanation import Explanation
from protwin.sim.as_configured.question import Said, settle, workload_of

SAID = Said(model="qwen2.5-0.5b", batch_size=1, sequence_length=256, optimizer=Optimizer.ADAMW)
ASKED = Asked(file="ds.json", hardware_name="a100-80gb-x8", machine=machine("a100-80gb-x8"), searches=False)


def ignore(message: str) -> None:
    del message


class Filled(HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):  # type: ignore[misc, unused-ignore]
    """What transformers makes of a file, without DeepSpeed."""

    def __init__(self, content: dict[str, Any]) -> None:
        HfDeepSpeedConfig.__init__(self, content)
        self._dtype = None
        self.mismatches: list[str] = []


def filled(content: dict[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """The oracle: the file as the Trainer hands it to DeepSpeed."""
    (folder / "config.json").write_text(json.dumps(dict(model_configuration(name).config)))
    arguments = TrainingArguments(output_dir=str(folder), per_device_train_batch_size=1)
    model = type("Model", (), {"config": AutoConfig.from_pretrained(folder)})
    found = Filled(json.loads(json.dumps(content)))
    found.trainer_config_process(arguments)
    found.trainer_config_finalize(arguments, model, 10)
    return dict(found.config)


def explained(content: dict[str, Any]) -> Explanation:
    return explain(read_deepspeed(content), SAID, ASKED, ignore)


def planned(content: dict[str, Any], name: str) -> ConfiguredPlan:
    reading = read_deepspeed(content)
    said = Said(model=name, batch_size=1, sequence_length=256, optimizer=Optimizer.ADAMW)
    settled = settle(reading, said, ASKED.machine, file="ds.json")
    workload, settled = workload_of(settled, cache=None, warn=ignore)
    return configured_plan(settled, workload, reading.tool)


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "gpt2", "bert-large"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buckets_are_those_that_transformers_fills_in(name: str, stage: int, tmp_path: Path) -> None:
    zero = {"stage": stage, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    content = {"zero_optimization": zero, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    expected = filled(content, name, tmp_path)
    found = planned(content, name)
    assert found.runtime.bucket_scalars == expected["zero_optimization"]["reduce_bucket_size"]
    assert found.plan.max_gradient_norm == expected["gradient_clipping"] == 1.0
    (note,) = found.notes
    assert f"reduce_bucket_size {expected['zero_optimization']['reduce_bucket_size']:,}" in note
    ahead = expected["zero_optimization"]["stage3_prefetch_bucket_size"]
    assert ("stage3_prefetch_bucket_size" in note) == (stage == 3) == (ahead != "auto")
    assert stage < 3 or f"{ahead:,}" in note


def test_fetching_ahead_follows_the_model(tmp_path: Path) -> None:
    """The plan is that of a file with the number that transformers writes."""
    zero = {"stage": 3, "stage3_prefetch_bucket_size": "auto", "offload_param": {"device": "cpu"}}
    content = {"zero_optimization": zero, "bf16": {"enabled": "auto"}}
    expected = filled(content, "gpt2", tmp_path)["zero_optimization"]["stage3_prefetch_bucket_size"]
    written = {**content, "zero_optimization": zero | {"stage3_prefetch_bucket_size": expected}}
    usual = {**content, "zero_optimization": zero | {"stage3_prefetch_bucket_size": 5e7}}
    assert planned(content, "gpt2").plan == planned(written, "gpt2").plan != planned(usual, "gpt2").plan


def test_an_answer_says_what_it_took() -> None:
    found = explained({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "bf16": {"enabled": True}})
    words = 'reduce_bucket_size 802,816 for "auto": of the hidden size 896, as transformers fills them in.'
    assert words in found.settled
    (note,) = [note for note in found.reading.understood if note.key.endswith("reduce_bucket_size")]
    assert note.about == "filled in by transformers with the square of the model's hidden size"
    assert not any("5e8" in one for one in found.differences)
    known = explained({"zero_optimization": {"stage": 2, "reduce_bucket_size": 7_000_000}, "bf16": {"enabled": True}})
    assert not any("hidden size" in one for one in known.settled)


def test_arguments_of_transformers_fill_in_their_own_limit() -> None:
    """Where the file lies beside them, theirs counts and not the usual one."""
    arguments = {
        "per_device_train_batch_size": 1,
        "max_grad_norm": 0.5,
        "deepspeed": {"gradient_clipping": "auto", "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}},
    }
    reading = read_training_arguments(arguments)
    assert reading.run.max_gradient_norm == 0.5
    assert (reading.run.bucket_follows_model, reading.run.runtime) == (True, Runtime.DEEPSPEED_ZERO2)
