"""Write docs/results.md and README's table of measurements from the newest results in benchmarks/results/.

Run it with ``make docs``; a test fails while the page is stale.
"""

from __future__ import annotations

import json
import runpy
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protwin.calibration.published.outcome import Outcome, calibrated_comparisons
from protwin.calibration.published.run_tables import run_tables
from protwin.shared import format_bytes
from protwin.shared.basics.units import format_seconds
from protwin.shared.tables.table import Heading, Table

_ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = _ROOT / "benchmarks" / "results"
PAGE: Final = _ROOT / "docs" / "results.md"
README: Final = _ROOT / "README.md"
_BEGIN: Final = "<!-- measured -->"
_END: Final = "<!-- end -->"

_HEAD: Final = """# Results

<!-- Written by docs/results_page.py from benchmarks/results/. Keep a result there, then run `make docs`. -->

Every table is read from a dated file in `benchmarks/results/`. The command of each section measures the figures anew;
with `--keep` it keeps the result as the section's file. Times come from a shared machine. Compare them within one table
only: all contestants of a table took turns in one run.
"""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark, the files that it keeps, and how their content is shown."""

    target: str
    """Of the Makefile."""
    keep: str
    """The command that keeps a result."""
    files: str
    """How the names of kept files begin."""
    title: str
    question: str
    show: Callable[[Any], Iterator[str]]


def main() -> None:
    """Write the page, and the table between README's marks."""
    PAGE.write_text(page(), encoding="utf-8")
    before, rest = README.read_text(encoding="utf-8").split(_BEGIN)
    README.write_text(f"{before}{_BEGIN}\n\n{summary()}\n\n{_END}{rest.split(_END)[1]}", encoding="utf-8")


def page(results: Path = RESULTS) -> str:
    """The page as text."""
    parts = [_HEAD, "| benchmark | question | kept |", "| --- | --- | --- |"]
    for one in BENCHMARKS:
        found = kept_files(results, one.files)
        kept = _date(found[-1]) if found else "no result kept"
        parts.append(f"| [{one.title}](#{one.title.lower().replace(' ', '-')}) | {one.question} | {kept} |")
    for one in BENCHMARKS:
        parts += ["", *_section(one, kept_files(results, one.files))]
    return "\n".join(parts) + "\n"


def summary(results: Path = RESULTS) -> str:
    """README's table: one line per claim that a stranger asks for, each with its command."""
    rows = []
    shown = {
        "proof": _proof_lines,
        "fidelity": _fidelity_lines,
        "fidelity_ranks": _fidelity_lines,
        "published": runpy.run_path(str(Path(__file__).with_name("results_published.py")))["published_lines"],
        "peers": _peer_lines,
    }
    for files, show in shown.items():
        one = next(one for one in BENCHMARKS if one.files == files)
        kept = kept_files(results, one.files)
        found = show(joined(kept)) if kept else [(one.question, "not kept")]
        rows += [(claim, outcome, f"`make {one.target}`") for claim, outcome in found]
    return "\n".join(_table(("claim", "result", "command"), rows, words=3))


_PROOF_WORDS: Final = {
    "equality": "losses and weights equal the plain loop's, bit for bit (fp32 and bfloat16, CPU)",
    "memory": "measured peaks of tiny models are within 0.5 % of the account, and 1000 steps grow nothing",
    "optimizers": "the same with every optimizer that can step the model here",
    "orthogonal": "orthogonal subspace fine-tuning equals the plain loop with the same projections, bit for bit",
    "tiles": "MLPs and losses in tiles equal the plain loop but for the order of sums, in the accounted memory",
    "faults": "a training that is killed resumes and ends with the plain loop's bits",
    "exhaustion": "out of memory at any task ends in one error that names its cause, and chunks are left at a step",
    "ranks": "processes that train together equal DistributedDataParallel, in the guaranteed memory (gloo, CPU)",
    "properties": "the property tests of compiler, verifier, simulator and search hold with all of their examples",
}
"""What each section of the proof claims, in their order."""


