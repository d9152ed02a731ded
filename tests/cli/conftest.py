"""The real console script, as a user calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from protwin.shared.catalogue.machines import hardware_to_toml, machine
from protwin.shared.cli.main import main
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.plan import Plan
from tests.cli.saved import decoder

Protwin = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The folder that commands run in."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def folder(work: Path) -> Path:
    """The folder that the command runs in, with one good file of each kind."""
    workload = decoder()
    workload.save(work / "workload.json")
    plan = Plan(workload_id=workload.identity, chunk_bytes=2**26, n_persist=2, n_buffer=4)
    plan.save(work / "plan.json")
    Calibration(hardware_name="rtx-3090", machine="a machine").save(work / "calibration.json")
    (work / "machine.toml").write_text(hardware_to_toml(machine("rtx-3090")))
    return work


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """What sets a command apart from the machine: empty cache, plain text of a fixed width, no network."""
    return {
        "COLUMNS": "120",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        # Set, so that what a command asks of the allocator stays out of the process that tests it.
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


@pytest.fixture
def environment(variables: dict[str, str]) -> dict[str, str]:
    """The environment of a process that a test starts."""
    return os.environ | variables


@pytest.fixture
def protwin(work: Path, environment: dict[str, str]) -> Protwin:
    """Run the installed ``protwin`` as a process in ``work``; gives exit code, output and errors."""
    script = Path(sys.executable).with_name("protwin")

    def run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [script, *arguments],
            cwd=work,
            env=environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return run


@pytest.fixture
def protwin_here(
    work: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Protwin:
    """The same within this process, for the many cases that would otherwise only start Python."""
    monkeypatch.chdir(work)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["protwin", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        output, errors = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), output, errors)

    return run


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """Variables of a process in which importing torch or transformers ends it."""
    folder = tmp_path / "blocked"
    folder.mkdir()
    for module in ("torch", "transformers"):
        (folder / f"{module}.py").write_text(f"raise SystemExit('{module} was imported')\n")
    return {"PYTHONPATH": str(folder)}
