"""Speed of the search: seconds from a saved workload to the certified plan, warm, and what it took.

Workloads are traced once (no weights) and then read from their files, as a user without torch has them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from protwin.runtime.identity import machine_name
from protwin.runtime.tracing_configurations import workload_of_configuration
from protwin.shared.compile import compile_schedule
from protwin.shared.machines import load_hardware
from protwin.shared.models import model_configuration
from protwin.shared.units import format_seconds
from protwin.shared.workload import Workload
from protwin.sim.contention import ContentionModel
from protwin.sim.costs import CostModel
from protwin.sim.longest_path import longest_path_s
from protwin.sim.search import search
from protwin.sim.simulator import simulate_timing

CASES = (
    ("gpt2-xl", "rtx-3090", 4, 1024),
    ("llama-2-7b", "rtx-3090", 1, 2048),
    ("llama-3-8b", "rtx-3090", 1, 2048),
    ("llama-2-13b", "a100-80gb", 4, 4096),
    ("mistral-7b", "h100-80gb", 8, 4096),
)


def main() -> None:
    """Print one row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="searches per case (5)")
    options = parser.parse_args()
    console = Console(highlight=False, width=160)
    table = Table(title=f"search on {machine_name()}, median of {options.repeats}", title_justify="left")
    table.add_column("case")
    for heading in ("plans", "simulated", "search", "fastest", "tasks", "SimPy simulation", "longest path"):
        table.add_column(heading, justify="right")
    for model, machine, batch_size, sequence_length in CASES:
        table.add_row(*_case(model, machine, batch_size, sequence_length, options.repeats))
    console.print(table)


def _case(model: str, machine: str, batch_size: int, sequence_length: int, repeats: int) -> tuple[str, ...]:
    traced = workload_of_configuration(
        model_configuration(model).config, name=model, batch_size=batch_size, sequence_length=sequence_length
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.json"
        traced.save(path)
        workload = Workload.load(path)
    hardware = load_hardware(machine)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = search(workload, hardware)
        times.append(time.perf_counter() - start)
    schedule = compile_schedule(result.plan, workload)
    durations_s = CostModel.of(workload, hardware).durations_s(schedule)
    contention = ContentionModel.of(hardware)
    simulated_s = _median_s(lambda: simulate_timing(schedule, durations_s, contention), repeats)
    longest_s = _median_s(lambda: longest_path_s(schedule, durations_s, 4), repeats)
    return (
        f"{model} on {machine}, {batch_size} x {sequence_length}",
        f"{result.certificate.num_candidates:,}",
        str(result.certificate.num_simulated),
        format_seconds(statistics.median(times)),
        format_seconds(min(times)),
        str(len(schedule.tasks)),
        format_seconds(simulated_s),
        format_seconds(longest_s),
    )


def _median_s(work: object, repeats: int) -> float:
    assert callable(work)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
