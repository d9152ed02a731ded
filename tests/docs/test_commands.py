"""Every command line of README and docs exists and parses; where its output is shown, it is what the command prints."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from protwin.shared.cli.root import COMMANDS, root_command
from tests.docs.documents import DOCUMENTS, ROOT, Block, Command, blocks_of, commands_of

COMMAND_LINES = [
    command
    for document in DOCUMENTS
    for block in blocks_of(document)
    if block.language in {"bash", "console"}
    for command in commands_of(block)
]
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
ALLOWED = {"cd", "git", "make", "pip", "protwin", "python3", "torchrun"}


def check(text: str) -> None:
    """Raise unless ``text`` could be run: known program, known target, options that exist with values that parse."""
    program, *arguments = shlex.split(text, comments=True)
    assert program in ALLOWED, f"{program} is not known"
    if program == "make":
        targets = [argument for argument in arguments if "=" not in argument]
        assert set(targets) <= MAKE_TARGETS, f"the Makefile has no target {targets}"
    if program == "protwin":
        parse(root_command(), "protwin", arguments)


def parse(command: Any, name: str, arguments: list[str]) -> None:
    """Parse ``arguments`` as the command would, without running it."""
    if "--help" in arguments[-1:] and len(arguments) == 1:
        return
    commands = getattr(command, "commands", None)
    if commands is None:
        command.make_context(name, list(arguments))
        return
    if arguments == ["--version"] and name == "protwin":
        return
    assert arguments, f"{name} needs a command"
    assert arguments[0] in commands, f"{name} has no command {arguments[0]}"
    below = commands[arguments[0]]
    if arguments[0] in COMMANDS and name == "protwin":
        below = typer.main.get_command(below.load())
    parse(below, arguments[0], arguments[1:])


@pytest.mark.parametrize("command", COMMAND_LINES, ids=str)
def test_command_lines_parse(command: Command) -> None:
    check(command.text)


@pytest.mark.parametrize(
    "text",
    [
        "protwinn search",
        "protwin serch",
        "protwin search --no-such-option",
        "protwin search --model gpt2 --hardware rtx-3090 --batch-size many",
        "protwin hardware lst",
        "make no-such-target",
    ],
)
def test_wrong_command_lines_are_seen(text: str) -> None:
    with pytest.raises(Exception, match=r"known|no command|no target|No such option|valid integer"):
        check(text)


SHOWN = [command for command in COMMAND_LINES if command.output]


@pytest.mark.slow
@pytest.mark.parametrize("document", sorted({command.block.document for command in SHOWN}), ids=lambda path: path.name)
def test_output_is_what_the_commands_print(document: Path, tmp_path: Path) -> None:
    """The commands of one document run in order in one folder, since later ones read what earlier ones wrote."""
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for command in SHOWN:
        if command.block.document != document:
            continue
        program, *arguments = shlex.split(command.text)
        assert program == "protwin", f"{command}: show the output of other programs in a text block"
        script = Path(sys.executable).with_name(program)
        result = subprocess.run(
            [script, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        printed = "\n".join(line.rstrip() for line in result.stdout.strip("\n").splitlines())
        assert printed == command.output, command


def test_console_blocks_are_read_as_written() -> None:
    block = Block(ROOT / "README.md", 1, "console", "$ protwin search \\\n    --json\nfirst\n\nsecond\n$ make demo\n")
    assert [(command.text, command.output) for command in commands_of(block)] == [
        ("protwin search --json", "first\n\nsecond"),
        ("make demo", ""),
    ]
