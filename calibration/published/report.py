"""Published training runs beside what the simulator says of them: prediction, measurement, signed error.

Run it with ``make published`` (``--json`` for a document, ``--keep FOLDER`` for a file of the results page).  It needs
torch, to trace the models, and no hardware.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from ...shared.basics.progress import progress_bar
from ...shared.basics.units import format_seconds
from ...shared.tables.table import Heading, Parts, Table
from ...shared.tables.terminal import Printed, least_width
from .outcome import Outcome, calibrated_comparisons
from .predictions import MATCHING, NUM_RANKS, predict_published
from .run_predictions import predict_runs
from .run_tables import run_tables
from .runs import (
    DATA_PARALLEL,
    ON_DEVICE,
    PUBLISHED_RUNS,
    REPLICATED,
    SHARDED,
    Measurement,
    Prediction,
    PublishedRun,
    Quantity,
)

AIM_FRAC: Final = {Quantity.ITERATION: 0.15, Quantity.DEVICE_PEAK: 0.05, Quantity.PINNED: 0.05}
"""How near predictions are to come."""
_SAMPLES: Final = {ON_DEVICE: 2, DATA_PARALLEL: 2 * NUM_RANKS, REPLICATED: 2 * NUM_RANKS, SHARDED: 2 * NUM_RANKS}
"""Of one iteration of R1, over all ranks."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict all published runs and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of tables")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="write the predictions there, by their date, and beside this module"
    )
    parser.add_argument("--fidelity", type=Path, metavar="FILE", help="a result of bench-fidelity, whose plans compare")
    options = parser.parse_args(arguments)
    with progress_bar("predicting published figures") as on_progress:
        predictions = predict_published(on_progress)
    with progress_bar("predicting published runs") as on_progress:
        outcome = Outcome.of(predictions, predict_runs(on_progress))
    if options.keep is not None:
        outcome.keep(options.keep)
        outcome.ship()
    calibrated = calibrated_comparisons(options.fidelity) if options.fidelity is not None else []
    if options.json:
        document = published_document(outcome.predictions) | {
            "measured_runs": [run.model_dump(mode="json") for run in outcome.runs]
        }
        print(json.dumps(document, indent=2))  # noqa: T201
    else:
        tables = (*published_tables(outcome.predictions), *run_tables(outcome, calibrated))
        console = Console(highlight=False)
        console.width = max(console.width if console.is_terminal else 150, least_width(tables))
        console.print(Printed(tables))


def predictions_of(measurement: Measurement, predictions: Sequence[Prediction]) -> list[Prediction]:
    """The predictions of one measurement, the one that counts first."""
    key = (measurement.row, measurement.case, measurement.quantity)
    found = [p for p in predictions if (p.row, p.case, p.quantity) == key]
    return sorted(found, key=lambda prediction: prediction.variant)


