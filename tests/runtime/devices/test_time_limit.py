"""Work that takes too long ends in a message that says what ran, how long, and what to do."""

from __future__ import annotations

import pytest

from protwin.runtime.devices import time_limit
from protwin.runtime.devices.time_limit import TimeLimitError, check_time
from protwin.runtime.tracing.configurations import workload_of_configuration

MODEL = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("calls", [3, 2_000], ids=["building", "tracing"])
def test_a_trace_is_given_up_in_time(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by one second with every look at it."""
    seconds = iter(range(10**9))
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: next(seconds))
    with (
        time_limit.time_limit("tracing mine", calls),
        pytest.raises(TimeLimitError, match=rf"tracing mine took more than {calls} s .* --time-limit {4 * calls}"),
    ):
        workload_of_configuration(MODEL | {"num_hidden_layers": 40}, name="mine", batch_size=2, sequence_length=8)


def test_time_is_unlimited_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: 10.0**9)
    check_time()
    with time_limit.time_limit("work", 5.0):
        check_time()
