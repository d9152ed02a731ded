"""Write docs/commands.md: every command and option, read off the command line's own help.

Run it with ``make docs``; a test fails while the page is stale.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer

from protwin.shared.cli.root import COMMANDS, root_command

PAGE: Final = Path(__file__).resolve().parent / "commands.md"

_HEAD: Final = """# Commands

<!-- Written by docs/command_reference.py from the command line's own help. Change that, then run `make docs`. -->

`protwin COMMAND --help` prints the same on a terminal; `python -m protwin` is `protwin`. Sizes take units (`10GiB`,
`512MiB`), rates too (`25GB/s`). With `--json` a command prints one document for programs, whose fields are on the page
[Files](json.md). The exit code is 0 on success, 2 for a mistake of the user (one message on standard error, and no file
is left half-written), 130 after Ctrl-C, and 1 without a message where nobody reads its output any more (`| head`). A
search that Ctrl-C ends writes the best plan so far to `--output`, with a `note` that nothing is proven about it;
`advise` writes the ranking so far.

`--output -` is standard output, which then shows no tables. A folder that is missing is an error, which names the
command that makes it. Names may be written as people write them (`meta-llama/Meta-Llama-3-8B`, `"RTX 3090"`, `8xH100`,
`bf16`). Streams that are not UTF-8 show plain characters; files are always UTF-8.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page as text."""
    parts = [_HEAD, "| command | |", "| --- | --- |"]
    parts += [f"| [`protwin {name}`](#protwin-{name}) | {_cell(summary)} |" for name, summary in COMMANDS.items()]
    for path, command in _commands(root_command()):
        parts += ["", *_section(path, command)]
    return "\n".join(parts) + "\n"


def _commands(app: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its path, groups before what they hold."""
    for name, command in app.commands.items():
        whole = typer.main.get_command(command.load()) if hasattr(command, "load") else command
        yield (*path, name), whole
        if hasattr(whole, "commands"):
            yield from _commands(whole, *path, name)


def _section(path: tuple[str, ...], command: Any) -> Iterator[str]:
    name = " ".join(("protwin", *path))
    yield f"{'#' * (1 + len(path))} {name}\n"
    yield "\n\n".join(_cell(paragraph) for paragraph in (command.help or "").split("\n\n"))
    rows = [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    if rows:
        yield "\n| option | meaning | default |"
        yield "| --- | --- | --- |"
        yield from rows
    examples = [line.strip() for line in (command.epilog or "").splitlines() if line.strip().startswith("protwin ")]
    if examples:
        yield "\n```console"
        yield from (f"$ {_wrapped(example)}" for example in examples)
        yield "```"


def _row(parameter: Any) -> str:
    with typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None))) as context:
        names, words = parameter.get_help_record(context) or (parameter.human_readable_name, parameter.help or "")
    found = re.search(r" *\[([^\]]*)\]$", words)
    said = found[1].split("; ") if found else []
    default = next((one.removeprefix("default: ") for one in said if one.startswith("default: ")), "")
    if "required" in said:
        default = "required"
    bounds = [one for one in said if "<=" in one or ">=" in one]
    meaning = words[: found.start()] if found else words
    if bounds:
        meaning = f"{meaning.removesuffix('.')} ({', '.join(bounds).replace('<=', ' ≤ ').replace('>=', ' ≥ ')})."
    return f"| `{names.replace('|', '/')}` | {_cell(meaning)} | {_cell(default)} |"


def _cell(words: str) -> str:
    """Words on one line, without what Markdown takes for markup; options and examples stand as code."""
    words = " ".join(words.replace("\b", "").split())
    words = re.sub(r"([|<>*\[\]_])", r"\\\1", words)
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", words)


def _wrapped(example: str, width: int = 108) -> str:
    r"""A command line with ``\`` before what would stand beyond ``width``."""
    lines, line = [], ""
    for word in (shlex.quote(word) for word in shlex.split(example)):
        if line and len(line) + len(word) + 1 > width:
            lines.append(line + " \\")
            line = "    " + word
        else:
            line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])


if __name__ == "__main__":
    main()
