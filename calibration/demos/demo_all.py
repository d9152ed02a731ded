"""All methods in one path: adapters on long sequences, a distillation, and fine-tuning of the student.

A small Llama learns a text.  Two processes then train LoRA beside it on long sequences, in tiles, sharded and offloaded
within a budget; they stop, and go on by another plan in another parallel mode.  The merged model is the teacher of a
student with half of its FFNs and key-value heads, which learns from it block by block.  The student learns sums of
numbers by orthogonal subspace fine-tuning.  Every part has a plan of its own that was searched for its budget, which
the device enforces, and is held against a training without one.  Run it with ``make demo-all``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from ...runtime.data.byte_text import byte_batches
from ...runtime.data.sample_texts import sums
from ...runtime.devices.cpu_device import CpuDevice
from ...runtime.devices.ledger import MemoryLedger
from ...runtime.devices.process_settings import leave_a_core_for_lanes
from ...runtime.model.pretrained import no_progress_bar
from ...runtime.model.snapshot import without_cache
from ...runtime.osft.orthogonal_model import make_orthogonal
from ...runtime.osft.projection import project_gradients, project_parameters
from ...runtime.planning.planned import Planned, planned
from ...runtime.planning.request import PlanRequest
from ...runtime.students.saving import load_student
from ...runtime.timing.plain_loop import train_plainly
from ...runtime.training.carry_out import carry_out
from ...shared.basics.documents import write_atomically
from ...shared.basics.errors import ProtwinError
from ...shared.basics.units import format_bytes, format_seconds
from ...shared.compile.compile import compile_schedule
from ...shared.report.page import PageTable, Section
from ...shared.report.report import Facts, report
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ...shared.tables.table import Table
from ...shared.tables.terminal import Printed
from .demo import predictions_held, stage
from .demo_bypass import CONFIGURATION, BypassDemo, run_bypass_demo, taught, text_of
from .long_on_ranks import NUM_RANKS, LongSize

_SEED: Final = 0
_SUM_LINES: Final = 20_000
_MAKE_OPTIMIZER: Final = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0, fused=True)
_OWN_PARTS: Final = ("base", "merged", "checkpoint", "distillation")
"""Folders that a demo leaves, which the next one replaces."""


@dataclass(frozen=True, kw_only=True)
class WholeDemo:
    """How large the demo is."""

    long: LongSize = field(default_factory=LongSize)
    bypass: BypassDemo = field(
        default_factory=lambda: BypassDemo(
            configuration={**CONFIGURATION, "num_hidden_layers": 4, "max_position_embeddings": 2048},
            teacher_steps=300,
            steps=40,
            probe_seconds=1.0,
            repeats=2,
            calibration_steps=3,
            slowdown_seconds=1.0,
        )
    )
    unfreeze_rank_ratio: float = 0.5
    osft_steps: int = 20
    osft_budget_frac: float = 0.4
    """Of what orthogonal fine-tuning needs without a plan."""


STANDARD: Final = WholeDemo()


def main() -> None:
    """Run the demo and leave its files in the output folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/demo-all"), help="folder for the files (out/demo-all)")
    console = Console(highlight=False)
    run_whole_demo(parser.parse_args().output, console if console.is_terminal else Console(highlight=False, width=120))


def run_whole_demo(folder: Path, console: Console, size: WholeDemo = STANDARD) -> dict[str, Any]:
    """The whole demo; gives what ``comparison.json`` holds."""
    started = time.perf_counter()
    for name in _OWN_PARTS:
        shutil.rmtree(folder / name, ignore_errors=True)
    with stage(console, f"{size.bypass.teacher_steps} plain steps: a Llama learns a text, byte by byte"):
        base = taught(size.bypass, text_of(size.bypass))
        with no_progress_bar():
            base.save_pretrained(folder / "base")
    told = f"LoRA on {NUM_RANKS} processes, sequences of {size.long.sequence_length:,} bytes in tiles, by two plans"
    with stage(console, told):
        long = _long_part(folder, size.long)
    with no_progress_bar():
        teacher = type(base).from_pretrained(folder / "merged", dtype=torch.float32).eval()
    leave_a_core_for_lanes()
    console.print("[bold]the merged model is a teacher[/bold]")
    bypass = run_bypass_demo(folder / "distillation", console, size.bypass, teacher)
    student = load_student(Path(bypass["student"]))
    with stage(console, f"OSFT: the student learns sums of numbers in {size.osft_steps} steps, by a plan and plainly"):
        osft = _osft_part(student, size)
    comparison = {"long": long, "distillation": bypass, "osft": osft}
    tables = [_parts_table(comparison), _moved_table(long, osft), _equality_table(long, osft)]
    for table in tables:
        console.print(Printed([table]))
    write_atomically(folder / "comparison.json", json.dumps(comparison, indent=1) + "\n")
    _write_page(folder, comparison, tables)
    console.print(f"{time.perf_counter() - started:.0f} s in all. Files: {folder}/ (open report.html)")
    return comparison


