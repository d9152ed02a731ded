"""The command ``protwin explain-config``: what a configuration file of another tool asks for, takes, and could take.

Imports neither the other tools nor torch, which only a model that no catalogue has needs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ...runtime.integrations.axolotl_file import check_plugin, step_of
from ...runtime.integrations.axolotl_question import Question, disagreements, question_of, read_named
from ...runtime.integrations.axolotl_section import PlanSection, contradictions, is_listed, meanings, section_of
from ...shared.basics.errors import PlanError
from ...shared.basics.gc_pause import gc_paused
from ...shared.basics.progress import progress_bar
from ...shared.basics.units import as_bytes
from ...shared.cli.option_groups import with_groups
from ...shared.cli.options import (
    BatchSize,
    CalibrationPath,
    DeviceBudget,
    DTypeName,
    HardwareChanges,
    JsonFlag,
    KernelPackages,
    NoCacheFlag,
    OptimizerName,
    PackedLengths,
    SequenceLength,
    cache_folder,
    command_app,
    examples,
    warn,
)
from ...shared.cli.output import show
from ...shared.cli.streams import say, write_data
from ...shared.cli.training_choice import LoraMaps, PackedTo, trained
from ...shared.foreign.asked_run import Checkpointing, Tool
from ...shared.foreign.files import read_content, read_run
from ...shared.schema.calibration import Calibration
from ...shared.tables.table import Table
from ...sim.commands.machine_choice import NumRanks, machine_of
from ...sim.commands.options import MicroBatches

if TYPE_CHECKING:
    from ...sim.as_configured.explain import Asked
    from ...sim.as_configured.explanation import Explanation
    from ...sim.as_configured.question import Said

__all__ = ["explain_config"]

explain_config = command_app()

_CHECKPOINTING: Final = {True: Checkpointing.FULL, False: Checkpointing.NONE}


@dataclass(frozen=True, kw_only=True)
class Besides:
    """What a file does not say; see [Note: Groups of options] in ``shared/cli/option_groups.py``."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="NAME|FILE", help="A model of the catalogue, or a config.json, where no file says."
        ),
    ] = None
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", metavar="NAME|FILE", help="A machine of the catalogue, or its file."),
    ] = None
    changes: HardwareChanges = None
    batch_size: BatchSize = None
    sequence_length: SequenceLength = None
    packed_lengths: PackedLengths = None
    micro_batches: MicroBatches = None
    num_ranks: NumRanks = None
    dtype: DTypeName = None
    lora: LoraMaps
    packed: PackedTo
    kernels: KernelPackages = None
    optimizer: OptimizerName = None
    is_checkpointed: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing",
            help="Whether every block is recomputed in backward; DeepSpeed's files leave it to the program.",
            show_default=False,
        ),
    ] = None
    device_budget_bytes: DeviceBudget = None
    calibration: CalibrationPath = None

    def said(self) -> Said:
        """What is said of the training.  Raises ProtwinError if it makes no sense together."""
        from ...sim.as_configured.question import Said

        quantized, lora = self.packed.options(), self.lora.options()
        checked = trained(lora, quantized, None, None, frozen=None, loss=None, kernels=self.kernels)
        return Said(
            model=self.model,
            batch_size=self.batch_size,
            micro_batches=self.micro_batches,
            sequence_length=self.sequence_length,
            packed_lengths=self.packed_lengths,
            num_ranks=self.num_ranks,
            dtype=self.dtype,
            optimizer=self.optimizer,
            checkpointing=None if self.is_checkpointed is None else _CHECKPOINTING[self.is_checkpointed],
            lora=lora,
            quantized=quantized,
            kernels=checked.kernels,
        )

    def asked(self, file: Path, budget_bytes: int | None, *, has_cache: bool) -> Asked:
        """What is asked about ``file``.  Raises ProtwinError if the machine or the calibration is none."""
        from ...sim.as_configured.explain import Asked

        return Asked(
            file=str(file),
            hardware_name=self.hardware,
            machine=None if self.hardware is None else machine_of(self.hardware, self.changes),
            changes=tuple(self.changes or ()),
            device_budget_bytes=self.device_budget_bytes or budget_bytes,
            calibration=None if self.calibration is None else Calibration.load(self.calibration),
            calibration_path=None if self.calibration is None else str(self.calibration),
            cache=cache_folder() if has_cache else None,
        )