def _proof_lines(content: Any) -> Iterator[tuple[str, str]]:
    for name, section in content["sections"].items():
        cases = sum(claim["num_cases"] for claim in section["claims"])
        failed = sum(len(claim["failures"]) for claim in section["claims"])
        missed = [claim["subject"] for claim in section["claims"] if not claim["is_shown"]]
        outcome = f"{cases - failed:,} of {cases:,} cases"
        yield _PROOF_WORDS[name], outcome + (f"; **missed** for {' and '.join(missed)}" if missed else "")


def _fidelity_lines(content: Any) -> Iterator[tuple[str, str]]:
    """A line for each figure: of one model by itself, of several the range of their means and the worst of all."""
    names = ", ".join(one["model"] for one in content)
    plans = f"{names}, {sum(len(one['plans']) for one in content)} plans that nothing was fitted to"
    for figure, digits, subject in (("peak", 2, plans), ("iteration", 1, "the same plans")):
        means = sorted({f"{one[f'mean_{figure}_error_frac'] * 100:.{digits}f}" for one in content}, key=float)
        worst = max(one[f"worst_{figure}_error_frac"] for one in content)
        told = " to ".join(dict.fromkeys((means[0], means[-1])))
        yield f"error of the predicted {figure}; {subject}", f"mean {told} %, worst {worst * 100:.1f} %"


_PEER_LINES: Final = (
    (
        "step time with parameters on the host; plain loop without a budget = 1",
        "plain PyTorch loop",
        {"protwin": "protwin, fixed plan", "FSDP2": "FSDP2", "DeepSpeed ZeRO-3": "DeepSpeed ZeRO-3"},
    ),
    (
        "step time of two ranks, sharded, parameters on the hosts; FSDP2 with offload = 1",
        "FSDP2, two ranks",
        {"protwin": "protwin, sharded on hosts, two ranks", "DeepSpeed ZeRO-3": "DeepSpeed ZeRO-3, two ranks"},
    ),
    (
        "step time of two ranks, everything on the devices; DDP = 1",
        "DDP, two ranks",
        {
            "protwin (ddp)": "protwin, ddp, two ranks",
            "protwin (sharded)": "protwin, sharded on devices, two ranks",
            "FSDP2": "FSDP2 without offload, two ranks",
        },
    ),
)
"""Claims, whose step time is 1, and the contestants by their shown names."""


def _peer_lines(content: Any) -> Iterator[tuple[str, str]]:
    found = {one["name"]: one for one in content["contestants"] if not one["failure"]}
    for claim, reference, shown in _PEER_LINES:
        if reference in found:
            ratios = [
                f"{name} {_median_ratio(found[key]['burst_step_s'], found[reference]['burst_step_s']):.2f}"
                for name, key in shown.items()
                if key in found
            ]
            yield claim, ", ".join(ratios)


def kept_files(results: Path, files: str) -> list[Path]:
    """The kept file with the latest date, last; before it, earlier ones that have sections which it lacks."""
    found: list[Path] = []
    sections: set[str] = set()
    for path in sorted(results.glob(f"{files}-*.json"), key=_date, reverse=True):
        own = set(_sections(json.loads(path.read_text(encoding="utf-8"))))
        if not found or own - sections:
            found.insert(0, path)
        sections |= own
    return found


def joined(kept: Sequence[Path]) -> Any:
    """What the last of the files says, with sections of earlier ones where it has none of that name."""
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in kept]
    found = contents[-1]
    if _sections(found):
        every = {name: section for content in contents for name, section in _sections(content).items()}
        found["sections"] = {name: every[name] for name in sorted(every, key=list(_PROOF_WORDS).index)}
    return found


def _sections(content: Any) -> dict[str, Any]:
    found = content.get("sections") if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}


def _date(path: Path) -> str:
    """Of a kept file, by its name: fidelity-2026-11-21.json, gpu-2026-11-21-MACHINE.json."""
    return "-".join(path.stem.split("-")[1:4])


