"""The simulator: what a plan does on a machine, and which plan is best, without the machine.

Importing it costs nothing: each name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..shared.basics.lazy_face import lazy_face

if TYPE_CHECKING:
    from .engine.pipelines import simulate_pipeline as simulate_pipeline
    from .engine.rank_groups import RankGroup as RankGroup
    from .engine.rank_groups import simulate_groups as simulate_groups
    from .questions.by_name import search as search
    from .questions.by_name import simulate as simulate
    from .questions.splits import search_splits as search_splits
    from .searching.request import Effort as Effort
    from .searching.request import GlobalBatch as GlobalBatch
    from .searching.request import SearchRequest as SearchRequest
    from .searching.request import Step as Step
    from .searching.search import SearchResult as SearchResult
    from .searching.search import search_batches as search_batches
    from .space.space import SearchSpace as SearchSpace

_HOMES = {
    "Effort": "searching.request",
    "GlobalBatch": "searching.request",
    "RankGroup": "engine.rank_groups",
    "SearchRequest": "searching.request",
    "SearchResult": "searching.search",
    "SearchSpace": "space.space",
    "Step": "searching.request",
    "search": "questions.by_name",
    "search_batches": "searching.search",
    "search_splits": "questions.splits",
    "simulate": "questions.by_name",
    "simulate_groups": "engine.rank_groups",
    "simulate_pipeline": "engine.pipelines",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_face(__name__, _HOMES)
