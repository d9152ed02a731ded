"""README and docs, taken apart: links, headings and fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
IN_ORDER = [ROOT / "docs" / "how-to" / "laptop-to-machine.md"]
"""Pages whose programs and commands need what those before them wrote; others are one program each, and commands."""

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    document: Path
    line: int
    language: str
    body: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """One command line of a block, with the output that the block shows for it."""

    block: Block
    text: str
    output: str

    def __str__(self) -> str:
        return f"{self.block}: {self.text}"


def blocks_of(document: Path) -> list[Block]:
    """All fenced blocks, in order."""
    text = document.read_text(encoding="utf-8")
    return [
        Block(document, text.count("\n", 0, match.start()) + 1, match["language"], match["body"])
        for match in _FENCE.finditer(text)
    ]


def commands_of(block: Block) -> Iterator[Command]:
    """The command lines of a ``console`` block (after ``$``) or a ``bash`` block (each line); ``\\`` continues one."""
    lines = re.sub(r" *\\\n\s*(?:> )?", " ", block.body).splitlines()
    if block.language == "bash":
        yield from (Command(block, line.strip(), "") for line in lines if line.strip() and not line.startswith("#"))
        return
    text: str | None = None
    output: list[str] = []
    for line in [*lines, "$ "]:
        if line.startswith("$ "):
            if text is not None:
                yield Command(block, text, "\n".join(output).strip("\n"))
            text, output = line[2:].strip(), []
        else:
            output.append(line)


def links_of(document: Path) -> list[str]:
    """Targets of links and pictures outside fenced blocks."""
    return [match["target"] for match in _LINK.finditer(_FENCE.sub("", document.read_text(encoding="utf-8")))]


def anchors_of(document: Path) -> set[str]:
    """What ``#`` links may name: headings in lower case, punctuation dropped, spaces as hyphens."""
    headings = _HEADING.findall(_FENCE.sub("", document.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
