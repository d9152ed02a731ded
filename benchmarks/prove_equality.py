"""Equality: whatever the plan, losses and weights are those of the plain loop, bit for bit.

A plan changes where tensors lie and when they come, not what is computed with them nor in which order, so nothing has
to be allowed for, in narrow types either: there the plain loop is the one that steps float32 masters.  Every training
has a device of just the memory that its schedule guarantees to be enough, and ends with an error where it is not.
"""

from __future__ import annotations

from protwin.shared.basics.progress import OnProgress
from protwin.shared.basics.units import format_bytes
from protwin.shared.schema.plan import Plan
from tests.runtime.equality import Outcome, miscounted, offloaded_chunks, random_plans, swapped_bytes, trained
from tests.runtime.families import family_cases
from tests.runtime.models import Case, cases

from .prove_claims import Claim, Settings

_FEW: int = 10
"""Of so many plans at least one offloads, one swaps, and one has several micro-batches."""


def subjects(settings: Settings) -> dict[str, Case]:
    """The models that are tried."""
    every = {**cases(settings.steps), **family_cases(settings.steps)}
    return {name: case for name, case in every.items() if settings.has(name)}


def prove(settings: Settings, report: OnProgress) -> list[Claim]:
    """One claim for each model, tried on random plans."""
    chosen = subjects(settings)
    claims = []
    for number, (name, case) in enumerate(chosen.items()):
        claims.append(_prove_model(name, case, settings, seed=settings.seed + number))
        report(number + 1, len(chosen))
    return claims


def _prove_model(name: str, case: Case, settings: Settings, seed: int) -> Claim:
    claim = Claim(
        "equality",
        name,
        f"losses and weights of {settings.steps} steps equal the plain loop's, in the guaranteed memory",
    )
    plans = random_plans(case.workload, settings.plans, seed)
    moved_bytes = cpu_adam_steps = 0
    fullest_frac = 0.0
    for plan in plans:
        with claim.case(plan.to_json()):
            outcome = trained(case, plan)
            compare(case, plan, outcome)
            moved_bytes += outcome.to_device_bytes + outcome.to_host_bytes
            cpu_adam_steps += outcome.num_cpu_adam_steps
            fullest_frac = max(fullest_frac, outcome.peak_bytes / outcome.guaranteed_bytes)
    kinds = {
        "offloading": [plan for plan in plans if offloaded_chunks(case.workload, plan)],
        "stepped on the host alone": [plan for plan in plans if plan.n_host_stepped],
        "swapping": [plan for plan in plans if swapped_bytes(case.workload, plan)],
        "with micro-batches": [plan for plan in plans if plan.micro_batches > 1],
        "whose limit bound": [plan for plan in plans if _has_bound(case, plan)],
    }
    claim.figures = {kind: len(found) for kind, found in kinds.items()}
    claim.figures |= {"moved": format_bytes(moved_bytes), "CPU Adam steps": cpu_adam_steps}
    claim.figures["of the guaranteed memory"] = f"{fullest_frac:.1%} at most"
    if settings.plans >= _FEW:
        empty = [kind for kind in ("offloading", "swapping", "with micro-batches") if not kinds[kind]]
        claim.failures += [f"no plan is one {kind}: that shows nothing" for kind in empty]
        if not (moved_bytes and cpu_adam_steps):
            claim.failures.append("nothing was moved, or CPU Adam never stepped: that shows nothing")
    return claim


def compare(case: Case, plan: Plan, outcome: Outcome) -> None:
    """Raise AssertionError unless a training did what the plain loop does, and moved what its plan says."""
    plain = case.plain_with(plan.micro_batches, plan.max_gradient_norm)
    assert outcome.losses == plain.losses, "the losses differ"
    assert outcome.different == [], f"weights differ: {', '.join(outcome.different)}"
    assert miscounted(case, plan, outcome) == [], "; ".join(miscounted(case, plan, outcome))
    assert outcome.peak_bytes <= outcome.guaranteed_bytes, (
        f"the peak is {outcome.peak_bytes} bytes, guaranteed are {outcome.guaranteed_bytes}"
    )


def _has_bound(case: Case, plan: Plan) -> bool:
    """Whether the limit of the norm changed a step."""
    limit = plan.max_gradient_norm
    return limit is not None and any(norm > limit for norm in case.plain_with(plan.micro_batches, limit).norms)
