"""Every example runs, and does what it is for."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

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


@pytest.mark.slow
@pytest.mark.usefixtures("probed_once")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT's own, of transformers
def test_the_notebook_of_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells, one after the other, as "run all" does."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells_of("peft_lora.ipynb")):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    first, last = re.search(r"\nloss ([\d.]+) -> ([\d.]+)\n", printed).groups()  # type: ignore[union-attr]
    merged, beside = re.search(r"merged: loss ([\d.]+), .* ([\d.]+)\n", printed).groups()  # type: ignore[union-attr]
    assert float(last) < float(first)
    assert float(merged) == pytest.approx(float(beside), abs=2e-4)
    assert list(tmp_path.iterdir()) == []


def cells_of(notebook: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "examples" / notebook).read_text(encoding="utf-8"))["cells"]
    return found


def test_notebooks_are_kept_without_outputs() -> None:
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        code = [cell for cell in cells_of(notebook.name) if cell["cell_type"] == "code"]
        assert code
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), notebook


def test_every_example_runs_in_a_test() -> None:
    """Those of axolotl in ``test_axolotl_section`` and ``test_explain_config``."""
    run = {"accelerate_loop.py", "peft_lora.ipynb", "peft_lora.py", "train.py", "train_ranks.py", "trainer.py"}
    assert {path.name for path in (ROOT / "examples").iterdir() if path.is_file()} == run
