"""Overhead: what the runtime costs beside the work that it must do, as ratios within one run.

- With everything persistent and kept, training by a plan does what the plain loop does: at most 1.02 times as slow.
- Nobody asks for a Record: noting when tasks began and ended costs less than 1 % of an iteration.
- With parameters on the host behind throttled links, by a plan whose transfers overlap as the simulator says, an
  iteration takes at most 1.10 times as long as its busiest lane is busy, and the simulated iteration is within 5 % of
  the measured one.

All trainings live in one process and take turns in short bursts, in random order: a slow moment of the machine hits
all of them alike.  Step times are means of the middle half, ratios medians over rounds.  ``make bench-overhead`` runs
it; results are kept in benchmarks/results/ with date and machine.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from protwin.calibration.demos.demo import CONFIGURATION
from protwin.calibration.fitting.fit import Pair, fit_calibration
from protwin.calibration.fitting.measurement_plans import bootstrap_plans
from protwin.calibration.fitting.slowdowns import measure_slowdowns
from protwin.runtime.data.byte_text import byte_batches, python_reference
from protwin.runtime.devices.cpu_device import CpuDevice
from protwin.runtime.devices.lanes import Span
from protwin.runtime.devices.machine import machine_name, num_cores
from protwin.runtime.devices.probe import probe_hardware
from protwin.runtime.devices.process_settings import leave_a_core_for_lanes
from protwin.runtime.model.configurations import build_model
from protwin.runtime.model.identity import software_versions
from protwin.runtime.model.snapshot import without_cache
from protwin.runtime.recording.recorder import IterationLog, Recorder, middle_half
from protwin.runtime.tracing.tracing import trace
from protwin.runtime.training.carry_out import carry_out
from protwin.runtime.training.training import Training
from protwin.shared.basics.documents import write_atomically
from protwin.shared.basics.progress import progress_bar
from protwin.shared.basics.units import format_seconds
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.engine.simulator import simulate
from protwin.sim.searching.request import SearchRequest
from protwin.sim.searching.search import search
from protwin.sim.space.space import SearchSpace

Batch = dict[str, torch.Tensor]
Burst = Callable[[int], list[float]]
"""Trains so many steps that count and gives the seconds of each."""

_SLOW_LINKS: Final[dict[str, Any]] = {"host_to_device_bytes_per_s": 0.6e9, "device_to_host_bytes_per_s": 0.3e9}
"""With the model below, its gathers take about half as long as its computations, its gradient offloads likewise."""
_MAKE_OPTIMIZER: Final = partial(torch.optim.AdamW, lr=1e-4, fused=True)
_BATCH_SIZE: Final = 2
_SEQUENCE_LENGTH: Final = 128
_WARM_UP: Final = 3


def main() -> None:
    """Measure, and print what was found beside the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="bursts of every training (20)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a burst (4)")
    parser.add_argument("--only", choices=["persistent", "offload"], help="one part instead of both")
    parser.add_argument("--keep", action="store_true", help="keep the result in benchmarks/results/")
    options = parser.parse_args()
    if min(options.rounds, options.steps) < 1:
        parser.error("--rounds and --steps must be at least 1.")
    console = Console(highlight=False, width=130)
    threads = leave_a_core_for_lanes()
    torch.manual_seed(0)
    model = build_model(CONFIGURATION, "llama", torch.float32, device="cpu")
    batch = next(
        byte_batches(python_reference(), batch_size=_BATCH_SIZE, sequence_length=_SEQUENCE_LENGTH, num_batches=1)
    )
    workload = trace(model, batch, name="llama")
    found: dict[str, Any] = {}
    for part, measure in (("persistent", measure_persistent), ("offload", measure_offload)):
        if options.only in (None, part):
            measured = measure(model, batch, workload, options.rounds, options.steps)
            show(measured, threads, console)
            found |= measured
    if options.keep:
        today = datetime.date.today().isoformat()
        path = Path(__file__).parent / "results" / f"overhead-{today}.json"
        about = {
            "schema_version": 1,
            "date": today,
            "machine": machine_name(),
            "num_cores": num_cores(),
            "threads": threads,
            "software": software_versions(),
            "rounds": options.rounds,
            "steps_per_burst": options.steps,
        }
        write_atomically(path, json.dumps(about | found, indent=1) + "\n")
        console.print(f"kept in {path}")


# -- everything persistent and kept ------------------------------------------------------------------------------------


