"""The loop of Accelerate's documentation, with and without a plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader
from transformers import get_scheduler

from tests.runtime.integrations.trainers import LIMIT, rows
from tests.runtime.models import adamw


@dataclass
class Trained:
    """What a loop has seen, and what it leaves."""

    accelerator: Any
    seen: list[Any]
    """Of every micro-batch: the losses of all processes, the norm and the rate."""
    weights: dict[str, torch.Tensor]


def loop(
    kind: Any,
    model: nn.Module,
    *,
    steps: int,
    num_rows: int = 10,
    limit: float | None = LIMIT,
    save: Path | None = None,
    resume: Path | None = None,
    **options: Any,
) -> Trained:
    """Two epochs, of which the first ends in ``save``, or begins behind ``resume``."""
    set_seed(3)
    # The order of an epoch is its number's, so that a loop that is resumed by its epoch has the same one.
    options["dataloader_config"] = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = kind(cpu=True, gradient_accumulation_steps=steps, **options)
    optimizer = adamw([{"params": list(model.parameters())}])
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=20)
    loader: Any = DataLoader(rows(num_rows), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seen = []
    if resume is not None:
        accelerator.load_state(str(resume))
    for epoch in range(0 if resume is None else 1, 2):
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                norm = None
                if accelerator.sync_gradients and limit is not None:
                    norm = accelerator.clip_grad_norm_(model.parameters(), limit).item()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append((accelerator.gather(loss.detach()).tolist(), norm, scheduler.get_last_lr()))
        if epoch == 0 and save is not None:
            accelerator.save_state(str(save))
    unwrapped = accelerator.unwrap_model(model)
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(unwrapped).items()}
    return Trained(accelerator, seen, weights)
