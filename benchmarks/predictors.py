"""Other predictors on the same questions, none of which needs the hardware.

MemTracker (torch.distributed._tools) follows the storages of real iterations of the model on fake tensors; ours lays
the phases of a traced workload end to end by a schedule.  The two share neither code nor method, so that where
definitions agree, their peaks must.  llm-analysis and Calculon are formulas over a model's shape, and are asked what
they can answer.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

from predictors_formulas import ask_calculon, ask_llm_analysis
from predictors_memory import Case, compare, measure_theirs, predict_ours
from predictors_rows import Row
from rich.console import Console
from rich.table import Table
from rich.text import Text

from protwin.runtime.devices.machine import machine_name
from protwin.shared.basics.documents import write_atomically
from protwin.shared.basics.progress import progress_bar

CASES = (
    Case("llama-3-8b", 1, 2048, "bfloat16", is_checkpointed=False, has_optimizer=False),
    Case("llama-3-8b", 1, 2048, "bfloat16", is_checkpointed=True, has_optimizer=False),
    Case("llama-3.2-1b", 1, 2048, "float32", is_checkpointed=False, has_optimizer=True),
)
AIM_FRAC = 0.01


def main() -> None:
    """Ask every predictor and print the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="ask about this model of the catalogue instead")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    rows: list[Row] = []
    with progress_bar("asking predictors") as on_progress:
        for done, case in enumerate(CASES):
            on_progress(done, len(CASES) + 1)
            asked = case.of_model(options.model) if options.model else case
            started = time.perf_counter()
            ours = predict_ours(asked)
            between = time.perf_counter()
            theirs = measure_theirs(asked)
            rows += compare(asked, ours, theirs, ours_s=between - started, theirs_s=time.perf_counter() - between)
            gc.collect()
        on_progress(len(CASES), len(CASES) + 1)
        rows += ask_llm_analysis() + ask_calculon()
    _print(rows)
    if options.output is not None:
        document = {"machine": machine_name(), "rows": [row.as_json() for row in rows]}
        write_atomically(options.output, json.dumps(document, indent=2) + "\n")


def _print(rows: list[Row]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    table = Table(title=f"predictors on {machine_name()}", title_justify="left")
    for heading, justify in (("question", "left"), ("figure", "left"), ("ours", "right"), ("theirs", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("difference", justify="right")
    table.add_column("why")
    question = ""
    for row in rows:
        asked = f"{row.peer}: {row.question}"
        table.add_row(
            Text(asked if asked != question else ""),
            Text(row.account),
            _show(row.ours, row.unit),
            _show(row.theirs, row.unit),
            f"{row.difference_frac:+.2%}" if row.difference_frac is not None else "–",
            Text(row.why),
        )
        question = asked
    console.print(table)
    peaks = [row for row in rows if row.account == "peak" and row.difference_frac is not None]
    near = sum(abs(row.difference_frac or 0.0) <= AIM_FRAC for row in peaks)
    console.print(f"peaks within {AIM_FRAC:.0%} of MemTracker's: {near} of {len(peaks)}")


def _show(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "B":
        return f"{value / 2**30:.3f} GiB"
    return f"{value:.3f} s" if unit == "s" else f"{value:.4g}"


if __name__ == "__main__":
    main()
