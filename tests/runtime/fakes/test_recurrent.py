"""Recurrent layers of fake models: one call of cuDNN, of the sizes and multiplications that real ones have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from protwin.runtime import trace
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.workload import Operation, Workload

STEPS, SAMPLES, WIDTH = 5, 3, 6
LAYERS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["LSTM", "GRU", "RNN"]),
        "hidden_size": st.integers(2, 7),
        "num_layers": st.integers(1, 3),
        "bias": st.booleans(),
        "batch_first": st.booleans(),
        "bidirectional": st.booleans(),
        "proj_size": st.integers(0, 1),
    }
)


class Recurrent(nn.Module):
    """Two blocks with a recurrent layer each, between linear maps."""

    def __init__(self, kind: str, **sizes: Any) -> None:
        super().__init__()
        if kind != "LSTM":
            sizes.pop("proj_size", None)
        self.layers = nn.ModuleList(Block(getattr(nn, kind)(WIDTH, **sizes)) for _ in range(2))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            given = layer(given)
        return given


class Block(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.recurrent = layer
        made = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
        self.back = nn.Linear(made, WIDTH)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found, _ = self.recurrent(given)
        return self.back(found)  # type: ignore[no-any-return]


def loss_of(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().sum()


def batch(*, batch_first: bool = False, device: str = "meta", **_: Any) -> torch.Tensor:
    return (
        torch.randn(SAMPLES, STEPS, WIDTH, device=device)
        if batch_first
        else torch.randn(STEPS, SAMPLES, WIDTH, device=device)
    )


def fake(sizes: dict[str, Any], **options: Any) -> Workload:
    with torch.device("meta"):
        model = Recurrent(**sizes)
    return trace(model, batch(**sizes), loss=loss_of, **options)


def calls(workload: Workload) -> tuple[Operation, Operation]:
    profile = workload.profiles[workload.blocks[1].profile]
    (forward,) = [o for o in profile.forward.operations if o.name == "_cudnn_rnn"]
    (backward,) = [o for o in profile.backward.operations if o.name == "_cudnn_rnn_backward"]
    return forward, backward


@contextmanager
def step_by_step() -> Iterator[None]:
    """An LSTM falls apart on the CPU as the others do."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@given(LAYERS)
@settings(max_examples=6, deadline=None)
def test_multiplications_are_those_of_the_steps(sizes: dict[str, Any]) -> None:
    """Of a real layer that falls apart into steps on the CPU; its gradient of the first state is nobody's."""
    forward, backward = calls(fake(sizes))
    torch.manual_seed(0)
    layer = Recurrent(**sizes).layers[1].recurrent
    given = batch(**sizes, device="cpu").requires_grad_()
    with step_by_step(), FlopCounterMode(display=False) as ahead:
        made, _ = layer(given)
    assert forward.flops == ahead.get_total_flops()
    with FlopCounterMode(display=False) as back:
        made.sum().backward()
    of_states = 2 * SAMPLES * sum(w.numel() for name, w in layer.named_parameters() if name.startswith("weight_hh"))
    assert 0 <= backward.flops - back.get_total_flops() <= of_states
    number, steps, samples, gates, state = forward.shape
    assert (number, steps, samples) == (sizes["num_layers"] * (2 if sizes["bidirectional"] else 1), STEPS, SAMPLES)
    assert layer.weight_hh_l0.shape == (gates, state)


def test_an_lstm_that_a_cpu_has_run_multiplies_as_much() -> None:
    """One call a layer there, one for all on a GPU: of one layer they are the same products."""
    sizes: dict[str, Any] = {"kind": "LSTM", "hidden_size": 8}
    real = trace(Recurrent(**sizes), batch(**sizes, device="cpu"), loss=loss_of, repeats=0)
    for phase, wanted in zip(("forward", "backward"), calls(fake(sizes)), strict=True):
        found = [o for o in getattr(real.profiles[real.blocks[1].profile], phase).operations if "rnn" in o.name]
        assert [(o.flops, o.shape) for o in found] == [(wanted.flops, wanted.shape)]


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_what_is_kept_for_backward(kind: str, num_layers: int) -> None:
    """Beside what every block keeps: states of each step, results between layers, and the weights in one buffer."""
    sizes = {"kind": kind, "hidden_size": 8, "bias": False, "num_layers": num_layers}
    found = fake(sizes)
    weights = sum(p.size_bytes for p in found.parameters if ".1.recurrent" in p.name)
    result = STEPS * SAMPLES * 8 * 4
    kept = (num_layers * {"RNN": 1, "LSTM": 5, "GRU": 5}[kind] + num_layers - 1) * result
    states = num_layers * (2 if kind == "LSTM" else 1) * SAMPLES * 8 * 4
    profile = found.profiles[found.blocks[1].profile]
    assert profile.forward.net_bytes == weights + result + kept + states + STEPS * SAMPLES * WIDTH * 4


def test_each_step_is_traced_for_a_cpu_alone() -> None:
    found = fake({"kind": "GRU", "hidden_size": 4}, device_kind=DeviceKind.CPU)
    products = [o for o in found.profiles[0].forward.operations if o.name == "addmm"]
    assert sum(o.count for o in products) >= STEPS


def test_autocast_casts_weights_into_the_buffer() -> None:
    sizes = {"kind": "LSTM", "hidden_size": 8, "bias": False}
    with torch.autocast("cpu", torch.bfloat16):
        forward, _ = calls(fake(sizes))
    assert forward.dtype == "bfloat16"
    assert forward.bytes_moved < calls(fake(sizes))[0].bytes_moved / 2 + 1
