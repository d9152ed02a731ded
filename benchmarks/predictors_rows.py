"""One figure that two predictors give for the same question."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """Ours beside theirs; both None where the other one cannot be asked, which ``why`` explains."""

    peer: str
    question: str
    account: str
    unit: str
    """``B``, ``s``, or empty for a count."""
    ours: float | None
    theirs: float | None
    is_comparable: bool
    """Whether both define the figure alike, so that the difference is an error of one of them."""
    why: str

    @property
    def difference_frac(self) -> float | None:
        """Ours over theirs, less one."""
        if self.ours is None or not self.theirs:
            return None
        return self.ours / self.theirs - 1

    def as_json(self) -> dict[str, Any]:
        """The row with its difference."""
        return asdict(self) | {"difference_frac": self.difference_frac}
