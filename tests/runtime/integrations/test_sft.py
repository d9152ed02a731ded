"""TRL's SFTTrainer by a plan is the SFTTrainer, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from protwin.runtime import planned_trainer
from protwin.shared.basics.errors import PlanError, WorkloadError
from protwin.shared.catalogue.machines import load_hardware
from tests.runtime.integrations.trainers import Logs, check_same
from tests.runtime.models import VOCABULARY, llama
from tests.runtime.watchdog import ends_in_time

trl = pytest.importorskip("trl", reason="SFTTrainer is TRL's")
datasets = pytest.importorskip("datasets", reason="SFTTrainer takes its datasets alone")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def tokenizer() -> PreTrainedTokenizerFast:
    names = {f"word{index}": index for index in range(VOCABULARY - 2)}
    made = Tokenizer(models.WordLevel({**names, "<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def sft(folder: Path, arguments: dict[str, Any], **wishes: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    lengths = (12, 7, 9)
    rows = [
        {"input_ids": torch.randint(0, VOCABULARY - 2, (lengths[i % 3],), generator=generator).tolist()}
        for i in range(10)
    ]
    data = datasets.Dataset.from_list(rows)
    kind = planned_trainer(trl.SFTTrainer, tell=lambda _: None, **wishes) if wishes else trl.SFTTrainer
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "max_length": 12,
    }
    return kind(
        model=llama(),
        args=trl.SFTConfig(str(folder), **(settings | arguments)),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer(),
        callbacks=[Logs()],
    )


WISHES: dict[str, Any] = {"budget_bytes": "8MiB", "knobs": {"n_persist": 0, "chunk_bytes": 9_000}}


@pytest.mark.parametrize("arguments", [{}, {"packing": True}])
def test_it_trains_as_the_trainer(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Its metrics of training, entropy and accuracy, are those without a plan, too: a trace adds none."""
    plain = sft(tmp_path, arguments)
    planned = sft(tmp_path, arguments, hardware=load_hardware("rtx-3090"), **WISHES)
    with ends_in_time():
        plain.train()
        planned.train()
    check_same(plain, planned)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="activation_checkpointing is True, but the plan decides"):
        sft(tmp_path, {"activation_checkpointing": True}, **WISHES)
    smoothed = sft(tmp_path, {"label_smoothing_factor": 0.1}, hardware=load_hardware("rtx-3090"), **WISHES)
    with pytest.raises(WorkloadError, match="calls the model a second time for one batch"):
        smoothed.train()
