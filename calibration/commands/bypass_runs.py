"""The runs that ``protwin bypass`` is asked for: one, or those of a sweep, each with its workload and its plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ...runtime.bypass.data import BypassData, TokenFiles
from ...runtime.bypass.run import BypassRun
from ...runtime.bypass.teacher import TeacherFolder
from ...runtime.commands.run_options import DeviceChoice
from ...runtime.commands.run_ranks import ALONE, RunRank
from ...runtime.runs.run_settings import RunSettings
from ...runtime.runs.sweeps import sweep
from ...shared.basics.documents import read_mapping
from ...shared.basics.errors import FileError
from ...shared.basics.progress import no_progress, progress_bar
from ...shared.basics.suggestions import did_you_mean
from ...shared.cli.options import cache_folder, warn
from ...shared.pipelines.pipeline import Pipeline
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import DeviceKind
from ...shared.schema.plan import Plan
from ...shared.schema.training_options import TrainingOptions
from ...shared.schema.workload import Workload
from ...shared.students.student import Student
from ...shared.workloads.dtypes import TRAINABLE
from ...shared.workloads.source import WorkloadRequest, resolve_workload
from ...sim.searching.request import SearchRequest, Step
from ...sim.searching.search import search
from .bypass_inputs import BypassInputs

_RUNS: Final = "run"
"""Name of the tables of a sweep's file."""
_SWEPT: Final = frozenset(
    {
        "student",
        "num_tokens",
        "seed",
        "data_seed",
        "learning_rate",
        "least_rate_frac",
        "warmup_frac",
        "betas",
        "weight_decay",
        "max_gradient_norm",
        "kept_weights",
        "validate_every",
        "validation_batches",
        "statistics_batches",
        "save_every",
        "log_every",
    }
)
"""Fields that runs of a sweep may differ in: neither the data, nor how batches are made of them."""


@dataclass(frozen=True, kw_only=True)
class BypassRequest:
    """One run, or several."""

    inputs: BypassInputs
    calibration: Calibration | None
    """Of the machine that plans are searched for."""
    device: DeviceChoice
    output: Path
    sweep: Path | None
    disk_folder: Path | None
    rank: RunRank = ALONE

    def runs(self) -> list[BypassRun]:
        """All that is asked for, checked but for plans.  Raises ProtwinError."""
        inputs = self.inputs
        teacher = TeacherFolder.opened(inputs.teacher, trust_remote_code=inputs.trust_remote_code)
        student, fields = Student.load(inputs.student), inputs.fields
        size, length = fields["micro_batch_size"], fields["sequence_length"]
        entries = [] if self.sweep is None else _entries(self.sweep, is_planned=inputs.plan is not None)
        most = max(int(entry.get("validation_batches", fields["validation_batches"])) for entry in (*entries, {}))
        data, tokenizer = _read_data(inputs, teacher, size * length * most)
        workload = self._workload(teacher, student)
        base = RunSettings(
            teacher_weights=teacher.fingerprint(),
            teacher_configuration=dict(teacher.configuration),
            teacher_code=None if teacher.code is None else teacher.code.fingerprint,
            student=student,
            dtype=workload.compute_dtype,
            data=data.fingerprint(length),
            **fields,
        )
        wanted = [base] if self.sweep is None else list(sweep(base, entries))

        def made(settings: RunSettings) -> BypassRun:
            own = workload if settings.student == student else self._workload(teacher, settings.student)
            return BypassRun(
                path=self.output if self.sweep is None else self.output / settings.label,
                settings=settings,
                teacher=teacher,
                data=data,
                workload=own,
                plan=lambda: self._plan_for(settings, own),
                num_ranks=1 if inputs.plan is None else inputs.plan.num_ranks,
                device=lambda: self.device.at_hand(self.rank.local_rank),
                tokenizer=tokenizer,
                inputs=None if self.sweep is not None else inputs.fingerprint,
                disk_folder=self.disk_folder,
            )

        return [made(settings) for settings in wanted]

    def _plan_for(self, settings: RunSettings, workload: Workload) -> Plan | Pipeline:
        """The plan of one run.  Raises InfeasibleError if none fits."""
        if self.inputs.plan is not None:
            return self.inputs.plan
        assert self.inputs.hardware is not None, "the command has seen to it"
        with progress_bar("searching") as on_progress:
            found = search(
                SearchRequest(
                    workload=workload,
                    hardware=self.inputs.hardware,
                    calibration=self.calibration,
                    device_budget_bytes=self.device.budget_bytes,
                    step=Step(
                        micro_batches=settings.micro_batches,
                        max_gradient_norm=settings.max_gradient_norm,
                        optimizer=settings.optimizer,
                    ),
                ),
                on_progress=on_progress,
            )
        return found.certificate.noted(found.plan)

    def _workload(self, teacher: TeacherFolder, student: Student) -> Workload:
        """Of the student, in the element type that the plan is for.

        A search may have chosen another one than the published, for its machine; the plan's identity tells which.
        """
        inputs, plan, found = self.inputs, self.inputs.plan, None
        for dtype in (inputs.dtype,) if inputs.dtype is not None or plan is None else (None, *TRAINABLE):
            asked = WorkloadRequest(
                str(inputs.teacher / "config.json"),
                batch_size=inputs.fields["micro_batch_size"],
                sequence_length=inputs.fields["sequence_length"],
                dtype=dtype,
                device=None if inputs.hardware is None else inputs.hardware.device,
                device_kind=DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU,
                options=TrainingOptions(autocast=inputs.fields["autocast"]),
                student=student,
                code=teacher.code,
            )
            workload = resolve_workload(asked, cache=cache_folder(), warn=warn)
            found = found or workload
            if plan is None or workload.identity == plan.workload_id:
                return workload
        assert found is not None
        return found


