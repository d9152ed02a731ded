"""Whether a run is long enough for a measured Record: asked before any work is done.  Needs no torch."""

from __future__ import annotations

from ...shared.basics.errors import PlanError
from ..recording.timed_iterations import LEAST_EVERY, iterations_until_record


def check_record(steps: int, checkpoint_every: int | None, done: int = 0) -> None:
    """Raise PlanError now if training from step ``done`` on will give no record."""
    missing = missing_for_record(steps, checkpoint_every, done)
    if missing is not None:
        raise PlanError(f"--output, --timeline and --json ask for a record, but {missing}")


def missing_for_record(steps: int, checkpoint_every: int | None, done: int) -> str | None:
    """What a record of training from step ``done`` on is missing, and what would help; None if nothing is."""
    need = iterations_until_record(pause_every=checkpoint_every, done=done)
    if need is None:
        return (
            f"--checkpoint-every {checkpoint_every} leaves no two iterations in a row without a save before either, "
            f"which its times are taken from. Make it {LEAST_EVERY} or more, or ask for no record."
        )
    if steps - done >= need:
        return None
    after = " after the checkpoint" if done else ""
    saves = f" with --checkpoint-every {checkpoint_every}" if checkpoint_every is not None else ""
    return (
        f"{steps - done} steps{after} are too few for its times, which need {need}{saves}. Raise --steps to "
        f"{done + need}."
    )
