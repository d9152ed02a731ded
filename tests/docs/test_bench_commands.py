"""The benchmark of all command lines: it leaves none out, and its figures are those of the command alone."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

from benchmarks.commands import cost_of, lines_of_documents
from tests.docs.documents import ROOT

MIB = 2**20
LIMIT_S = 600
"""No command of these takes so long on any machine."""


def test_every_line_of_readme_and_docs_is_there() -> None:
    """Counted by another way than the benchmark's: prompts at the beginning of a line."""
    found = [str(command.block.document) for command in lines_of_documents()]
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    counts = {
        str(document): len(re.findall(r"^\$ protwin ", document.read_text(encoding="utf-8"), re.MULTILINE))
        for document in documents
    }
    assert {document: found.count(document) for document in counts} == counts
    assert sum(counts.values()) > 50


def python(code: str) -> list[str | Path]:
    return [sys.executable, "-S", "-c", code]


def test_time_and_memory_are_the_command_s_own(tmp_path: Path) -> None:
    """And those of the processes that it waits for, whatever ran before."""
    large = cost_of(python(f"data = b'1' * {200 * MIB}"), tmp_path, os.environ, LIMIT_S)
    assert 200 * MIB < large.peak_rss_bytes < 300 * MIB
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'data = b\"1\" * {200 * MIB}'])"
    assert cost_of(python(nested), tmp_path, os.environ, LIMIT_S).peak_rss_bytes > 200 * MIB
    small = cost_of(python("import time; time.sleep(0.3)"), tmp_path, os.environ, LIMIT_S)
    assert small.peak_rss_bytes < 100 * MIB
    assert small.wall_s >= 0.3 > small.cpu_s
    busy = "import time\nwhile time.process_time() < 0.2: pass"
    assert cost_of(python(busy), tmp_path, os.environ, LIMIT_S).cpu_s >= 0.2
    assert small.exit_code == large.exit_code == 0


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    failed = cost_of(python("import sys; sys.exit('no such plan')"), tmp_path, os.environ, LIMIT_S)
    assert (failed.exit_code, failed.message) == (1, "no such plan")


def test_a_command_ends_at_the_limit(tmp_path: Path) -> None:
    began_s = time.monotonic()
    ended = cost_of(python("import time; time.sleep(900)"), tmp_path, os.environ, 0.2)
    assert ended.exit_code == -9
    assert time.monotonic() - began_s < LIMIT_S