def _read_data(inputs: BypassInputs, teacher: TeacherFolder, num_held_out: int) -> tuple[BypassData, Any]:
    """The tokens, of which so many are held out where nothing else is named, and the tokenizer, if there is one.

    Raises FileError.
    """
    tokenizer = None if inputs.is_bytes else teacher.tokenizer(inputs.tokenizer)
    files = TokenFiles(tokenizer, inputs.tokenizer or teacher.path)
    tokens = files.read(inputs.training)
    if not inputs.validation:
        return BypassData.held_out(tokens, num_held_out), tokenizer
    return BypassData(tokens, files.read(inputs.validation)), tokenizer


def _entries(path: Path, *, is_planned: bool) -> list[dict[str, Any]]:
    """The runs of a sweep's file.  Raises FileError if it holds anything else, or what no run may differ in."""
    content = read_mapping(path)
    entries = content.get(_RUNS)
    if set(content) != {_RUNS} or not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise FileError(
            f"{path} is no sweep. Write one [[{_RUNS}]] table for every run, with what differs from the base."
        )
    for number, entry in enumerate(entries, 1):
        for name in entry:
            if name not in _SWEPT:
                raise FileError(f"run {number} of {path} states {name!r:.60}. {did_you_mean(name, sorted(_SWEPT))}")
    if is_planned and any("max_gradient_norm" in entry for entry in entries):
        raise FileError(f"{path} states max_gradient_norm, which the plan has. Leave --plan out to search one per run.")
    return entries


def carry_out(runs: list[BypassRun], tell: Callable[[str], None], *, speaks: bool = True) -> None:
    """One run after the other; what is complete is told of.  Raises ProtwinError, RunInterruptedError.

    ``speaks``: whether this rank shows how far a run has come.
    """
    for number, run in enumerate(runs, 1):
        if len(runs) > 1:
            tell(f"run {number} of {len(runs)}: {run.path}")
        with progress_bar("training") if speaks else nullcontext(no_progress) as on_progress:
            run.carry_out(tell, on_progress)
