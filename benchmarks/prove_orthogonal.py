"""Orthogonal subspace fine-tuning: by random plans the plain loop's bits, and the schedule's own peaks.

The plain loop has the same factorised maps and the same projections, on one device.
"""

from __future__ import annotations

import itertools
from typing import Final

from protwin.shared.basics.progress import OnProgress
from protwin.shared.basics.units import format_bytes
from protwin.shared.layout.layout import layout_of, why_not_on_device
from protwin.shared.schema.plan import Plan, ProjectionPlace
from tests.runtime.accounts import BAR, MIXTURES, RESIDENCIES, plan_of
from tests.runtime.equality import trained
from tests.runtime.models import Case
from tests.runtime.orthogonal import AutocastCase, device_for, orthogonal_cases, orthogonal_plans

from .prove_claims import Claim, Settings
from .prove_memory import Peaks

_FEW: Final = 20
"""Of so many plans at least one is of every kind that is counted."""


def prove(settings: Settings, report: OnProgress) -> list[Claim]:
    """Two claims for each model: its bits by random plans, and its peaks in every mode and residency."""
    chosen = {name: case for name, case in orthogonal_cases(settings.steps).items() if settings.has(name)}
    claims = []
    for number, (name, case) in enumerate(chosen.items()):
        claims.append(_prove_bits(name, case, settings, settings.seed + number))
        if not isinstance(case, AutocastCase):
            # Accounts of what autocast makes are of what is held at most, give or take a few bytes.
            claims.append(_prove_peaks(name, case))
        report(number + 1, len(chosen))
    return claims


def _prove_bits(name: str, case: Case, settings: Settings, seed: int) -> Claim:
    device = device_for(case)
    words = f"losses and weights of {settings.steps} steps equal the plain loop's with the same projections"
    claim = Claim("orthogonal", name, words if device is not None else f"{words}, in the guaranteed memory")
    plans = orthogonal_plans(case.workload, settings.plans, seed)
    moved_bytes = cpu_adam_steps = 0
    for plan in plans:
        with claim.case(plan.to_json()):
            outcome = trained(case, plan, device_for(case))
            plain = case.plain_with(plan.micro_batches, plan.max_gradient_norm)
            assert outcome.losses == plain.losses, "the losses differ"
            assert outcome.different == [], f"weights differ: {', '.join(outcome.different)}"
            assert device is not None or outcome.peak_bytes <= outcome.guaranteed_bytes, (
                f"the peak is {outcome.peak_bytes} bytes, guaranteed are {outcome.guaranteed_bytes}"
            )
            moved_bytes += outcome.to_device_bytes + outcome.to_host_bytes
            cpu_adam_steps += outcome.num_cpu_adam_steps
    kinds = _kinds(plans)
    claim.figures = {kind: len(found) for kind, found in kinds.items()}
    claim.figures |= {"moved": format_bytes(moved_bytes), "CPU Adam steps": cpu_adam_steps}
    if settings.plans >= _FEW:
        claim.failures += [f"no plan is one {kind}: that shows nothing" for kind, found in kinds.items() if not found]
        if not (moved_bytes and cpu_adam_steps):
            claim.failures.append("nothing was moved, or CPU Adam never stepped: that shows nothing")
    return claim


def _kinds(plans: list[Plan]) -> dict[str, list[Plan]]:
    return {
        "projecting on the device": [p for p in plans if p.projects_gradients_on is ProjectionPlace.DEVICE],
        "adding micro-batches up on the device before that": [
            p for p in plans if p.projects_gradients_on is ProjectionPlace.DEVICE and p.micro_batches > 1
        ],
        "stepped on the host alone": [p for p in plans if p.n_host_stepped],
        "checkpointing": [p for p in plans if p.n_checkpoint],
        "swapping": [p for p in plans if p.n_swap],
        "with micro-batches": [p for p in plans if p.micro_batches > 1],
        "with a limit of the norm": [p for p in plans if p.max_gradient_norm is not None],
        "with parameters on a disk": [p for p in plans if p.n_disk],
    }


def _prove_peaks(name: str, case: Case) -> Claim:
    claim = Claim("orthogonal", name, f"measured peak within {BAR:.1%} of the schedule's account, nothing left")
    peaks = Peaks(case)
    for mixture, residency, place in itertools.product(MIXTURES, RESIDENCIES, ProjectionPlace):
        plan = plan_of(case, mixture, residency).model_copy(update={"projects_gradients_on": place})
        reason = why_not_on_device(layout_of(case.workload, plan.chunk_bytes))
        if place is ProjectionPlace.DEVICE and reason is not None:
            continue
        with claim.case(f"{mixture}, {residency}, {place}"):
            peaks.compare(f"{mixture}, {residency}, {place}", plan)
    claim.figures = peaks.figures
    return claim
