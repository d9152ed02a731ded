"""Runs that are stopped at any moment and gone on with: the same batches, the same weights, the same losses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from protwin.runtime.bypass.interruption import Interruption, RunInterruptedError
from protwin.runtime.bypass.loop import HISTORY, BypassLoop
from protwin.runtime.data.token_stream import TokenStream
from protwin.runtime.distillation.distil import Distilling
from protwin.runtime.runs.run_folder import CheckpointRole, RunFolder, read_state
from protwin.runtime.runs.run_settings import KeptWeights
from protwin.shared.basics.errors import FileError
from tests.proof_size import share, some_quick
from tests.runtime.bypass import killed_runs
from tests.runtime.bypass.small_runs import LENGTH, SAMPLES, carry_out, run_of, save_teacher, settings_of
from tests.runtime.ranks.processes import printed_by

STEPS = 12


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "teacher"
    save_teacher(folder)
    return folder


class Killed(BaseException):
    """Nothing catches it."""


@dataclass
class Watch:
    """What a run trains on, and whether it is stopped."""

    batches: dict[int, list[list[int]]] = field(default_factory=dict)
    """Tokens of every micro-batch, by completed steps."""
    kill_after: int | None = None
    """Die when so many steps are completed, before anything is saved."""
    ask_after: int | None = None
    """Ask to stop in the middle of the step that follows."""

    def see(self, training: Distilling, tokens: torch.Tensor, interruption: Interruption | None) -> None:
        step = training.num_steps
        of_step = self.batches.setdefault(step, [])
        if len(of_step) == training.plan.micro_batches:
            of_step.clear()  # trained again, since nothing was saved behind it
        of_step.append(tokens.flatten().tolist())
        if step == self.ask_after and interruption is not None and not interruption.is_wanted:
            interruption._heard(2, None)


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Within the block runs tell ``watch`` what they do."""
    call, step, made = Distilling.__call__, Distilling.step, Interruption.__init__
    known: list[Interruption] = []

    def seen(self: Distilling, **batch: Any) -> torch.Tensor:
        watch.see(self, batch["input_ids"], known[-1] if known else None)
        return call(self, **batch)

    def stepped(self: Distilling) -> None:
        step(self)
        if self.num_steps == watch.kill_after:
            raise Killed

    def noted(self: Interruption) -> None:
        made(self)
        known.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Distilling, "__call__", seen)
        patch.setattr(Distilling, "step", stepped)
        patch.setattr(Interruption, "__init__", noted)
        yield


@dataclass(frozen=True)
class Ended:
    """What a run has come to."""

    batches: Mapping[int, list[list[int]]]
    weights: Mapping[str, torch.Tensor]
    history: Mapping[str, Any]


def ended(folder: Path, model: Path, watch: Watch) -> Ended:
    weights = load_file(model / "model.safetensors")
    return Ended(watch.batches, weights, json.loads((folder / HISTORY).read_text()))


def different(one: Ended, other: Ended) -> list[str]:
    """What is not the same, by name."""
    assert one.weights.keys() == other.weights.keys()
    names = [name for name in one.weights if not torch.equal(one.weights[name], other.weights[name])]
    names += ["batches"] * (one.batches != other.batches)
    return names + ["history"] * (one.history != other.history)


def whole(folder: Path, teacher: Path, *budgets: int, **changed: Any) -> Ended:
    """What a run that nothing disturbs gives, with these numbers of steps in turn."""
    watch = Watch()
    with watched(watch):
        for steps in budgets:
            model = carry_out(run_of(folder, teacher, asked(teacher, steps, **changed)))
    return ended(folder, model, watch)


def asked(teacher: Path, steps: int = STEPS, **changed: Any) -> Any:
    return settings_of(teacher, num_tokens=steps * 3 * SAMPLES * LENGTH, **changed)


@pytest.fixture(scope="module")
def expected(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return whole(tmp_path_factory.mktemp("whole") / "run", teacher, STEPS)


@pytest.mark.slow
def test_a_run_that_is_killed_after_every_step_ends_with_the_same_bits(
    tmp_path: Path, teacher: Path, expected: Ended
) -> None:
    """Killed when a step is completed and before it is saved, for every step in turn."""
    folder, seen, roles = tmp_path / "run", Watch(), set()
    for step in range(1, STEPS + 1):
        with watched(Watch(seen.batches, kill_after=step)), pytest.raises(Killed):
            carry_out(run_of(folder, teacher, asked(teacher)))
        newest = RunFolder(folder, asked(teacher)).newest
        roles.add(None if newest is None else newest.role)
    with watched(seen):
        model = carry_out(run_of(folder, teacher, asked(teacher)))
    assert roles == {None, CheckpointRole.PERIODIC, CheckpointRole.BEST}, "where runs went on from"
    assert different(ended(folder, model, seen), expected) == []


@pytest.mark.slow
@some_quick("wrong", ["batches", "best", "history"], quick=1)
def test_what_a_run_forgets_shows(tmp_path: Path, teacher: Path, expected: Ended, wrong: str) -> None:
    """The comparison sees batches that begin anew, a best loss that is forgotten, and losses that are lost."""
    resume, batches = BypassLoop._resume, TokenStream.batches

    def forgetful(self: BypassLoop) -> None:
        resume(self)
        if wrong == "best":
            self.at.best_loss = self.at.best_step = None
        if wrong == "history":
            self._meter.restore(torch.empty(0, 2))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BypassLoop, "_resume", forgetful)
        if wrong == "batches":
            patch.setattr(TokenStream, "batches", lambda self, num_before: batches(self, 0))
        watch = Watch(ask_after=6)
        with watched(watch):
            with pytest.raises(RunInterruptedError):
                carry_out(run_of(tmp_path, teacher, asked(teacher)))
            model = carry_out(run_of(tmp_path, teacher, asked(teacher)))
    found = different(ended(tmp_path, model, watch), expected)
    assert {"batches": "batches", "best": "model.layers.0.mlp.up_proj.weight", "history": "history"}[wrong] in found


