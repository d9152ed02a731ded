"""axolotl trains by a plan as without it, bit for bit: its plugin manager, its configuration, its Trainer.

axolotl asks for packages of a GPU, so that it is installed without them: these tests run where enough of it can be
imported, and elsewhere say what is missing.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import default_data_collator

from protwin.runtime.integrations.axolotl_section import PLUGIN
from tests.runtime.integrations.trainers import rows
from tests.runtime.models import differences, llama, snapshot


def axolotls(module: str) -> Any:
    """A module of axolotl.  What it warns of is its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(f"axolotl.{module}")
        except ImportError as error:
            pytest.skip(f"axolotl.{module} cannot be imported: {error}")


@pytest.fixture(autouse=True)
def _fresh_manager() -> Iterator[None]:
    """The manager of plugins keeps what it knows for the process."""
    yield
    manager = axolotls("integrations.base").PluginManager.get_instance()
    manager.plugins.clear()


def validated(folder: Path, **changes: Any) -> Any:
    """The configuration as axolotl reads it, with the plugin registered and its section checked."""
    config = axolotls("utils.config")
    keys = {
        "base_model": str(folder / "base"),
        "plugins": [PLUGIN],
        "protwin": {"budget": "300KiB", "hardware": "rtx-3090"},
        "datasets": [{"path": "rows.jsonl", "ds_type": "json", "type": "completion"}],
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 10,
        "learning_rate": 0.01,
        "optimizer": "adamw_torch",
        "lr_scheduler": "cosine",
        "sequence_len": 12,
        "output_dir": str(folder / "out"),
    }
    cfg = axolotls("utils.dict").DictDefault(keys | changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config.prepare_plugins(cfg)
        return config.validate_config(cfg)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama(num_layers=2).save_pretrained(tmp_path / "base")
    return tmp_path


def test_the_manager_of_plugins_takes_it_and_the_section_is_part_of_the_file(folder: Path) -> None:
    cfg = validated(folder)
    assert cfg.protwin == {"budget": "300KiB", "hardware": "rtx-3090", "knobs": {}, "keep_last_step": False}
    manager = axolotls("integrations.base").PluginManager.get_instance()
    assert list(manager.plugins) == [PLUGIN]
    manager.pre_model_load(cfg)
    assert cfg.device_map == {"": "cpu"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deepspeed": "zero3.json"}, "deepspeed asks for DeepSpeed"),
        ({"gradient_checkpointing": True}, "n_checkpoint"),
        ({"tensor_parallel_size": 2}, "tensor parallelism"),
        ({"optimizer": "lion_8bit"}, "lion_8bit"),
        ({"protwin": {"budgte": 1}}, "budgte is no key"),
    ],
    ids=str,
)
def test_axolotl_refuses_what_contradicts_a_plan(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validated(folder, **changes)


def trained(
    kind: type, cfg: Any, output: Path, resume: str | None = None, **changes: Any
) -> tuple[Any, list[dict[str, Any]], Any]:
    usual: dict[str, Any] = {"gradient_accumulation_steps": 2}
    arguments = axolotls("core.training_args").AxolotlTrainingArguments(
        **usual | changes,
        output_dir=str(output),
        per_device_train_batch_size=2,
        max_steps=10,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=1,
        save_strategy="steps",
        save_steps=5,
        eval_strategy="steps",
        eval_steps=5,
        optim="adamw_torch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    table = pytest.importorskip("datasets").Dataset
    data = table.from_list([{name: one.tolist() for name, one in row.items()} for row in rows()])
    trainer = kind(
        model=llama(num_layers=2),
        args=arguments,
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        data_collator=default_data_collator,
        eval_data_collator=default_data_collator,
    )
    trainer.axolotl_cfg = cfg
    trainer.train(resume_from_checkpoint=resume)
    names = ("loss", "grad_norm", "eval_loss", "learning_rate")
    return (
        trainer.model,
        [{name: log[name] for name in names if name in log} for log in trainer.state.log_history],
        trainer,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_its_trainer_gives_the_same_bits_with_the_plan_and_without_it_and_after_a_resume(folder: Path) -> None:
    own = axolotls("core.trainers.base").AxolotlTrainer
    cfg = validated(folder)
    manager = axolotls("integrations.base").PluginManager.get_instance()
    planned = manager.get_trainer_cls(cfg)
    assert issubclass(planned, own)
    plain, logs, _ = trained(own, cfg, folder / "plain")
    model, found, trainer = trained(planned, cfg, folder / "planned")
    assert trainer.protwin.counts.bytes_host_to_device > 0
    assert trainer.protwin.counts.num_cpu_adam_steps > 0
    assert found == logs
    assert differences(model, snapshot(plain)) == []
    again, resumed, _ = trained(planned, cfg, folder / "planned", str(folder / "planned" / "checkpoint-5"))
    assert resumed == logs
    assert differences(again, snapshot(plain)) == []
