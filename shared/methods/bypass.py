"""Bypass distillation: every block of a student by a loss of its own, beside its teacher."""

from __future__ import annotations

from typing import Final

from ..compile.compile import BYPASS as POLICIES
from ..verify.bypass import BYPASS as RULES
from .method import Method

BYPASS: Final = Method(policies=POLICIES, rules=RULES)
