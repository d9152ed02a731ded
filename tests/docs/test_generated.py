"""Generated pages and pictures are fresh, and say what they are generated from."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.families import KINDS
from protwin.shared.cli.root import root_command
from tests.docs.documents import DOCUMENTS, ROOT

DOCS = ROOT / "docs"


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(DOCS / f"{name}.py"))


def kept(prefix: str) -> Any:
    (path,) = sorted((ROOT / "benchmarks" / "results").glob(f"{prefix}-*.json"))[-1:]
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return script("results_page")


def test_commands_are_fresh() -> None:
    assert script("command_reference")["page"]() == (DOCS / "commands.md").read_text(), "run make docs"


def test_combinations_are_fresh_and_name_tests_that_are_there() -> None:
    page = (DOCS / "combinations.md").read_text()
    assert script("combinations_page")["page"]() == page, "run make docs"
    for path in re.findall(r"`(tests/[\w./]+)`", page):
        assert (ROOT / path).is_file(), path


def test_every_constant_of_the_cost_model_is_listed_with_its_source() -> None:
    """A count may be what its words say; a rate, or a table, must say where it comes from."""
    made = script("constants_page")
    assert made["page"]() == (DOCS / "constants.md").read_text(), "run make docs"
    found = list(made["constants"]())
    assert len(found) > 60
    assert [one.name for one in found if not one.words] == []
    assert [one.name for one in found if not one.is_counted and not one.has_source] == []


def test_the_page_of_families_is_what_the_kept_sweep_found() -> None:
    """Every family that is swept has a row, none failed or differs, and refusals have their reasons."""
    made, found = script("families_page"), kept("families")
    assert made["page"](found) == (DOCS / "families.md").read_text(), "run make docs"
    rows = {(row["kind"], row["family"]): row for row in found["rows"]}
    assert rows.keys() == {(kind, family) for kind, families in KINDS.items() for family in families}
    for row in rows.values():
        assert row["verdict"] in ("equal", "refused"), row
        assert row["verdict"] == "refused" or row["gathers"] > row["blocks"] > 0, row
        assert (row["verdict"] == "refused") == ("reason" in row), row


def test_every_option_of_a_command_is_on_its_page() -> None:
    """Held against what the command prints for --help, which is another way through the same definitions."""
    for name, command in root_command().commands.items():
        section = (DOCS / "commands.md").read_text().split(f"\n## protwin {name}\n")[1].split("\n## ")[0]
        printed = CliRunner().invoke(command.load(), ["--help"]).output  # type: ignore[attr-defined]
        shown = set(re.findall(r"^  (?:-\w, )?(--[a-z][\w-]+)", printed, re.MULTILINE)) - {"--help"}
        assert shown <= set(re.findall(r"`(?:-\w, )?(--[a-z][\w-]+)", section)), name
        has_help_alone = len(re.findall(r"^  -", printed, re.MULTILINE)) == 1
        assert shown or "Commands:" in printed or has_help_alone, name


@pytest.mark.parametrize("face", ["protwin", "shared", "sim", "runtime", "calibration"])
def test_python_pages_are_fresh(face: str) -> None:
    assert script("python_reference")["page"](face) == (DOCS / "python" / f"{face}.md").read_text(), "run make docs"


def test_the_pictures_are_fresh() -> None:
    assert script("iteration_picture")["picture"]() == (DOCS / "iteration.svg").read_text(), "run make docs"
    assert script("published_picture")["picture"]() == (DOCS / "published.svg").read_text(), "run make docs"


def test_every_published_run_lies_within_the_axes() -> None:
    picture = (DOCS / "published.svg").read_text()
    frame = re.search(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" fill="none"', picture)
    assert frame is not None
    x, y, width, height = map(float, frame.groups())
    runs = re.findall(r'<circle cx="([-\d.]+)" cy="([-\d.]+)" r="4"', picture)
    assert len(runs) > 100
    assert [run for run in runs if not (x < float(run[0]) < x + width and y < float(run[1]) < y + height)] == []


def test_results_are_fresh(results: dict[str, Any]) -> None:
    assert results["page"]() == (DOCS / "results.md").read_text(), "run make docs"
    assert f"\n{results['summary']()}\n" in (ROOT / "README.md").read_text(), "run make docs"


def test_results_say_what_was_missed(results: dict[str, Any]) -> None:
    sections: dict[str, Any] = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("proof-*.json"), key=lambda path: path.stem):
        # Each day's proof has some sections; the latest of each counts.
        sections |= json.loads(path.read_text(encoding="utf-8"))["sections"]
    missed = [claim for section in sections.values() for claim in section["claims"] if not claim["is_shown"]]
    assert "ranks" in sections
    assert "equality" in sections
    for claim in missed:
        assert f"- {claim['subject']}, {claim['claim']}: {claim['failures'][0]}" in results["page"]()
        assert claim["subject"] in results["summary"]()
    assert ("**missed**" in results["summary"]()) == bool(missed)


def test_results_hold_the_kept_figures(results: dict[str, Any]) -> None:
    page = results["page"]()
    for model in kept("fidelity"):
        assert f"| {model['worst_iteration_error_frac'] * 100:.1f} % |" in page
    for row in kept("search")["searches"]:
        assert f"| {row['case']} | {row['num_plans']:,} |" in page
    (fms,) = (run for run in kept("published")["runs"] if run["id"] == "fms-7b-a100-128")
    assert f"| tokens/s and device | 3,760 | {fms['tokens_per_s_per_device']:,.0f} |" in page


def test_what_a_validation_says_besides_is_shown_where_a_file_says_it(results: dict[str, Any]) -> None:
    """Files of before have no such fields, and are shown without them."""
    (kind,) = [{"kind": "gather", "blame_frac": -0.031}]
    more = {"num_rounds": 8, "signed_mean_iteration_error_frac": -0.021, "median_noise_frac": 0.044, "kinds": [kind]}
    more |= dict.fromkeys(("drift_frac", "median_half_width_frac", "mean_retimed_peak_error_frac"), 0.015)
    more |= {"time_coverage_frac": 0.92, "peak_coverage_frac": None}
    old = [{name: value for name, value in one.items() if name not in more} for one in kept("fidelity")]
    new = [one | more for one in old]
    before, shown = ("\n".join(results["fidelity"](content)) for content in (old, new))
    assert shown.startswith(before)
    assert "| -2.1 % | 4.4 % | 1.5 % | 92 % | 1.5 % | – | 1.50 % | gather -3.1 % |" in shown
    assert "to blame" not in before


def test_a_benchmark_without_a_kept_result_is_named_so(results: dict[str, Any], tmp_path: Path) -> None:
    """Every benchmark of the Makefile has its place, kept or not."""
    page = results["page"](tmp_path)
    targets = re.findall(r"^(bench-\w+|prove|published):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {one.target for one in results["BENCHMARKS"]} == set(targets)
    assert page.count("**No result is kept.**") == page.count("| no result kept |") == len(results["BENCHMARKS"])


def test_the_newest_result_counts(results: dict[str, Any], tmp_path: Path) -> None:
    for name in ("gpu-2026-09-30-b.json", "gpu-2026-10-01-a.json"):
        (tmp_path / name).write_text("{}")
    assert [path.name for path in results["kept_files"](tmp_path, "gpu")] == ["gpu-2026-10-01-a.json"]
    assert results["kept_files"](tmp_path, "search") == []


def test_the_newest_result_of_each_section_counts(results: dict[str, Any], tmp_path: Path) -> None:
    for day, sections in (("30", ["memory"]), ("29", ["equality", "memory"]), ("31", ["ranks"]), ("28", ["ranks"])):
        proof = {"date": day, "sections": {name: {"of": day} for name in sections}}
        (tmp_path / f"proof-2026-10-{day}.json").write_text(json.dumps(proof))
    kept = results["kept_files"](tmp_path, "proof")
    assert [path.stem for path in kept] == ["proof-2026-10-29", "proof-2026-10-30", "proof-2026-10-31"]
    found = results["joined"](kept)["sections"]
    assert list(found.items()) == [("equality", {"of": "29"}), ("memory", {"of": "30"}), ("ranks", {"of": "31"})]


def test_every_benchmark_can_be_shown(results: dict[str, Any]) -> None:
    """Results that nobody has kept yet, in the form in which their benchmarks write them."""
    row = {"peer": "P", "question": "q", "account": "peak", "unit": "B", "ours": 2**30, "theirs": 2**29, "why": ""}
    rows = [row | {"difference_frac": 1.0}, row | {"ours": None, "theirs": None, "why": "it cannot", "unit": "s"}]
    shown = "\n".join(results["predictors"]({"rows": rows}))
    assert "| P: q | peak | 1 GiB | 512 MiB | +100.00 % |" in shown
    assert "| P: q | it cannot |" in shown
    assert "| `noting_frac` | 0.004 |" in list(results["overhead"]({"noting_frac": 0.004, "rounds": 20}))
    section = {"name": "proof", "is_met": False, "not_done": "", "checks": [{"is_met": True}, {"is_met": False}]}
    assert "| proof | missed | 1 of 2 |" in list(results["gpu"]({"sections": [section]}))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_documents_name_exist(document: Path) -> None:
    if document.name in ("CHANGELOG.md", "exceptions.md"):
        return
    named = re.findall(
        r"`((?:shared|sim|runtime|calibration|benchmarks|docs|examples|tests)/[\w./-]+\.\w+)`", document.read_text()
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_index_lists_every_decision() -> None:
    pages = {path.name for path in (DOCS / "decisions").glob("0*.md")}
    assert set(re.findall(r"\]\((0[\w-]+\.md)\)", (DOCS / "decisions" / "README.md").read_text())) == pages
