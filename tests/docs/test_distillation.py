"""The figures of the page on distillation are those that its command prints."""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.cli.conftest import Protwin, protwin_here, variables, work
from tests.docs.documents import ROOT, blocks_of, commands_of
from tests.docs.test_commands import is_shown

__all__ = ["protwin_here", "variables", "work"]

STUDENT = """
kind = "student"
schema_version = 1
keys_to_learn = ["subblock_attention", "subblock_ffn"]
"""


def test_the_search_for_a_teacher_of_70_billion(protwin_here: Protwin, work: Path) -> None:
    blocks = blocks_of(ROOT / "docs" / "how-to" / "distillation.md")
    place = next(place for place, block in enumerate(blocks) if "llama-3-70b" in block.body)
    (command,), shown = commands_of(blocks[place]), blocks[place + 1].body.rstrip("\n")
    (work / "student.toml").write_text(STUDENT)
    found = protwin_here(*shlex.split(command.text)[1:])
    assert found.returncode == 0, found.stderr
    printed = "\n".join(line.rstrip() for line in found.stdout.strip("\n").splitlines())
    assert is_shown(printed, shown), printed
