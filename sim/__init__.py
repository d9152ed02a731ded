"""The simulator: what a plan does on a machine, and which plan is best, without the machine.

Importing it costs nothing: each name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..shared.basics.lazy_face import lazy_face

if TYPE_CHECKING:
    from .engine.rank_groups import RankGroup as RankGroup
    from .engine.rank_groups import simulate_groups as simulate_groups
    from .engine.simulator import simulate as simulate
    from .searching.rank_search import search_ranks as search_ranks
    from .searching.search import SearchResult as SearchResult
    from .searching.search import search as search
    from .space.space import SearchSpace as SearchSpace

_HOMES = {
    "RankGroup": "engine.rank_groups",
    "SearchResult": "searching.search",
    "SearchSpace": "space.space",
    "search": "searching.search",
    "search_ranks": "searching.rank_search",
    "simulate": "engine.simulator",
    "simulate_groups": "engine.rank_groups",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_face(__name__, _HOMES)
