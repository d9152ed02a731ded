"""How many examples a property is tried on: some in every run of the tests, all of them in ``make prove``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from typing import Final, TypeVar

T = TypeVar("T")

IS_PROOF: Final = os.environ.get("PROTWIN_PROOF") == "1"
"""Set by the section ``properties`` of ``make prove``."""


def examples(proof: int, quick: int) -> int:
    """``proof`` in ``make prove``, else ``quick``: enough to notice the wrong variants that the tests keep."""
    return proof if IS_PROOF else quick


def share(cases: Iterable[T], one_in: int) -> list[T]:
    """All ``cases`` in ``make prove``, else one in ``one_in``, evenly spaced."""
    return list(islice(cases, 0, None, 1 if IS_PROOF else one_in))
