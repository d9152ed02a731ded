"""A distillation on real input: a small teacher learns a text, its smaller student learns from it block by block.

The student has half of the teacher's FFN and half of its key-value heads.  It is trained by a plan that is searched on
the calibrated simulator, under a device budget that the weights of both models exceed.  Run it with
``make demo-bypass``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console

from ...runtime.bypass.data import BypassData
from ...runtime.bypass.loop import HISTORY
from ...runtime.bypass.losses import BypassHistory
from ...runtime.bypass.run import BypassRun
from ...runtime.bypass.teacher import TeacherFolder
from ...runtime.data.byte_text import python_reference
from ...runtime.data.sources import Batch
from ...runtime.data.token_stream import TokenStream
from ...runtime.devices.cpu_device import CpuDevice
from ...runtime.devices.probe import probe_hardware
from ...runtime.devices.process_settings import leave_a_core_for_lanes
from ...runtime.distillation.block_losses import block_loss
from ...runtime.distillation.distil import Distilling
from ...runtime.distillation.tracing import trace_distillation
from ...runtime.model.configurations import build_model
from ...runtime.model.pretrained import no_progress_bar
from ...runtime.runs.run_settings import RunSettings
from ...runtime.students.activation_statistics import activation_statistics
from ...runtime.students.saving import load_student
from ...runtime.students.student_model import make_student
from ...shared.answers.search_result import SearchResult
from ...shared.basics.documents import write_atomically
from ...shared.basics.progress import progress_bar
from ...shared.basics.units import format_bytes, format_seconds
from ...shared.catalogue.machines import hardware_to_toml
from ...shared.compile.compile import compile_schedule
from ...shared.phases.distillation import KeyToLearn
from ...shared.records.chrome_trace import chrome_trace
from ...shared.records.comparison import compare_records
from ...shared.report.losses import block_losses_chart
from ...shared.report.page import PageTable, Section
from ...shared.report.report import Facts, report
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.record import Record
from ...shared.schema.workload import DType, Workload
from ...shared.students.families import family_of
from ...shared.students.student import Student
from ...shared.tables.comparison import comparison_tables
from ...shared.tables.table import Table
from ...shared.tables.terminal import Printed
from ...sim.searching.request import SearchRequest, Step
from ...sim.searching.search import search
from ..fitting.calibrate import calibrate
from ..fitting.pair_subject import PairSubject
from .demo import predictions_held, stage

CONFIGURATION: Final[dict[str, Any]] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SEED: Final = 0
_STUDENT: Final = {
    "keys_to_learn": ["entire_block"],
    "initialization": {"ffn": "prune", "key_value_heads": "average"},
}
LOSSES: Final = {"teacher_loss": "teacher", "untrained_loss": "untrained student", "trained_loss": "trained student"}
"""Keys of ``comparison.json`` and what they are the language-model losses of."""


@dataclass(frozen=True, kw_only=True)
class BypassDemo:
    """How large the demo is."""

    configuration: Mapping[str, Any]
    batch_size: int = 2
    sequence_length: int = 128
    teacher_steps: int = 800
    steps: int = 60
    validate_every: int = 20
    budget_frac: float = 0.65
    """Of the weights of both models."""
    probe_seconds: float = 3.0
    repeats: int = 3
    """Timed iterations of the trace."""
    calibration_steps: int = 5
    """Timed iterations of every plan that the calibration is fitted to."""
    slowdown_seconds: float = 4.0
    """To measure how lanes slow each other."""

    @property
    def student(self) -> Student:
        """Half of the FFN, and half of the key-value heads."""
        sizes = {name: self.configuration[name] // 2 for name in ("intermediate_size", "num_key_value_heads")}
        return Student.model_validate({**_STUDENT, "all": sizes})


STANDARD: Final = BypassDemo(configuration=CONFIGURATION)


def main() -> None:
    """Run the demo and leave its files in the output folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("out/demo-bypass"), help="folder for the files (out/demo-bypass)"
    )
    console = Console(highlight=False)
    run_bypass_demo(parser.parse_args().output, console if console.is_terminal else Console(highlight=False, width=120))


