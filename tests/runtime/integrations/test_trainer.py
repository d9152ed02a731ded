"""A Trainer that trains by a plan is the Trainer, bit for bit: what it logs, learns, measures and saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, trace
from protwin.shared.basics.errors import InfeasibleError, PlanError
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.workload import Workload
from tests.proof_size import some_quick
from tests.runtime.integrations.trainers import (
    LIMIT,
    MICRO_BATCHES,
    Case,
    accuracy,
    check_offloaded,
    check_same,
    logs_of,
    rows,
    wishes_for,
)
from tests.runtime.models import differences, gpt2, llama, token_batches
from tests.runtime.watchdog import ends_in_time, lanes_alive


@pytest.fixture(scope="module")
def workload() -> Workload:
    return trace(llama(), token_batches(1)[0], repeats=0)


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    """Budgets decide here, and no time does."""
    return load_hardware("rtx-3090")


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows of several lengths as one batch."""

    def joined(name: str, filler: int) -> torch.Tensor:
        values = [sample[name] for sample in samples]
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=filler)

    ids, labels = joined("input_ids", 0), joined("labels", -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


# -- the whole of it -------------------------------------------------------------------------------------------------

ALL: dict[str, Any] = {
    "num_train_epochs": 1.6,
    "save_strategy": "steps",
    "save_steps": 3,
    "eval_steps": 3,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
}


@some_quick("build", [llama, gpt2], quick=1)
def test_ten_steps_with_everything_and_a_resume_in_the_middle(
    build: Callable[[], nn.Module], hardware: Hardware, tmp_path: Path
) -> None:
    """A searched plan, dropout, accumulation with an uneven end, clipping, warm-up, evaluation, saving, the best model.

    Resumed under another plan: another budget.
    """
    plain = Case(tmp_path / "plain", ALL).trained(build())
    assert plain.state.global_step > 10
    wishes = {"hardware": hardware, "budget_bytes": "300KiB"}
    planned = Case(tmp_path / "planned", ALL).trained(build(), **wishes)
    check_same(plain, planned)
    assert len({Path(one.state.best_model_checkpoint).name for one in (plain, planned)}) == 1
    kept = [sorted(path.name for path in folder.iterdir()) for folder in sorted(tmp_path.iterdir())]
    assert kept[0] == kept[1]
    middle = min((tmp_path / "planned").iterdir(), key=lambda path: int(path.name.partition("-")[2]))
    again = Case(tmp_path / "planned", ALL, resume=str(middle))
    resumed = again.trained(build(), **{**wishes, "budget_bytes": "400KiB"})
    assert resumed.protwin.plan != planned.protwin.plan
    # The last log has means over what this process has trained.
    assert logs_of(resumed)[:-1] == logs_of(plain)[-len(logs_of(resumed)) : -1]
    assert len(logs_of(resumed)) > 4
    assert differences(resumed.model, plain.model.state_dict()) == []
    found, expected = (one.predict(rows(5, seed=3)) for one in (planned, plain))
    assert (found.predictions == expected.predictions).all()


# -- one thing after the other ---------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"lr_scheduler_type": "linear", "warmup_steps": 0},
    "plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0},
        "eval_steps": 1,
        "metric_for_best_model": "loss",
    },
    "warmup_stable_decay": {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2}},
    "not fused": {"optim": "adamw_torch"},
    "sgd": {"optim": "sgd"},
    "smoothed": {"label_smoothing_factor": 0.1},
    "bfloat16": {"bf16": True},
    "noisy": {"neftune_noise_alpha": 5.0},
    "dropped": {"dataloader_drop_last": True},
    "evaluated first": {"eval_on_start": True},
    "by length": {"train_sampling_strategy": "group_by_length"},
}


@some_quick("variant", VARIANTS, quick=4)
def test_it_trains_as_the_trainer(variant: str, workload: Workload, tmp_path: Path) -> None:
    others: dict[str, Any] = {"train_dataset": rows(10)}
    if variant == "by length":
        others |= {"train_dataset": rows(10, lengths=(12, 7, 9)), "data_collator": padded}
    if variant == "bfloat16":
        with torch.autocast("cpu", torch.bfloat16):
            workload = trace(llama(), token_batches(1)[0], repeats=0)
    case = Case(tmp_path, {"num_train_epochs": 1, "eval_steps": 2, **VARIANTS[variant]}, others)
    plain, planned = case.trained(llama()), case.trained(llama(), **wishes_for(workload))
    check_same(plain, planned)
    assert len(logs_of(plain)) > 3


