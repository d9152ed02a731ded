"""The command ``protwin explain-config``: what an axolotl file asks of a plan.  Imports neither axolotl nor torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ...shared.basics.errors import PlanError
from ...shared.cli.options import JsonFlag, command_app, examples
from ...shared.cli.output import show
from ...shared.cli.streams import say, write_data
from ...shared.tables.table import Table
from .axolotl_file import read_configuration, step_of
from .axolotl_question import Question, disagreements, question_of, read_named
from .axolotl_section import contradictions, meanings, section_of

__all__ = ["explain_config"]

explain_config = command_app()

ConfigurationFile = Annotated[
    Path, typer.Argument(metavar="FILE.yml", help="The file that axolotl trains by.", show_default=False)
]


@explain_config.command(epilog=examples("protwin explain-config lora.yml", "protwin explain-config lora.yml --json"))
def explain_config_command(file: ConfigurationFile, as_json: JsonFlag = False) -> None:
    """Say what the section protwin of an axolotl file means.

    Prints every key of the section, and by which command the plan can be asked about before the training.  The exit
    code is 2, with one message that names both sides, if anything in the file contradicts a plan.  Files that it names
    are looked for where the command runs, as axolotl does.
    """
    configuration = read_configuration(file)
    try:
        section = section_of(configuration)
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from error
    if not as_json:
        show(
            [
                Table(
                    title=f"Section protwin of {file}",
                    columns=("key", "value", "meaning"),
                    rows=meanings(section),
                    always=None,
                )
            ]
        )
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
    if as_json:
        asked = {"section": section.model_dump(mode="json"), **asdict(question)}
        write_data(json.dumps(asked, indent=1, ensure_ascii=False) + "\n")
    else:
        _say(question)


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
