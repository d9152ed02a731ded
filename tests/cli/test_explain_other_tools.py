"""Files of other tools, as a user asks about them: told without torch, and in one message where there is no answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protwin.shared.foreign.explanation import Explanation
from protwin.shared.schema.search_result import SearchResult
from tests.cli.conftest import Protwin

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
        "DeepSpeed's runtime is not simulated",
        "The run fits.",
        "the run of the file",
        "times those of the run as predicted",
    ):
        assert words in " ".join(result.stdout.split()), words
    (command,) = [line.split() for line in result.stdout.splitlines() if line.startswith("  protwin ")]
    assert "--micro-batches=2" in command


def test_json_has_everything_and_the_command_asks_for_the_same_plan(
    work: Path, environment: dict[str, str], protwin_here: Protwin
) -> None:
    """Without torch; the oracle of the plan is the search that the command line asks for."""
    (work / "ds.json").write_text(json.dumps(ZERO_3))
    arguments = ["protwin", "explain-config", "ds.json", *SAID, "--json"]
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
    searched = protwin_here(*told.command.split()[1:], "--json")
    assert searched.returncode == 0, searched.stderr
    found = SearchResult.from_mapping(json.loads(searched.stdout), origin="standard output")
    assert found.plan == told.found.plan


@pytest.mark.parametrize(
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
    ],
    ids=range(7),
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
