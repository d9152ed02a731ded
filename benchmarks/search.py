"""Speed of the search: seconds from a workload to the certified plan, warm, on one core, and what else could be done.

For each case one row: the plans in the space, how many were replayed and simulated, and the seconds of the search,
of the processor and by the clock (they differ where others use the machine).  Beside them two other ways to the same
answer, each measured on a sample of the same space and extrapolated to all of its plans that no memory bound excludes:
(a) brute force, which compiles and simulates every plan; (b) a vectorised evaluation, which replays every plan by the
simulator's rules, many at once (without the time to lay out what travels, which many plans share).  ``--shell`` times
whole commands, from the shell to their last line.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from protwin.runtime.devices.machine import machine_name
from protwin.shared.answers.search_result import SearchResult
from protwin.shared.basics.documents import write_atomically
from protwin.shared.basics.errors import InfeasibleError
from protwin.shared.basics.units import format_seconds
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.workloads.source import load_workload
from protwin.sim.bounds.replay import Replayer, ReplayPlan
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.simulator import simulate_timing
from protwin.sim.searching.candidates import Candidates
from protwin.sim.searching.levels import Candidate
from protwin.sim.searching.problem import SearchProblem, search_problem
from protwin.sim.searching.request import SearchRequest, Step
from protwin.sim.searching.search import search
from protwin.sim.space.space import SearchSpace

ROOMY_HOST_BYTES = 16 * 2**40
"""The largest models need more host memory than the machines of the catalogue have: the search is timed all the same,
and the row says so."""
_NUM_SAMPLED = 256
"""Plans of the space, those with the best bounds, that the other ways are measured on."""


@dataclass(frozen=True)
class Case:
    """What is searched."""

    model: str
    machine: str
    batch_size: int
    sequence_length: int
    host_budget_bytes: int | None = None
    max_gradient_norm: float | None = None
    swaps: bool = False
    micro_batches: int = 1

    @property
    def title(self) -> str:
        """``model on machine, batch x sequence``."""
        extras = (
            (self.host_budget_bytes is not None, ", 16 TiB of host memory"),
            (self.max_gradient_norm is not None, ", norm limited"),
            (self.swaps, ", swaps"),
            (self.micro_batches > 1, f", {self.micro_batches} micro-batches"),
        )
        extra = "".join(text for is_so, text in extras if is_so)
        return f"{self.model} on {self.machine}, {self.batch_size} x {self.sequence_length}{extra}"

    @property
    def space(self) -> SearchSpace:
        """With every number of swapped blocks, or the usual one."""
        return SearchSpace(n_swap=None) if self.swaps else SearchSpace()

    def problem(self, workload: Workload) -> SearchProblem:
        """What the search starts from."""
        return search_problem(self.request(workload))

    def search(self, workload: Workload) -> SearchResult:
        """What is timed."""
        return search(self.request(workload))

    def request(self, workload: Workload) -> SearchRequest:
        """The search of this case."""
        return SearchRequest(
            workload=workload,
            hardware=load_hardware(self.machine),
            host_budget_bytes=self.host_budget_bytes,
            space=self.space,
            step=Step(micro_batches=self.micro_batches, max_gradient_norm=self.max_gradient_norm),
        )


CASES = (
    Case("llama-2-7b", "rtx-3090", 1, 2048),
    Case("llama-3-8b", "rtx-3090", 1, 2048),
    Case("llama-3-8b", "rtx-3090", 1, 2048, max_gradient_norm=1.0),
    Case("llama-3-8b", "rtx-3090", 1, 2048, swaps=True),
    Case("llama-2-7b", "rtx-3090", 1, 2048, micro_batches=4),
    Case("llama-2-7b", "rtx-3090", 1, 2048, micro_batches=64),
    Case("llama-2-13b", "a100-80gb", 4, 4096),
    Case("llama-3-70b", "h100-80gb", 1, 4096, ROOMY_HOST_BYTES),
    Case("llama-3-70b", "h100-80gb", 1, 4096, ROOMY_HOST_BYTES, max_gradient_norm=1.0),
    Case("llama-3.1-405b", "h200-141gb", 1, 4096, ROOMY_HOST_BYTES),
)
SHELL_CASES = (Case("llama-3-8b", "rtx-3090", 1, 2048), Case("llama-2-7b", "rtx-3090", 1, 2048))


@dataclass(frozen=True)
class Row:
    """What was measured of a case."""

    case: str
    num_plans: int
    num_may_fit: int
    """Plans that no memory bound excludes."""
    num_below_limit: int
    """Plans whose bound alone does not exclude them."""
    num_simulated: int
    search_cpu_s: float
    """Median."""
    search_clock_s: float
    """Median."""
    fastest_cpu_s: float
    gap_frac: float
    simulated_events_per_s: float
    """Ends of tasks."""
    brute_force_s: float
    """Extrapolated from ``num_compiled`` plans."""
    num_compiled: int
    all_replayed_s: float
    """Extrapolated from ``num_replayed`` plans."""
    num_replayed: int


@dataclass(frozen=True)
class ShellRow:
    """A command, from the shell to its last line; medians."""

    command: str
    cpu_s: float
    clock_s: float


def main() -> None:
    """Print one row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="searches per case (5)")
    parser.add_argument("--sample", type=int, default=12, help="plans that brute force is measured on (12)")
    parser.add_argument("--only", default="", help="cases whose title contains this")
    parser.add_argument("--shell", action=argparse.BooleanOptionalAction, default=True, help="time commands, too")
    parser.add_argument("--keep", action="store_true", help="keep the result in benchmarks/results/")
    options = parser.parse_args()
    console = Console(highlight=False, width=200)
    rows: list[Row] = []
    for case in CASES:
        if options.only in case.title:
            try:
                rows.append(_row(case, options.repeats, options.sample))
            except InfeasibleError as error:
                console.print(f"{case.title}: {error}")
    console.print(_table(rows, options.repeats))
    shell_rows = [_shell_row(case, options.repeats) for case in SHELL_CASES] if options.shell else []
    for row in shell_rows:
        console.print(f"{row.command}: {row.cpu_s:.2f} s of the processor, {row.clock_s:.2f} s by the clock")
    load = os.getloadavg()[0]
    console.print(f"{load:.1f} processes were running on average.")
    if options.keep:
        today = datetime.date.today().isoformat()
        path = Path(__file__).parent / "results" / f"search-{today}.json"
        kept = {
            "machine": machine_name(),
            "load_average": load,
            "repeats": options.repeats,
            "searches": [asdict(row) for row in rows],
            "commands": [asdict(row) for row in shell_rows],
        }
        write_atomically(path, json.dumps(kept, indent=1) + "\n")
        console.print(f"kept in {path}")