@pytest.mark.slow
def test_lion_of_bitsandbytes(workload: Workload, tmp_path: Path) -> None:
    """Its state, its bytes and its steps are the plan's; a plan for another optimizer is refused."""
    case = Case(tmp_path, {"optim": "lion_32bit", "max_steps": 3, "eval_steps": 2})
    plain = case.trained(llama())
    check_same(plain, case.trained(llama(), **wishes_for(workload, optimizer=Optimizer.LION)))
    with pytest.raises(PlanError, match="the plan accounts for the optimizer sgd"):
        case.trained(llama(), **wishes_for(workload, optimizer=Optimizer.SGD))


def test_without_a_limit_no_norm_is_taken(workload: Workload, tmp_path: Path) -> None:
    """CPU Adam waits for no gradient but its chunk's, so that there is no norm to log."""
    case = Case(tmp_path, {"max_grad_norm": 0.0, "max_steps": 3})
    plain = case.trained(llama())
    planned = case.trained(llama(), **wishes_for(workload, max_gradient_norm=None))
    expected = [{key: value for key, value in log.items() if key != "grad_norm"} for log in logs_of(plain)]
    assert logs_of(planned) == expected
    assert differences(planned.model, plain.model.state_dict()) == []
    check_offloaded(planned)


def test_a_trainer_of_ones_own(workload: Workload, tmp_path: Path) -> None:
    """A subclass with its own loss, and a class that was made of it, keep what is theirs."""
    from transformers import Trainer

    class Own(Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            return (found[0] * 2, found[1]) if isinstance(found, tuple) else found * 2

    case = Case(tmp_path, {"max_steps": 3}, trainer_class=Own)
    plain, planned = case.trained(llama()), case.trained(llama(), **wishes_for(workload))
    check_same(plain, planned)
    assert isinstance(planned, Own)
    assert logs_of(plain) != logs_of(Case(tmp_path, {"max_steps": 3}).trained(llama()))


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps is 3, but the plan has 2 micro-batches"),
        ({"max_grad_norm": 2.0}, r"max_grad_norm is 2, .* but the plan limits their norm to 0\.5"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm is 0, .* but the plan limits their norm to 0\.5"),
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size is 4, .* traced with 2 samples"),
        ({"activation_checkpointing": True}, r"activation_checkpointing is True, but the plan .*n_checkpoint"),
        (
            {"activation_checkpointing": True},
            r"Set activation_checkpointing=False \(gradient_checkpointing=False by its",
        ),
        ({"torch_compile": True}, "torch_compile is set, but a plan"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is True, but a plan is for one batch size"),
        ({"optim": "adamw_8bit"}, "optim is 'adamw_8bit', an optimizer that no plan accounts for"),
        ({"optim": "adafactor"}, "optim is 'adafactor'.*an Adafactor of its own"),
    ],
)
def test_arguments_that_contradict_the_plan(
    arguments: dict[str, Any], message: str, workload: Workload, tmp_path: Path
) -> None:
    model = llama()
    with pytest.raises(PlanError, match=message):
        Case(tmp_path, arguments).made(model, **wishes_for(workload))
    assert differences(model, llama().state_dict()) == []


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", "told to use DeepSpeed .*a plan decides alone"),
        ("ACCELERATE_USE_FSDP", "true", "told to use FSDP .*a plan decides alone"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "torch_compile is set, but a plan"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "fp16 is set: Accelerate scales"),
    ],
)
def test_what_accelerate_launch_was_told(
    variable: str, value: str, message: str, workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer, TrainingArguments

    from protwin.runtime import planned_trainer

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    kind = planned_trainer(Trainer, **wishes_for(workload))
    monkeypatch.setenv(variable, value)
    with pytest.raises(PlanError, match=message):
        kind(model=llama(), args=arguments)


def test_what_the_arguments_say_is_no_wish() -> None:
    from transformers import Trainer

    from protwin.runtime import planned_trainer

    with pytest.raises(PlanError, match="micro_batches of a Trainer's plan is gradient_accumulation_steps"):
        planned_trainer(Trainer, micro_batches=2)


def test_a_budget_that_nothing_fits(hardware: Hardware, tmp_path: Path) -> None:
    """Nothing is trained, and the model is ordinary."""
    model = llama()
    trainer = Case(tmp_path).made(model, hardware=hardware, budget_bytes="20KiB")
    with pytest.raises(InfeasibleError, match="20 KiB"), ends_in_time():
        trainer.train()
    assert differences(model, llama().state_dict()) == []
    assert not hasattr(model, "_is_accelerate_prepared")
    assert lanes_alive() == []


def test_an_error_within_training_gives_the_model_back(workload: Workload, tmp_path: Path) -> None:
    def fail(prediction: Any) -> dict[str, float]:
        raise ZeroDivisionError(accuracy(prediction))

    model = llama()
    trainer = Case(tmp_path, {"eval_steps": 2}, {"compute_metrics": fail}).made(model, **wishes_for(workload))
    with pytest.raises(ZeroDivisionError), ends_in_time():
        trainer.train()
    assert trainer.protwin.training is None
    assert lanes_alive() == []
    assert all(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    assert (trainer.optimizer, trainer.lr_scheduler) == (None, None)


def test_it_keeps_to_the_budget(hardware: Hardware, tmp_path: Path) -> None:
    """A device of the user's own, whose budget is the search's."""
    device = CpuDevice(budget_bytes=300 * 2**10)
    planned = Case(tmp_path, {"max_steps": 4}).trained(llama(), hardware=hardware, device=device)
    assert planned.protwin.plan.micro_batches == MICRO_BATCHES
    assert planned.protwin.plan.max_gradient_norm == LIMIT
    assert 0 < planned.protwin.peak_device_bytes <= 300 * 2**10
    check_offloaded(planned)


# -- what is the user's own ------------------------------------------------------------------------------------------


def test_an_optimizer_and_a_scheduler_of_ones_own(workload: Workload, tmp_path: Path) -> None:
    """Both are what they were afterwards: the scheduler sets the rates of its optimizer again."""

    def trained(**wishes: Any) -> Any:
        model = llama()
        optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
                torch.optim.lr_scheduler.StepLR(optimizer, 2),
            ],
            milestones=[2],
        )
        case = Case(tmp_path, {"max_steps": 5}, {"optimizers": (optimizer, scheduler)})
        return case.trained(model, **wishes)

    plain, planned = trained(), trained(**wishes_for(workload, optimizer=Optimizer.ADAFACTOR))
    check_same(plain, planned)
    assert type(planned.optimizer) is torch.optim.Adafactor
    assert planned.lr_scheduler.optimizer is planned.optimizer


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it by the old name
def test_an_adapter_stops_early_and_the_best_one_is_loaded(hardware: Hardware, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import EarlyStoppingCallback

    arguments = {
        "num_train_epochs": 4,
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "learning_rate": 0.3,
    }

    def adapted() -> nn.Module:
        torch.manual_seed(5)
        return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    def trained(name: str, **wishes: Any) -> Any:
        others = {"callbacks": [EarlyStoppingCallback(2)], "train_dataset": rows(10)}
        return Case(tmp_path / name, arguments, others).trained(adapted(), **wishes)

    plain = trained("plain")
    planned = trained("planned", hardware=hardware, budget_bytes="200KiB")
    assert plain.state.global_step < 12, "it stops early"
    assert plain.state.best_global_step < plain.state.global_step, "the best is not the last"
    assert logs_of(planned) == logs_of(plain)
    assert differences(planned.model, plain.model.state_dict()) == []
    assert planned.protwin.counts.num_gathers > 0


def test_a_checkpoint_goes_from_one_to_the_other(workload: Workload, tmp_path: Path) -> None:
    """What the Trainer has saved, the planned one resumes, and the other way round."""
    arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    plain = Case(tmp_path / "plain", arguments).trained(llama())
    planned = Case(tmp_path / "planned", arguments).trained(llama(), **wishes_for(workload))
    to_plan = Case(tmp_path / "plain", arguments, resume=str(tmp_path / "plain" / "checkpoint-2"))
    from_plan = Case(tmp_path / "planned", arguments, resume=str(tmp_path / "planned" / "checkpoint-2"))
    for found in (to_plan.trained(llama(), **wishes_for(workload)), from_plan.trained(llama()), planned):
        assert differences(found.model, plain.model.state_dict()) == []
