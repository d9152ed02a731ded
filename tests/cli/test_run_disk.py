"""``protwin run`` with chunks on a disk: the losses of the same plan without one, and folders that cannot be used."""

from __future__ import annotations

import json
import os
from pathlib import Path

from protwin.shared.schema.workload import Workload
from tests.cli.conftest import Protwin
from tests.cli.test_run_checkpoints import MODEL
from tests.runtime.resuming import on_disk


def test_a_run_with_chunks_on_a_disk(protwin_here: Protwin, work: Path) -> None:
    (work / "config.json").write_text(json.dumps(MODEL))
    (work / "text.txt").write_text("to be or not to be, that is the question. " * 20)
    (work / "disk").mkdir()
    shape = ("--batch-size", "2", "--sequence-length", "16")
    traced = protwin_here("trace", "--model", "config.json", *shape, "--output", "workload.json")
    assert traced.returncode == 0, traced.stderr
    plan = on_disk(Workload.load(work / "workload.json"))
    plan.save(work / "disk.json")
    plan.model_copy(update={"n_disk_state": 0, "n_disk": 0, "n_staging": 0}).save(work / "host.json")

    def run(plan: str, *more: str, code: int = 0) -> str:
        fixed = ("--workload", "workload.json", "--model", "config.json", "--text", "text.txt", "--steps", "2")
        result = protwin_here("run", "--plan", plan, *fixed, *more)
        assert result.returncode == code, result.stderr
        return str(result.stdout if code == 0 else result.stderr)

    def loss(said: str) -> str:
        return next(line for line in said.splitlines() if line.startswith("loss "))

    assert loss(run("disk.json", "--disk-folder", "disk")) == loss(run("host.json"))
    assert os.listdir(work / "disk") == []
    for more, message in (
        ((), "no folder is named"),
        (("--disk-folder", "absent"), "absent does not exist"),
    ):
        refused = run("disk.json", *more, code=2)
        assert message in refused
        assert "Traceback" not in refused
