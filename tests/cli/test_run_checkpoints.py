"""``protwin run`` stops and goes on as if it had not stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.runtime.checkpoints.checkpoints import read_checkpoint
from protwin.runtime.commands.run_checkpoints import RunCheckpoints
from protwin.shared.basics.errors import FileError, ProtwinError
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import Workload
from tests.cli.conftest import Protwin
from tests.cli.refusals import RUN, refusal
from tests.runtime.resuming import kept, offloaded, same_bits

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


@pytest.mark.slow
def test_a_run_goes_on_under_another_plan(protwin: Protwin, protwin_here: Protwin, work: Path) -> None:
    """What was saved goes on in a process of its own, which knows nothing but the files."""
    (work / "config.json").write_text(json.dumps(MODEL))
    (work / "text.txt").write_text("to be or not to be, that is the question. " * 20)
    shape = ("--batch-size", "2", "--sequence-length", "16")

    def call(protwin: Protwin, *arguments: str, code: int = 0) -> str:
        result = protwin(*arguments)
        assert result.returncode == code, result.stderr
        return result.stderr

    call(protwin_here, "trace", "--model", "config.json", *shape, "--output", "workload.json")
    workload = Workload.load(work / "workload.json")
    for name, plan in (("kept", kept(workload)), ("offloaded", offloaded(workload))):
        assert isinstance(plan, Plan)
        plan.save(work / f"{name}.json")

    def run(plan: str, folder: str, steps: int, *more: str, code: int = 0, by: Protwin = protwin_here) -> str:
        fixed = ("--workload", "workload.json", "--model", "config.json", "--text", "text.txt", "--checkpoint", folder)
        return call(by, "run", "--plan", f"{plan}.json", *fixed, "--steps", str(steps), *more, code=code)

    run("kept", "whole", 4)
    run("kept", "parts", 2, "--checkpoint-every", "1")
    assert "--resume" in run("kept", "parts", 4, code=2)
    run("offloaded", "parts", 4, "--resume", by=protwin)
    whole, parts = (read_checkpoint(work / folder) for folder in ("whole", "parts"))
    assert whole.step == parts.step == 4
    assert same_bits(whole.weights, parts.weights)
    assert same_bits(whole.optimizer, parts.optimizer)
    assert whole.training["data_position"] == parts.training["data_position"]
    assert "--seed" in run("kept", "parts", 5, "--resume", "--seed", "1", code=2)


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    def check(folder: Path | None, *, every: int | None = None, is_resuming: bool = False) -> None:
        RunCheckpoints(folder=folder, every=every, is_resuming=is_resuming).check()

    check(None)
    check(tmp_path / "new", every=3)
    with pytest.raises(ProtwinError, match="--resume needs --checkpoint"):
        check(None, is_resuming=True)
    with pytest.raises(ProtwinError, match="--checkpoint-every needs --checkpoint"):
        check(None, every=3)
    with pytest.raises(FileError, match="holds no checkpoint"):
        check(tmp_path / "new", is_resuming=True)
    (tmp_path / "saved").write_text("")
    with pytest.raises(FileError, match="is a file"):
        check(tmp_path / "saved")


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("asked", ["--output=new.json", "--timeline=new.json", "--json"])
def test_a_record_that_no_step_can_give_is_refused_before_the_work(
    protwin_here: Protwin, folder: Path, every: int, asked: str
) -> None:
    """The model's configuration is damaged, so that a command that looks at it first says so."""
    (folder / "config.json").write_text("damaged")
    saving = ("--checkpoint=saved", f"--checkpoint-every={every}", "--steps=6")
    message = refusal(protwin_here, folder, (*RUN[:-1], "config.json", *saving, asked))
    if every < 3:
        assert f"--checkpoint-every {every} leaves no two iterations in a row" in message
        assert "Make it 3 or more, or ask for no record" in message
    else:
        assert "Train 7 steps: --steps 7" in message


def test_a_run_that_saves_every_step_needs_no_record(protwin_here: Protwin, work: Path) -> None:
    (work / "config.json").write_text(json.dumps(MODEL))
    shape = ("--batch-size=1", "--sequence-length=16")
    assert protwin_here("trace", "--model=config.json", *shape, "--output=workload.json").returncode == 0
    kept(Workload.load(work / "workload.json")).save(work / "plan.json")
    run = ("run", "--plan=plan.json", "--workload=workload.json", "--model=config.json", "--checkpoint=saved")
    result = protwin_here(*run, "--checkpoint-every=1", "--steps=6")
    assert result.returncode == 0, result.stderr
    assert "over 6 steps" in result.stdout
    assert "no times: --checkpoint-every 1 leaves no two iterations in a row" in result.stdout
    assert read_checkpoint(work / "saved").step == 6
    result = protwin_here(*run, "--checkpoint-every=3", "--steps=12", "--resume", "--output=new.json")
    assert result.returncode == 0, result.stderr
    assert Record.load(work / "new.json").num_iterations == 1
    result = protwin_here(*run, "--steps=15", "--resume", "--json")
    assert result.returncode == 2
    assert "3 steps after the checkpoint are too few" in result.stderr
    assert "Train 17 steps: --steps 17" in result.stderr