def published_document(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Every run with its measurements, predictions and signed errors, as JSON; units are those of the quantity."""
    return {
        "runs": [
            run.model_dump(mode="json", exclude={"measurements", "sharded"})
            | {
                "figures": [
                    measurement.model_dump(mode="json", exclude={"row"})
                    | {
                        "predictions": [
                            prediction.model_dump(mode="json", exclude={"row", "case", "quantity"})
                            | {"error_frac": [prediction.error_frac(reading) for reading in measurement.readings]}
                            for prediction in predictions_of(measurement, predictions)
                        ]
                    }
                    for measurement in run.measurements
                ]
            }
            for run in PUBLISHED_RUNS
        ],
        "order_of_R1": {"measured": measured_order(), "predicted": predicted_order(predictions)},
    }


def published_tables(predictions: Sequence[Prediction]) -> Parts:
    """Every run as a table, and what it comes to."""
    return (*(part for run in PUBLISHED_RUNS for part in _run_tables(run, predictions)), *_summary(predictions))


def _run_tables(run: PublishedRun, predictions: Sequence[Prediction]) -> Parts:
    title = f"{run.row}: {run.title}"
    if run.not_predicted is not None:
        return Heading(title), f"Not predicted: {run.not_predicted}"
    how: list[str] = []
    rows = []
    for measurement in run.measurements:
        for prediction in predictions_of(measurement, predictions):
            if prediction.how not in how:
                how.append(prediction.how)
            rows.append((*_cells(measurement, prediction), f"[{how.index(prediction.how) + 1}]"))
    lines = [f"[{number}] {words}" for number, words in enumerate(how, start=1)]
    if run.remark is not None:
        lines.append(f"Remark: {run.remark}")
    lines += [f"Unknown: {'; '.join(run.unknown)}.", f"Source: {run.source}."]
    columns = ("", "figure", ">measured", ">predicted", ">range", ">error", "met by", "note")
    return Table(title=title, columns=columns, rows=rows), "\n".join(lines)


def _cells(measurement: Measurement, prediction: Prediction) -> tuple[str, ...]:
    quantity = measurement.quantity
    errors = " or ".join(f"{prediction.error_frac(reading):+.1%}" for reading in measurement.readings)
    return (
        measurement.case + (f" ({prediction.variant})" if prediction.variant else ""),
        _NAMES[quantity],
        " or ".join(_show(quantity, reading) for reading in measurement.readings),
        _show(quantity, prediction.likely),
        f"{_show(quantity, prediction.low)} – {_show(quantity, prediction.high)}",
        "given" if prediction.is_given else errors,
        _verdict(measurement, prediction),
    )


def _verdict(measurement: Measurement, prediction: Prediction) -> str:
    """Whether the aim is met by the likely prediction, or by some reading of what is unknown."""
    if prediction.is_given:
        return ""
    if is_within_aim(measurement, prediction):
        return "likely"
    return "range" if prediction.reaches(measurement.readings, AIM_FRAC.get(measurement.quantity, 0.0)) else "no"


def is_within_aim(measurement: Measurement, prediction: Prediction) -> bool:
    """Whether the likely prediction comes as near as it is to come to one reading of the measurement."""
    aim_frac = AIM_FRAC.get(measurement.quantity)
    return aim_frac is not None and any(abs(prediction.error_frac(r)) <= aim_frac for r in measurement.readings)


def measured_order() -> list[str]:
    """The cases of R1 by samples per second as measured, fastest first."""
    measured = {
        m.case: m.readings[0]
        for run in PUBLISHED_RUNS
        for m in run.measurements
        if (m.row, m.quantity) == ("R1", Quantity.ITERATION)
    }
    return sorted(_SAMPLES, key=lambda case: measured[case] / _SAMPLES[case])


def predicted_order(predictions: Sequence[Prediction], variant: str = "", *, unfavourable: bool = False) -> list[str]:
    """The cases of R1 by samples per second as predicted, fastest first; ``variant`` where there is one.

    Of the likely reading of what is unknown, or of the unfavourable one.
    """
    of_case = {
        case: [p for p in predictions if (p.row, p.case, p.quantity) == ("R1", case, Quantity.ITERATION)]
        for case in _SAMPLES
    }
    chosen = {case: next((p for p in found if p.variant == variant), found[0]) for case, found in of_case.items()}

    def seconds_per_sample(case: str) -> float:
        return (chosen[case].high if unfavourable else chosen[case].likely) / _SAMPLES[case]

    return sorted(_SAMPLES, key=seconds_per_sample)


def _summary(predictions: Sequence[Prediction]) -> Parts:
    figures = [m for run in PUBLISHED_RUNS for m in run.measurements if m.quantity in AIM_FRAC]
    pairs = [(m, p) for m in figures for p in predictions_of(m, predictions) if not p.variant and not p.is_given]
    lines = []
    for name, quantities in (("time within 15 %", [Quantity.ITERATION]), ("memory within 5 %", [Quantity.DEVICE_PEAK])):
        chosen = [(m, p) for m, p in pairs if m.quantity in quantities]
        aims = sum(is_within_aim(m, p) for m, p in chosen)
        ranges = sum(p.reaches(m.readings, AIM_FRAC[m.quantity]) for m, p in chosen)
        lines.append(f"{name}: {aims} of {len(chosen)} figures; for some reading of what is unknown: {ranges}")
    measured = measured_order()
    lines.append("R1 by samples/s, measured:  " + " > ".join(measured))
    for variant, unfavourable in (("", False), (MATCHING, False), (MATCHING, True)):
        predicted = predicted_order(predictions, variant, unfavourable=unfavourable)
        readings = [reading for reading, holds in ((variant, bool(variant)), ("unfavourable", unfavourable)) if holds]
        named = f" ({', '.join(readings)})" if readings else ""
        verdict = "the same" if predicted == measured else "another order"
        lines.append(f"R1 by samples/s, predicted{named}: {' > '.join(predicted)} ({verdict})")
    return Heading("What it comes to"), "\n".join(lines)


_NAMES: Final = {
    Quantity.ITERATION: "iteration",
    Quantity.DEVICE_PEAK: "device peak",
    Quantity.PINNED: "pinned host",
    Quantity.LARGEST: "parameters",
    Quantity.LONGEST: "longest sample",
    Quantity.ADAM: "full update",
}


def _show(quantity: Quantity, value: float) -> str:
    if quantity is Quantity.LARGEST:
        return f"{value / 1e9:.1f} B"
    if quantity is Quantity.LONGEST:
        return f"{value:,.0f} tokens"
    if quantity in (Quantity.ITERATION, Quantity.ADAM):
        return format_seconds(value)
    return f"{value / 1e9:.2f}e9 B"


if __name__ == "__main__":
    main()
