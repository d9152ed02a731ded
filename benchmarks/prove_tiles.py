"""Tiles: whatever the plan, MLPs and losses in tiles train as the plain loop of whole tensors, in the account's memory.

Tiles add up gradients in another order, so that bits may differ; what may be allowed for that is derived where the
comparison is (``tests/runtime/tiles/random_tiles.py``).  Half of the families weigh every token by itself, so that a
mean of tiles in place of a sum shows.  Every training has a device of just the memory that its schedule guarantees.
"""

from __future__ import annotations

from protwin.shared.basics.progress import OnProgress
from tests.runtime.tiles.random_tiles import NAMED, UNNAMED, check, plans_of

from .prove_claims import Claim, Settings


def prove(settings: Settings, report: OnProgress) -> list[Claim]:
    """One claim for each family, tried on random plans."""
    chosen = [family for family in (*NAMED, *UNNAMED) if settings.has(family)]
    claims = []
    for number, family in enumerate(chosen):
        claims.append(_prove_family(family, settings.plans, settings.seed + number))
        report(number + 1, len(chosen))
    return claims


def _prove_family(family: str, number: int, seed: int) -> Claim:
    claim = Claim("tiles", family, "losses and weights are the plain loop's but for the order of sums, peaks accounted")
    plans = plans_of(family, number, seed)
    errors = []
    for plan in plans:
        with claim.case(plan.to_json()):
            errors.append(check(family, plan))
    if errors:
        of_losses, of_weights, of_peaks = zip(*errors, strict=True)
        claim.figures = {
            "losses within": f"{max(of_losses):.1e}",
            "weights within": f"{max(of_weights):.1e}",
            "peaks within": f"{max(map(abs, of_peaks)):.3%}",
        }
    claim.figures |= {
        "in tiles of the MLP": sum(plan.mlp_tiles > 1 for plan in plans),
        "of the loss": sum(plan.loss_tiles > 1 for plan in plans),
        "with offloaded inputs": sum(plan.n_offload_input > 0 for plan in plans),
    }
    return claim
