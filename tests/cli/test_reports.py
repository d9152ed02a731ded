"""Reports and pictures from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.shared.cli.report_options import write_report
from protwin.shared.cli.told import warn, warnings_apart
from protwin.shared.report.page import Report
from protwin.shared.schema.record import Origin, Record
from tests.cli.conftest import Protwin
from tests.cli.saved import decoder
from tests.shared.report_pages import check_self_contained, parse


@pytest.fixture
def ask(work: Path) -> tuple[str, ...]:
    decoder().save(work / "workload.json")
    return ("--model", "workload.json", "--hardware", "rtx-3090", "--device-budget", "700MiB")


def headings(path: Path) -> list[str]:
    page = parse(path.read_text(encoding="utf-8"))
    check_self_contained(page)
    return [heading.words for heading in page.named("h2")]


def test_the_whole_chain_leaves_reports(protwin_here: Protwin, work: Path, ask: tuple[str, ...]) -> None:
    searched = protwin_here("search", *ask, "--output", "plan.json", "--report", "search.html", "--json")
    assert searched.returncode == 0, searched.stderr
    assert json.loads(searched.stdout)["kind"] == "search_result", "a report leaves standard output alone"
    assert headings(work / "search.html")[:3] == ["Asked", "What to do", "Search"]

    of_plan = ("--plan", "plan.json", *ask, "--output", "predicted.json", "--report", "simulated.html")
    simulated = protwin_here("simulate", *of_plan)
    assert simulated.returncode == 0, simulated.stderr
    assert headings(work / "simulated.html")[:4] == ["Asked", "Plan", "Where the time goes", "Timeline"]

    predicted = Record.load(work / "predicted.json")
    predicted.model_copy(update={"origin": Origin.MEASURED, "machine": "one GPU"}).save(work / "measured.json")
    both = ("compare", "predicted.json", "measured.json", "--report", "both.html")
    for extra in ((), ("--workload", "workload.json")):
        compared = protwin_here(*both, *extra)
        assert compared.returncode == 0, compared.stderr
        assert "Predicted against measured" in headings(work / "both.html")
        page = (work / "both.html").read_text(encoding="utf-8")
        assert ("held up by" in page.partition("<script")[0]) == bool(extra), "what tasks wait for needs the workload"
    tight = protwin_here(
        "simulate", "--plan", "plan.json", *ask[:4], "--device-budget", "9MiB", "--report", "tight.html"
    )
    warned = [line.removeprefix("warning: ") for line in tight.stderr.splitlines() if line.startswith("warning: ")]
    assert any("of device memory but the budget is 9 MiB" in line for line in warned)
    (aside,) = parse((work / "tight.html").read_text(encoding="utf-8")).named("aside")
    assert all(line in aside.words for line in warned), "the page says what the terminal said"
    assert not parse((work / "both.html").read_text(encoding="utf-8")).named("aside")
    refused = protwin_here("compare", "predicted.json", "predicted.json", "--report", "twice.html")
    assert refused.returncode == 2
    assert "predicted.json is a prediction, in the place of the measurement" in refused.stderr
    assert not (work / "twice.html").exists()
    twice = protwin_here("compare", "measured.json", "measured.json", "--report", "twice.html")
    assert twice.returncode == 0, twice.stderr
    assert headings(work / "twice.html")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--report", "report.json"), "would hold HTML"),
        (("--report", "workload.json/report.html"), "is no folder"),
        (("--report", "folder"), "is a folder"),
        (("--report", "plan.html", "--output", "plan.html"), "would hold JSON"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_work(
    protwin_here: Protwin, work: Path, ask: tuple[str, ...], option: tuple[str, ...], message: str
) -> None:
    (work / "folder").mkdir()
    refused = protwin_here("search", *ask, *option)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert refused.stdout == ""
    assert sorted(path.name for path in work.iterdir()) == ["folder", "workload.json"]


def test_a_report_has_the_warnings_of_its_own_command_alone(tmp_path: Path) -> None:
    page, made = tmp_path / "report.html", Report("t", "s", (), (), warnings=("Its own.",))

    def asides() -> list[str]:
        write_report(page, lambda: made)
        return [aside.words for aside in parse(page.read_text(encoding="utf-8")).named("aside")]

    with warnings_apart():
        warn("First.")
        warn("First.")
        with warnings_apart():
            warn("Within.")
            assert "First." not in asides()[0]
        (told,) = asides()
        assert told.split("\n") == ["Warnings", "Its own.", "First.", ""]
    assert asides() == ["Warning\nIts own.\n"]


def test_no_report_is_made_unless_asked_for(tmp_path: Path) -> None:
    def unwanted() -> Report:
        raise AssertionError("nobody asked")

    write_report(None, unwanted)
    made = Report("t", "s", (), ())
    write_report(tmp_path / "report.html", lambda: made)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == made.html
