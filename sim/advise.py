"""Which machine to rent: one search over batch sizes per machine, many at once, resumable, ranked.

Machines with several devices are asked about as if one device trained alone; what their other devices add is not
counted, and neither is its price.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Final

from ..shared.advice import Advice, AdviceState, MachineAdvice
from ..shared.errors import FileError, ProtwinError
from ..shared.hardware import Hardware
from ..shared.progress import OnProgress
from ..shared.rank_share import price_of_ranks
from .batch_search import search_batches
from .step_rule import StepRule

_SECONDS_PER_HOUR: Final = 3600
SearchOne = Callable[["Request", Hardware], MachineAdvice]


@dataclass(frozen=True)
class Request:
    """What is to be trained; everything that decides an answer besides the machine."""

    model: str
    sequence_length: int | None
    dtype: str | None
    global_batch: int
    max_gradient_norm: float | None
    fingerprint: str
    """Of what ``model`` stands for and of the software, so that answers of another are not taken for its own."""

    @property
    def identity(self) -> str:
        """Hash of all of it."""
        return hashlib.sha256(json.dumps(vars(self), sort_keys=True).encode()).hexdigest()[:32]


def advise(
    request: Request,
    machines: Sequence[Hardware],
    *,
    search_one: SearchOne,
    num_processes: int,
    state: Path | None = None,
    on_progress: OnProgress,
    keep_interrupted: bool = False,
) -> Advice:
    """The machines ranked by time, and by cost per token where prices are given.

    ``search_one`` runs in other processes (spawned), ``num_processes`` at once.  Every answer is written to ``state``
    as it comes, and read from there when the same is asked again.  ``keep_interrupted``: Ctrl-C ends the sweep with the
    answers so far, if there are any.  Raises FileError if ``state`` belongs to another request or is damaged, or cannot
    be written, and ProtwinError if a process was ended from outside.
    """
    keys = {hardware.name: machine_key(hardware) for hardware in machines}
    known = _known(request, state)
    found = {hardware.name: known[key] for hardware in machines if (key := keys[hardware.name]) in known}
    missing = [hardware for hardware in machines if hardware.name not in found]
    on_progress(len(found), len(machines))
    try:
        for answer in _answers(request, missing, search_one, num_processes):
            found[answer.hardware_name] = answer
            known[keys[answer.hardware_name]] = answer
            if state is not None:
                AdviceState(request=request.identity, answers=known).save(state)
            on_progress(len(found), len(machines))
    except KeyboardInterrupt:
        if not keep_interrupted or not found:
            raise
    return Advice(
        model=request.model,
        sequence_length=request.sequence_length,
        global_batch_size=request.global_batch,
        machines=tuple(sorted(found.values(), key=MachineAdvice.rank)),
        unanswered=tuple(hardware.name for hardware in machines if hardware.name not in found),
    )


def machine_key(hardware: Hardware) -> str:
    """Hash of a machine's description."""
    return hashlib.sha256(hardware.to_json().encode()).hexdigest()[:32]


def _known(request: Request, state: Path | None) -> dict[str, MachineAdvice]:
    if state is None or not state.exists():
        return {}
    saved = AdviceState.load(state)
    if saved.request != request.identity:
        raise FileError(
            f"{state} holds answers to another question: another model, shape, global batch or release. "
            f"Name another file, or remove it to begin anew."
        )
    return dict(saved.answers)


def _answers(
    request: Request, machines: Sequence[Hardware], search_one: SearchOne, num_processes: int
) -> Iterator[MachineAdvice]:
    """Answers as they come.  Ctrl-C ends all processes."""
    if not machines:
        return
    if num_processes == 1 or len(machines) == 1:
        for hardware in machines:
            yield search_one(request, hardware)
        return
    pool = ProcessPoolExecutor(min(num_processes, len(machines)), mp_context=get_context("spawn"), initializer=_begin)
    try:
        with _interruptions_held():
            futures: list[Future[MachineAdvice]] = [pool.submit(search_one, request, hardware) for hardware in machines]
        for future in as_completed(futures):
            yield future.result()
    except BrokenExecutor as error:
        raise ProtwinError(
            f"one of {min(num_processes, len(machines))} processes that search ended by itself: out of memory, most "
            f"likely. Ask again with --processes {max(1, num_processes // 2)}, and --state FILE to keep what is known."
        ) from error
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interruptions_held() -> Iterator[None]:
    """Let Ctrl-C wait.  Processes that are started meanwhile never hear it, not even while they begin.

    It reaches every process of a terminal, and the parent ends the others.
    """
    import signal

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """Make a searching process end with its parent.

    A parent that is killed cannot end it, and it would wait for ever for work that never comes.
    """
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    Thread(target=follow, daemon=True).start()


def check_request(request: Request) -> None:
    """Raise ProtwinError if no machine could answer: the model is unknown, its shape missing, an option impossible."""
    from ..shared.cli_options import cache_folder
    from .workload_source import resolve_workload, saved_sizes

    StepRule(max_gradient_norm=request.max_gradient_norm)
    sizes = saved_sizes(request.model, request.global_batch)
    resolve_workload(
        request.model,
        batch_size=sizes[0] if sizes else 1,
        sequence_length=request.sequence_length,
        dtype=request.dtype,
        cache=cache_folder(),
        warn=lambda message: None,
    )


def search_machine(request: Request, hardware: Hardware) -> MachineAdvice:
    """The best plan on one machine, or why there is none.

    The workload comes without torch where the model's family is shipped, and from the cache otherwise.
    """
    from ..shared.cli_options import cache_folder
    from .workload_source import resolve_workload, saved_sizes

    price = price_of_ranks(hardware, 1)
    try:
        found = search_batches(
            lambda size: resolve_workload(
                request.model,
                batch_size=size,
                sequence_length=request.sequence_length,
                dtype=request.dtype,
                cache=cache_folder(),
                warn=lambda message: None,
                device_kind=hardware.device.kind,
            ),
            request.global_batch,
            hardware,
            micro_batch_sizes=saved_sizes(request.model, request.global_batch),
            max_gradient_norm=request.max_gradient_norm,
        )
    except ProtwinError as error:
        return MachineAdvice(hardware_name=hardware.name, price_usd_per_hour=price, reason=str(error))
    prediction = found.result.prediction
    tokens_per_s = prediction.num_tokens / prediction.iteration_s
    return MachineAdvice(
        hardware_name=hardware.name,
        price_usd_per_hour=price,
        tokens_per_s=tokens_per_s,
        usd_per_million_tokens=None if price is None else price / _SECONDS_PER_HOUR / tokens_per_s * 10**6,
        plan=found.result.plan,
        micro_batch_size=found.micro_batch_size,
        iteration_s=prediction.iteration_s,
        num_tokens=prediction.num_tokens,
        guaranteed_peak_device_bytes=prediction.guaranteed_peak_device_bytes,
        is_certified=found.result.certificate.is_certified,
        gap_frac=found.result.gap_frac,
    )
