"""One call trains as the plain loop that it stands for, to the bit: accumulation, norm limit, schedule, resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import protwin
from protwin.calibration import Replanner
from protwin.runtime import CpuDevice
from protwin.shared import CalibrationError, Plan, PlanError, ProtwinError, Record, parse_bytes
from tests.calibration.fitting.test_budgeted import HERE
from tests.runtime.models import SEED, differences, gpt2, hand_written, llama, snapshot, token_batches, uncached
from tests.runtime.small_language import write_rows

BUDGET = "300KiB"
RATE = 1e-2
NUM_STEPS, MICRO_BATCHES, LIMIT = 10, 2, 0.7


def factor(step: int) -> float:
    return 1 - step / 20


def samples(number: int = 12) -> TensorDataset:
    rows = [batch["input_ids"][0] for batch in token_batches(number, batch=1)]
    return TensorDataset(torch.stack(rows))


def collated(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([row[0] for row in rows])
    return {"input_ids": tokens, "labels": tokens}


def shuffled() -> DataLoader[Any]:
    """Drawn anew in every epoch, from torch's own random state; the epochs do not divide into steps."""
    return DataLoader(samples(11), batch_size=2, shuffle=True, drop_last=True, collate_fn=collated)


def endless(data: Any) -> Iterator[Any]:
    while True:
        yield from data


def plainly(
    model: nn.Module, data: Any, *, evaluation: Any = (), steps: int = NUM_STEPS, norm: float | None = LIMIT
) -> tuple[list[float], list[float]]:
    """The loop that everybody writes; losses, and what is evaluated after every third step and the last one."""
    uncached(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, fused=True)
    scheduler = LambdaLR(optimizer, factor)
    losses, evaluations, batches = [], [], endless(data)
    for step in range(1, steps + 1):
        total = []
        for _ in range(MICRO_BATCHES):
            loss = model(**next(batches)).loss / MICRO_BATCHES
            loss.backward()
            total.append(loss.detach())
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(torch.stack(total).sum().item())
        if evaluation and (step % 3 == 0 or step == steps):
            model.eval()
            with torch.no_grad():
                evaluations.append(sum(model(**batch).loss.item() * 2 for batch in evaluation) / (2 * len(evaluation)))
            model.train()
    return losses, evaluations


def train(model: nn.Module, data: Any, **options: Any) -> protwin.Trained:
    usual: dict[str, Any] = {
        "budget": BUDGET,
        "machine": HERE,
        "micro_batches": MICRO_BATCHES,
        "max_gradient_norm": LIMIT,
        "learning_rate": RATE,
        "optimizer_options": {"weight_decay": 0.1},
        "scheduler": partial(LambdaLR, lr_lambda=factor),
        "tell": None,
    }
    return protwin.train(model, data, **usual | options)