def run_bypass_demo(folder: Path, console: Console, size: BypassDemo = STANDARD, teacher: Any = None) -> dict[str, Any]:
    """The whole demo; gives what ``comparison.json`` holds.

    ``teacher``: a model of ``size.configuration``; None: one is taught.  The trained student's folder is in ``run``.
    """
    started = time.perf_counter()
    leave_a_core_for_lanes()
    data = text_of(size)
    if teacher is None:
        told = f"{size.teacher_steps} steps: the teacher learns the Python language reference, byte by byte"
        with stage(console, told):
            teacher = taught(size, data)
    path = _saved(teacher, folder)
    subject = _Subject(size, data, TeacherFolder.opened(path), teacher)
    with stage(console, "make the student, trace both models"):
        untrained = subject.student()
        workload = subject.workload(untrained)
        weights_bytes = sum(parameter.size_bytes for parameter in workload.parameters)
        budget_bytes = int(size.budget_frac * weights_bytes)
    console.print(
        f"  the weights of both models are {format_bytes(weights_bytes)}, without gradients and optimizer; the device "
        f"has {format_bytes(budget_bytes)}"
    )
    with stage(console, "measure the machine and calibrate"):
        hardware = probe_hardware(seconds=size.probe_seconds, device=CpuDevice())
        calibration = subject.calibrated(untrained, workload, hardware)
    with stage(console, "search a plan on the simulator"):
        found = _searched(workload, hardware, calibration, budget_bytes, subject.settings(workload))
    measured, model = _trained(subject, workload, found, budget_bytes, folder, console)
    batches = subject.data.batches_to_validate(subject.settings(workload))
    losses = dict(zip(LOSSES, (_loss(one, batches) for one in (teacher, untrained, load_student(model))), strict=True))
    history = BypassHistory.load(folder / "run" / HISTORY)
    comparison = {**losses, **predictions_held(found.prediction, measured), "device_budget_bytes": budget_bytes}
    comparison |= {"weights_bytes": weights_bytes, "student": str(model)}
    calibration.save(folder / "calibration.json")
    write_atomically(folder / "hardware.toml", hardware_to_toml(hardware))
    workload.save(folder / "workload.json")
    write_atomically(folder / "comparison.json", json.dumps(comparison, indent=1) + "\n")
    _write_records(folder, workload, found, measured, comparison, history)
    console.print(Printed(comparison_tables(compare_records(found.prediction, measured))))
    console.print(Printed([_losses_table(comparison)]))
    _print_summary(console, comparison)
    console.print(f"{time.perf_counter() - started:.0f} s in all. Files: {folder}/ (open report.html)")
    return comparison


def text_of(size: BypassDemo) -> BypassData:
    """The Python language reference, with a part held out."""
    tokens = np.frombuffer(python_reference(), dtype=np.uint8).astype(np.int32)
    return BypassData.held_out(tokens, 8 * size.batch_size * size.sequence_length)


