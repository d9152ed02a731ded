"""Rates are those of transformers' schedulers, step by step."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from protwin.runtime.commands.learning_rates import LearningRates, Schedule


@pytest.mark.parametrize("num_steps", [1, 7, 20])
@pytest.mark.parametrize("warmup_steps", [0, 1, 5, 30])
@pytest.mark.parametrize("schedule", Schedule)
def test_rates_are_those_of_transformers(schedule: Schedule, warmup_steps: int, num_steps: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-4)
    name = "constant_with_warmup" if schedule is Schedule.CONSTANT else str(schedule)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=num_steps)
    rates = LearningRates(3e-4, schedule, warmup_steps)
    for step in range(num_steps):
        assert rates.at(step, num_steps) == scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