def _section(one: Benchmark, kept: Sequence[Path]) -> Iterator[str]:
    yield f"## {one.title}\n"
    yield one.question
    yield f"\n```console\n$ make {one.target}\n```\n"
    if not kept:
        yield f"**No result is kept.** `{one.keep}` writes one into `benchmarks/results/`."
        return
    yield from one.show(joined(kept))
    for path in kept:
        content = json.loads(path.read_text(encoding="utf-8"))
        about = content[0] if isinstance(content, list) else content
        software = ", ".join(f"{name} {version}" for name, version in about.get("software", {}).items())
        yield f"\n`benchmarks/results/{path.name}`, {about['machine']}{', ' if software else ''}{software}."


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> Iterator[str]:
    """A table whose first ``words`` columns hold words and whose others hold figures."""
    yield f"| {' | '.join(headings)} |"
    yield f"| {' | '.join(['---'] * words + ['---:'] * (len(headings) - words))} |"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def fidelity(content: Any) -> Iterator[str]:
    """Per model, errors of the predictions over all its plans, and the choice of the search."""
    headings = ("model", "plans", "peak error, mean", "worst", "iteration error, mean", "worst", "rank correlation")
    yield from _table(
        (*headings, "search's choice, above the best"),
        [
            (
                one["model"],
                str(len(one["plans"])),
                f"{one['mean_peak_error_frac'] * 100:.2f} %",
                f"{one['worst_peak_error_frac'] * 100:.1f} %",
                f"{one['mean_iteration_error_frac'] * 100:.1f} %",
                f"{one['worst_iteration_error_frac'] * 100:.1f} %",
                f"{one['rank_correlation']:.2f}",
                f"{one['search_regret_frac'] * 100:.1f} %",
            )
            for one in content
        ],
    )
    judged = [one for one in content if one.get("num_rounds") is not None]  # older files do not say
    if judged:
        yield ""
        yield from _intervals_and_blame(judged)


def _intervals_and_blame(judged: Sequence[Any]) -> Iterator[str]:
    """What ``protwin validate`` says besides: intervals, noise, and the kind of task that is to blame most."""

    def percent(share_frac: float | None, digits: int = 1, sign: str = "") -> str:
        return "–" if share_frac is None else f"{share_frac * 100:{sign}.{digits}f} %"

    headings = ("model", "signed mean", "noise", "drift", "within 90 % intervals", "half width", "peaks within theirs")
    yield from _table(
        (*headings, "peak error, measured times", "to blame most"),
        [
            (
                one["model"],
                percent(one["signed_mean_iteration_error_frac"], sign="+"),
                percent(one["median_noise_frac"]),
                percent(one["drift_frac"]),
                percent(one["time_coverage_frac"], 0),
                percent(one["median_half_width_frac"]),
                percent(one["peak_coverage_frac"], 0),
                percent(one["mean_retimed_peak_error_frac"], 2),
                ", ".join(f"{kind['kind']} {percent(kind['blame_frac'], sign='+')}" for kind in one["kinds"][:1]),
            )
            for one in judged
        ],
    )


def fidelity_of_ranks(content: Any) -> Iterator[str]:
    """Errors of predictions over all plans of ranks, and the choice of the mode."""
    yield from fidelity(content)
    yield ""
    yield from _table(
        ("model", "collectives of an iteration, mean error", "worst", "search's mode, above the fastest"),
        [
            (
                one["model"],
                f"{one['mean_collectives_error_frac'] * 100:.1f} %",
                f"{one['worst_collectives_error_frac'] * 100:.1f} %",
                f"{one['mode_regret_frac'] * 100:.1f} %",
            )
            for one in content
        ],
    )


def fidelity_of_bypass(content: Any) -> Iterator[str]:
    """Errors of predictions over all plans of a distillation, and the search's picks beside a plain loop."""
    yield from fidelity(content)
    yield ""
    yield from _table(
        ("model", "plain loop", "search's plan without a budget", "within the budget", "budget"),
        [
            (
                one["model"],
                format_seconds(one["plain_iteration_s"]),
                f"{one['plain_ratio']:.2f} times",
                f"{one['plain_ratio_in_budget']:.2f} times",
                format_bytes(one["budget_bytes"]),
            )
            for one in content
        ],
    )


