"""What every refusal has in common, and the calls that tests spoil."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.cli.conftest import Protwin

SEARCH = ("search", "--model", "workload.json", "--hardware", "rtx-3090", "--output", "found.json")
SIMULATE = ("simulate", "--plan", "plan.json", "--model", "workload.json", "--hardware", "rtx-3090")


RUN = ("run", "--plan", "plan.json", "--workload", "workload.json", "--model", "gpt2")
CALIBRATE = ("calibrate", "--model", "gpt2", "--batch-size=1", "--sequence-length=8", "--hardware", "machine.toml")


def refusal(protwin: Protwin, folder: Path, arguments: Iterable[str]) -> str:
    """The one message that ``arguments`` get; asserts everything that holds for all of them."""
    before = contents(folder)
    result = protwin(*arguments)
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert contents(folder) == before
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("Usage: ", "Try ")) and line]
    assert len(lines) == 1, result.stderr
    assert lines[0].lower().startswith("error: ")
    return lines[0]


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def replaced(arguments: tuple[str, ...], old: str, new: str) -> list[str]:
    """``arguments`` with one of them exchanged."""
    assert old in arguments
    return [new if argument == old else argument for argument in arguments]
