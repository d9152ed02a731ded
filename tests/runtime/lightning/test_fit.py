"""Lightning's fit by a plan is the fit without one, bit for bit, and its checkpoints go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint

from protwin.runtime import CpuDevice, planned_lightning
from protwin.runtime.lightning.steps import filled, named_leaves
from protwin.shared.basics.errors import PlanError, ScheduleError, WorkloadError
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.schema.plan import Plan
from tests.runtime.integrations.trainers import LIMIT, MICRO_BATCHES
from tests.runtime.lightning.fits import Fit, Language, check_offloaded, check_same, logs_of
from tests.runtime.models import differences, gpt2
from tests.runtime.watchdog import ends_in_time, lanes_alive

# What Lightning warns of in every training with a small loader and no workers.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*isinstance.treespec, LeafSpec",
    "ignore:You're resuming from a checkpoint that ended before",
    "ignore:.*have no `val_dataloader`",
    "ignore:Be aware that when using `ckpt_path`",
)
SEARCHED: dict[str, Any] = {"hardware": load_hardware("rtx-3090"), "budget_bytes": "300KiB"}


def saving(folder: Path) -> dict[str, Any]:
    """Checkpoints of the best and of the last validation, and one in the middle of a step's neighbours."""
    keep = ModelCheckpoint(folder, filename="{step}", monitor="val_loss", save_top_k=-1, save_last=True)
    return {"arguments": {"enable_checkpointing": True}, "callbacks": [keep]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fits")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    """A training without a plan."""
    return Fit(folder / "plain", **saving(folder / "plain")).fitted(gpt2())


@pytest.fixture(scope="module")
def planned(folder: Path) -> Any:
    """The same by a searched plan."""
    return Fit(folder / "planned", **saving(folder / "planned")).fitted(gpt2(), **SEARCHED)


def plan(planned: Any, **knobs: Any) -> dict[str, Any]:
    """That plan with other knobs, for another Trainer."""
    made = planned.protwin.plan.model_copy(update=knobs)
    assert isinstance(made, Plan)
    return {"plan": made, "workload": planned.protwin.workload, "device": CpuDevice()}


def test_a_searched_plan_and_a_resume_under_another(plain: Any, planned: Any, folder: Path, tmp_path: Path) -> None:
    """Dropout, accumulation with an uneven last step, clipping, a scheduler, validation, metrics, checkpoints.

    What the plan's training has saved, a training without a plan and one by another plan go on from, to the same bits.
    """
    check_same(plain, planned)
    assert plain.global_step == 14
    saved = sorted(path.name for path in (folder / "plain").glob("step*"))
    assert saved == sorted(path.name for path in (folder / "planned").glob("step*"))
    assert len(saved) == 6
    middle = "step=6.ckpt"
    expected, found = (torch.load(folder / of / middle, weights_only=False) for of in ("plain", "planned"))
    assert list(found["state_dict"]) == list(expected["state_dict"])
    assert all(torch.equal(value, found["state_dict"][name]) for name, value in expected["state_dict"].items())
    again = Fit(tmp_path / "again", resume=folder / "plain" / middle).fitted(gpt2())
    for of in ("plain", "planned"):
        other = plan(planned, n_checkpoint=1)
        resumed = Fit(tmp_path / "by", resume=folder / of / middle).fitted(gpt2(), **other)
        assert resumed.protwin.plan != planned.protwin.plan
        assert logs_of(resumed) == logs_of(again)
        assert differences(resumed.lightning_module, again.lightning_module.state_dict()) == []
        check_offloaded(resumed, steps=14 - 6)
    back = Fit(tmp_path / "back", resume=folder / "planned" / middle).fitted(gpt2())
    assert logs_of(back) == logs_of(again)


@pytest.mark.slow
def test_a_plateau_stops_early_and_the_plan_is_given(planned: Any, tmp_path: Path) -> None:
    stop: dict[str, Any] = {
        "callbacks": [EarlyStopping("val_loss", patience=1, min_delta=1.0)],
        "module": {"plateau": True},
    }
    plain = Fit(tmp_path, **stop).fitted(gpt2())
    stop["callbacks"] = [EarlyStopping("val_loss", patience=1, min_delta=1.0)]
    check_same(plain, Fit(tmp_path, **stop).fitted(gpt2(), **plan(planned, n_checkpoint=1)))
    assert plain.global_step < 14


@pytest.mark.slow
def test_what_follows_a_fit(planned: Any, tmp_path: Path) -> None:
    """Prediction under the plan, a second fit with a new optimizer, and a checkpoint of weights, which is told."""
    told: list[str] = []
    case = Fit(tmp_path, {"max_epochs": 1})
    plain = case.fitted(gpt2())
    trainer = planned_lightning(pl.Trainer, tell=told.append, **plan(planned))(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "accumulate_grad_batches": MICRO_BATCHES},
        **{"gradient_clip_val": LIMIT, "logger": False, "enable_progress_bar": False, "enable_checkpointing": False},
        **{"enable_model_summary": False, "val_check_interval": 4},
    )
    module = Language(gpt2())
    pl.seed_everything(5, verbose=False)
    with ends_in_time():
        trainer.fit(module, **case.loaders())
        assert differences(module, plain.lightning_module.state_dict()) == []
        before = trainer.protwin.counts.bytes_host_to_device
        found = trainer.predict(module, case.loaders()["val_dataloaders"])
        assert trainer.protwin.counts.bytes_host_to_device > before
        assert trainer.protwin.training is None
        expected = plain.predict(plain.lightning_module, case.loaders()["val_dataloaders"])
        assert found == expected
        trainer.save_checkpoint(tmp_path / "weights.ckpt")
    assert "holds the weights alone" in told[-1]
    saved = torch.load(tmp_path / "weights.ckpt", weights_only=False)
    assert "optimizer_states" not in saved
    assert differences(module, saved["state_dict"]) == []
    assert lanes_alive() == []


@pytest.mark.slow
def test_in_bfloat16(tmp_path: Path) -> None:
    case = Fit(tmp_path, {"precision": "bf16-mixed", "max_epochs": 1})
    check_same(case.fitted(gpt2()), case.fitted(gpt2(), **SEARCHED))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "deepspeed"}, "strategy of the Trainer is deepspeed, so that DeepSpeed .*decides alone"),
        ({"strategy": "fsdp"}, "so that FSDP would train the model"),
        ({"strategy": "ddp_spawn", "devices": 2}, "starts its processes by spawn"),
        ({"strategy": "ddp", "sync_batchnorm": True}, "sync_batchnorm is True"),
        ({"precision": "64-true"}, r"precision of the Trainer is 64-true \(DoublePrecision\)"),
        ({"precision": "16-true"}, "precision of the Trainer is 16-true"),
        ({"gradient_clip_algorithm": "value"}, 'gradient_clip_algorithm is "value"'),
    ],
)
def test_what_a_trainer_asks_for_beside_a_plan(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message):
        Fit(tmp_path, arguments).made(**SEARCHED)


def test_what_a_request_may_not_say() -> None:
    with pytest.raises(PlanError, match="micro_batches of a Lightning Trainer's plan is accumulate_grad_batches"):
        planned_lightning(pl.Trainer, micro_batches=2)
    with pytest.raises(PlanError, match="buget_bytes is nothing that a plan is searched with"):
        planned_lightning(pl.Trainer, buget_bytes="1GiB")


def checkpointing() -> Language:
    model = gpt2()
    model.activation_checkpointing_enable()
    return Language(model)


@pytest.mark.parametrize(
    ("made", "arguments", "error", "message"),
    [
        (
            lambda: Language(gpt2(), manual=True),
            {"gradient_clip_val": None},
            PlanError,
            "automatic_optimization = False",
        ),
        (checkpointing, {}, ScheduleError, "the model checkpoints activations itself"),
        (lambda: Language(gpt2(), skipped=2), {}, ScheduleError, r"training_step\(\) returned None"),
        (lambda: Language(gpt2()), {"accumulate_grad_batches": 3}, PlanError, "but the plan has 2 micro-batches"),
        (lambda: Language(gpt2()), {"gradient_clip_val": 1.0}, PlanError, "to 1, but the plan limits their norm to"),
    ],
)
def test_what_a_module_or_a_given_plan_contradicts(
    made: Any, arguments: dict[str, Any], error: type[Exception], message: str, planned: Any, tmp_path: Path
) -> None:
    case = Fit(tmp_path, {"num_sanity_val_steps": 0, **arguments})
    if "gradient_clip_val" in arguments and arguments["gradient_clip_val"] is None:
        case.arguments["accumulate_grad_batches"] = 1
    trainer, module = case.made(**plan(planned)), made()
    with ends_in_time(), pytest.raises(error, match=message):
        trainer.fit(module, **case.loaders())
    assert trainer.protwin.training is None
    assert lanes_alive() == []
    assert all(parameter.untyped_storage().nbytes() for parameter in module.parameters())


def test_a_limit_that_the_plan_does_not_know(planned: Any, tmp_path: Path) -> None:
    case = Fit(tmp_path, {"gradient_clip_val": None}, module={"limit": 2.0})
    with ends_in_time(), pytest.raises(ScheduleError, match=r"clipped by norm to 2, but the plan limits .* to nothing"):
        case.fitted(gpt2(), **plan(planned, max_gradient_norm=None))


def test_another_number_of_micro_batches_later(planned: Any, tmp_path: Path) -> None:
    case = Fit(tmp_path, {"accumulate_grad_batches": 1}, [GradientAccumulationScheduler({0: 2, 1: 4})])
    with ends_in_time(), pytest.raises((PlanError, ScheduleError), match="accumulate_grad_batches is"):
        case.fitted(gpt2(), **plan(planned))


def test_data_that_begin_once() -> None:
    trainer, module = Fit(Path()).made(**SEARCHED), Language(gpt2())
    with pytest.raises(WorkloadError, match="the training data can be gone through once alone"):
        trainer.fit(module, train_dataloaders=iter([{"input_ids": torch.zeros(1, 2, dtype=torch.long)}]))


def test_batches_by_name() -> None:
    """Of any shape; what is not nested in mappings, lists and tuples is one thing."""
    one, two, three = torch.zeros(1), torch.ones(2), torch.ones(3)
    for batch in (one, [one, two], (one, {"a": two, "b": [three, 4]}), {"x": (one, two), "y": "text"}):
        leaves = dict(named_leaves(batch))
        again = filled(batch, {name: (name, leaf) for name, leaf in leaves.items()})
        assert [name for name, _ in named_leaves(filled(batch, leaves))] == list(leaves)
        assert type(again) is type(batch) or isinstance(batch, torch.Tensor)
    assert list(dict(named_leaves((one, {"a": two, "b": [three, 4]})))) == ["0", "1.a", "1.b.0", "1.b.1"]
