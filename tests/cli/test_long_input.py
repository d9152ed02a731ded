"""Input of any length and any script: the message quotes the beginning of it, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from protwin.shared.basics.errors import ProtwinError, shortened
from tests.cli.conftest import Protwin
from tests.cli.refusals import CALIBRATE, RUN, SEARCH, SIMULATE, refusal, replaced

FORMS = {
    "one word": "h" * 40_000,
    "many words": "h h " * 10_000,
    "a name of a file": "n" * 300 + ".json",
    "folders": "f/" * 20_000 + "x.toml",
    "signs": "𝕙ü\u202e\u0007" * 9000,
    "digits": "9" * 40_000,
}
GPT2 = ("--model", "gpt2", "--batch-size=1", "--sequence-length=8")
CALLS = {
    "a command": ("{}",),
    "an option": ("search", "--{}"),
    "a machine to show": ("hardware", "show", "{}"),
    "a machine": ("search", *GPT2, "--hardware={}"),
    "a model": ("search", "--model={}", "--hardware=rtx-3090"),
    "a shape": ("search", "--model=gpt2", "--batch-size={}", "--sequence-length=8", "--hardware=rtx-3090"),
    "a budget": (*SIMULATE, "--device-budget={}"),
    "a part": (*SIMULATE, "--set={}=1"),
    "a part's value": (*SIMULATE, "--set=device.memory_bytes={}"),
    "a dtype": ("search", *GPT2, "--hardware=rtx-3090", "--dtype={}"),
    "an output": (*SEARCH[:-1], "{}/x.toml"),
    "a report": (*SIMULATE, "--report={}.txt"),
    "a plan": (*SIMULATE[:1], "--plan={}", *SIMULATE[3:]),
    "a calibration": (*SIMULATE, "--calibration={}"),
    "a record": ("compare", "{}", "plan.json"),
    "a text": (*RUN, "--text={}"),
    "a checkpoint": (*RUN, "--checkpoint={}", "--resume"),
    "a rate": (*RUN, "--host-to-device={}"),
    "a workload's place": (*CALIBRATE, "--output=new.json", "--workload-output={}/x.toml"),
}


@pytest.mark.parametrize("call", CALLS)
def test_long_input_is_quoted_in_short(call: str, protwin_here: Protwin, folder: Path) -> None:
    for form, text in FORMS.items():
        arguments = [part.replace("{}", text) for part in CALLS[call]]
        message = refusal(protwin_here, folder, arguments)
        assert len(message) < 6000, (form, message[:300])


def test_what_is_short_stays_and_long_paths_do() -> None:
    path = "/" + "/".join(["folder"] * 500)
    assert str(ProtwinError(f"{path} cannot be read.")) == f"{path} cannot be read."
    assert shortened("x" * 255) == "x" * 255
    cut = shortened("no machine '" + "x" * 40_000 + "'. Name another one.")
    assert cut == "no machine '" + "x" * 79 + "... (39903 more characters) ..." + "x" * 18 + "'. Name another one."
    words = shortened("word " * 2000 + "Do this.")
    assert words.endswith("Do this.")
    assert len(words) < 5100


def test_a_name_in_a_file_has_a_bound(protwin_here: Protwin, folder: Path) -> None:
    """It would be in every table and report."""
    machine = (folder / "machine.toml").read_text()
    for length, is_taken in ((255, True), (256, False), (40_000, False)):
        (folder / "long.toml").write_text(machine.replace('name = "rtx-3090"', f'name = "{"n" * length}"'))
        if is_taken:
            assert protwin_here(*replaced(SIMULATE, "rtx-3090", "long.toml")).returncode == 0
            continue
        message = refusal(protwin_here, folder, replaced(SIMULATE, "rtx-3090", "long.toml"))
        assert "name: String should have at most 255 characters" in message
        assert len(message) < 300