@pytest.mark.parametrize(
    "build", [pytest.param(partial(llama, num_layers=2), id="llama", marks=pytest.mark.slow), gpt2]
)
def test_ten_steps_with_a_resume_are_those_of_the_plain_loop_to_the_bit(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    held_out = token_batches(3)
    plain = build()
    torch.manual_seed(SEED)
    losses, evaluations = plainly(plain, shuffled(), evaluation=held_out)

    common: dict[str, Any] = {
        "evaluation": held_out,
        "evaluate_every": 3,
        "checkpoint": tmp_path / "saved",
        "checkpoint_every": 5,
    }
    interrupted = build()
    torch.manual_seed(SEED)
    told: list[str] = []
    first = train(interrupted, shuffled(), steps=7, resume=True, tell=told.append, **common)
    assert any("holds no checkpoint: begins at the first step" in line for line in told)
    # Another process begins with other weights and other random states.
    torch.manual_seed(99)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    second = train(model, shuffled(), steps=NUM_STEPS, resume=True, **common)
    assert [*first.losses, *second.losses] == losses
    # The first call evaluates after its last step too.
    assert [value for _, value in first.evaluations[:2]] + [value for _, value in second.evaluations] == evaluations
    assert differences(model, snapshot(plain)) == []
    assert first.prediction.guaranteed_peak_device_bytes <= parse_bytes(BUDGET)
    assert first.plan.n_persist < 8, "something leaves the device"
    # A loop that forgets what a resume puts back is told apart.
    wrong = build()
    torch.manual_seed(SEED)
    assert plainly(wrong, shuffled(), norm=None)[0] != losses


def test_the_plan_changes_on_the_way_and_no_bit_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured leads to another plan; here one that keeps less, whatever this machine's times say."""
    plain, batches = llama(num_layers=2), token_batches(26)
    expected, _ = plainly(plain, batches, steps=13)
    model = llama(num_layers=2)

    def other(self: Replanner, record: Record) -> Plan:
        assert record.num_iterations >= 3
        return record.plan.model_copy(update={"n_checkpoint": 2 - record.plan.n_checkpoint})

    monkeypatch.setattr(Replanner, "__call__", other)
    trained = train(model, batches, steps=13, replan_after=9, knobs={"n_checkpoint": 2}, budget=None)
    assert list(trained.losses) == expected
    assert differences(model, snapshot(plain)) == []
    assert [plan.n_checkpoint for plan in trained.plans] == [2, 0]
    assert trained.prediction.plan == trained.plan
    assert trained.first_prediction.plan == trained.plans[0]
    text = str(trained)
    assert "first prediction" in text
    assert "13 steps" in text


def test_a_plan_is_searched_again_with_what_the_first_steps_measure() -> None:
    device = CpuDevice(host_to_device_bytes_per_s=2e6)
    batches, model = token_batches(13), llama(num_layers=2)
    trained = train(model, batches, micro_batches=1, scheduler=None, budget=None, device=device, replan_after=9)
    # On a busy machine nothing may be learnt, which is told.
    assert any("measured" in note or "the plan stays as it is" in note for note in trained.notes)
    assert len(trained.losses) == 13


def test_why_nothing_can_be_learnt_is_in_the_notes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Replanner, record: Record) -> Plan:
        raise CalibrationError("something else runs here")

    monkeypatch.setattr(Replanner, "__call__", refuse)
    trained = train(llama(num_layers=2), token_batches(10), budget=None, replan_after=9, steps=10)
    assert "the plan stays as it is: something else runs here" in trained.notes
    assert len(trained.plans) == 1
    assert "stays as it is" not in capsys.readouterr().err, "who asked is told, and nobody else"


def test_what_is_trained_is_saved_and_told(tmp_path: Path) -> None:
    told: list[str] = []
    batches = token_batches(13)
    model = llama(num_layers=2)
    trained = train(
        model,
        batches,
        micro_batches=1,
        save=tmp_path / "model",
        report=tmp_path / "report.html",
        tell=told.append,
        probe_s=0.1,
        machine=None,
        schedule="linear",
        warmup_steps=2,
        scheduler=None,
    )
    assert len(trained.losses) == len(batches)
    assert trained.measured is not None
    assert trained.measured.plan == trained.plan == trained.prediction.plan
    assert trained.comparison is not None
    assert "predicted" in trained.comparison_text()
    assert "Predicted against measured" in (tmp_path / "report.html").read_text()
    assert "block" in trained.explain()
    assert told[:3] == ["tracing the model", "measuring this machine", "searching a plan"]
    assert told[-1] == f"saved in {tmp_path / 'model'}"
    again = type(model).from_pretrained(tmp_path / "model")
    assert differences(again, snapshot(model)) == []


