"""How many tokens a model's rotary positions were made for, by its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_SIGNS: Final = ("rope_theta", "rope_scaling", "rope_parameters", "rotary_pct", "rotary_dim", "rotary_emb_base")
"""Keys of which a configuration has one where positions are rotations."""
_LONGEST: Final = ("max_position_embeddings", "n_positions")
_AT_ANY_LENGTH: Final = "dynamic"
"""Rotations whose base grows with the sequence."""


def rotary_tokens(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest sample for which the rotary positions were made; None if they are none, or know no end.

    That is ``max_position_embeddings``.  Where rotations are scaled, it may be the length before or after: the larger
    of it and of ``factor`` times the length before counts.  Rotations go on beyond, at angles that nobody has trained.
    """
    texts = config.get("text_config")
    config = texts if isinstance(texts, Mapping) else config
    longest = next((found for key in _LONGEST if (found := _whole(config.get(key))) is not None), None)
    if longest is None or config.get("alibi") is True or not any(key in config for key in _SIGNS):
        return None
    for scaling in _scalings(config):
        if scaling.get("rope_type", scaling.get("type")) == _AT_ANY_LENGTH:
            return None
        factor = scaling.get("factor")
        if isinstance(factor, int | float) and not isinstance(factor, bool) and 1 < factor < 2**40:
            before = _whole(scaling.get("original_max_position_embeddings"))
            longest = max(longest, int((longest if before is None else before) * factor))
    return longest


def _scalings(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What is said of scaled rotations: of all layers, or of every kind of layers."""
    said = [found for key in ("rope_scaling", "rope_parameters") if isinstance(found := config.get(key), Mapping)]
    return [*said, *(inner for one in said for inner in one.values() if isinstance(inner, Mapping))]


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
