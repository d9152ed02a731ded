"""Files of other tools, as a user asks about them: told without torch, and in one message where there is no answer."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protwin.runtime.integrations.axolotl_section import PLUGIN
from protwin.shared.answers.search_result import SearchResult
from protwin.sim.as_configured.explanation import Explanation
from tests.cli.conftest import Protwin
from tests.proof_size import some_quick

ZERO_3: dict[str, Any] = {
    "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
        "zero_quantized_weights": True,
        "spread_evenly": 1,
    },
}
SAID = ("--model=qwen2.5-0.5b", "--hardware=a100-80gb-x8", "--batch-size=1", "--sequence-length=256")


def test_a_file_is_answered_key_by_key_and_by_a_prediction(work: Path, protwin_here: Protwin) -> None:
    (work / "ds.json").write_text(json.dumps(ZERO_3))
    result = protwin_here("explain-config", "ds.json", *SAID)
    assert result.returncode == 0, result.stderr
    for words in (
        "ds.json: a DeepSpeed configuration",
        "ZeRO-3: ranks have parameters, gradients and optimizer state in parts",
        "fewer bytes pass between ranks than in the answer",
        "not known here",
        "8 ranks: all devices of a100-80gb-x8",
        "no block is recomputed in backward, as far as the file says (--checkpointing",
        "DeepSpeed's runtime is not simulated",
        "The run fits.",
        "the run of the file",
        "times those of the run as predicted",
    ):
        assert words in " ".join(result.stdout.split()), words
    (command,) = [line.split() for line in result.stdout.splitlines() if line.startswith("  protwin ")]
    assert "--micro-batches=2" in command


def test_json_has_everything_without_torch(work: Path, environment: dict[str, str]) -> None:
    (work / "ds.json").write_text(json.dumps(ZERO_3))
    arguments = ["protwin", "explain-config", "ds.json", *SAID, "--checkpointing", "--json"]
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'deepspeed')))\n"
        f"from protwin.shared.cli.main import main; sys.argv = {arguments!r}; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = Explanation.from_mapping(json.loads(done.stdout), origin="standard output")
    assert [one.key for one in told.reading.unknown] == ["zero_optimization.spread_evenly"]
    assert told.found is not None
    assert told.speedup is not None
    assert told.configured.plan.n_checkpoint == 24, "every block of the model"
    assert not any("no block is recomputed" in one for one in told.settled)


TITAN = """
[job]
description = "a run"
[model]
name = "qwen3"
flavor = "0.6B"
[training]
local_batch_size = 1
seq_len = 256
compile = true
[parallelism]
data_parallel_shard_degree = 8
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
QLORA = """
base_model: unsloth/Llama-3.2-1B
adapter: qlora
lora_r: 16
lora_target_linear: true
sequence_len: 512
micro_batch_size: 1
datasets:
  - path: rows
    type: alpaca
"""


