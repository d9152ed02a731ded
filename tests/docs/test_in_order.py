"""Pages whose programs and commands need what those before them wrote: everything runs, in the order of the page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.cli.conftest import Protwin, protwin_here, variables, work
from tests.docs.documents import IN_ORDER, ROOT, blocks_of, commands_of

__all__ = ["protwin_here", "variables", "work"]


@pytest.mark.slow
@pytest.mark.parametrize("document", IN_ORDER, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_runs_from_its_first_block_to_its_last(document: Path, protwin_here: Protwin, work: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(document):
        if block.language == "python":
            exec(compile("\n" * block.line + block.body, str(document), "exec"), names)
        for command in commands_of(block) if block.language == "console" else ():
            program, *arguments = shlex.split(command.text)
            assert program == "protwin", f"{command}: only commands of protwin run here"
            result = protwin_here(*arguments)
            assert result.returncode == 0, result.stderr
            pieces = re.split(r"\.\.\.\n?", command.output)
            assert re.search(".*".join(map(re.escape, pieces)), result.stdout, re.DOTALL), result.stdout
    losses = {
        name: AutoModelForCausalLM.from_pretrained(work / name)(input_ids=ids, labels=ids).loss.item()
        for ids in [names["prompt"]["input_ids"]]
        for name in ("base", "tuned", "longer")
    }
    assert losses["tuned"] != losses["base"]
    assert losses["longer"] != losses["tuned"]
