"""Every example runs, and does what it is for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.documents import ROOT


@pytest.mark.slow
def test_train(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "buffer 0" in result.stdout, "nothing is offloaded"
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 10
    rates = [float(rate) for rate in re.findall(r"learning rate (\S+)", result.stdout)]
    assert max(rates) > 10 * rates[-1], "the scheduler does not show"
    gathered, stepped = re.search(r"([\d.]+) MiB gathered, (\d+) chunks stepped", result.stdout).groups()  # type: ignore[union-attr]
    assert float(gathered) > 0
    assert int(stepped) > 0
    assert list(tmp_path.iterdir()) == []