def _table(rows: list[Row], repeats: int) -> Table:
    table = Table(title=f"search on {machine_name()}, median of {repeats}", title_justify="left")
    table.add_column("case")
    for heading in (
        *("plans", "may fit", "below limit", "simulated", "search (cpu)", "(clock)", "gap", "events per s"),
        *("brute force, extrapolated", "all replayed, extrapolated"),
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        ways = (f"{format_seconds(s)} ({s / row.search_cpu_s:,.0f} x)" for s in (row.brute_force_s, row.all_replayed_s))
        table.add_row(
            row.case,
            f"{row.num_plans:,}",
            f"{row.num_may_fit:,}",
            f"{row.num_below_limit:,}",
            str(row.num_simulated),
            format_seconds(row.search_cpu_s),
            format_seconds(row.search_clock_s),
            f"{row.gap_frac:.2%}",
            f"{row.simulated_events_per_s:,.0f}",
            *ways,
        )
    return table


def _row(case: Case, repeats: int, sample: int) -> Row:
    workload = load_workload(case.model, batch_size=case.batch_size, sequence_length=case.sequence_length)
    times: list[tuple[float, float]] = []
    result: SearchResult | None = None
    gc.disable()
    for _ in range(repeats + 1):
        start = time.process_time(), time.perf_counter()
        result = case.search(workload)
        times.append((time.process_time() - start[0], time.perf_counter() - start[1]))
    gc.enable()
    assert result is not None
    cpu_s, clock_s = zip(*times[1:], strict=True)
    certificate = result.certificate
    problem = case.problem(workload)
    limit_s = certificate.best_iteration_s * (1 - certificate.tolerance_frac)
    through = Candidates(problem)
    num_below = sum(map(len, _all_below(through, limit_s)))
    num_left = certificate.num_candidates - through.num_bounded_by_memory
    brute_s, num_compiled, replay_s, num_replayed = _other_ways(problem, workload, sample)
    return Row(
        case=case.title,
        num_plans=certificate.num_candidates,
        num_may_fit=num_left,
        num_below_limit=num_below,
        num_simulated=certificate.num_simulated,
        search_cpu_s=statistics.median(cpu_s),
        search_clock_s=statistics.median(clock_s),
        fastest_cpu_s=min(cpu_s),
        gap_frac=result.gap_frac,
        simulated_events_per_s=_events_per_s(case, workload, result),
        brute_force_s=brute_s * num_left,
        num_compiled=num_compiled,
        all_replayed_s=replay_s * num_left,
        num_replayed=num_replayed,
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


def _all_below(candidates: Candidates, limit_s: float) -> Iterator[list[Candidate]]:
    """Plans with bounds below the limit, some at a time."""
    while some := candidates.below(limit_s, _NUM_SAMPLED):
        yield some


def _other_ways(problem: SearchProblem, workload: Workload, sample: int) -> tuple[float, int, float, int]:
    """Seconds per plan of brute force, and of how many plans; seconds per plan of replaying, and of how many."""
    candidates = [one for some in islice(_all_below(Candidates(problem), np.inf), 8) for one in some][:_NUM_SAMPLED]
    compiled = candidates[:: max(1, len(candidates) // sample)]

    def simulate_all() -> None:
        for one in compiled:
            plan = problem.plan(one.layout, *one.index)
            schedule = compile_schedule(plan, workload, problem.layouts[one.layout].grid.layout)
            guaranteed_device_peak(schedule)
            simulate_timing(schedule, problem.costs.durations_s(schedule), problem.contention)

    def replay_all() -> None:
        families = [problem.family(*one.family) for one in candidates]
        plans = [
            ReplayPlan(family, *one.index[1:], problem.num_left_out_of(family))
            for family, one in zip(families, candidates, strict=True)
        ]
        Replayer(problem.contention).periods_s(plans)

    return (
        *(_seconds(simulate_all) / len(compiled), len(compiled)),
        *(_seconds(replay_all) / len(candidates), len(candidates)),
    )


def _shell_row(case: Case, repeats: int) -> ShellRow:
    arguments = ["search", "--model", case.model, "--hardware", case.machine]
    arguments += ["--batch-size", str(case.batch_size), "--sequence-length", str(case.sequence_length)]
    program = Path(sys.executable).parent / "protwin"
    # As an installed package, whose byte code is there.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        before, start_s = os.times(), time.perf_counter()
        subprocess.run([program, *arguments], check=True, capture_output=True, env=environment)
        after = os.times()
        cpu_s = after.children_user - before.children_user + after.children_system - before.children_system
        times.append((cpu_s, time.perf_counter() - start_s))
    cpu_s, clock_s = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return ShellRow(" ".join(["protwin", *arguments]), cpu_s, clock_s)


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


if __name__ == "__main__":
    main()
