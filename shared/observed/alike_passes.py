"""Passes of a loop over tiles that do the same, of which a trace without values runs few.

[Note: Passes that need not run]
What a pass does follows from its tokens and from what the loop holds when it begins.  The first pass makes what later
ones add to, and the second one finds it.  So once two passes behind the first, of as many tokens, have made the same
calls with the same levels, and left as many bytes as they found, the next one of as many tokens finds what they found,
and does the same.  The last one of as many tokens runs: what comes behind the loop may let go of what it made, or
change it.  Those between are noted as the one before them.  Where tensors have values a pass may depend on those, and
all run; so they do where something of each pass stays, such as results that are joined.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from .observation import Observation

_FEWEST: Final = 3
"""Passes of a loop after which two may be alike: the first one is another."""


@dataclass(frozen=True, slots=True)
class Held:
    """What there is between two passes."""

    seen: Observation | None
    """The section that the loop is in; None where it has only been announced."""
    level_bytes: int
    square_bytes: int


@dataclass(frozen=True, slots=True)
class _Begun:
    """A pass of a loop."""

    num_tokens: int
    held: Held
    first_call: int
    num_exchanges: int


@dataclass(slots=True)
class AlikePasses:
    """The passes of one loop so far."""

    _begun: list[_Begun] = field(default_factory=list)

    def begin(self, num_tokens: int, held: Held) -> None:
        """The next pass begins, the first of a loop or a later one."""
        seen = held.seen
        calls, exchanges = (0, 0) if seen is None else (len(seen.calls), len(seen.exchanges))
        self._begun.append(_Begun(num_tokens, held, calls, exchanges))

    def end(self) -> None:
        """The loop has ended."""
        self._begun.clear()

    def have_settled(self, now: Held) -> bool:
        """Whether another pass of as many tokens as the latest, which has ended, would do the same."""
        if len(self._begun) < _FEWEST or now.seen is None:
            return False
        seen, before, latest = now.seen, *self._begun[-2:]
        if any(one.held.seen is not seen or one.num_exchanges != len(seen.exchanges) for one in (before, latest)):
            return False
        first, second = slice(before.first_call, latest.first_call), slice(latest.first_call, len(seen.calls))
        return (
            before.num_tokens == latest.num_tokens
            and before.held == latest.held == now
            and latest.first_call < len(seen.calls)
            and seen.calls[first] == seen.calls[second]
            and seen.levels[first] == seen.levels[second]
            and seen.adding_levels[first] == seen.adding_levels[second]
        )

    def repeat(self, num_passes: int) -> None:
        """Note so many more passes like the latest, which has ended."""
        latest = self._begun[-1]
        seen = latest.held.seen
        assert seen is not None, "passes have settled within a section"
        place = slice(latest.first_call, len(seen.calls))
        per_pass = place.stop - place.start
        seen.passes += ((place.stop + number * per_pass, latest.num_tokens) for number in range(num_passes))
        seen.calls += seen.calls[place] * num_passes
        seen.operations += seen.operations[place] * num_passes
        seen.levels += seen.levels[place] * num_passes
        seen.adding_levels += seen.adding_levels[place] * num_passes
