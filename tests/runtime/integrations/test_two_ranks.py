"""Two processes under torchrun, by plans of two ranks, beside the same ones without a plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.documents import ROOT


@pytest.mark.slow
def test_the_trainer_and_accelerate_on_two_ranks(tmp_path: Path) -> None:
    """See ``on_two_ranks``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.runtime.integrations.on_two_ranks", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
