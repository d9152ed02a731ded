"""``protwin largest`` as it is called: its table, its document, and bad input."""

from __future__ import annotations

import json

import pytest

from protwin.calibration.commands import largest as command
from protwin.calibration.published import largest as published
from protwin.shared.answers.advice import LargestModels
from protwin.shared.answers.search_result import SearchResult
from protwin.sim.questions import largest as question
from tests.cli.conftest import Protwin


def test_a_machine_and_what_was_published(protwin_here: Protwin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default question, of one small model, one machine and one claim."""
    monkeypatch.setattr(question, "model_names", lambda: ("gpt2",))
    monkeypatch.setattr(command, "_MACHINES", ("rtx-3090",))
    monkeypatch.setattr(published, "CLAIMS", published.CLAIMS[:1])
    monkeypatch.setattr(command, "CLAIMS", published.CLAIMS[:1])
    result = protwin_here(
        "largest", "--sequence-length=64", "--host-memory=unlimited", "--host-memory=16GiB", "--output=found.json"
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "The largest models that train: 1 x 64 tokens, AdamW" in result.stdout
    assert "Beside what was published" in result.stdout
    found = LargestModels.load("found.json")
    assert [one.host_memory_bytes for one in found.machines] == [16 * 2**30, None]
    for one in found.machines:
        assert one.following is None
        assert one.found is not None
        assert one.found.model == "gpt2"
        assert one.found.tokens_per_s == pytest.approx(64 / one.found.iteration_s)
    (claim,) = found.published
    assert (claim.system, claim.num_parameters, claim.model) == ("ProTrain", 34 * 10**9, "gpt2")


def test_adapters_beside_packed_weights(protwin_here: Protwin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options mean what they mean to a search; what was published of full training is not laid beside it."""
    monkeypatch.setattr(question, "model_names", lambda: ("tinyllama-1.1b",))
    monkeypatch.setattr(command, "_MACHINES", ("rtx-3090",))
    told = ("--lora-rank=4", "--quantize=nf4", "--double-quantize")
    result = protwin_here("largest", "--sequence-length=64", "--host-memory=16GiB", *told, "--output=found.json")
    assert (result.returncode, result.stderr) == (0, "")
    title = " ".join(result.stdout.split())
    assert "LoRA of rank 4 beside nf4, double quantized" in title
    found = LargestModels.load("found.json")
    box = ("--hardware=rtx-3090", "--set=host.memory_bytes=16GiB")
    asked = ("--model=tinyllama-1.1b", "--dtype=bfloat16", "--batch-size=1", "--sequence-length=64")
    searched = protwin_here("search", *asked, *box, *told, "--json")
    (answer,) = found.machines
    assert answer.found is not None
    plan = SearchResult.from_mapping(json.loads(searched.stdout), origin="search").plan
    assert answer.found.plan == plan
    assert not found.published


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host-memory=much",), "Or say unlimited"),
        (("--host-memory=64",), "such as 64GiB. Or say unlimited"),
        (("--hardware=rtx-3091",), "there is no machine"),
        (("--dtype=int8",), "int8"),
        (("--quantize=nf4",), "Train low-rank matrices beside them"),
        (("--output=found.json", "--hardware=found.json"), "found.json"),
    ],
)
def test_bad_input_is_one_message(protwin_here: Protwin, arguments: tuple[str, ...], words: str) -> None:
    result = protwin_here("largest", *arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
