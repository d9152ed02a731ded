"""Fits of Lightning with and without a plan, on the same data, and what both must have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from protwin.runtime import planned_lightning
from tests.runtime.integrations.trainers import BATCH_SIZE, LIMIT, MICRO_BATCHES, NUM_ROWS, rows
from tests.runtime.models import VOCABULARY, differences, uncached
from tests.runtime.watchdog import ends_in_time, lanes_alive


class Language(pl.LightningModule):
    """Learns the next token; counts, in a metric and in a list, what it has seen."""

    def __init__(
        self,
        model: nn.Module,
        *,
        plateau: bool = False,
        manual: bool = False,
        skipped: int | None = None,
        limit: float | None = None,
    ) -> None:
        """``manual``: it would step by itself; ``skipped``: a batch; ``limit``: of the norm, instead of Lightning's."""
        super().__init__()
        self.model = model
        self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro")
        self.seen: list[int] = []
        self.plateau, self.skipped, self.limit = plateau, skipped, limit
        self.automatic_optimization = not manual

    def forward(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """The output of the model."""
        return self.model(**batch)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor] | None:
        """The loss of a batch."""
        output = self(batch)
        self.accuracy(output.logits[:, :-1].argmax(-1), batch.pop("input_ids")[:, 1:])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("loss", output.loss, on_step=True, on_epoch=True)
        self.seen.append(batch_idx)
        return None if batch_idx == self.skipped else {"loss": output.loss}

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Logs the loss of a batch."""
        self.log("val_loss", self(batch).loss)

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        """The loss of a batch."""
        return self(batch).loss

    def configure_gradient_clipping(self, optimizer: Any, *given: Any, **named: Any) -> None:
        """Clips as Lightning does, unless it has a limit of its own."""
        if self.limit is None:
            super().configure_gradient_clipping(optimizer, *given, **named)
        else:
            self.clip_gradients(optimizer, self.limit, "norm")

    def configure_optimizers(self) -> Any:
        """Two groups, and a scheduler by steps or by what was validated."""
        named = list(self.named_parameters())
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        if self.plateau:
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], [3])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Logs(pl.Callback):
    """Keeps what was logged, and the rates, after every step and validation."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def _keep(self, trainer: pl.Trainer) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.logs.append({**found, "step": trainer.global_step, **{f"lr{i}": lr for i, lr in enumerate(rates)}})

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """After a micro-batch."""
        self._keep(trainer)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """After a validation."""
        self._keep(trainer)


@dataclass
class Fit:
    """A training with Lightning."""

    folder: Path
    arguments: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Any] = field(default_factory=list)
    resume: Path | None = None
    num_rows: int = NUM_ROWS
    module: dict[str, Any] = field(default_factory=dict)

    def made(self, **wishes: Any) -> Any:
        """The Trainer, which fits by a plan if there are wishes."""
        kind = planned_lightning(pl.Trainer, tell=lambda _: None, **wishes) if wishes else pl.Trainer
        settings: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 2,
            "accumulate_grad_batches": MICRO_BATCHES,
            "gradient_clip_val": LIMIT,
            "val_check_interval": 4,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "log_every_n_steps": 1,
            "default_root_dir": self.folder,
        }
        return kind(**(settings | self.arguments), callbacks=[Logs(), *self.callbacks])

    def loaders(self) -> dict[str, Any]:
        """Of training, shuffled, and of validation."""
        data: Any = rows(self.num_rows)
        return {
            "train_dataloaders": DataLoader(data, batch_size=BATCH_SIZE, shuffle=True),
            "val_dataloaders": DataLoader(rows(5, seed=2), batch_size=BATCH_SIZE),  # type: ignore[arg-type]
        }

    def fitted(self, model: nn.Module, **wishes: Any) -> Any:
        """The Trainer after ``fit()``."""
        trainer, module = self.made(**wishes), Language(uncached(model), **self.module)
        pl.seed_everything(5, verbose=False)
        with ends_in_time():
            trainer.fit(module, ckpt_path=self.resume, weights_only=False, **self.loaders())
        return trainer


def logs_of(trainer: Any) -> list[dict[str, float]]:
    return next(one.logs for one in trainer.callbacks if isinstance(one, Logs))


def check_same(plain: Any, planned: Any) -> None:
    """Bit for bit the same was logged, counted and learnt, and chunks have moved."""
    assert logs_of(planned) == logs_of(plain)
    assert planned.lightning_module.seen == plain.lightning_module.seen
    assert differences(planned.lightning_module, plain.lightning_module.state_dict()) == []
    check_offloaded(planned)


def check_offloaded(planned: Any, *, steps: int | None = None) -> None:
    counts = planned.protwin.counts
    assert counts.num_iterations == (planned.global_step if steps is None else steps)
    assert counts.num_gathers > 3 * counts.num_iterations
    assert counts.num_cpu_adam_steps > 0
    assert counts.bytes_host_to_device > counts.bytes_device_to_host > 0
    assert planned.protwin.training is None
    assert lanes_alive() == []
