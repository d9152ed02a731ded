"""``protwin published``: the runs that come with it, by class and one by one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from protwin.calibration.published.measured_runs import MEASURED_RUNS, RUNS_OF_OTHER_FORMS
from protwin.calibration.published.outcome import Outcome
from tests.cli.conftest import Protwin

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_what_comes_with_protwin_is_the_newest_kept_outcome() -> None:
    newest = max(RESULTS.glob("published-*.json"))
    assert Outcome.load(newest) == Outcome.shipped()


def test_classes_are_summed_up(protwin_here: Protwin) -> None:
    result = protwin_here("published")
    assert (result.returncode, result.stderr) == (0, "")
    for run in MEASURED_RUNS:
        if run.iteration_s is not None:
            assert run.run_class in result.stdout
    assert all(run.id in result.stdout for run in RUNS_OF_OTHER_FORMS)


def test_runs_of_a_class_are_shown_one_by_one(protwin_here: Protwin) -> None:
    result = protwin_here("published", "--class", "llama, fsdp2 ON")
    chosen = [run for run in MEASURED_RUNS if run.run_class == "Llama, FSDP2 on 64 A100"]
    assert len(chosen) == 5
    assert sum(line.startswith("llama-") for line in result.stdout.splitlines()) == 5
    assert "torchtitan" in result.stdout


def test_a_document_has_source_prediction_and_error(protwin_here: Protwin) -> None:
    name = "fms-7b-a100-128"
    (document,) = json.loads(protwin_here("published", "--run", name, "--json").stdout)
    predicted = Outcome.shipped().predicted[name]
    assert document["run"]["id"] == name
    assert document["source"]["url"].startswith("https://")
    tokens_per_s = document["run"]["measured"]["tokens_per_s_per_device"]
    measured_s = document["run"]["batch_size"] * document["run"]["sequence_length"] / tokens_per_s
    assert document["iteration_error_frac"] == pytest.approx(predicted.iteration_s / measured_s - 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--class", "TPU"), "--class 'TPU' is in no class"),
        (("--class", "LoRA two RTX 4090"), 'The nearest are "LoRA, two RTX 4090", "QLoRA, two RTX 4090" and "'),
        (("--run", "fms-7b-a100"), "Did you mean fms-7b-a100-128"),
        (("--run", "prime-rl-3234-8192-none"), "no plan has its form: expert parallelism over 8 devices"),
        (("--class", "eXperts on eight"), "no plan has its form: expert parallelism over 8 devices"),
    ],
)
def test_what_is_not_there_is_refused(protwin_here: Protwin, arguments: tuple[str, str], words: str) -> None:
    result = protwin_here("published", *arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr) < 300, "the nearest, and where all of them stand: they were a paragraph"


def test_it_needs_no_torch() -> None:
    code = "import sys, protwin.calibration.commands.published; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_runs_of_memory_alone_show_their_memory(protwin_here: Protwin) -> None:
    """Also where the table is narrow: its columns of time were kept, and all of them are empty."""
    told = protwin_here("published", "--class", "memory alone").stdout
    chosen = [run for run in MEASURED_RUNS if "memory alone" in run.run_class]
    figures = [run.measured.memory for run in chosen]
    assert figures
    for figure in figures:
        assert figure is not None
        assert f"{figure[1] / 2**30:.2f}" in told
