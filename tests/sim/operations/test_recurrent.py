"""Seconds of recurrent layers: by hand, and beside calls of cuDNN that others have timed."""

from __future__ import annotations

import pytest

from protwin.shared.catalogue.parts import device_part
from protwin.shared.schema.workload import DType, Operation, OperationClass
from protwin.sim.operations.recurrent import recurrent_s
from protwin.sim.operations.roofline import operation_s

GATES = {"LSTM": 4, "RNN": 1}
TIMED = (
    # kind, steps, samples, width, state, layers; ms forward, ms backward
    ("LSTM", 5895, 1, 288, 152, 4, 129.5, 199.2),
    ("LSTM", 5826, 1, 200, 160, 4, 127.8, 186.6),
    ("LSTM", 2091, 7, 320, 152, 4, 47.5, 115.0),
    ("LSTM", 3095, 9, 16, 152, 4, 75.4, 161.4),
    ("LSTM", 1252, 12, 304, 192, 1, 13.8, 17.2),
    ("LSTM", 1125, 44, 40, 160, 1, 13.0, 18.0),
    ("LSTM", 5005, 8, 80, 128, 4, 47.0, 64.6),
    ("LSTM", 3854, 16, 112, 128, 1, 10.2, 15.9),
    ("RNN", 5654, 5, 232, 320, 4, 145.6, 245.5),
    ("RNN", 4814, 6, 160, 360, 1, 44.2, 47.9),
    ("RNN", 3047, 6, 104, 296, 1, 21.0, 30.4),
    ("RNN", 1824, 3, 80, 336, 3, 35.2, 57.9),
)
"""float32, torch 1.11 (github.com/xwang233/code-snippet, cudnn-rnn-bench-62143); the board is not stated."""


def layer(
    kind: str, steps: int, samples: int, width: int, state: int, layers: int, *, backward: bool = False
) -> Operation:
    gates = GATES[kind] * state
    products = sum(gates * ((width if number == 0 else state) + state) for number in range(layers))
    return Operation(
        name="_cudnn_rnn_backward" if backward else "_cudnn_rnn",
        operation_class=OperationClass.MATMUL,
        dtype=DType.FLOAT32,
        flops=(4 if backward else 2) * steps * samples * products,
        bytes_moved=0,
        shape=(layers, steps, samples, gates, state),
    )


@pytest.mark.parametrize("name", ["v100-16gb", "a100-80gb"])
def test_within_a_factor_of_two_of_timed_calls(name: str) -> None:
    device = device_part(name)
    for kind, steps, samples, width, state, layers, *measured_ms in TIMED:
        for is_backward, ms in zip((False, True), measured_ms, strict=True):
            called = layer(kind, steps, samples, width, state, layers, backward=is_backward)
            assert 0.5 < operation_s(called, device) * 1e3 / ms < 2, (kind, steps, is_backward)


def test_steps_of_few_samples_take_their_launches() -> None:
    a100, called = device_part("a100-80gb"), layer("LSTM", 1000, 1, 256, 256, 2)
    assert recurrent_s(called, a100, 156e12) == pytest.approx(2 * 1000 * 2 * 3.2e-6, rel=0.05)


def test_large_steps_take_their_products() -> None:
    """4,096 samples by a state of 4,096: products alone, of steps and of all inputs at once."""
    a100, called = device_part("a100-80gb"), layer("LSTM", 10, 4096, 4096, 4096, 1)
    share = called.flops / recurrent_s(called, a100, 156e12) / 156e12
    assert 0.7 < share < 0.81


def test_small_states_stay_within_one_kernel() -> None:
    a100 = device_part("a100-80gb")
    small, wide = (operation_s(layer("LSTM", 1000, 1, 128, state, 1), a100) for state in (128, 129))
    assert small < wide / 2
