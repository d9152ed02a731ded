"""Full training: every parameter that the workload trains, by its own gradients."""

from __future__ import annotations

from typing import Final

from ..compile.compile import FULL_TRAINING as POLICIES
from ..verify.full_training import FULL_TRAINING as RULES
from .method import Method

FULL_TRAINING: Final = Method(policies=POLICIES, rules=RULES)