def measure_persistent(model: Any, batch: Batch, workload: Workload, rounds: int, steps: int) -> dict[str, Any]:
    """The plain loop, training by a plan that keeps everything, and the same with every iteration's memory watched.

    A second plain loop tells how far two equal loops are apart in this run.
    """
    plan = bootstrap_plans(workload)[0]
    with ExitStack() as undo:

        def begin(meter_every: int | None) -> Training:
            taken = copy.deepcopy(model)
            return undo.enter_context(
                carry_out(taken, plan, workload, optimizer=_MAKE_OPTIMIZER, device=CpuDevice(), meter_every=meter_every)
            )

        unwatched = begin(None)
        bursts = {
            "plain": plain_burst(copy.deepcopy(model), batch, undo),
            "plain again": plain_burst(copy.deepcopy(model), batch, undo),
            "persistent": training_burst(unwatched, batch),
            "persistent, watched": training_burst(begin(1), batch),
        }
        seconds = take_turns("everything persistent", bursts, rounds, steps)
        start = time.perf_counter()
        unwatched.record()
        record_s = time.perf_counter() - start
        noting_s = seconds_of_noting(unwatched)
    step_s = {name: middle_mean([s for burst in found for s in burst]) for name, found in seconds.items()}
    return {
        "step_s": step_s,
        "plain_again_over_plain": median_ratio(seconds["plain again"], seconds["plain"]),
        "persistent_over_plain": median_ratio(seconds["persistent"], seconds["plain"]),
        "watched_over_unwatched": median_ratio(seconds["persistent, watched"], seconds["persistent"]),
        "noting_s": noting_s,
        "noting_frac": noting_s / step_s["persistent"],
        "record_s": record_s,
    }


