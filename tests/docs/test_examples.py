"""Every example runs, and does what it is for."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.documents import ROOT


@pytest.mark.slow
@pytest.mark.usefixtures("probed_once")
def test_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, since starting one with torch takes longer than the example."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "train.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "buffer 0" in printed, "nothing is offloaded"
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 10
    rates = [float(rate) for rate in re.findall(r"learning rate (\S+)", printed)]
    assert max(rates) > 10 * rates[-1], "the scheduler does not show"
    gathered, stepped = re.search(r"([\d.]+) MiB gathered, (\d+) chunks stepped", printed).groups()  # type: ignore[union-attr]
    assert float(gathered) > 0
    assert int(stepped) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "launcher"),
    [("trainer", []), ("accelerate_loop", ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"])],
)
def test_loops_of_others(example: str, launcher: list[str], tmp_path: Path) -> None:
    """Each in a process of its own, as users start it; Accelerate's loop by its launcher."""
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / f"{example}.py")],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    gathered = re.search(r"([\d.]+) MiB gathered", done.stdout)
    assert gathered is not None
    assert float(gathered[1]) > 0, "nothing is offloaded"
    losses = [float(loss) for loss in re.findall(r"loss'?:? '?([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.usefixtures("probed_once")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT's own, of transformers
def test_peft_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The adapter learns within its budget, goes on from what was saved, and merges into what it was beside."""
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "peft_lora.py"), run_name="__main__")
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"step +\d+: loss ([\d.]+)", printed)]
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True), "the second training does not go on from the first"
    bare = [float(loss) for loss in re.findall(r"without the adapter: loss ([\d.]+)", printed)]
    assert bare[0] == bare[1] > losses[2]
    merged = float(re.search(r"merged: loss ([\d.]+), a LlamaForCausalLM", printed).group(1))  # type: ignore[union-attr]
    assert merged < losses[-1]
    for peak, budget in re.findall(r"peak ([\d.]+) MiB of ([\d.]+) MiB", printed):
        assert float(peak) <= float(budget)
    assert list(tmp_path.iterdir()) == []
