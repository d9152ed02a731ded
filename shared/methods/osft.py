"""Orthogonal subspace fine-tuning: full training whose gradients and parameters are projected."""

from __future__ import annotations

from typing import Final

from ..compile.compile import OSFT as POLICIES
from ..verify.osft import OSFT as RULES
from .method import Method

OSFT: Final = Method(policies=POLICIES, rules=RULES)
