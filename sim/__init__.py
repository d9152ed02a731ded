"""The simulator: what a plan does on a machine, and which plan is best, without the machine.

Importing it costs nothing: each name is loaded when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .engine.rank_groups import RankGroup, simulate_groups
    from .engine.simulator import simulate
    from .searching.rank_search import search_ranks
    from .searching.search import SearchResult, search
    from .space.space import SearchSpace

__all__ = ["RankGroup", "SearchResult", "SearchSpace", "search", "search_ranks", "simulate", "simulate_groups"]

_HOME: Final = {
    "RankGroup": ".engine.rank_groups",
    "SearchResult": ".searching.search",
    "SearchSpace": ".space.space",
    "search": ".searching.search",
    "search_ranks": ".searching.rank_search",
    "simulate": ".engine.simulator",
    "simulate_groups": ".engine.rank_groups",
}


class _LazyPackage(ModuleType):
    """This package: its exported names are never shadowed by its modules.

    Importing the module ``search`` would otherwise bind the package's attribute of that name to the module, in place
    of the function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name], __name__), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


sys.modules[__name__].__class__ = _LazyPackage