def test_a_longer_budget_goes_on_with_the_same_run_and_can_be_stopped(
    tmp_path: Path, teacher: Path, expected: Ended
) -> None:
    fresh, expected = expected, whole(tmp_path / "whole", teacher, 7, STEPS)
    assert len(different(fresh, expected)) > 5, "it has had the rates of both budgets"
    state = read_state(tmp_path / "whole")
    assert state is not None
    assert state.fingerprint != asked(teacher).fingerprint, "so it is no run of the longer budget alone"
    assert RunFolder.begin(tmp_path / "whole", asked(teacher)).is_complete
    folder, watch = tmp_path / "run", Watch()
    with watched(watch):
        carry_out(run_of(folder, teacher, asked(teacher, 7)))
        for step in share((7, 9), 2):
            watch.ask_after = step
            with pytest.raises(RunInterruptedError) as stopped:
                carry_out(run_of(folder, teacher, asked(teacher)))
            assert stopped.value.step == step + 1, "the step is completed"
        watch.ask_after = None
        model = carry_out(run_of(folder, teacher, asked(teacher)))
    assert different(ended(folder, model, watch), expected) == []
    with pytest.raises(FileError, match="has completed 12 steps, and num_tokens = 336 are 7"):
        carry_out(run_of(folder, teacher, asked(teacher, 7)))


def test_a_complete_run_is_not_run_again(tmp_path: Path, teacher: Path) -> None:
    model = carry_out(run_of(tmp_path, teacher, asked(teacher, 1)))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    told: list[str] = []
    assert carry_out(run_of(tmp_path, teacher, asked(teacher, 1)), told.append) == model
    assert told == [f"{tmp_path} is complete: the student is in {model}"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_run_ends_with_the_weights_that_were_asked_for(tmp_path: Path, teacher: Path, expected: Ended) -> None:
    """The best are those of a checkpoint, the last ones those of the last step."""
    validations = expected.history["validations"]
    best = min(validations, key=lambda one: one["student_loss"])["step"]
    assert best < STEPS, "the case is one in which they differ"
    last = whole(tmp_path / "last", teacher, STEPS, kept_weights=KeptWeights.FINAL)
    assert last.batches == expected.batches
    assert set(different(last, expected)) > {"model.layers.0.mlp.up_proj.weight"}
    settings = asked(teacher, kept_weights=KeptWeights.FINAL)
    (newest,) = [one for one in RunFolder(tmp_path / "last", settings).checkpoints if one.step == STEPS]
    saved = load_file(newest.path / "model.safetensors")
    assert {name for name in last.weights if not torch.equal(last.weights[name], saved[name])} == set()


def test_blocks_whose_losses_are_not_finite_are_named_and_never_the_best(tmp_path: Path, teacher: Path) -> None:
    told: list[str] = []

    def broken(self: Distilling, **batch: Any) -> torch.Tensor:
        numbers, loss = iter(range(2)), self.model.loss
        with pytest.MonkeyPatch.context() as inner:
            if self.num_steps == 2:
                inner.setattr(self.model, "loss", lambda *pair: loss(*pair) * (1.0, float("nan"))[next(numbers)])
            return call(self, **batch)

    call, losses = Distilling.__call__, iter([float("nan"), 2.0, 3.0, 1.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Distilling, "__call__", broken)
        patch.setattr(
            "protwin.runtime.bypass.loop.language_model_losses",
            lambda training, models, batches: [next(losses) for _ in models],
        )
        carry_out(run_of(tmp_path, teacher, asked(teacher, 8, save_every=None)), told.append)
    history = json.loads((tmp_path / HISTORY).read_text())
    assert [report["num_not_finite"] for report in history["reports"]] == [[0, 3], [0, 0]]
    assert "the loss of model.layers.1 was not finite in 3 micro-batches" in "\n".join(told)
    assert "step 5: held, since the norm of their gradients was not finite: student.model.layers.1 (1x)" in told
    assert [one["student_loss"] for one in history["validations"]] == [None, 3.0]
    assert RunFolder(tmp_path, asked(teacher, 8, save_every=None)).best is not None


@pytest.mark.slow
def test_runs_that_are_killed_at_random_moments_go_on_and_end_equal(tmp_path: Path) -> None:
    """A hundred of them: make prove."""
    ends = json.loads(printed_by(killed_runs.main, str(tmp_path), "1", "1"))
    assert sum(end["code"] == -9 for end in ends) >= 1
    assert ends[-1]["code"] == 0


def test_streams_go_on_where_they_were() -> None:
    stream = TokenStream(np.arange(53, dtype=np.int32), 3, 5, 7)
    first = [batch["input_ids"] for batch in islice(stream.batches(0), 40)]
    for before in range(20):
        again = [batch["input_ids"] for batch in islice(stream.batches(before), 10)]
        assert all(torch.equal(a, b) for a, b in zip(first[before:], again, strict=False))
    epoch = torch.cat(first)[: stream.num_sequences]
    assert sorted(epoch[:, 0].tolist()) == [5 * place for place in range(stream.num_sequences)], "each once an epoch"