_REFERENCES: Final = {
    "One rank": {"plain loop": "plain PyTorch loop", "protwin": "protwin, fixed plan"},
    "Two ranks": {
        "DDP": "DDP, two ranks",
        "FSDP2": "FSDP2 without offload, two ranks",
        "FSDP2, offload": "FSDP2, two ranks",
    },
}
"""Whose step times are 1 in a column, by the column's heading; the losses are the first's."""


def peers(content: Any) -> Iterator[str]:
    """Per contestant, its step time over those of others: medians of bursts that took turns."""
    by_name = {one["name"]: one for one in content["contestants"] if not one["failure"]}
    for num_ranks, (words, references) in enumerate(_REFERENCES.items(), start=1):
        of_ranks = [one for one in content["contestants"] if one.get("num_ranks", 1) == num_ranks]
        there = {heading: by_name[name] for heading, name in references.items() if name in by_name}
        if not of_ranks or not there:
            continue
        yield f"{words}:\n"
        yield from _peers_table(of_ranks, there)
        first, reference = next(iter(there.items()))
        yield (
            f"\n{first} takes {reference['median_step_s'] * 1000:.0f} ms a step. The loss difference is the largest of "
            f"any step from its losses.\n"
        )
    yield (
        f"All contestants train `{content['model']}`, batch size {content['batch_size']}, "
        f"{content['sequence_length']} tokens, with {content['threads_per_process']} thread per process, on the same "
        f"data."
    )


