"""What a model forgets of a first text while it learns a second one: whole, by LoRA and by OSFT, over several seeds.

Seeds differ in the first model's weights and in the order of batches.  Every way chooses its learning rate of the same
grid, anew for every seed and text, by validation loss on the second text.  The loop is the plain one with the same
modules and projections: ``make demo-osft`` shows that plans give the same losses bit for bit.
``make bench-forgetting`` runs it; results are kept in benchmarks/results/ with date and machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from protwin.calibration.demos.forgetting import (
    CONFIGURATION,
    Learned,
    Lesson,
    Way,
    best_of,
    documentation,
    learned,
    learned_first,
    source_code,
    sums_of_numbers,
)
from protwin.runtime.devices.machine import machine_name, num_cores
from protwin.runtime.model.identity import software_versions
from protwin.shared.basics.documents import write_atomically

_AT_MOST: Final = 0.5
"""Of what full fine-tuning forgets, OSFT is to forget at most this part."""


def main() -> None:
    """Train with all seeds, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of weights and batches (0 1 2)")
    parser.add_argument("--first-steps", type=int, default=1000, help="steps on the first text (1000)")
    parser.add_argument("--steps", type=int, default=150, help="steps on the second text (150)")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[3e-3, 1e-2, 3e-2], help="learning rates to choose of"
    )
    parser.add_argument("--ratio", type=float, default=0.25, help="part of the directions that OSFT trains (0.25)")
    parser.add_argument("--keep", action="store_true", help="keep the result in benchmarks/results/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(highlight=False, width=150)
    console.print(f"rates to choose of: {' '.join(map(str, options.rates))}")
    lesson = Lesson(
        configuration=CONFIGURATION,
        first_steps=options.first_steps,
        steps=options.steps,
        rates=tuple(options.rates),
        unfreeze_rank_ratio=options.ratio,
    )
    rows = [row for seed in options.seeds for row in of_seed(lesson, seed, console)]
    content = {"schema_version": 1, "lesson": asdict(lesson), "texts": summaries(rows), "rows": rows}
    show(content["texts"], console)
    if options.keep:
        console.print(f"kept in {keep(content)}")


def of_seed(lesson: Lesson, seed: int, console: Console) -> list[dict[str, Any]]:
    """What every way came to on every second text, one row for each."""
    started = time.perf_counter()
    first = documentation(lesson)
    base = learned_first(lesson, first, seed)
    rows = []
    for second in (sums_of_numbers(lesson), source_code(lesson)):
        for way in Way:
            chosen = best_of([learned(base, way, rate, first, second, lesson, seed)[0] for rate in lesson.rates])
            rows.append(row_of(chosen, seed, first.name, second.name))
    console.print(f"seed {seed}: {time.perf_counter() - started:.0f} s")
    return rows


def row_of(chosen: Learned, seed: int, first: str, second: str) -> dict[str, Any]:
    """For a file, without the losses of the steps."""
    figures = {name: value for name, value in asdict(chosen).items() if name != "losses"}
    return {"first": first, "second": second, "seed": seed} | figures | {"forgotten": chosen.forgotten}


def summaries(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every second text, mean and spread of every way, and whether OSFT does what it is to do."""
    found = []
    for second in dict.fromkeys(row["second"] for row in rows):
        by_way = {way: [row for row in rows if row["second"] == second and row["way"] == way] for way in Way}
        ratios = [
            osft["forgotten"] / full["forgotten"] for osft, full in zip(by_way[Way.OSFT], by_way[Way.FULL], strict=True)
        ]
        beyond = [
            osft["second_after"] - lora["second_after"]
            for osft, lora in zip(by_way[Way.OSFT], by_way[Way.LORA], strict=True)
        ]
        found.append(
            {
                "first": rows[0]["first"],
                "second": second,
                "ways": {str(way): figures_of(of_way) for way, of_way in by_way.items()},
                "forgotten_by_osft_over_full": mean_and_spread(ratios),
                "osft_less_lora_on_second": mean_and_spread(beyond),
                "forgets_half_at_most": statistics.fmean(ratios) <= _AT_MOST,
                "learns_as_lora_does": statistics.fmean(beyond) <= 0,
            }
        )
    return found


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one way, over seeds."""
    names = ("first_before", "first_after", "forgotten", "second_before", "second_after")
    return {
        "num_trained": rows[0]["num_trained"],
        "rates": [row["rate"] for row in rows],
        **{name: mean_and_spread([row[name] for row in rows]) for name in names},
    }


def mean_and_spread(values: Sequence[float]) -> list[float]:
    """The mean, and the standard deviation over seeds; of a single seed 0."""
    return [statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0]


def show(texts: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a table for each second text."""
    for one in texts:
        table = Table(
            title=f"{one['first']} first, then {one['second']}: held-out losses in nats per byte, mean ± spread",
            title_justify="left",
        )
        for name in ("way", "trained", "rates", one["first"], "forgotten", one["second"]):
            table.add_column(name, justify="left" if name == "way" else "right")
        for way, figures in one["ways"].items():
            table.add_row(
                way,
                f"{figures['num_trained']:,}",
                " ".join(f"{rate:g}" for rate in figures["rates"]),
                *(told(figures[name]) for name in ("first_after", "forgotten", "second_after")),
            )
        console.print(table)
        console.print(
            f"OSFT forgets {told(one['forgotten_by_osft_over_full'])} times what full fine-tuning does "
            f"({'as claimed' if one['forgets_half_at_most'] else 'missed'}: at most {_AT_MOST}); on the second text "
            f"its loss is {told(one['osft_less_lora_on_second'])} beyond that of LoRA "
            f"({'as claimed' if one['learns_as_lora_does'] else 'missed'}: at most 0)"
        )


def told(figure: Sequence[float]) -> str:
    """Mean and spread."""
    return f"{figure[0]:.3f} ± {figure[1]:.3f}"


def keep(content: dict[str, Any]) -> Path:
    """Write the result, with date and machine; gives its path."""
    today = datetime.date.today().isoformat()
    path = Path(__file__).parent / "results" / f"forgetting-{today}.json"
    about = {"date": today, "machine": machine_name(), "num_cores": num_cores(), "software": software_versions()}
    write_atomically(path, json.dumps(about | content, indent=1) + "\n")
    return path


if __name__ == "__main__":
    main()