LONG: dict[str, Any] = {"bf16": {"enabled": True}, "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}
LONG_ROWS = ("--batch-size=1", "--sequence-length=16384")
LORA: dict[str, Any] = {
    "peft": {"r": 8},
    "per_device_train_batch_size": 2,
    "optim": "adamw_torch",
    "gradient_checkpointing": True,
    "max_grad_norm": 0.5,
}


ASKED = [
    ("ds.json", LONG, ("--model=qwen2.5-0.5b", "--hardware=rtx-4090", *LONG_ROWS)),
    ("ds.json", LONG, ("--model=llama-3-8b", "--hardware=rtx-3090", "--device-budget=1GiB", *LONG_ROWS)),
    ("ds.json", ZERO_3, SAID),
    ("ds.json", ZERO_3, (*SAID[:-1], "--sequence-length=32768", "--packed-lengths=uniform:100:9000")),
    ("a.toml", TITAN, ("--hardware=a100-80gb-x8",)),
    ("a.yml", QLORA, ("--hardware=rtx-4090", "--set=host.memory_bytes=32GiB")),
    ("a.json", LORA, (*SAID[:2], "--ranks=1", "--sequence-length=512", "--lora-rank=8", "--optimizer=lion")),
]


@some_quick(("name", "content", "said"), ASKED, quick=ASKED[:1])
def test_the_command_that_is_printed_asks_the_same_question(
    name: str, content: str | dict[str, Any], said: tuple[str, ...], work: Path, protwin_here: Protwin
) -> None:
    (work / name).write_text(content if isinstance(content, str) else json.dumps(content))
    done = protwin_here("explain-config", name, *said, "--json")
    assert done.returncode == 0, done.stderr
    told = Explanation.from_mapping(json.loads(done.stdout), origin="")
    searched = protwin_here(*shlex.split(told.command)[1:], "--json")
    if told.found is None:
        assert told.infeasible is not None
        assert (searched.returncode, told.infeasible in searched.stderr) == (2, True), searched.stderr
        return
    assert searched.returncode == 0, searched.stderr
    found = SearchResult.from_mapping(json.loads(searched.stdout), origin="standard output")
    for field in ("plan", "plan_kind", "certificate", "device_budget_bytes", "host_budget_bytes"):
        assert getattr(found, field) == getattr(told.found, field), field
    assert found.prediction.iteration_s == told.found.prediction.iteration_s


@pytest.mark.slow
def test_files_of_torchtitan_and_axolotl_name_their_model(work: Path, protwin_here: Protwin) -> None:
    (work / "a.toml").write_text(TITAN)
    told = json.loads(protwin_here("explain-config", "a.toml", "--hardware=a100-80gb-x8", "--json").stdout)
    assert (told["configured"]["model_name"], told["num_ranks"]) == ("qwen3-0.6b", 8)
    plan = told["configured"]["plan"]
    assert (plan["n_checkpoint"], plan["n_selective"], plan["product_stride"]) == (28, 28, 2), "every second product"
    assert told["other_readings"] == []
    by_compilation = TITAN.replace('"selective"\nselective_ac_option = "op"', '"memory_budget"')
    (work / "b.toml").write_text(by_compilation)
    told = json.loads(protwin_here("explain-config", "b.toml", "--hardware=a100-80gb-x8", "--json").stdout)
    assert [one["name"] for one in told["other_readings"]] == ["nothing recomputed", "every block recomputed"]
    pytest.importorskip("yaml")
    (work / "a.yml").write_text(QLORA)
    result = protwin_here("explain-config", "a.yml", "--hardware=rtx-4090")
    assert result.returncode == 0, result.stderr
    assert "unsloth/Llama-3.2-1B is taken as llama-3.2-1b, by its name" in result.stdout
    assert "nf4, double quantized" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("--lora-rank=16 --quantize=nf4 --double-quantize")


@pytest.mark.slow
def test_a_file_with_a_section_is_answered_too_where_a_machine_is_named(work: Path, protwin_here: Protwin) -> None:
    pytest.importorskip("yaml")
    (work / "a.yml").write_text(QLORA + f"plugins: [{PLUGIN}]\nprotwin: {{budget: 12GiB}}\n")
    result = protwin_here("explain-config", "a.yml", "--hardware=rtx-4090", "--json")
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["section"]["budget"] == "12GiB"
    assert told["explanation"]["found"]["device_budget_bytes"] == 12 * 2**30
    assert protwin_here("explain-config", "a.yml").stdout.rstrip().endswith("is predicted, beside a plan.")


@some_quick(
    ("content", "options", "said"),
    [
        (
            ZERO_3,
            (),
            ["ds.json does not say which model", "--model", "--hardware", "--batch-size", "--sequence-length"],
        ),
        (ZERO_3, SAID[:-1], ["how many tokens a sample has", "Add it to the command"]),
        (ZERO_3 | {"sequence_parallel_size": 2}, SAID, ["ds.json", "sequence_parallel_size is 2"]),
        ({"train_batch_size": 3}, SAID, ["steps of 3 samples", "8 ranks"]),
        ({"a": 1}, SAID, ["none of the keys", "--tool"]),
        ([1], SAID, ["holds a list"]),
        (ZERO_3, (*SAID[:1], "--hardware=no-such", *SAID[2:]), ["no-such"]),
        (ZERO_3, (*SAID, "--dtype=float9"), ["float9"]),
    ],
    quick=3,
)
def test_what_cannot_be_answered_is_one_message(
    work: Path, protwin_here: Protwin, content: Any, options: tuple[str, ...], said: list[str]
) -> None:
    (work / "ds.json").write_text(json.dumps(content))
    result = protwin_here("explain-config", "ds.json", *options)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert all(words in result.stderr for words in said), result.stderr