@explain_config.command(
    epilog=examples(
        "protwin explain-config lora.yml --hardware rtx-4090",
        "protwin explain-config ds_config.json --model llama-3-8b --hardware a100-80gb-x8 --batch-size 1 "
        "--sequence-length 4096",
        "protwin explain-config train.toml --hardware h100-80gb-x8 --json",
    )
)
@gc_paused()
@with_groups
def explain_config_command(
    *,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="An axolotl YAML, the YAML of a script of TRL, TrainingArguments or a DeepSpeed configuration as "
            "JSON, a torchtitan TOML.",
            show_default=False,
        ),
    ],
    tool: Annotated[Tool | None, typer.Option("--tool", help="Whose file it is, where its keys do not tell.")] = None,
    besides: Besides,
    as_json: JsonFlag = False,
    no_cache: NoCacheFlag = False,
) -> None:
    """Say what a configuration file of another tool asks for, what that run takes, and what a plan would do for it.

    The prediction is of a plan that does the same; what the file does not say, options do.  Every key is told: what it
    means, or that the answer leaves it out.  The exit code is 2, with one message, where a key contradicts and cannot
    be left out.  Of an axolotl file with a section protwin it says what the section means, and by which command its
    plan can be asked about; with --hardware the rest of the file is answered too.
    """
    content = read_content(file)
    section, budget_bytes = None, None
    if "protwin" in content or is_listed(content):
        section = _explain_section(file, content, as_json=as_json)
        if besides.hardware is None:
            _tell(section, None, as_json=as_json)
            return
        budget_bytes = _budget_bytes(content)
        content = {name: value for name, value in content.items() if name != "protwin"}
    said = besides.said()
    reading = read_run(content, file, tool, said.optimizer)
    asked = besides.asked(file, budget_bytes, has_cache=not no_cache)
    _tell(section, _explained(reading, said, asked), as_json=as_json)


def _tell(section: dict[str, Any] | None, told: Explanation | None, *, as_json: bool) -> None:
    """What an axolotl file's section means, if it has one, and the answer about the rest."""
    if as_json:
        if section is not None:
            beside = {} if told is None else {"explanation": json.loads(told.to_json())}
            write_data(json.dumps(section | beside, indent=1, ensure_ascii=False) + "\n")
        elif told is not None:
            write_data(told.to_json())
    elif told is not None:
        from ...sim.as_configured.tables import explanation_tables

        if section is not None:
            say("\nThe rest of the file, as axolotl trains by it without the plugin:\n")
        show(explanation_tables(told))
        say(f"\nAsk for such a plan:\n\n  {told.command}")
    else:
        say("- with --hardware NAME, what the file asks for without the plugin is predicted, beside a plan.")


def _budget_bytes(configuration: dict[str, Any]) -> int | None:
    """The budget of the section, if it has one."""
    budget = section_of(configuration).budget
    return None if budget is None else as_bytes(budget)


def _explained(reading: Any, said: Said, asked: Asked) -> Explanation:
    from ...sim.as_configured.explain import explain

    with progress_bar("searching") as on_progress:
        return explain(reading, said, asked, warn, on_progress)


def _explain_section(file: Path, configuration: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """What the section protwin of an axolotl file means, said or, as what ``--json`` prints of it, given back."""
    check_plugin(configuration, file)
    try:
        section = section_of(configuration)
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from error
    if not as_json:
        show([_section_table(section, file)])
    try:
        # Everything that contradicts is told at once; what a file names is read where nothing does.
        if found := contradictions(configuration):
            raise PlanError(" ".join(found))
        step, files = step_of(configuration), read_named(section)
        if found := disagreements(section, step, files):
            raise PlanError(" ".join(found))
        question = question_of(section, step, files)
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from error
    if not as_json:
        _say(question)
    return {"section": section.model_dump(mode="json"), **asdict(question)}


def _section_table(section: PlanSection, file: Path) -> Table:
    return Table(
        title=f"Section protwin of {file}",
        columns=("key", "value", "meaning"),
        rows=meanings(section),
        always=None,
    )


def _say(question: Question) -> None:
    """Command lines stay whole, however narrow the terminal is."""
    say("\nNothing in the file contradicts a plan.\n")
    if question.commands:
        say("Ask about the plan before the training:\n")
        for command in question.commands:
            say(f"  {command}")
    else:
        say("The plan cannot be asked about ahead; it is searched when training begins:\n")
        for obstacle in question.obstacles:
            say(f"- {obstacle}")
    say()
    for note in question.notes:
        say(f"- {note}")
