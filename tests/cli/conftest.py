"""The real console script, as a user calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Protwin = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment of its own: empty cache, plain text of a fixed width, no network."""
    cache = tmp_path / "cache"
    return os.environ | {
        "COLUMNS": "120",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "XDG_CACHE_HOME": str(cache),
    }


@pytest.fixture
def protwin(tmp_path: Path, environment: dict[str, str]) -> Protwin:
    """Run the installed ``protwin`` in an empty folder; gives exit code, output and errors."""
    script = Path(sys.executable).with_name("protwin")
    work = tmp_path / "work"
    work.mkdir()

    def run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [script, *arguments],
            cwd=work,
            env=environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run
