"""The known names that a misspelt one may have meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Final

_LEAST_SIMILARITY: Final = 0.5
_PART: Final = 0.8
"""Similarity from which on a name is taken for a part of another one, misspelt."""
_MAX_SHOWN: Final = 3
_MAX_LISTED: Final = 30
"""Known names up to which all of them are an answer."""
_LONGEST: Final = 100
"""Characters of a name that are compared, which takes their number squared; no known name is as long."""
_SHORTEST_PART: Final = 3
"""Letters from which on one name within another says something."""


def nearest_names(name: str, known: Iterable[str], *, least_similarity: float = _LEAST_SIMILARITY) -> tuple[str, ...]:
    """Up to three known names that resemble ``name``, the nearest first; empty if none does.

    A name that holds the other whole ("h100" in "h100-80gb") counts as near whatever its length, and one that begins
    with the same part ("vit-huge" for "vit-large") before names that end alike.  Where nothing else is near, a part of
    a name is ("bandwith" of "memory_bandwidth_bytes_per_s").
    """
    wanted, names = _plain(name), {_plain(candidate): candidate for candidate in known}
    close = get_close_matches(wanted, names, n=_MAX_SHOWN, cutoff=least_similarity)
    parts = [
        found
        for found in names
        if min(len(wanted), len(found)) >= _SHORTEST_PART and (wanted in found or found in wanted)
    ]
    first = _first_part(wanted)
    alike = [found for found in names if len(first) >= _SHORTEST_PART and _first_part(found) == first]
    if alike and not set(alike) & set(close):
        close = [*get_close_matches(wanted, alike, n=1, cutoff=0.0), *close]
    near = [*close, *parts]
    if not near and len(wanted) > _SHORTEST_PART:
        near = [found for found in names if get_close_matches(wanted, found.split("-"), cutoff=_PART)]
    return tuple(names[found] for found in dict.fromkeys(near))[:_MAX_SHOWN]


def did_you_mean(name: str, known: Iterable[str], *, all_names: bool = False) -> str:
    """``"Did you mean llama-3-8b or llama-2-7b?"``, or the whole list if nothing resembles ``name``.

    Of a long list, the nearest names and how many there are, unless ``all_names`` are wanted.
    """
    known = tuple(known)
    if not _plain(name):
        return "The name is empty."
    near = nearest_names(name, known)
    if not near and len(known) > _MAX_LISTED and not all_names:
        least = nearest_names(name, known, least_similarity=0.0)
        return f"None of the {len(known)} known names resembles it; the nearest are {', '.join(least)}."
    if not near:
        return f"Known are {', '.join(known)}."
    return f"Did you mean {listed(near, 'or')}?"


def listed(words: Sequence[str], last: str = "and") -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def _plain(name: str) -> str:
    return name[:_LONGEST].casefold().replace("_", "-").replace(" ", "-").strip("-")


def _first_part(name: str) -> str:
    return name.partition("-")[0]
