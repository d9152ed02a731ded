"""Two processes under torchrun, by plans of two ranks, beside the same ones without a plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.documents import ROOT
from tests.runtime.integrations.test_axolotl import axolotls


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", ["integrations.on_two_ranks", "integrations.axolotl_on_two_ranks", "lightning.on_two_ranks"]
)
def test_on_two_ranks(program: str, tmp_path: Path) -> None:
    """See the modules."""
    if "axolotl" in program:
        axolotls("core.trainers.base")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", f"tests.runtime.{program}", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
