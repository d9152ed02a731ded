"""One process of the peers' bench: makes a contestant, then trains as many steps as it is told to.

Requests come as lines of JSON on standard input, answers go as lines of JSON to what was standard output; everything
that libraries print goes to standard error.  ``peers.py`` starts it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from peers_subject import BUDGETED, LONG, OURS_TOGETHER, make_batches


class Contestant(Protocol):
    """A model in training."""

    about: str

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One training step; gives its loss."""

    def synchronize(self) -> None:
        """Wait for whatever runs beside the loop."""

    def close(self) -> None:
        """End."""


def main() -> None:
    """Make the contestant, answer requests until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestant")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--meeting-place", type=Path, required=True, help="a file that does not exist yet")
    parser.add_argument("--plans", type=Path, required=True, help="folder of our plans; the first of ours makes them")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    torch.set_num_threads(options.threads)
    try:
        contestant = make_contestant(options)
        own: Callable[[], Iterator[dict[str, torch.Tensor]]] | None = getattr(contestant, "batches", None)
        batches = own() if own is not None else make_batches(options.rank, options.ranks)
        answer({"about": contestant.about})
        for line in sys.stdin:
            request = json.loads(line)
            if request["watch"]:
                answer(watched_step(contestant, next(batches)))
            else:
                answer(burst(contestant, [next(batches) for _ in range(request["steps"])]))
        contestant.close()
    except ModuleNotFoundError as error:
        answer({"not_installed": error.name})
    except Exception as error:
        # Whatever a library raises is this contestant's result: the table says so, and the others go on.
        answer({"failed": f"{type(error).__name__}: {error}".splitlines()[0]})
        raise


def make_contestant(options: argparse.Namespace) -> Contestant:
    """The contestant that was asked for.  Raises ValueError if there is none of that name."""
    if options.contestant in ("fixed", "searched"):
        from peers_ours import Ours

        return Ours(options.contestant, options.plans)
    from peers_others import Ddp, DeepSpeedZero3, Fsdp2, Plain, join_ranks

    if options.contestant == "plain":
        return Plain()
    if options.contestant in ("plain-osft", "mini-trainer", *BUDGETED):
        from peers_budget import Budgeted, MiniTrainer, PlainOsft

        if options.contestant in BUDGETED:
            return Budgeted(options.contestant, options.plans)
        return PlainOsft(options.plans) if options.contestant == "plain-osft" else MiniTrainer()
    if options.contestant.startswith(LONG):
        from peers_long_models import make_contestant as make_long

        if options.ranks == 1:
            return make_long(options.contestant)
        from peers_long_ranks import make_rank

        is_ours = "-ours-" in options.contestant
        join_ranks(options.rank, options.ranks, options.meeting_place, sets_environment=not is_ours)
        return make_rank(options.contestant, options.ranks)
    if options.contestant.startswith(OURS_TOGETHER):
        from peers_ranks import OurRank

        join_ranks(options.rank, options.ranks, options.meeting_place, sets_environment=False)
        return OurRank(options.contestant.removeprefix(OURS_TOGETHER), options.plans, options.ranks)
    sharded: dict[str, Callable[[int], Contestant]] = {
        "ddp": Ddp,
        "fsdp2": Fsdp2,
        "fsdp2-on-devices": partial(Fsdp2, offloads=False),
        "deepspeed": DeepSpeedZero3,
    }
    if options.contestant not in sharded:
        raise ValueError(f"{options.contestant} is no contestant.")
    join_ranks(options.rank, options.ranks, options.meeting_place)
    return sharded[options.contestant](options.ranks)


def burst(contestant: Contestant, batches: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Train one step per batch; what still runs beside the loop at the end counts too.

    Seconds of the processor are those of all threads.
    """
    start, start_of_processor = time.perf_counter(), time.process_time()
    losses = [contestant.step(batch) for batch in batches]
    contestant.synchronize()
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - start_of_processor
    return {"seconds": seconds, "processor_seconds": processor_seconds, "losses": losses}


def watched_step(contestant: Contestant, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One step that does not count, and how many bytes were copied in it.

    A contestant of long sequences watches itself: its memory is asked for.  Ours counts what its lanes moved; of the
    others torch's profiler sees every copy, of which plain training makes a few of activations.
    """
    watched: Callable[[dict[str, torch.Tensor]], dict[str, Any]] | None = getattr(contestant, "watched", None)
    if watched is not None:
        return watched(batch)
    copied: Callable[[], int] | None = getattr(contestant, "copied_bytes", None)
    if copied is not None:
        contestant.synchronize()
        before = copied()
        losses = [contestant.step(batch)]
        contestant.synchronize()
        return {"losses": losses, "copied_bytes": copied() - before}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        losses = [contestant.step(batch)]
    shapes = [event.input_shapes for event in profile.events() if event.name == "aten::copy_"]
    return {"losses": losses, "copied_bytes": 4 * sum(math.prod(shape[0]) for shape in shapes if shape and shape[0])}


if __name__ == "__main__":
    main()