def _peers_table(contestants: Sequence[Any], references: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for one in contestants:
        if one["failure"]:
            rows.append((one["name"], one["failure"], *[""] * (3 + len(references))))
            continue
        ratios = [
            f"{_median_ratio(one['burst_step_s'], reference['burst_step_s']):.2f}" for reference in references.values()
        ]
        figures = (f"{one['spread_frac'] * 100:.1f} %", format_bytes(one["copied_bytes_per_step"]))
        rows.append((one["name"], one["about"], *ratios, *figures, f"{one['largest_loss_difference']:.1g}"))
    headings = ("contestant", "how", *(f"{heading} = 1" for heading in references), "spread", "copied per step")
    yield from _table((*headings, "loss difference"), rows, words=2)


def _median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def proof(content: Any) -> Iterator[str]:
    """Per section, claims, cases and what was missed; every missed claim by name."""
    sections = content["sections"]
    rows, missed = [], []
    for name, section in sections.items():
        claims = section["claims"]
        shown = sum(claim["is_shown"] for claim in claims)
        words = "; ".join(dict.fromkeys(claim["claim"] for claim in claims))
        cases = sum(claim["num_cases"] for claim in claims)
        failures = sum(len(claim["failures"]) for claim in claims)
        rows.append((name, words, f"{shown} of {len(claims)}", f"{cases:,}", str(failures)))
        missed += [claim for claim in claims if not claim["is_shown"]]
    yield from _table(("section", "claim", "claims shown", "cases", "failed cases"), rows, words=2)
    if missed:
        yield "\nMissed:\n"
    for claim in missed:
        yield f"- {claim['subject']}, {claim['claim']}: {'; '.join(claim['failures']) or 'not tried'}"


def search(content: Any) -> Iterator[str]:
    """Per search, its time beside brute force and replaying everything."""
    yield from _table(
        ("search", "plans", "may fit", "simulated", "seconds", "brute force", "replay of all that may fit", "gap"),
        [
            (
                one["case"],
                f"{one['num_plans']:,}",
                f"{one['num_may_fit']:,}",
                str(one["num_simulated"]),
                f"{one['search_cpu_s']:.2f}",
                f"{one['brute_force_s']:,.0f} s",
                f"{one['all_replayed_s']:,.1f} s",
                f"{one['gap_frac'] * 100:.2f} %",
            )
            for one in content["searches"]
        ],
    )
    yield (
        "\nSeconds are CPU time, the workload and the machine loaded. Brute force and replay are extrapolated from "
        "samples. The gap is proven: no plan of the space is faster by more. From the shell:\n"
    )
    yield from _table(
        ("command", "seconds"), [(f"`{one['command']}`", f"{one['clock_s']:.2f}") for one in content["commands"]]
    )


def overhead(content: Any) -> Iterator[str]:
    """Every ratio and fraction that the benchmark keeps."""
    found = {name: value for name, value in content.items() if isinstance(value, float)}
    yield from _table(("figure", "value"), [(f"`{name}`", f"{value:.4g}") for name, value in found.items()])


def predictors(content: Any) -> Iterator[str]:
    """Per question, both answers."""
    rows = []
    for one in content["rows"]:
        if one["ours"] is None:
            rows.append((f"{one['peer']}: {one['question']}", one["why"], "", "", ""))
            continue
        worth = format_bytes if one["unit"] == "B" else (lambda value, unit=one["unit"]: f"{value:.4g} {unit}".strip())
        answers = [worth(one["ours"]), worth(one["theirs"])]
        rows.append(
            (f"{one['peer']}: {one['question']}", one["account"], *answers, f"{one['difference_frac'] * 100:+.2f} %")
        )
    yield from _table(("question", "figure", "protwin", "other", "difference"), rows, words=2)


def commands(content: Any) -> Iterator[str]:
    """Each command line once, the slowest first, and those that need files of the reader's."""
    once = {row["command"]: row for row in content["rows"]}
    rows = sorted(once.values(), key=lambda row: -row["cost"]["wall_s"])
    done = [row for row in rows if row["cost"]["exit_code"] == 0]
    yield from _table(
        ("command", "seconds", "of the processor", "peak memory"),
        [
            (
                f"`{row['command']}`",
                f"{row['cost']['wall_s']:.1f}",
                f"{row['cost']['cpu_s']:.1f}",
                format_bytes(row["cost"]["peak_rss_bytes"]),
            )
            for row in done
        ],
    )
    missing = ", ".join(f"`{row['command']}`" for row in rows if row["cost"]["exit_code"])
    if missing:
        yield f"\nNot timed, since they need files of your own or more time than the limit: {missing}."
    load = content["load_average"]
    yield f"\nThe machine had {load:.0f} processes at work at the end: seconds by the clock are too long by as much."


def gpu(content: Any) -> Iterator[str]:
    """Per section, its checks."""
    rows = []
    for section in content["sections"]:
        met = sum(check["is_met"] for check in section["checks"])
        state = "as claimed" if section["is_met"] else section["not_done"] or "missed"
        rows.append((section["name"], state, f"{met} of {len(section['checks'])}"))
    yield from _table(("section", "state", "checks met"), rows, words=2)
    if "note" in content:
        yield f"\n{content['note']}"


def published(content: Any) -> Iterator[str]:
    """Runs that others measured, in their own units, by class, as comparisons of plans, and their memory."""
    fidelity = kept_files(RESULTS, "fidelity")
    calibrated = calibrated_comparisons(fidelity[-1]) if fidelity else []
    yield from ("![Predicted against measured seconds of a step, one colour for classes alike](published.svg)", "")
    for part in run_tables(Outcome.model_validate(content), calibrated):
        if isinstance(part, Table):
            words = next(place for place in range(len(part.columns)) if part.is_figure(place))
            headings = [column.removeprefix(">") for column in part.columns]
            yield from (f"**{part.title}**", "", *_table(headings, part.rows, words=words), "")
        elif not isinstance(part, Heading):
            yield from (*(f"- {line}" for line in part.splitlines()), "")
    yield "Other published figures, with ranges: [Predictions without measurements](predictions.md#published-runs)."


def _benchmarks() -> Iterator[Benchmark]:
    """The sections of ``results_page.toml``."""
    described = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    shows = dict(globals())
    for module in ("results_osft.py", "results_long.py", "results_sheets.py"):
        shows |= runpy.run_path(str(Path(__file__).with_name(module)))
    for one in described["benchmark"]:
        yield Benchmark(**one | {"show": shows[one["show"]]})


BENCHMARKS: Final = tuple(_benchmarks())


if __name__ == "__main__":
    main()
