"""``protwin sweep``: tables, JSON and page of a sweep, its price, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.shared.catalogue.list_prices import list_price
from protwin.shared.catalogue.machines import machine
from protwin.shared.sweeps.sweep import Sweep
from tests.cli.conftest import Protwin
from tests.cli.saved import decoder
from tests.shared.report_pages import check_self_contained, parse

ASKED = ("--model", "gpt2", "--hardware", "rtx-4090")


def test_a_sweep_is_told_in_tables_and_saved(protwin_here: Protwin, work: Path) -> None:
    shapes = ("--sequence-length", "256:512", "--batch-size", "2", "--processes", "1")
    result = protwin_here("sweep", *ASKED, *shapes, "--report", "sweep.html", "--output", "sweep.json")
    assert result.returncode == 0, result.stderr
    found = Sweep.load(work / "sweep.json")
    assert [one.sequence_length for one in found.points] == [256, 512]
    assert found.list_price == list_price(machine("rtx-4090"))
    assert found.list_price is not None
    for point in found.points:
        assert point.found is not None
        hour_usd, cost_usd = found.list_price.usd_per_hour, point.found.usd_per_million_tokens
        assert cost_usd == pytest.approx(hour_usd / 3600 / point.found.tokens_per_s * 10**6)
    assert "No plan has anything on the host" in result.stdout
    assert str(found.list_price.stated) in result.stdout
    page = (work / "sweep.html").read_text()
    check_self_contained(parse(page))
    assert 'id="figure-throughput"' in page


def test_points_are_answered_as_a_search_answers_them(protwin_here: Protwin) -> None:
    """With options that both commands have; a point too long for the model says why, and the sweep goes on."""
    options = (*ASKED, "--lora-rank", "4", "--optimizer", "lion", "--device-budget", "1GiB", "--price", "rtx-4090=1.5")
    options += ("--micro-batches", "2", "--set", "host.memory_bytes=64GiB", "--tokens", "3M")
    result = protwin_here("sweep", *options, "--sequence-length", "512,2048", "--processes", "1", "--json")
    assert result.returncode == 0, result.stderr
    found = Sweep.from_mapping(json.loads(result.stdout), origin="standard output")
    assert found.list_price is None
    point, too_long = found.points
    assert point.found is not None
    searched = protwin_here("search", *options, "--sequence-length", "512", "--batch-size", "1", "--json")
    assert searched.returncode == 0, searched.stderr
    answer = json.loads(searched.stdout)
    assert point.found.plan.model_dump(mode="json") == answer["plan"]
    assert point.found.iteration_s == answer["prediction"]["iteration_s"]
    assert point.found.run is not None
    assert point.found.run.model_dump(mode="json", exclude_none=True) == answer["prediction"]["run"]
    assert point.found.run.num_steps == -(-3_000_000 // (2 * 512))
    assert too_long.found is None
    assert "learned positions for 1024 tokens" in too_long.reason


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*ASKED, "--sequence-length", "1024:256"), "Write 256:1024"),
        ((*ASKED, "--sequence-length", "256", "--batch-size", "0"), "--batch-size"),
        ((*ASKED, "--sequence-length", "256", "--batch-size", ""), "--batch-size"),
        ((*ASKED, "--sequence-length", "1:100:1", "--batch-size", "1:100:1"), "10,000 points, but a sweep has at most"),
        ((*ASKED, "--batch-size", "1"), "--sequence-length"),
        ((*ASKED, "--sequence-length", "2048:4096"), "learned positions for 1024"),
        (("--model", "no-such-model", "--hardware", "rtx-4090", "--sequence-length", "64"), "no-such-model"),
        (("--model", "gpt2", "--hardware", "rtx-1", "--sequence-length", "64"), "rtx-1"),
        (("--model", "vit-huge", "--hardware", "rtx-4090", "--sequence-length", "64"), "has none"),
        (("--model", "workload.json", "--hardware", "rtx-4090", "--sequence-length", "64"), "has one shape"),
        ((*ASKED, "--sequence-length", "64", "--price", "a10=1"), "a10"),
        ((*ASKED, "--sequence-length", "64", "--ranks", "4"), "4 ranks do not fit"),
        (
            (*ASKED, "--sequence-length", "64", "--hardware", "rtx-4090-x8", "--ranks", "3", "--shard-ranks", "2"),
            "shard_ranks",
        ),
        ((*ASKED, "--sequence-length", "64", "--report", "sweep.json"), "HTML"),
        ((*ASKED, "--sequence-length", "64", "--output", "-", "--json"), "both write to standard output"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    protwin_here: Protwin, work: Path, arguments: tuple[str, ...], words: str
) -> None:
    decoder().save(work / "workload.json")
    before = {path: path.read_bytes() for path in work.iterdir()}
    result = protwin_here("sweep", "--processes", "1", *arguments)
    assert result.returncode == 2, result.stdout
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert {path: path.read_bytes() for path in work.iterdir()} == before


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            "--model qwen2.5-0.5b --hardware a100-80gb-sxm4-x8 --ranks 4 --sequence-ranks 2 --loss-tiles 4",
            marks=pytest.mark.slow,
        ),
        "--model gpt2 --hardware rtx-4090 --unfreeze-rank-ratio 0.25 --packed-lengths uniform:16:256",
    ],
)
def test_points_of_other_trainings_are_answered_as_a_search_answers_them(protwin_here: Protwin, options: str) -> None:
    asked = (*options.split(), "--sequence-length", "1024")
    result = protwin_here("sweep", *asked, "--processes", "1", "--json")
    assert result.returncode == 0, result.stderr
    (point,) = Sweep.from_mapping(json.loads(result.stdout), origin="standard output").points
    assert point.found is not None
    searched = protwin_here("search", *asked, "--batch-size", "1", "--json")
    assert searched.returncode == 0, searched.stderr
    answer = json.loads(searched.stdout)
    assert point.found.plan.model_dump(mode="json") == answer["plan"]
    assert (point.num_tokens, point.found.tokens_per_s) == (
        answer["prediction"]["num_tokens"],
        pytest.approx(answer["prediction"]["num_tokens"] / answer["prediction"]["iteration_s"]),
    )
