"""Properties: every property test with its full number of examples, every fault of example schedules, slow tests."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from protwin.shared.basics.progress import OnProgress

from .prove_claims import Claim, Settings

_ROOT: Final = Path(__file__).parents[1]


def test_files() -> list[str]:
    """The files with tests that are larger in a proof (``tests/proof_size.py``), draw by Hypothesis, or are slow."""
    files = sorted((_ROOT / "tests").rglob("test_*.py"))
    marks = ("tests.proof_size", "import given", "mark.slow")
    return [str(path.relative_to(_ROOT)) for path in files if any(mark in path.read_text() for mark in marks)]


def prove(settings: Settings, on_progress: OnProgress) -> list[Claim]:
    """One claim per test file; its cases are the tests."""
    claims = []
    files = [name for name in test_files() if settings.has(name)]
    for place, name in enumerate(files):
        claims.append(_run(name))
        on_progress(place + 1, len(files))
    return claims


def _run(name: str) -> Claim:
    claim = Claim("properties", name, "its tests pass with all of their examples")
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", name]
        command += ["-m", "not gpu and not benchmark"]
        result = subprocess.run(
            command, cwd=_ROOT, env=os.environ | {"PROTWIN_PROOF": "1"}, capture_output=True, text=True, check=False
        )
        if not report.exists():
            claim.num_cases = 1
            claim.failures.append(f"{name}: {result.stdout[-300:]} {result.stderr[-300:]}")
            return claim
        for case in ElementTree.parse(report).iter("testcase"):
            with claim.case(str(case.get("name"))):
                for failure in (*case.iter("failure"), *case.iter("error")):
                    raise AssertionError(failure.get("message"))
    return claim
