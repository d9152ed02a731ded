"""Whether a run is long enough for a measured Record: asked before any work is done.  Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from ...shared.basics.errors import PlanError
from ..recording.timed_iterations import LEAST_EVERY, iterations_until_record


def check_record(steps: int, pauses: Mapping[str, int | None], done: int = 0) -> None:
    """Raise PlanError now if training from step ``done`` on will give no record.

    ``pauses`` are the steps between two pauses, by option.
    """
    missing = missing_for_record(steps, pauses, done)
    if missing is not None:
        raise PlanError(f"--output, --timeline and --json ask for a record, but {missing}")


def missing_for_record(steps: int, pauses: Mapping[str, int | None], done: int) -> str | None:
    """What a record of training from step ``done`` on is missing, and what would help; None if nothing is."""
    given = {option: every for option, every in pauses.items() if every is not None}
    named = " and ".join(f"{option} {every}" for option, every in given.items())
    need = iterations_until_record(pauses=tuple(given.values()), done=done)
    if need is None:
        several = len(given) > 1
        return (
            f"{named} {'leave' if several else 'leaves'} no two iterations in a row without a pause before either, "
            f"which its times are taken from. Make {'one' if several else 'it'} {LEAST_EVERY} or more"
            f"{' and the other a multiple of it' if several else ''}, or ask for no record."
        )
    if steps - done >= need:
        return None
    after = " after the checkpoint" if done else ""
    return (
        f"{steps - done} steps{after} are too few for its times, which need {need}{f' with {named}' if named else ''}. "
        f"Train {done + need} steps: --steps {done + need}."
    )
