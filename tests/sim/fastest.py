"""Searches for the fastest plan by what it allocates: the answer that brute force over the simulator gives too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from protwin.sim.searching.confidence import NO_UNCERTAINTY
from protwin.sim.searching.request import Effort, SearchRequest


def fastest_request(*, effort: Effort | None = None, **wanted: Any) -> SearchRequest:
    """A request that takes predictions for exact, and no account of segments."""
    effort = replace(effort or Effort(), uncertainty=NO_UNCERTAINTY)
    return SearchRequest(margin_frac=None, effort=effort, **wanted)
