"""``protwin run`` on several ranks: this process among them, starting them, and one voice for all.

torch is imported where it is needed alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

import typer

from ...shared.basics.errors import ProtwinError, RanksError
from ...shared.cli.exits import EXIT_INTERRUPTED, EXIT_MISTAKE
from ...shared.pipelines.pipeline import Pipeline
from ...shared.schema.plan import Plan
from ..devices.machine import num_cores
from ..ranks.launch import Launch, check_num_ranks, launch_of

_PATIENCE_S: Final = 5.0
"""Seconds until a store that does not answer is given up."""
FACTORISING_TIMEOUT_S: Final = 7200.0
"""Seconds that a rank waits for another one's decompositions: they are shared evenly, but by whole weights, each of
which may take a core half an hour.  A rank that ends is noticed at once all the same."""
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RunRank:
    """This process among the ranks of a run."""

    rank: int = 0
    num_ranks: int = 1
    num_local: int = 1
    """Ranks on this machine, which share its cores and its memory."""
    local_rank: int = 0
    """Its number among them."""

    @property
    def speaks(self) -> bool:
        """Whether it writes what is to be written, and tells how training went."""
        return self.rank == 0


ALONE: Final = RunRank()
"""A run that nobody shares."""


def rank_at_hand(environment: Mapping[str, str]) -> RunRank:
    """As launched; one rank alone where nobody launched several.  Raises RanksError if variables contradict."""
    launch = launch_of(environment)
    if launch is None:
        return ALONE
    local = environment.get("LOCAL_WORLD_SIZE", "")
    num_local = int(local) if local.isascii() and local.isdigit() else launch.num_ranks
    return RunRank(launch.rank, launch.num_ranks, min(max(1, num_local), launch.num_ranks), launch.local_rank)


def has_to_start(plan: Plan | Pipeline, asked: int | None, environment: Mapping[str, str]) -> bool:
    """Whether ranks are still to be started.

    ``asked`` is what ``--ranks`` says.  Raises ProtwinError if it contradicts the plan, or the plan contradicts how
    many processes there are.
    """
    if asked is not None and asked != plan.num_ranks:
        if plan.num_ranks == 1:
            raise ProtwinError(
                f"--ranks is {asked}, but the plan is for one rank. Leave it out, or search a plan with --ranks "
                f"{asked}."
            )
        how = f"a pipeline of {plan.num_stages} stages" if isinstance(plan, Pipeline) else plan.parallel
        remedy = f"search a plan with --ranks {asked}" if asked > 1 else "search a plan without --ranks"
        raise ProtwinError(
            f"--ranks is {asked}, but the plan is for {plan.num_ranks} ranks ({how}). Pass --ranks "
            f"{plan.num_ranks}, or {remedy}."
        )
    launch = launch_of(environment)
    if launch is not None:
        check_num_ranks(plan.num_ranks, launch.num_ranks, f"WORLD_SIZE = {launch.num_ranks}")
    elif asked is None:
        check_num_ranks(plan.num_ranks, 1, "no --ranks is given")
    return launch is None and plan.num_ranks > 1


def ranks_to_measure(asked: int | None, environment: Mapping[str, str]) -> tuple[int, bool]:
    """How many ranks a command that measures a machine has, and whether they are still to be started.

    ``asked`` is what ``--ranks`` says; where torchrun has started ranks, it may be left out.  Raises ProtwinError if
    the two contradict, RanksError if torchrun's variables do.
    """
    launch = launch_of(environment)
    if launch is None:
        return asked or 1, (asked or 1) > 1
    if asked not in (None, launch.num_ranks):
        raise ProtwinError(
            f"--ranks is {asked}, but {launch.num_ranks} processes were started (WORLD_SIZE = {launch.num_ranks}). "
            f"Leave --ranks out under torchrun, or start protwin without it."
        )
    return launch.num_ranks, False


def start_ranks(num_ranks: int, arguments: Sequence[str]) -> int:
    """Run ``protwin`` with ``arguments`` on every rank, by torchrun, on this machine; gives the exit code.

    It is that of the rank that failed first; torchrun ends the others then.  Raises RanksError if a rank was killed.
    """
    # torchrun would set it to 1, and warn.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # The rank that failed has told its user; what torchrun logs of it is for operators of clusters.
    logging.disable(logging.ERROR)
    try:
        # torch does not annotate them.
        wanted = parse_args(  # type: ignore[no-untyped-call]
            ["--standalone", "--nproc-per-node", str(num_ranks), "-m", "protwin", *arguments]
        )
        run(wanted)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            raise RanksError(
                f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}, and the others with it. See "
                f"whether the machine ran out of memory."
            ) from error
        return failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        logging.disable(logging.NOTSET)
    return 0


def in_one_voice(command: Callable[_P, _T]) -> Callable[_P, _T]:
    """``command``, of whose ranks one alone tells a mistake that several of them find, or that it was interrupted."""

    @wraps(command)
    def run(*arguments: _P.args, **options: _P.kwargs) -> _T:
        try:
            return command(*arguments, **options)
        except ProtwinError as error:
            launch = launch_of(os.environ)
            if launch is None or launch.num_ranks == 1 or _is_first_to_tell(launch, str(error)):
                raise
            raise typer.Exit(EXIT_MISTAKE) from error
        except KeyboardInterrupt as error:
            if rank_at_hand(os.environ).speaks:
                raise
            raise typer.Exit(EXIT_INTERRUPTED) from error

    return run


def _is_first_to_tell(launch: Launch, message: str) -> bool:
    """Whether no other rank has told ``message``; True where the ranks' store does not answer."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"protwin/told/{attempt}/{hashlib.sha256(message.encode()).hexdigest()}"
    own = str(launch.rank)
    try:
        return bool(_store(launch).compare_set(key, "", own) == own.encode())
    except RuntimeError:
        return True


def note_accepted(environment: Mapping[str, str]) -> None:
    """The options of this launch were accepted: when its ranks are started again, they go on from their checkpoint."""
    launch = launch_of(environment)
    if launch is None or launch.rank:
        return
    with suppress(RuntimeError):
        _store(launch).set(_ACCEPTED, "1")


def was_accepted(environment: Mapping[str, str]) -> bool:
    """Whether this launch had accepted its options before torchrun started its ranks again.

    torchrun starts ranks again after a refusal too.  A folder that another run has filled is refused then as before.
    """
    launch = launch_of(environment)
    if launch is None or environment.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    try:
        return bool(_store(launch).check([_ACCEPTED]))
    except RuntimeError:
        return False


_ACCEPTED: Final = "protwin/accepted"


def _store(launch: Launch) -> Any:
    """What the launcher keeps for all ranks, over restarts too.  Raises RuntimeError if it does not answer."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=_PATIENCE_S)
    return TCPStore(launch.address, launch.port, is_master=False, wait_for_workers=False, timeout=timeout)
