"""A training method: policies by which its plans are compiled, and rules by which its schedules are verified."""

from __future__ import annotations

from dataclasses import dataclass

from ..compile.compile import Policies
from ..verify.rules import Rules


@dataclass(frozen=True, kw_only=True)
class Method:
    """What simulator, search and verifier need to know of a training method, and all that they know.

    Policies and rules are written apart, on purpose: neither reads the other.
    ``dataclasses.replace(FULL_TRAINING, ...)`` extends full training (``full_training.py``).
    """

    policies: Policies
    rules: Rules
