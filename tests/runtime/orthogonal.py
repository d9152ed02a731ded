"""Models with factorised maps, and plans for them: what equality, accounts and the proof are tried on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import nn

from protwin.runtime import CpuDevice, add_lora, make_orthogonal, trace
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from tests.runtime.equality import different
from tests.runtime.families import families
from tests.runtime.models import SEED, Case, gpt2, hand_written, llama, point_batches, three_groups, token_batches
from tests.strategies.subspaces import plans_of_subspaces

RATIO = 0.4
STEPS = 4


def factorised(build: Callable[[], nn.Module], *targets: str, ratio: float = RATIO) -> nn.Module:
    torch.manual_seed(SEED)
    model = build()
    make_orthogonal(model, unfreeze_rank_ratio=ratio, targets=targets)
    return model


class AutocastCase(Case):
    """Computes in bfloat16 with float32 parameters.

    Whatever the method, accounts of what autocast makes are off by a few bytes: its trainings have devices without a
    limit.
    """

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().loss(model, batch)

    @cached_property
    def workload(self) -> Workload:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return trace(self.build(), self.batches[0], repeats=0)


def device_for(case: Case) -> CpuDevice | None:
    """What ``case`` is trained on: None for a device of just the guaranteed memory."""
    return CpuDevice() if isinstance(case, AutocastCase) else None


def _with_lora() -> nn.Module:
    """Low-rank matrices beside attention, factors in the rest; all that is neither is frozen."""
    torch.manual_seed(SEED)
    model = llama(num_layers=3)
    add_lora(model, rank=2, targets=["q_proj", "v_proj"])
    make_orthogonal(model, unfreeze_rank_ratio=RATIO, targets=["up_proj", "down_proj", "o_proj"])
    return model


@lru_cache
def orthogonal_cases(steps: int = STEPS) -> dict[str, Case]:
    """Families of models, biases, transposed maps, narrow types and low-rank matrices, with so many batches."""
    tokens = token_batches(steps)
    found = {
        "llama": Case(partial(factorised, llama), tokens, groups=three_groups),
        "gpt2, biases, transposed, dropout": Case(partial(factorised, gpt2), tokens),
        "llama in bfloat16": Case(partial(factorised, lambda: llama().to(torch.bfloat16)), tokens),
        "llama, some maps and the head": Case(
            partial(factorised, partial(llama, num_layers=2), "up_proj", "q_proj", "lm_head"), tokens
        ),
        "hand-written": Case(
            partial(factorised, hand_written, "stack.*.up", "stack.*.down"), point_batches(steps), has_loss=False
        ),
        "llama, LoRA on other maps": Case(_with_lora, tokens),
        "llama within autocast": AutocastCase(partial(factorised, llama), tokens),
    }
    for name in ("t5", "mixtral", "gemma2", "bert"):
        family = families()[name]
        found[name] = Case(partial(factorised, family.build), [family.batch] * steps, groups=three_groups)
    return found


def orthogonal_plans(workload: Workload, number: int, seed: int) -> list[Plan]:
    """So many different plans of one rank that ``workload`` can follow, the same ones for the same seed."""
    return different(plans_of_subspaces(workload), number, seed)
