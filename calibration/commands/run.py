"""The command ``protwin run``.  torch is imported when it is called."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import typer

from ...runtime.commands.run_budget import check_budget, check_random_weights
from ...runtime.commands.run_options import (
    TEXT_STEPS,
    CheckpointChoice,
    DataChoice,
    DeviceChoice,
    DiskFolder,
    ExtentChoice,
    ModelOfPlan,
    PlanPath,
    RankCount,
    ReplanAfter,
    SaveFolder,
    Shape,
    StatedMachine,
    TrainingOfPlan,
)
from ...runtime.commands.run_ranks import has_to_start, in_one_voice, rank_at_hand, start_ranks, was_accepted
from ...runtime.commands.run_record import check_record
from ...runtime.devices.process_settings import prefer_expandable_segments
from ...shared.basics.documents import write_atomically
from ...shared.basics.errors import ProtwinError
from ...shared.catalogue.machines import load_hardware
from ...shared.catalogue.models import load_model_configuration
from ...shared.cli.loss_options import check_loss_of_plan
from ...shared.cli.option_groups import with_groups
from ...shared.cli.options import (
    CalibrationPath,
    JsonFlag,
    OutputPath,
    Seed,
    TimelinePath,
    command_app,
    examples,
    keep_apart,
    load_plan,
)
from ...shared.cli.output import is_standard_output, save, tell
from ...shared.cli.streams import say
from ...shared.compile.compile import compile_schedule
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ...shared.workloads.source import WorkloadRequest

__all__ = ["run"]

run = command_app()


@dataclass(frozen=True, kw_only=True)
class Replanning:
    """Whether a plan is searched again; see [Note: Groups of options] in ``shared/cli/option_groups.py``."""

    after: ReplanAfter = None
    calibration: CalibrationPath = None

    def check(self, hardware: Hardware | None, plan: Plan, steps: int | None) -> None:
        """Raise ProtwinError if a plan is to be searched again, and cannot be."""
        if self.after is None:
            if self.calibration is not None:
                raise ProtwinError("--calibration is what a search knows before, and --replan-after N is missing.")
            return
        if hardware is None:
            raise ProtwinError(
                "--replan-after searches a plan for this machine: describe it by --hardware machine.toml."
            )
        if plan.num_ranks > 1 or plan.n_disk_state:
            what = f"has {plan.num_ranks} ranks" if plan.num_ranks > 1 else "has chunks on a disk"
            raise ProtwinError(
                f"--replan-after: the plan {what}, and cannot change while it is carried out. Leave it out."
            )
        if steps is not None and self.after >= steps:
            raise ProtwinError(f"--replan-after is {self.after} of --steps {steps}: no step would be left. Lower it.")


@dataclass(frozen=True, kw_only=True)
class RecordChoice:
    """Where the measured record goes, and how it is shown."""

    output: OutputPath = None
    timeline: TimelinePath = None
    as_json: JsonFlag = False

    @property
    def is_wanted(self) -> bool:
        """Whether there is to be one."""
        return self.as_json or self.output is not None or self.timeline is not None

    @property
    def is_alone(self) -> bool:
        """Whether standard output gets nothing else."""
        return self.as_json or is_standard_output(self.output)

    def give(self, record: Record, workload: Workload) -> None:
        """Write the record where it was asked for, and show it."""
        from ...shared.records.chrome_trace import chrome_trace
        from ...shared.tables.record import record_tables

        save(record, self.output)
        if self.timeline is not None:
            schedule = compile_schedule(record.plan, workload)
            write_atomically(self.timeline, chrome_trace({"measured": record}, schedule=schedule))
        tell(record, self.output, as_json=self.as_json, tables=lambda: record_tables(record))


@run.command(
    epilog=examples(
        "protwin run --plan plan.json --workload workload.json --model config.json --steps 20 --output measured.json",
        "protwin run --plan plan.json --workload workload.json --model gpt2 --checkpoint saved --checkpoint-every 100",
        "protwin run --plan plan.json --workload workload.json --weights base --data chats.jsonl --save tuned",
    )
)
@in_one_voice
@with_groups
def run_command(
    *,
    plan: PlanPath,
    ranks: RankCount = None,
    subject: ModelOfPlan,
    shape: Shape,
    training: TrainingOfPlan,
    data: DataChoice,
    extent: ExtentChoice,
    checkpoints: CheckpointChoice,
    save: SaveFolder = None,
    disk_folder: DiskFolder = None,
    hardware: StatedMachine = None,
    device: DeviceChoice,
    replanning: Replanning,
    seed: Seed = 0,
    wanted: RecordChoice,
) -> None:
    """Carry a plan out: fine-tune the weights of a folder on rows of JSON Lines, or try a plan with random weights.

    --weights and --data fine-tune, and --save writes a folder for from_pretrained.  --model trains random weights on
    text, bytes as tokens.  Uses the first CUDA device where there is one, with expandable segments of PyTorch's
    allocator unless PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF is set; else the CPU as a device.  --output writes
    the measured record, which protwin compare lays beside the predicted one.  --ranks starts as many processes, by
    torchrun, each with its part of the data; torchrun -m protwin run does the same.  --replan-after searches again with
    what the first steps have measured on --hardware, and goes on by a faster plan if there is one.
    """
    outputs = {"--output": wanted.output, "--timeline": wanted.timeline}
    read = {"--plan": plan, "--workload": subject.workload, "--model": subject.model}
    read |= {"--text": data.text, "--evaluation": data.evaluation}
    keep_apart(outputs, read | {f"--data {path}": path for path in data.data or ()}, as_json=wanted.as_json)
    subject.check()
    extent.check(has_data=bool(data.data))
    if wanted.is_wanted and (extent.steps is not None or not data.data):
        pauses = {"--checkpoint-every": checkpoints.every, "--evaluate-every": data.evaluate_every}
        check_record(extent.steps or TEXT_STEPS, pauses)
    shape = shape.checked
    chosen = load_plan(plan, extent.optimizer)
    given = None if subject.workload is None else Workload.load(subject.workload)
    if given is not None:
        check_budget(chosen, given, device.budget_bytes)
    starts = has_to_start(chosen, ranks, os.environ)
    machine = None if hardware is None else load_hardware(hardware)
    replanning.check(machine, chosen, extent.steps)
    known = None if replanning.calibration is None else Calibration.load(replanning.calibration)
    described = load_model_configuration(subject.named)
    options = training.options(chosen)
    check_loss_of_plan(training.loss, chosen, given)
    if subject.weights is None:
        asked = WorkloadRequest(
            subject.named,
            batch_size=shape.batch_size,
            sequence_length=shape.sequence_length,
            dtype=shape.dtype,
            options=options,
            mlp_tiles=(chosen.mlp_tiles,),
            loss_tiles=(chosen.loss_tiles,),
        )
        check_random_weights(chosen, asked, described.name)

    prefer_expandable_segments(os.environ)
    if starts:
        raise typer.Exit(start_ranks(chosen.num_ranks, sys.argv[1:]))
    rank = rank_at_hand(os.environ)
    # This imports torch, which reads the settings of its allocator.
    from ...runtime.commands.run_checkpoints import RunCheckpoints
    from ...runtime.commands.run_data import RunSource
    from ...runtime.commands.run_model import RunModel
    from ...runtime.commands.run_request import RunRequest
    from ...runtime.commands.run_training import DiskChoice, ReplanChoice
    from ...runtime.osft.cache import FactorCache

    def replanner(workload: Workload, budget_bytes: int | None) -> Callable[[Record], Plan | None]:
        from ...sim.searching.request import SearchRequest
        from ..fitting.replanning import Replanner

        assert machine is not None
        asked = SearchRequest(workload=workload, hardware=machine, calibration=known, device_budget_bytes=budget_bytes)
        return Replanner(asked)

    cache = None if training.osft_cache is None else FactorCache(training.osft_cache)
    request = RunRequest(
        plan=chosen,
        workload=given,
        shape=shape,
        model=RunModel(described, subject.named, subject.weights, shape.dtype, options, seed, rank, cache),
        data=RunSource(
            **vars(data),
            weights=subject.weights,
            seed=seed,
            loss_weighting=extent.loss_weighting,
            images=options.images,
        ),
        extent=extent,
        checkpoints=RunCheckpoints(
            **vars(checkpoints),
            is_restarted=was_accepted(os.environ),
            lora=options.lora,
            quantized=options.quantized,
        ),
        save=save,
        device=device,
        disk=None if disk_folder is None else DiskChoice(disk_folder, None if machine is None else machine.disk),
        replan=None if replanning.after is None else ReplanChoice(replanning.after, replanner),
        wants_record=wanted.is_wanted,
        rank=rank,
    )
    traced, record = request.carry_out(say if rank.speaks and not wanted.is_alone else _tell_nobody)
    if record is not None and rank.speaks:
        wanted.give(record, traced)


def _tell_nobody(line: str) -> None:
    """Standard output is JSON alone, or another rank's."""