def plain_burst(model: Any, batch: Batch, undo: ExitStack) -> Burst:
    """The loop that everybody writes."""
    undo.enter_context(without_cache(model))
    optimizer = _MAKE_OPTIMIZER(model.parameters())

    def burst(steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            seconds.append(time.perf_counter() - start)
        return seconds

    return burst


def training_burst(training: Training, batch: Batch) -> Burst:
    """The same loop on a model whose plan is carried out."""

    def burst(steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            loss = training.model(**batch).loss
            loss.backward()
            training.step()
            loss.item()
            seconds.append(time.perf_counter() - start)
        training.synchronize()
        return seconds

    return burst


def seconds_of_noting(training: Training, repeats: int = 200) -> float:
    """Seconds of an iteration that go into noting when each task began and ended, whether or not somebody asks.

    It cannot be turned off, so the same calls are timed by themselves.
    """
    schedule, device = training.schedule, training.device
    recorder = Recorder(schedule, training.plan, training.workload, device)
    seconds = []
    for number in range(repeats):
        start = time.perf_counter()
        log = IterationLog(number)
        for task in schedule.tasks:
            span = log.spans[task.id] = Span(device.stamp())
            span.end = device.stamp()
        recorder.add(log)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


# -- parameters on the host, slow links --------------------------------------------------------------------------------


def measure_offload(model: Any, batch: Batch, workload: Workload, rounds: int, steps: int) -> dict[str, Any]:
    """The plan that the search finds with all but the first blocks on the host, beside those that the fit is made of.

    The plan comes from a first fit, the prediction that is judged from the fit of the whole run, in which the plan's
    own measurements have no part.
    """
    make_device = partial(CpuDevice, **_SLOW_LINKS)
    hardware = probe_hardware(seconds=4.0, device=make_device())
    contention = measure_slowdowns(make_device(), seconds=6.0)

    def fit(records: list[Record]) -> Any:
        return fit_calibration(
            [Pair(workload, record) for record in records],
            hardware,
            contention=contention,
            machine=make_device().description,
            software=software_versions(),
        )

    with ExitStack() as undo:

        def begin(plan: Any) -> Training:
            return undo.enter_context(
                carry_out(copy.deepcopy(model), plan, workload, optimizer=_MAKE_OPTIMIZER, device=make_device())
            )

        # Of a burst, a Record counts neither the first iteration nor the last.
        fitted = [begin(plan) for plan in bootstrap_plans(workload)]
        for training in fitted:
            training_burst(training, batch)(_WARM_UP + steps + 2)
        # Nothing recomputed: recomputation would hide the transfers behind work that need not be done.  With nothing
        # persistent an iteration would begin by waiting for the first block, whose gradients are the last to leave.
        space = SearchSpace(n_persist=(1, 2), n_checkpoint=(0,))
        first = fit([training.record() for training in fitted])
        # What keeping everything may need; what is left of the machine's memory is then the host's.
        budget_bytes = guaranteed_device_peak(fitted[0].schedule).size_bytes
        plan = search(
            SearchRequest(
                workload=workload, hardware=hardware, calibration=first, device_budget_bytes=budget_bytes, space=space
            )
        ).plan
        judged = begin(plan)
        training_burst(judged, batch)(_WARM_UP + 2)
        bursts = {str(number): training_burst(training, batch) for number, training in enumerate([*fitted, judged])}
        take_turns("parameters on the host", bursts, rounds, steps + 2, warm_up=0)
        measured = judged.record()
        calibration = fit([training.record() for training in fitted])
    predicted = simulate(plan, workload, hardware, calibration)
    return {
        "offload_plan": plan.model_dump(mode="json"),
        "measured_iteration_s": measured.iteration_s,
        "measured_noise_frac": measured.iteration_noise_frac,
        "predicted_iteration_s": predicted.iteration_s,
        "predicted_over_measured": predicted.iteration_s / measured.iteration_s,
        "measured_busy_s": {use.lane.value: use.busy_s for use in measured.lanes},
        "predicted_busy_s": {use.lane.value: use.busy_s for use in predicted.lanes},
        "measured_over_busiest": over_busiest(measured),
        "predicted_over_busiest": over_busiest(predicted),
        "offload_num_tasks": len(compile_schedule(plan, workload).tasks),
    }


def over_busiest(record: Record) -> float:
    """The iteration over the seconds of the tasks of its busiest lane: 1 where everything else is hidden."""
    return record.iteration_s / max(use.busy_s for use in record.lanes)


# -- taking turns ------------------------------------------------------------------------------------------------------


def take_turns(
    what: str, bursts: Mapping[str, Burst], rounds: int, steps: int, warm_up: int = _WARM_UP
) -> dict[str, list[list[float]]]:
    """Seconds of every step, by name and round; the order of a round is random."""
    found: dict[str, list[list[float]]] = {name: [] for name in bursts}
    if warm_up:
        for burst in bursts.values():
            burst(warm_up)
    with progress_bar(what) as report:
        for turn in range(rounds):
            order = list(bursts)
            random.Random(turn).shuffle(order)
            for name in order:
                found[name].append(bursts[name](steps))
            report(turn + 1, rounds)
    return found


def middle_mean(seconds: list[float]) -> float:
    """Mean of the middle half."""
    return statistics.fmean(seconds[place] for place in middle_half(seconds))


def median_ratio(above: list[list[float]], below: list[list[float]]) -> float:
    """Median over rounds of the ratio of medians of a burst."""
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in zip(above, below, strict=True))


# -- showing -----------------------------------------------------------------------------------------------------------


def show(found: Mapping[str, Any], threads: int, console: Console) -> None:
    """Print every figure beside its bar."""
    table = Table(title=f"llama, {threads} thread(s), {machine_name()}", title_justify="left")
    for heading in ("what", "measured", "bar", ""):
        table.add_column(heading, justify="left" if heading == "what" else "right")

    def row(what: str, value: float, bar: float | None, text: str) -> None:
        verdict = "" if bar is None else "met" if value <= bar else "missed"
        limit = "" if bar is None else f"{bar:.1%}" if "%" in text else f"{bar:.2f}"
        table.add_row(what, text, limit, verdict)

    if "persistent_over_plain" in found:
        step_s = found["step_s"]
        for name, seconds in step_s.items():
            row(f"step, {name}", seconds, None, format_seconds(seconds))
        ratio = found["plain_again_over_plain"]
        row("plain loop over itself", ratio, None, f"{ratio:.3f}")
        ratio = found["persistent_over_plain"]
        row("everything persistent and kept over plain loop", ratio, 1.02, f"{ratio:.3f}")
        row("noting times, of an iteration", found["noting_frac"], 0.01, f"{found['noting_frac']:.3%}")
        ratio = found["watched_over_unwatched"]
        row("memory of every iteration watched over unwatched", ratio, None, f"{ratio:.3f}")
        row("making a Record", found["record_s"], None, format_seconds(found["record_s"]))
    if "measured_over_busiest" in found:
        row("offloaded: iteration", 0.0, None, format_seconds(found["measured_iteration_s"]))
        row("offloaded: noise of iterations", 0.0, None, f"{found['measured_noise_frac']:.1%}")
        ratio = found["predicted_over_busiest"]
        row("offloaded: iteration over busiest lane, simulated", ratio, None, f"{ratio:.3f}")
        ratio = found["measured_over_busiest"]
        row("offloaded: iteration over busiest lane", ratio, 1.10, f"{ratio:.3f}")
        error = abs(found["predicted_over_measured"] - 1)
        row("offloaded: simulated against measured iteration", error, 0.05, f"{error:.1%}")
        busy = ", ".join(f"{lane} {format_seconds(seconds)}" for lane, seconds in found["measured_busy_s"].items())
        table.caption = f"offloaded, busy: {busy}"
    console.print(table)


if __name__ == "__main__":
    main()