def taught(size: BypassDemo, data: BypassData) -> Any:
    """The teacher, trained plainly."""
    torch.manual_seed(_SEED)
    model = build_model(size.configuration, "demo-teacher", torch.float32, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, fused=True)
    stream = TokenStream(data.training, size.batch_size, size.sequence_length, _SEED)
    with progress_bar("teaching the teacher") as on_progress:
        for step, batch in enumerate(islice(stream.batches(0), size.teacher_steps), 1):
            model(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            on_progress(step, size.teacher_steps)
    return model.eval()


def _saved(teacher: Any, folder: Path) -> Path:
    """The teacher's folder, which replaces one that an earlier demo left; nothing else of ``folder`` is removed."""
    for name in ("teacher", "run"):
        shutil.rmtree(folder / name, ignore_errors=True)
    with no_progress_bar():
        teacher.save_pretrained(folder / "teacher")
    return folder / "teacher"


@dataclass(frozen=True)
class _Subject:
    """What is distilled."""

    size: BypassDemo
    data: BypassData
    folder: TeacherFolder
    teacher: Any

    def settings(self, workload: Workload) -> RunSettings:
        """Of the run."""
        size = self.size
        return RunSettings(
            teacher_weights=self.folder.fingerprint(),
            teacher_configuration=dict(self.folder.configuration),
            student=size.student,
            dtype=DType(workload.compute_dtype),
            data=self.data.fingerprint(size.sequence_length),
            sequence_length=size.sequence_length,
            micro_batch_size=size.batch_size,
            num_tokens=size.steps * size.batch_size * size.sequence_length,
            learning_rate=1e-3,
            validate_every=size.validate_every,
            log_every=1,
        )

    def student(self) -> Any:
        """As it is before it is trained."""
        stream = TokenStream(self.data.training, self.size.batch_size, self.size.sequence_length, _SEED)
        statistics = activation_statistics(self.teacher, islice(stream.batches(0), 8))
        return make_student(self.teacher, self.size.student, statistics=statistics, seed=_SEED)

    def batch(self) -> Batch:
        """One batch of the run."""
        return next(TokenStream(self.data.training, self.size.batch_size, self.size.sequence_length, _SEED).batches(0))

    def workload(self, student: Any) -> Workload:
        """Timed on this machine."""
        keys = tuple(KeyToLearn(key.value) for key in self.size.student.keys_to_learn)
        loss = block_loss(self.size.student.loss)
        return trace_distillation(
            self.teacher, student, self.batch(), loss, keys_to_learn=keys, repeats=self.size.repeats
        ).model_copy(update={"model_name": "demo-student"})

    def calibrated(self, student: Any, workload: Workload, hardware: Hardware) -> Calibration:
        """Factors of this machine, fitted to a few plans that train copies of both models."""
        pair = PairSubject(
            self.teacher,
            self.batch(),
            workload,
            hardware,
            student=student,
            pair_loss=block_loss(self.size.student.loss),
            blocks=family_of(self.size.configuration, "demo-teacher").blocks,
        )
        with progress_bar("calibrating") as on_progress:
            return calibrate(
                pair,
                steps=self.size.calibration_steps,
                slowdown_seconds=self.size.slowdown_seconds,
                on_progress=on_progress,
            )


def _searched(
    workload: Workload, hardware: Hardware, calibration: Calibration, budget_bytes: int, settings: RunSettings
) -> SearchResult:
    return search(
        SearchRequest(
            workload=workload,
            hardware=hardware,
            calibration=calibration,
            device_budget_bytes=budget_bytes,
            step=Step(max_gradient_norm=settings.max_gradient_norm),
        )
    )


def _trained(
    subject: _Subject, workload: Workload, found: SearchResult, budget_bytes: int, folder: Path, console: Console
) -> tuple[Record, Path]:
    """What was measured, and the folder of the trained student."""
    records: list[Record] = []

    def look(training: Distilling) -> None:
        records.append(training.record(hardware_name=found.prediction.hardware_name))

    run = BypassRun(
        path=folder / "run",
        settings=subject.settings(workload),
        teacher=subject.folder,
        data=subject.data,
        workload=workload,
        plan=lambda: found.plan,
        device=partial(CpuDevice, budget_bytes),
        look=look,
    )
    lines: list[str] = []
    with stage(console, f"{subject.size.steps} steps under the enforced budget"), progress_bar("training") as progress:
        model = run.carry_out(lines.append, progress)
    for line in lines:
        if "language-model loss" in line:
            console.print(f"  {line}")
    return records[0], model


@torch.no_grad()
def _loss(model: Any, batches: Sequence[Batch]) -> float:
    """Of a language model by itself."""
    model.eval()
    found = [float(model(**batch, labels=batch["input_ids"]).loss) for batch in batches]
    return sum(found) / len(found)


def _losses_table(comparison: Mapping[str, Any]) -> Table:
    rows = tuple((name, f"{comparison[key]:.4f}") for key, name in LOSSES.items())
    return Table(title="Language-model loss on text held out", columns=("model", ">nats per byte"), rows=rows)


def _write_records(
    folder: Path,
    workload: Workload,
    found: SearchResult,
    measured: Record,
    comparison: Mapping[str, Any],
    history: BypassHistory,
) -> None:
    """The plan, both records, and the page."""
    predicted, schedule = found.prediction, compile_schedule(found.plan, workload)
    found.plan.save(folder / "plan.json")
    predicted.save(folder / "predicted.json")
    measured.save(folder / "measured.json")
    records = {"simulated": predicted, "measured": measured}
    write_atomically(folder / "timeline.json", chrome_trace(records, schedule=schedule))
    blocks = {
        name: [float("nan") if one.losses[number] is None else one.losses[number] for one in history.reports]
        for number, name in enumerate(history.blocks)
    }
    figure = block_losses_chart(blocks)  # type: ignore[arg-type]
    sections = [Section("Language models", (PageTable(_losses_table(comparison), "narrow"),))]
    if figure is not None:
        sections.append(Section("Losses of the blocks", (figure,)))
    facts = Facts(
        predicted=predicted,
        measured=measured,
        budget_bytes=comparison["device_budget_bytes"],
        schedule=schedule,
        search=found,
        further=tuple(sections),
        notes=(f"The weights of teacher and student are {format_bytes(comparison['weights_bytes'])}.",),
    )
    title = "protwin demo: a student learns from its teacher, block by block"
    write_atomically(folder / "report.html", report(title, facts).html)


def _print_summary(console: Console, comparison: Mapping[str, Any]) -> None:
    c = comparison
    won = (c["untrained_loss"] - c["trained_loss"]) / (c["untrained_loss"] - c["teacher_loss"])
    console.print(
        f"iteration: predicted {format_seconds(c['predicted_iteration_s'])}, measured "
        f"{format_seconds(c['measured_iteration_s'])} ({c['iteration_error_frac']:+.1%}, noise "
        f"± {c['iteration_noise_frac']:.1%})\n"
        f"peak: predicted {format_bytes(c['predicted_peak_device_bytes'])}, measured "
        f"{format_bytes(c['measured_peak_device_bytes'])} of a budget of {format_bytes(c['device_budget_bytes'])}\n"
        f"loss: teacher {c['teacher_loss']:.4f}, student {c['untrained_loss']:.4f} -> {c['trained_loss']:.4f}, which "
        f"is {won:.0%} of the way"
    )


if __name__ == "__main__":
    main()
