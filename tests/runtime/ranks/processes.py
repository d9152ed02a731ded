"""Real processes that stay, one per rank, which many cases share; and processes that do one thing.

[Note: Processes that need not start]
torch and transformers take five seconds to import and as long to leave, and tests ask for twenty processes.  So all of
them are forked from one process that has imported what ranks need, and has run nothing: it has no thread.  They get
the workloads that the tests have traced, so that not every one of them traces every model.  What was imported is set
aside before the first fork: a collection writes to all that it looks at, which every process would have to copy.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from protwin.runtime.ranks import failures
from tests.runtime.ranks.beside_ddp import take_workloads, traced_workloads

PATIENCE_S = 240.0
_IMPORTED = (
    "tests.runtime.families",
    "tests.runtime.killed_ranks",
    "tests.runtime.killed_saving",
    "tests.runtime.ranks.beside_groups",
    "tests.runtime.ranks.measuring",
    "tests.runtime.ranks.wrong_ranks",
    "torch.distributed.checkpoint",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "tests.runtime.ranks.imported",
)
"""See [Note: Processes that need not start]."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([*_IMPORTED])


@dataclass(frozen=True)
class Outcome:
    """What a call gave on one rank."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""

    def get(self) -> Any:
        assert self.error is None, self.trace
        return self.value


class Ranks:
    """Processes with the environment that torchrun gives; closed at the end of a ``with`` block."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        # As torchrun's agent does: the store is served here, at a port that is free.
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self._traced: set[tuple[int, str]] = set()
        """The cases whose workloads the processes have; see [Note: Processes that need not start]."""
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(num_ranks):
            own, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(theirs, self._environment(rank)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(own)
            self.processes.append(process)

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    @property
    def are_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def outcomes(self, function: Callable[..., Any], *arguments: Any, patience_s: float = PATIENCE_S) -> list[Outcome]:
        """``function(rank, *arguments)`` on every rank at once; what each gave or raised.

        ``function`` is a module's own, since its name alone travels.  Processes that do not answer in time are killed.
        """
        traced = {key: workload for key, workload in traced_workloads().items() if key not in self._traced}
        self._traced |= traced.keys()
        for pipe in self._pipes:
            pipe.send((function, arguments, traced))
        found, end = [], time.monotonic() + patience_s
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                self.kill()
                raise AssertionError(f"rank {rank} did not end {function.__name__} within {patience_s} s")
            try:
                found.append(pipe.recv())
            except EOFError:
                found.append(Outcome(error=EOFError(f"the process of rank {rank} has ended")))
        return found

    def run(self, function: Callable[..., Any], *arguments: Any, patience_s: float = PATIENCE_S) -> list[Any]:
        """What ``function(rank, *arguments)`` gave on every rank; an error of one fails the test."""
        return [outcome.get() for outcome in self.outcomes(function, *arguments, patience_s=patience_s)]

    def errors(self, function: Callable[..., Any], *arguments: Any, patience_s: float = PATIENCE_S) -> list[str]:
        """The class and message of what every rank raised; one that raised nothing fails the test."""
        found = self.outcomes(function, *arguments, patience_s=patience_s)
        assert all(outcome.error is not None for outcome in found), found
        return [f"{type(outcome.error).__name__}: {outcome.error}" for outcome in found]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(PATIENCE_S)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the processes end; one that does not is a failure."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(PATIENCE_S)
        still = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        self.kill()
        assert not still, f"ranks {still} did not end"


class Pool:
    """Processes by their number, started when so many are first asked for, and anew after they were killed."""

    def __init__(self) -> None:
        self._started: dict[int, Ranks] = {}
        self._ends = ExitStack()

    def of(self, num_ranks: int) -> Ranks:
        if num_ranks not in self._started or not self._started[num_ranks].are_alive:
            self._started[num_ranks] = self._ends.enter_context(Ranks(num_ranks))
        return self._started[num_ranks]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()


def _serve(pipe: Connection, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    rank = int(environment["RANK"])
    while True:
        try:
            function, arguments, traced = pipe.recv()
        except EOFError:
            return
        _set_aside_what_stays()
        try:
            take_workloads(traced)
            outcome = Outcome(value=function(rank, *arguments))
        except BaseException as error:
            outcome = Outcome(error=error, trace=traceback.format_exc())
        try:
            pipe.send(outcome)
        except Exception as error:
            pipe.send(Outcome(error=AssertionError(f"{outcome} cannot be sent: {error}"), trace=outcome.trace))


def _set_aside_what_stays() -> None:
    """See [Note: Collections during tests] in ``tests/conftest.py``."""
    gc.collect()
    gc.freeze()


def in_a_process(function: Callable[..., Any], *arguments: Any, patience_s: float = PATIENCE_S) -> Any:
    """What ``function(*arguments)`` gives in a process of its own, which may start others."""
    own, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        assert own.poll(patience_s), f"{function.__name__} did not end within {patience_s} s"
        return own.recv().get()
    finally:
        process.kill()
        process.join()


def printed_by(program: Callable[[], None], *arguments: str) -> str:
    """What a program prints that reads ``arguments`` from its command line, in a process of its own."""
    found: str = in_a_process(_print, program, arguments)
    return found


def _print(program: Callable[[], None], arguments: Sequence[str]) -> str:
    sys.argv[1:] = arguments
    with redirect_stdout(io.StringIO()) as said:
        program()
    return said.getvalue()


def _answer(pipe: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    _set_aside_what_stays()
    try:
        outcome = Outcome(value=function(*arguments))
    except BaseException as error:
        outcome = Outcome(error=error, trace=traceback.format_exc())
    pipe.send(outcome)


@contextmanager
def without_a_word() -> Iterator[None]:
    """Within the block a rank ends that says nothing: the others need not wait as long for what it might say."""
    with mock.patch.object(failures, "_PATIENCE", timedelta(seconds=0.5)):
        yield


@contextmanager
def environment(**changes: str | None) -> Iterator[None]:
    """Within the block variables have other values; None: they are not set."""
    before = dict(os.environ)
    try:
        for name, value in changes.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
