"""Memory: the measured peak is the schedule's own account, and a thousand steps grow nothing.

The account depends on when transfers happen.  So lanes are made to do all they can before every compute task, and the
schedule's buffers are added up for that timing: then a measured peak and its account are the same numbers or are not.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from protwin.runtime import CpuDevice
from protwin.shared.basics.progress import OnProgress
from protwin.shared.basics.units import format_bytes
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import Plan
from tests.runtime.accounts import BAR, MIXTURES, RESIDENCIES, error_frac, measured_peak_bytes, plan_of
from tests.runtime.eager_lanes import eager_peak, settle
from tests.runtime.growth import growth_over
from tests.runtime.models import SEED, Case, cases
from tests.runtime.resuming import kept, mixed, offloaded, start

from .prove_claims import Claim, Settings
from .prove_equality import subjects

_WARM_UP: Final = 250
"""Steps before growth counts: more than the iterations whose times a training keeps."""
_LONG: Final[tuple[tuple[str, str, Any, dict[str, Any]], ...]] = (
    ("everything persistent", "llama", kept, {}),
    ("offloaded, checkpointed, swapped", "gpt2 with dropout, tied", offloaded, {"n_swap": 1}),
    ("two micro-batches, limited norm", "llama, groups", mixed, {"micro_batches": 2, "max_gradient_norm": 1.0}),
)


def prove(settings: Settings, report: OnProgress) -> list[Claim]:
    """Peaks of every model under every mode and residency; growth under three plans."""
    chosen = subjects(settings)
    long_runs = [long for long in _LONG if settings.has(long[1])]
    total = 2 * len(chosen) + len(long_runs)
    claims = []
    for micro_batches in (1, 2):
        for name, case in chosen.items():
            claims.append(_prove_peaks(name, case, micro_batches))
            report(len(claims), total)
    for long in long_runs:
        claims.append(_prove_growth(*long, settings))
        report(len(claims), total)
    return claims


@dataclass
class Peaks:
    """Measured peaks of a case's plans, beside the accounts of their schedules."""

    case: Case
    errors: dict[str, float] = field(default_factory=dict)
    num_exact: int = 0

    def compare(self, name: str, plan: Plan) -> None:
        """Measure one.  Raises AssertionError if the account is off by more than the bar."""
        measured_bytes = measured_peak_bytes(self.case, plan)
        accounted = eager_peak(compile_schedule(plan, self.case.workload))
        self.errors[name] = error = error_frac(measured_bytes, accounted)
        self.num_exact += measured_bytes in (accounted.low_bytes, accounted.high_bytes)
        assert abs(error) <= BAR, (
            f"measured {measured_bytes} bytes, accounted {accounted.low_bytes} to {accounted.high_bytes} ({error:+.2%})"
        )

    @property
    def figures(self) -> dict[str, object]:
        """For a claim."""
        worst = max(self.errors, key=lambda name: abs(self.errors[name]), default="")
        return {"to the byte": self.num_exact, "worst": f"{self.errors[worst]:+.3%} ({worst})" if worst else "none"}


def _prove_peaks(name: str, case: Case, micro_batches: int) -> Claim:
    of = "" if micro_batches == 1 else f" with {micro_batches} micro-batches"
    claim = Claim("memory", name, f"measured peak within {BAR:.1%} of the schedule's account{of}, nothing left")
    peaks = Peaks(case)
    for mixture, residency in itertools.product(MIXTURES, RESIDENCIES):
        plan = plan_of(case, mixture, residency, micro_batches=micro_batches)
        with claim.case(f"{mixture}, {residency}"):
            peaks.compare(f"{mixture}, {residency}", plan)
    claim.figures = peaks.figures
    return claim


def _prove_growth(what: str, name: str, base: Any, knobs: dict[str, Any], settings: Settings) -> Claim:
    steps = settings.growth_steps
    claim = Claim("memory", f"{name}, {what}", f"{steps} steps grow nothing")
    case = cases()[name]
    plan: Plan = base(case.workload).model_copy(update=knobs)
    device, model = CpuDevice(), case.build()
    batches = itertools.cycle(case.batches)
    torch.manual_seed(SEED)
    with claim.case(what), start(case, model, plan, device=device) as training:

        def do_step() -> None:
            for _ in range(plan.micro_batches):
                case.loss(model, next(batches)).backward()
            training.step()
            # Moments are alike when lanes have done what they can: gathers for the next iteration are under way.
            training.synchronize()
            settle(training)

        found = growth_over(steps, do_step, device, warm_up=_WARM_UP)
        after = found.after
        claim.figures = {
            "ledger": format_bytes(after.ledger_bytes),
            "tensors": after.num_tensors,
            "threads": after.num_threads,
            "open files": after.num_descriptors,
            "process": f"{found.rss_growth_bytes / 1024:+.0f} KiB of at most {found.rss_bound_bytes / 1024:.0f} KiB",
        }
        assert found.grown == [], "; ".join(found.grown)
        assert found.rss_growth_bytes <= found.rss_bound_bytes, (
            f"the process grew by {found.rss_growth_bytes} bytes, at most {found.rss_bound_bytes} are noise"
        )
    return claim
