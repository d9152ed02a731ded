"""``protwin published``: training runs that others measured, beside what is predicted of them from data sheets."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ...shared.basics.errors import ProtwinError
from ...shared.basics.progress import progress_bar
from ...shared.basics.suggestions import did_you_mean, listed, nearest_names
from ...shared.cli.options import JsonFlag, command_app, examples
from ...shared.cli.output import show
from ...shared.cli.streams import write_data
from ..published.measured_runs import MEASURED_RUNS, RUNS_OF_OTHER_FORMS, SOURCES, MeasuredRun
from ..published.outcome import Outcome
from ..published.run_predictions import PredictedRun, predict_run
from ..published.run_tables import by_class, memory_by_class, of_intervals, of_other_forms, of_runs

__all__ = ["published"]

published = command_app()


@published.command(
    epilog=examples(
        "protwin published",
        "protwin published --class H100",
        "protwin published --class 'LoRA, one A100' --anew --json",
    )
)
def published_command(
    classes: Annotated[
        list[str] | None,
        typer.Option("--class", metavar="TEXT", help="Runs whose class has this text (repeatable), one by one."),
    ] = None,
    runs: Annotated[
        list[str] | None, typer.Option("--run", metavar="ID", help="This run (repeatable); --json lists the ids.")
    ] = None,
    is_anew: Annotated[
        bool,
        typer.Option("--anew", help="Predict now, which traces the models and takes seconds a run, as protwin trace."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show how far predictions from data sheets are from training runs that others have published.

    Without options, errors of times by class, as they were when this version was made.  Errors are signed: negative
    means predicted too fast.  No price was fitted to these runs; the range
    of compute in intervals is that of all of them.
    """
    chosen = _chosen(classes or [], runs or [])
    if is_anew:
        predicted = {}
        with progress_bar("predicting published runs") as on_progress:
            for done, run in enumerate(chosen):
                on_progress(done, len(chosen))
                predicted[run.id] = predict_run(run)
        words = "Predicted now."
    else:
        outcome = Outcome.shipped()
        predicted, words = outcome.predicted, f"Predicted on {outcome.date}; --anew predicts now."
    if as_json:
        write_data(json.dumps([_document(run, predicted[run.id]) for run in chosen], indent=2) + "\n")
    elif classes or runs:
        show([*of_runs(chosen, predicted), words])
    else:
        show(
            [
                *by_class(predicted),
                *memory_by_class(predicted),
                *of_intervals(predicted),
                *of_other_forms(),
                f"{words} --class TEXT shows runs one by one.",
            ]
        )


def _chosen(classes: list[str], runs: list[str]) -> list[MeasuredRun]:
    """The runs that are asked for; all where nothing is.  Raises ProtwinError if some name is none."""
    known = {run.id: run for run in MEASURED_RUNS}
    for name in runs:
        _check_form(f"--run {name}", [run for run in RUNS_OF_OTHER_FORMS if run.id == name])
        if name not in known:
            raise ProtwinError(f"--run {name}: no published run is called so. {did_you_mean(name, known)}")
    for text in classes:
        if not any(text.lower() in run.run_class.lower() for run in MEASURED_RUNS):
            _check_form(
                f"--class {text!r}", [run for run in RUNS_OF_OTHER_FORMS if text.lower() in run.run_class.lower()]
            )
            every = dict.fromkeys(run.run_class for run in MEASURED_RUNS)
            nearest = listed([f'"{one}"' for one in nearest_names(text, every, least_similarity=0.0)])
            raise ProtwinError(
                f"--class {text!r} is in no class. The nearest are {nearest}; protwin published lists all {len(every)}."
            )
    if not classes and not runs:
        return list(MEASURED_RUNS)
    wanted = [text.lower() for text in classes]
    return [run for run in MEASURED_RUNS if run.id in runs or any(text in run.run_class.lower() for text in wanted)]


def _check_form(asked: str, others: list[MeasuredRun]) -> None:
    """Raise ProtwinError if what is asked for are runs of forms that no plan has."""
    if others:
        forms = "; ".join(dict.fromkeys(run.other_form or "" for run in others))
        raise ProtwinError(f"{asked} is not predicted, for no plan has its form: {forms}.")


def _document(run: MeasuredRun, predicted: PredictedRun) -> dict[str, Any]:
    """A run as it was published, with its source, what is predicted, and the signed error of the time."""
    error = None if run.iteration_s is None else predicted.iteration_s / run.iteration_s - 1
    return {
        "run": run.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        "source": SOURCES[run.source].model_dump(mode="json"),
        "predicted": predicted.model_dump(mode="json"),
        "iteration_error_frac": error,
    }
