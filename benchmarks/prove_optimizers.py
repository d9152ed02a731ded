"""Optimizers: every model with every optimizer that can step it, by random plans, beside the same plain loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from protwin.runtime import named_optimizer
from protwin.runtime.optimizers.named import check_runs_on
from protwin.shared.basics.errors import PlanError
from protwin.shared.basics.progress import OnProgress
from protwin.shared.optimizers.check import check_optimizer
from protwin.shared.schema.optimizer import Optimizer
from tests.runtime.equality import random_plans, trained
from tests.runtime.models import Case, one_group

from .prove_claims import Claim, Settings
from .prove_equality import compare, subjects

RATES: Final = {Optimizer.SGD: 0.1, Optimizer.LION: 1e-3}
"""At which every step shows in every bit; the others have 0.01."""
_PLANS: Final = 8
"""Of the plans that equality is tried on, one in so many."""


def prove(settings: Settings, report: OnProgress) -> list[Claim]:
    """One claim for each optimizer; its cases are random plans of every model."""
    every = [*subjects(settings).items()]
    claims = []
    for number, optimizer in enumerate(Optimizer):
        claims.append(_prove_optimizer(optimizer, every, settings))
        report(number + 1, len(Optimizer))
    return [claim for claim in claims if claim.num_cases]


def case_with(case: Case, optimizer: Optimizer) -> Case:
    """``case``, stepped by another optimizer with one set of options."""
    changed = replace(
        case,
        groups=one_group,
        make_optimizer=named_optimizer(optimizer, lr=RATES.get(optimizer, 1e-2)),
        has_masters=optimizer is not Optimizer.ADAMW_BF16,
        _plain={},
    )
    changed.__dict__["workload"] = case.workload  # traced already
    return changed


def _prove_optimizer(optimizer: Optimizer, every: list[tuple[str, Case]], settings: Settings) -> Claim:
    steps = f"losses and weights of {settings.steps} steps equal the plain loop's, in the guaranteed memory"
    claim = Claim("optimizers", str(optimizer), steps)
    models = 0
    for number, (name, case) in enumerate(every):
        if not _can_step(optimizer, case):
            continue
        models += 1
        stepped = case_with(case, optimizer)
        count = -(-settings.plans // _PLANS)
        for plan in random_plans(case.workload, count, settings.seed + number, optimizer):
            with claim.case(f"{name}: {plan.to_json()}"):
                compare(stepped, plan, trained(stepped, plan))
    claim.figures = {"models": models}
    return claim


def _can_step(optimizer: Optimizer, case: Case) -> bool:
    try:
        check_runs_on(optimizer, torch.device("cpu"))
        check_optimizer(optimizer, case.workload.parameters)
    except PlanError:
        return False
    return True
