"""The envelope of runs, beside the levels of each of them added up by hand."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.phases.envelope import envelope
from protwin.shared.phases.phase import Phase

LEVELS = st.integers(-1000, 1000)
ENDS = (0.25, 0.5, 0.75)


@st.composite
def phases(draw: st.DrawFn) -> Phase:
    ends = [*sorted(draw(st.sets(st.sampled_from(ENDS)))), 1.0]
    gradient_bytes = draw(st.integers(0, 300))
    curve = tuple((end, draw(LEVELS)) for end in ends)
    return Phase(net_bytes=draw(LEVELS), gradient_bytes=gradient_bytes, curve=curve)


def highest(curve: tuple[tuple[float, int], ...], start: float, end: float) -> int:
    """The highest level between two moments."""
    begins = (0.0, *(until for until, _ in curve))
    return max(level for begin, (until, level) in zip(begins, curve, strict=False) if until > start and begin < end)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(phases(), phases(), phases()), min_size=1, max_size=4))
def test_no_run_is_above_the_envelope_at_any_moment_and_some_run_leaves_what_it_leaves(
    runs: list[tuple[Phase, ...]],
) -> None:
    found = envelope(runs)
    after = [0] * len(runs)
    most = 0
    for place, phase in enumerate(found):
        for start, end in zip((0.0, *ENDS), (*ENDS, 1.0), strict=True):
            levels = [level + highest(run[place].curve, start, end) for level, run in zip(after, runs, strict=True)]
            assert most + highest(phase.curve, start, end) == max(levels)
        after = [
            level + run[place].net_bytes - (run[place].gradient_bytes or 0)
            for level, run in zip(after, runs, strict=True)
        ]
        most += phase.net_bytes - (phase.gradient_bytes or 0)
        assert most == max(after)
        assert phase.gradient_bytes == max(run[place].gradient_bytes or 0 for run in runs)


@given(st.tuples(phases(), phases()))
def test_the_envelope_of_one_run_is_that_run(run: tuple[Phase, Phase]) -> None:
    for found, phase in zip(envelope([run]), run, strict=True):
        assert (found.net_bytes, found.gradient_bytes, found.peak_bytes) == (
            phase.net_bytes,
            phase.gradient_bytes,
            phase.peak_bytes,
        )


def test_the_first_phase_leaves_no_less_than_is_asked_and_the_second_takes_it_away() -> None:
    first, second = envelope([(Phase(net_bytes=5), Phase(net_bytes=-5))], least_after_first=9)
    assert (first.net_bytes, second.net_bytes) == (9, -9)