def _long_part(folder: Path, size: LongSize) -> dict[str, Any]:
    """What the two processes leave.  Raises ProtwinError with what they said if they fail."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    program = f"{__package__}.long_on_ranks"
    done = subprocess.run(
        [*command, "-m", program, str(folder), json.dumps(asdict(size))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ProtwinError(f"the processes of the first part have failed. They said:\n{done.stderr.strip()}")
    found: dict[str, Any] = json.loads((folder / "long.json").read_text(encoding="utf-8"))
    return found


def _osft_part(student: Any, size: WholeDemo) -> dict[str, Any]:
    """Fine-tuning of the student's factors by a plan, beside the plain loop with the same projections."""
    torch.manual_seed(_SEED)
    student.train()
    make_orthogonal(student, unfreeze_rank_ratio=size.unfreeze_rank_ratio)
    length, batch_size = size.bypass.sequence_length, size.bypass.batch_size
    batches = list(
        byte_batches(
            sums(_SUM_LINES, _SEED),
            batch_size=batch_size,
            sequence_length=length,
            num_batches=size.osft_steps,
            seed=_SEED,
        )
    )
    plain = copy.deepcopy(student)
    need_bytes = train_plainly(plain, batches[:2], _MAKE_OPTIMIZER, ledger=MemoryLedger()).peak_bytes
    plain = copy.deepcopy(student)
    expected = _plainly(plain, batches)
    budget_bytes = int(size.osft_budget_frac * need_bytes)
    found = planned(student, batches[0], PlanRequest(budget_bytes=budget_bytes, probe_s=1.0, name="demo-student, OSFT"))
    losses, record, counts = _osft_by_plan(student, found, batches, budget_bytes)
    same = losses == expected and all(
        torch.equal(one, other) for one, other in zip(student.parameters(), plain.parameters(), strict=True)
    )
    held = predictions_held(found.prediction, record)
    sizes = {"needs_bytes": need_bytes, "budget_bytes": budget_bytes}
    return {**held, **sizes, **counts, "losses": losses, "is_identical": same}


def _plainly(model: Any, batches: Sequence[dict[str, torch.Tensor]]) -> list[float]:
    """The loop that everybody writes, with the projections of orthogonal fine-tuning."""
    optimizer = _MAKE_OPTIMIZER([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses = []
    with without_cache(model):
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            project_gradients(model)
            optimizer.step()
            project_parameters(model)
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def _osft_by_plan(
    student: Any, found: Planned, batches: Sequence[dict[str, torch.Tensor]], budget_bytes: int
) -> tuple[list[float], Record, dict[str, int]]:
    losses = []
    device = CpuDevice(budget_bytes)
    with carry_out(student, found.plan, found.workload, optimizer=_MAKE_OPTIMIZER, device=device) as training:
        for batch in batches:
            loss = student(**batch).loss
            loss.backward()
            training.step()
            losses.append(loss.item())
        return losses, training.record(hardware_name=found.hardware.name), asdict(training.counts)


def _parts(comparison: Mapping[str, Any]) -> list[tuple[str, int, Mapping[str, Any]]]:
    """Every plan: its name, its budget, and what was predicted and measured."""
    long, bypass, osft = comparison["long"], comparison["distillation"], comparison["osft"]
    named = [
        (f"LoRA on long sequences, {part['parallel']}", budget, part)
        for part, budget in zip(long["parts"], long["budgets_bytes"], strict=True)
    ]
    return [
        *named,
        ("distillation of the merged model", bypass["device_budget_bytes"], bypass),
        ("OSFT of the student", osft["budget_bytes"], osft),
    ]


def _parts_table(comparison: Mapping[str, Any]) -> Table:
    rows = tuple(
        (
            name,
            format_bytes(budget_bytes),
            *(format_bytes(held[f"{which}_peak_device_bytes"]) for which in ("predicted", "measured")),
            *(format_seconds(held[f"{which}_iteration_s"]) for which in ("predicted", "measured")),
        )
        for name, budget_bytes, held in _parts(comparison)
    )
    columns = ("training", ">budget", ">predicted peak", ">measured", ">predicted iteration", ">measured")
    return Table(title="Every plan within its budget", columns=columns, rows=rows)


def _moved_table(long: Mapping[str, Any], osft: Mapping[str, Any]) -> Table:
    named = [(f"LoRA, {part['parallel']}", part) for part in long["parts"]] + [("OSFT", osft)]
    rows = tuple(
        (
            name,
            f"{part['num_iterations']:,}",
            f"{part['num_gathers']:,}",
            format_bytes(part["bytes_host_to_device"]),
            f"{part['num_cpu_adam_steps']:,}",
        )
        for name, part in named
    )
    columns = ("training", ">steps", ">gathers", ">host to device", ">chunks stepped on the host")
    return Table(title="What moved, of one process", columns=columns, rows=rows)


def _equality_table(long: Mapping[str, Any], osft: Mapping[str, Any]) -> Table:
    rows = (
        (
            "LoRA on two processes, stopped, and on by another plan",
            "the same tiles with everything on the devices, at a stretch",
            _said(long["is_identical"]),
        ),
        ("OSFT of the student", "the plain loop with the same projections", _said(osft["is_identical"])),
    )
    return Table(title="Losses and weights", columns=("training", "held against", "they are"), rows=rows)


def _said(is_identical: bool) -> str:
    return "the same, bit for bit" if is_identical else "NOT the same"


def _write_page(folder: Path, comparison: Mapping[str, Any], tables: Sequence[Table]) -> None:
    long = comparison["long"]
    plan, workload = Plan.load(folder / "plan-1.json"), Workload.load(folder / "workload.json")
    facts = Facts(
        predicted=Record.load(folder / "predicted-1.json"),
        measured=Record.load(folder / "measured-1.json"),
        budget_bytes=long["budgets_bytes"][0],
        plain_peak_bytes=long["needs_bytes"],
        losses={"in one go": long["losses_in_one_go"], "two plans": long["losses"]},
        schedule=compile_schedule(plan, workload),
        further=(Section("All trainings", tuple(PageTable(table) for table in tables)),),
        notes=(
            "Plan, iteration and memory are those of LoRA on long sequences, by the first of its two plans.",
            "distillation/report.html is the page of the distillation.",
        ),
    )
    title = "protwin demo: adapters, a distillation and OSFT in one path"
    write_atomically(folder / "report.html", report(title, facts).html)


if __name__ == "__main__":
    main()
