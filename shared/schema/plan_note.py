"""What a plan's file says of a plan that nothing is proven about."""

from __future__ import annotations

from .plan import Plan
from .search_result import Certificate


def with_certificate(plan: Plan, certificate: Certificate) -> Plan:
    """``plan`` as it is written to a file of its own: with a note if the search that found it was ended early."""
    if certificate.is_certified:
        return plan
    decided = certificate.num_candidates - certificate.num_undecided
    ended = "Ctrl-C ended the search" if certificate.is_interrupted else "the search ended at its limit of work"
    return plan.model_copy(
        update={
            "note": f"Not certified: {ended} when {decided:,} of {certificate.num_candidates:,} plans were decided. "
            f"This was the best of the {certificate.num_simulated:,} that had been simulated."
        }
    )
