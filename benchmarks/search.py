"""Speed of the search: seconds from a workload to the certified plan, warm, and what else could have been done.

For each case one row: the plans in the space, how many were replayed and simulated, and the seconds of the search on
one core.  Beside them two other ways to the same answer, each measured on a sample of the same space and extrapolated
to all of its plans that no memory bound excludes: (a) brute force, which compiles and simulates every plan; (b) a
vectorised evaluation, which replays every plan by the simulator's rules, many at once.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
from rich.console import Console
from rich.table import Table

from protwin.runtime.identity import machine_name
from protwin.shared.compile import compile_schedule
from protwin.shared.errors import InfeasibleError
from protwin.shared.machines import load_hardware
from protwin.shared.memory_bound import guaranteed_device_peak
from protwin.shared.search_result import SearchResult
from protwin.shared.units import format_seconds
from protwin.shared.workload import Workload
from protwin.sim.candidates import Candidates
from protwin.sim.contention import ContentionModel
from protwin.sim.costs import CostModel
from protwin.sim.replay import Replayer, ReplayPlan
from protwin.sim.search import search
from protwin.sim.search_problem import search_problem
from protwin.sim.simulator import MIN_ITERATIONS, simulate_timing
from protwin.sim.workload_source import resolve_workload

ROOMY_HOST_BYTES = 16 * 2**40
"""The largest models need more host memory than the machines of the catalogue have: the search is timed all the same,
and the row says so."""


@dataclass(frozen=True)
class Case:
    """What is searched."""

    model: str
    machine: str
    batch_size: int
    sequence_length: int
    host_budget_bytes: int | None = None

    @property
    def title(self) -> str:
        """``model on machine, batch x sequence``."""
        roomy = ", 16 TiB of host memory" if self.host_budget_bytes is not None else ""
        return f"{self.model} on {self.machine}, {self.batch_size} x {self.sequence_length}{roomy}"


CASES = (
    Case("llama-2-7b", "rtx-3090", 1, 2048),
    Case("llama-3-8b", "rtx-3090", 1, 2048),
    Case("llama-2-13b", "a100-80gb", 4, 4096),
    Case("llama-3-70b", "h100-80gb", 1, 4096, ROOMY_HOST_BYTES),
    Case("llama-3.1-405b", "h100-80gb", 1, 4096, ROOMY_HOST_BYTES),
)


def main() -> None:
    """Print one row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="searches per case (5)")
    parser.add_argument("--sample", type=int, default=12, help="plans that brute force is measured on (12)")
    parser.add_argument("--only", default="", help="cases whose model's name contains this")
    options = parser.parse_args()
    console = Console(highlight=False, width=200)
    table = Table(title=f"search on {machine_name()}, median of {options.repeats}", title_justify="left")
    table.add_column("case")
    for heading in (
        *("plans", "may fit", "looked at", "simulated", "search", "fastest", "gap", "events per s"),
        *("brute force, extrapolated", "all replayed, extrapolated"),
    ):
        table.add_column(heading, justify="right")
    for case in CASES:
        if options.only in case.model:
            try:
                table.add_row(*_row(case, options.repeats, options.sample))
            except InfeasibleError as error:
                console.print(f"{case.title}: {error}")
    console.print(table)


def _row(case: Case, repeats: int, sample: int) -> tuple[str, ...]:
    workload = resolve_workload(
        case.model,
        batch_size=case.batch_size,
        sequence_length=case.sequence_length,
        dtype=None,
        cache=None,
        warn=lambda message: print(f"warning: {message}", file=sys.stderr),
    )
    hardware = load_hardware(case.machine)
    times_s = []
    result: SearchResult | None = None
    gc.disable()
    for _ in range(repeats + 1):
        start_s = time.process_time()
        result = search(workload, hardware, host_budget_bytes=case.host_budget_bytes)
        times_s.append(time.process_time() - start_s)
    gc.enable()
    assert result is not None
    times_s = times_s[1:]
    certificate = result.certificate
    num_left = certificate.num_candidates - certificate.num_bounded_by_memory
    brute_s, replay_s, num_replayed = _other_ways(case, workload, sample)
    return (
        case.title,
        f"{certificate.num_candidates:,}",
        f"{num_left:,}",
        str(num_replayed),
        str(certificate.num_simulated),
        format_seconds(statistics.median(times_s)),
        format_seconds(min(times_s)),
        f"{result.gap_frac:.2%}",
        f"{_events_per_s(case, workload, result):,.0f}",
        f"{format_seconds(brute_s * num_left)} ({brute_s * num_left / statistics.median(times_s):,.0f} x)",
        f"{format_seconds(replay_s * num_left)} ({replay_s * num_left / statistics.median(times_s):,.0f} x)",
    )


def _events_per_s(case: Case, workload: Workload, result: SearchResult) -> float:
    """Ends of tasks that the simulator brings about in a second."""
    hardware = load_hardware(case.machine)
    schedule = compile_schedule(result.plan, workload)
    durations_s = CostModel.of(workload, hardware).durations_s(schedule)
    contention = ContentionModel.of(hardware)
    timing = simulate_timing(schedule, durations_s, contention)
    seconds = _seconds(lambda: simulate_timing(schedule, durations_s, contention))
    return timing.num_iterations * len(schedule.tasks) / seconds


def _other_ways(case: Case, workload: Workload, sample: int) -> tuple[float, float, int]:
    """Seconds per plan of brute force and of replaying, over the best-bounded plans; and how many must be looked at."""
    hardware = load_hardware(case.machine)
    problem = search_problem(workload, hardware, host_budget_bytes=case.host_budget_bytes)
    best = search(workload, hardware, host_budget_bytes=case.host_budget_bytes).certificate
    limit_s = best.best_iteration_s * (1 - best.tolerance_frac)
    looked_at = list(islice(Candidates(problem).below(limit_s), 100_000))
    candidates = list(islice(Candidates(problem).below(np.inf), 256))
    depths = problem.layouts[0].grid.prefetch_depth.tolist()

    def simulate_all() -> None:
        for one in candidates[:: max(1, len(candidates) // sample)]:
            plan = problem.plan(one.layout, *one.index)
            schedule = compile_schedule(plan, workload, problem.layouts[one.layout].grid.layout)
            guaranteed_device_peak(schedule)
            simulate_timing(schedule, problem.costs.durations_s(schedule), problem.contention)

    def replay_all() -> None:
        plans = [ReplayPlan(one.traffic, depths[one.index[1]], one.index[2]) for one in candidates]
        Replayer(problem.compute, problem.contention).periods_s(plans)

    assert MIN_ITERATIONS > 1
    num_simulated = len(candidates[:: max(1, len(candidates) // sample)])
    return _seconds(simulate_all) / num_simulated, _seconds(replay_all) / len(candidates), len(looked_at)


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


if __name__ == "__main__":
    main()