def test_a_model_of_no_library_with_a_loss_beside_it(tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    points, classes = torch.randn(24, 5), torch.randint(0, 3, (24,))

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, classes_of(batch))

    def classes_of(batch: Any) -> torch.Tensor:
        return classes[: len(batch)]

    batches = list(points.split(6))
    plain = hand_written()
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE, momentum=0.9, fused=True)
    losses = []
    torch.manual_seed(SEED)
    for batch in batches:
        value = loss(plain(batch), batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    model = hand_written()
    torch.manual_seed(SEED)
    trained = train(
        model,
        iter(batches),
        micro_batches=1,
        max_gradient_norm=None,
        optimizer="sgd",
        optimizer_options={},
        scheduler=None,
        loss=loss,
        save=tmp_path / "saved",
    )
    assert list(trained.losses) == losses
    assert differences(model, snapshot(plain)) == []
    assert trained.measured is None
    assert any("No times" in note for note in trained.notes)
    again = hand_written()
    with torch.no_grad():
        again.exit.weight.zero_()
    load_model(again, tmp_path / "saved" / "model.safetensors")
    assert differences(again, snapshot(model)) == []


def test_what_is_left_of_an_iterator_makes_no_step() -> None:
    told: list[str] = []
    batches = token_batches(5)
    trained = train(llama(num_layers=2), iter(batches), tell=told.append)
    assert len(trained.losses) == 2
    assert any("the last 1 batch makes no step of 2" in line for line in told)
    plain = llama(num_layers=2)
    assert plainly(plain, batches[:4], steps=2)[0] == list(trained.losses)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3, "epochs": 2}, "steps and epochs both"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"schedule": "wavy"}, "schedule is 'wavy'"),
        ({"schedule": "linear"}, "scheduler and schedule"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"resume": True}, "resume needs checkpoint"),
        ({"evaluate_every": 2}, "evaluate_every needs evaluation"),
        ({"replan_after": 2}, "replan_after is 2"),
        ({"optimizer": "sophia"}, "optimizer is 'sophia'"),
        ({"lr": 3}, "takes no lr. Known are .*learning_rate"),
        ({"learning_rat": 3}, "takes no learning_rat. Did you mean learning_rate"),
        ({"micro_batches": 9}, "hold 4 batches, and a step takes 9"),
        ({"knobs": {"n_pers": 1}}, "n_pers is no knob .* Did you mean n_persist"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_options_that_contradict_are_refused_before_anything_is_done(options: dict[str, Any], message: str) -> None:
    model = llama(num_layers=2)
    before = snapshot(model)
    with pytest.raises(ProtwinError, match=message):
        train(model, token_batches(4), **options)
    assert differences(model, before) == []


def test_data_and_models_of_no_use_are_refused_with_what_to_do(tmp_path: Path) -> None:
    model = llama(num_layers=2)
    for data, message in (
        ([], "hold no batch"),
        ([{"text": "hello"}], "without tensors"),
        (3, "the data are a int"),
        ({"input_ids": torch.ones(2, 3)}, "the data are a dict"),
        (samples(), "batch_size is missing"),
        (tmp_path / "rows.jsonl", r"rows\.jsonl does not exist"),
        (str(tmp_path / "rows.csv"), r"rows\.csv ends in \.csv"),
        ([write_rows(tmp_path / "there.jsonl", [{"text": "a"}]), "not.txt"], r"not\.txt does not exist"),
        (tmp_path / "there.jsonl", "batch_size, sequence_length and tokenizer are missing.* State them"),
    ):
        with pytest.raises(ProtwinError, match=message):
            train(model, data, micro_batches=1)
    with pytest.raises(ProtwinError, match="from_pretrained"):
        train("gpt2", token_batches(1))  # type: ignore[arg-type]
    with pytest.raises(ProtwinError, match="evaluation is an iterator"):
        train(model, token_batches(2), evaluation=iter(token_batches(1)))
    saved = tmp_path / "saved"
    train(model, token_batches(2), checkpoint=saved)
    with pytest.raises(ProtwinError, match="Pass resume=True"):
        train(model, token_batches(2), checkpoint=saved)
    with pytest.raises(PlanError, match="micro_batches = 1, but training asks for 2"):
        train(model, token_batches(2), checkpoint=saved, resume=True, plan=_plan_of(model))


def _plan_of(model: nn.Module) -> Any:
    return protwin.plan(model, HERE, batch=token_batches(1)[0]).plan
