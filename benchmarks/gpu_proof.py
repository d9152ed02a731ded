"""The proof: every test that needs a GPU, run as a part of the bench."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from gpu_subject import Clock, Section

_ROOT: Final = Path(__file__).parent.parent


_ALONE: Final = "tests/gpu/alone"
"""Where tests lie that get a process each, since they may leave CUDA unusable."""


def prove(section: Section, clock: Clock, *, limit_s: float) -> None:
    """Run ``tests/gpu`` within ``limit_s``; each test is one check, and one that did not run is none that was met."""
    clock.check(20)
    end = Clock(time.monotonic() + min(limit_s, clock.left_s()))
    alone = sorted(path.relative_to(_ROOT) for path in (_ROOT / _ALONE).glob("test_*.py"))
    for chosen in (["tests/gpu", f"--ignore={_ALONE}"], *([str(path)] for path in alone)):
        _run(section, chosen, end.left_s())


def _run(section: Section, chosen: list[str], seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # ``-m gpu``: the default run leaves these out.
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *chosen, f"--junitxml={report}", "--tb=short"]
        try:
            ended = subprocess.run(
                command, cwd=_ROOT, timeout=max(seconds, 1), capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired as error:
            output = error.stdout if isinstance(error.stdout, bytes) else b""
            section.found[f"output of {chosen[0]}"] = output.decode(errors="replace")[-3000:]
            section.not_done = f"{chosen[0]} had {seconds:.0f} s, which was too little"
            return
        if ended.returncode != 0:
            section.found[f"output of {chosen[0]}"] = ended.stdout[:6000] + ended.stdout[-3000:] + ended.stderr[-1000:]
        if not report.exists():
            section.not_done = f"pytest ended with {ended.returncode} and left no report of {chosen[0]}"
            return
        for case in ElementTree.parse(report).iter("testcase"):
            bad = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "")
            section.check(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}", float(bool(bad)), 0.0)
            if bad:
                section.checks[-1]["outcome"] = bad
