"""Pipelines on the command line: searched, written, simulated, refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.shared.pipelines.pipeline import Pipeline
from protwin.shared.pipelines.prediction import PipelinePrediction
from protwin.shared.pipelines.split_search import SplitSearch
from protwin.shared.schema.plan import Plan
from tests.cli.conftest import Protwin
from tests.sim.searching.test_bypass import pairs

SEARCH = ("search", "--model", "pairs.json", "--hardware", "rtx-4090-x8", "--ranks", "2")
SPACE = ("--chunk-bytes", "268435456", "--n-buffer", "4", "--prefetch-depth", "1")


@pytest.fixture
def here(folder: Path) -> Path:
    pairs(4).save(folder / "pairs.json")
    return folder


def test_a_search_splits_and_its_pipeline_is_simulated(protwin_here: Protwin, here: Path) -> None:
    done = protwin_here(*SEARCH, *SPACE, "--n-persist", "0", "--output", "plan.json")
    assert done.returncode == 0, done.stderr
    assert "Ways to have 2 ranks" in done.stdout
    found = SplitSearch.from_mapping(
        json.loads(protwin_here(*SEARCH, *SPACE, "--n-persist", "0", "--json").stdout), origin="it"
    )
    chosen = found.chosen.pipeline
    if chosen.num_stages == 1:
        assert Plan.load(here / "plan.json") == chosen.stages[0].plan
        chosen = chosen.model_copy(update={})
    else:
        assert Pipeline.load(here / "plan.json") == chosen
    chosen.save(here / "pipeline.json")
    arguments = ("simulate", "--plan", "pipeline.json", "--model", "pairs.json", "--hardware", "rtx-4090-x8")
    told = protwin_here(*arguments)
    assert told.returncode == 0, told.stderr
    assert "◀ slowest" in told.stdout
    assert "All stages go at the pace of the slowest" in told.stdout
    given = PipelinePrediction.from_mapping(json.loads(protwin_here(*arguments, "--json").stdout), origin="it")
    assert given.iteration_s == pytest.approx(found.chosen.iteration_s)


def test_what_takes_no_pipeline_says_so(protwin_here: Protwin, here: Path) -> None:
    from tests.shared.pipelines.test_pipeline import pipeline

    pipeline().save(here / "pipeline.json")
    named = ("--model", "pairs.json", "--hardware", "rtx-4090-x8")
    refused = {
        ("simulate", "--plan", "pipeline.json", *named, "--ranks", "2"): "--ranks is not known of a pipeline's file",
        ("simulate", "--plan", "pipeline.json", *named): "the pipeline belongs to workload",
        (*SEARCH, "--what-if", "rtx-3090"): "--what-if is not known of a distillation on several ranks",
        (*SEARCH[:-1], "16"): "16 ranks",
    }
    for arguments, message in refused.items():
        done = protwin_here(*arguments, "--output", "new.json")
        assert done.returncode == 2, arguments
        assert message in " ".join(done.stderr.split()), done.stderr
        assert not (here / "new.json").exists()
