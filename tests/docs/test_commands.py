"""Every command line of README and docs exists and parses; where its output is shown, it is what the command prints."""

from __future__ import annotations

import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from protwin.shared.basics.extras import install_command
from protwin.shared.cli.root import COMMANDS, root_command
from tests.cli.conftest import Protwin, protwin_here, variables, work
from tests.docs.documents import DOCUMENTS, IN_ORDER, ROOT, Block, Command, blocks_of, commands_of

__all__ = ["protwin_here", "variables", "work"]

COMMAND_LINES = [
    command
    for document in DOCUMENTS
    for block in blocks_of(document)
    if block.language in {"bash", "console"}
    for command in commands_of(block)
]
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
ALLOWED = {"cd", "git", "make", "pip", "protwin", "python3", "source", "torchrun"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


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


INSTALLATIONS = [
    (document, line)
    for document in DOCUMENTS
    for line in re.findall(r"pip install[^`\n]*", document.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("document", "line"), INSTALLATIONS, ids=str)
def test_installations_name_the_checkout_and_extras_that_exist(document: Path, line: str) -> None:
    """protwin is on no package index, where its name would bring something else."""
    arguments = shlex.split(line)[2:]
    assert "protwin" not in " ".join(arguments)
    for extras in re.findall(r"\.\[(.*?)\]", " ".join(arguments)):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    for file in (after for option, after in pairwise(arguments) if option == "--constraint"):
        assert (ROOT / file).is_file()


@pytest.mark.parametrize("document", ["README.md", "docs/index.md"])
def test_an_environment_is_activated_before_the_first_command(document: str) -> None:
    texts = [command.text for command in COMMAND_LINES if command.block.document == ROOT / document]
    first = {program: next(i for i, text in enumerate(texts) if text.startswith(program)) for program in
             ("python3 -m venv env", "source env/bin/activate", "pip install .", "protwin")}  # fmt: skip
    assert sorted(first.values()) == list(first.values())


def test_messages_name_what_the_runtime_needs() -> None:
    """Neither a checkout nor an index is at hand where the message is read."""
    assert shlex.split(install_command("runtime")) == ["pip", "install", *PROJECT["optional-dependencies"]["runtime"]]


@pytest.mark.parametrize("folder", ["shared", "sim", "runtime", "calibration"])
def test_no_message_installs_protwin_from_an_index(folder: str) -> None:
    """Or a part of a checkout alone, which whoever reads it may not have: ``install_command`` names the packages."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        # A string that goes on in the next line is one message.
        text = re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
        for line in re.findall(r"pip install [^`\n]*", text):
            assert not re.match(r"pip install '?protwin", line), f"{path}: {line}"
            assert not re.match(r"pip install '?\.\[", line) or "install_command" in text, f"{path}: {line}"


SHOWN = [command for command in COMMAND_LINES if command.output and command.block.document not in IN_ORDER]
LEFT_OUT = "..."


def is_shown(printed: str, shown: str) -> bool:
    """Whether a document shows what a command prints; ``...`` alone on a line stands for any lines."""
    lines = [r"(?:.*\n)*?" if line == LEFT_OUT else re.escape(line) + r"\n" for line in shown.splitlines()]
    return re.fullmatch("".join(lines), printed + "\n") is not None


@pytest.mark.slow
@pytest.mark.parametrize("document", sorted({command.block.document for command in SHOWN}), ids=lambda path: path.name)
def test_output_is_what_the_commands_print(document: Path, protwin_here: Protwin) -> None:
    """The commands of one document run in order in one folder, since later ones read what earlier ones wrote."""
    for command in SHOWN:
        if command.block.document != document:
            continue
        program, *arguments = shlex.split(command.text)
        assert program == "protwin", f"{command}: show the output of other programs in a text block"
        result = protwin_here(*arguments)
        assert result.returncode == 0, result.stderr
        printed = "\n".join(line.rstrip() for line in result.stdout.strip("\n").splitlines())
        assert is_shown(printed, command.output), f"{command} prints:\n{printed}"


@pytest.mark.parametrize(
    ("shown", "is_right"),
    [
        ("a\nb\nc\nd", True),
        ("a\n...\nd", True),
        ("...\nc\n...", True),
        ("a\n...\nb\nc\n...", True),
        ("a\nb", False),
        ("b\n...", False),
        ("a\n...\nc", False),
        ("a\n...\nd\n...\nb\n...", False),
        ("...\nb\nd\n...", False),
    ],
)
def test_shown_output_may_leave_lines_out_but_not_change_them(shown: str, is_right: bool) -> None:
    assert is_shown("a\nb\nc\nd", shown) is is_right


def test_console_blocks_are_read_as_written() -> None:
    block = Block(ROOT / "README.md", 1, "console", "$ protwin search \\\n    --json\nfirst\n\nsecond\n$ make demo\n")
    assert [(command.text, command.output) for command in commands_of(block)] == [
        ("protwin search --json", "first\n\nsecond"),
        ("make demo", ""),
    ]


@pytest.mark.parametrize(
    "document", sorted({command.block.document for command in COMMAND_LINES}), ids=lambda p: p.name
)
def test_a_plan_for_several_ranks_is_searched_before_it_runs(document: Path) -> None:
    """Whoever follows a page from its top has, at ``protwin run --ranks N``, a plan of as many ranks."""
    searched: dict[str, str | None] = {}
    for command in (one for one in COMMAND_LINES if one.block.document == document):
        program, *arguments = shlex.split(command.text, comments=True)
        said = dict(pairwise(arguments))
        if program == "protwin" and arguments[:1] == ["search"] and "--output" in said:
            searched[said["--output"]] = said.get("--ranks")
        if program == "protwin" and arguments[:1] == ["run"] and "--ranks" in said and said["--plan"] in searched:
            assert searched[said["--plan"]] == said["--ranks"], f"{command}: the last plan is for other ranks"
