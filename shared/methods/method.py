"""A training method: policies by which its plans are compiled, and rules by which its schedules are verified."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ..compile.compile import Policies
from ..verify.full_training import FULL_TRAINING as FULL_TRAINING_RULES
from ..verify.rules import Rules


@dataclass(frozen=True, kw_only=True)
class Method:
    """What simulator, search and verifier need to know of a training method, and all that they know.

    Policies and rules are written apart, on purpose: neither reads the other.
    """

    policies: Policies = field(default_factory=Policies)
    rules: Rules = FULL_TRAINING_RULES


FULL_TRAINING: Final = Method()
"""Every parameter that the workload trains, by its own gradients."""
