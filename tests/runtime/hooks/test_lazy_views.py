"""Conjugate and negative views, and zeros without memory, are on their way back what they were on their way out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import carry_out, trace
from protwin.shared.schema.plan import ActivationMode, Plan, mode_counts

WIDTH = 32
CHECKPOINT, SWAP, OFFLOAD_INPUT = ActivationMode.CHECKPOINT, ActivationMode.SWAP, ActivationMode.OFFLOAD_INPUT


class Correlating(nn.Module):
    """Saves the spectrum of its keys as a conjugate view, as blocks of an Autoformer do."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.query(x)) * torch.fft.rfft(self.key(x)).conj()
        return x + torch.fft.irfft(spectrum, n=WIDTH)


class Imaginary(Correlating):
    """Is given a negative view, saves one, and gives one to the next block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(self.query(x), self.key(x)).conj().imag
        result = x + turned * turned.tanh()
        view = torch.complex(result, result).conj().imag
        assert view.is_neg()
        return view


class Directional(Correlating):
    """Saves the tangent of its weight within forward-mode AD: zeros that state a size and have no memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, change = torch.func.jvp(lambda given: self.query(given).tanh(), (x,), (torch.ones_like(x),))
        return x + self.key(value) * change


class Stack(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.body = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.body:
            x = block(x)
        return x.square().mean()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("block", "mode"), [(Correlating, SWAP), (Imaginary, SWAP), (Imaginary, OFFLOAD_INPUT), (Directional, SWAP)]
)
def test_weights_equal_the_plain_loops(block: type[nn.Module], mode: ActivationMode) -> None:
    torch.manual_seed(0)
    plain, batch = Stack(block), torch.randn(4, WIDTH)
    model = copy.deepcopy(plain)
    workload = trace(model, batch, loss=lambda output, _: output, repeats=0)
    modes = (CHECKPOINT if mode is OFFLOAD_INPUT else SWAP, mode)
    knobs: dict[str, Any] = mode_counts(modes)
    plan = Plan(
        workload_id=workload.identity, chunk_bytes=2**13, n_persist=0, n_buffer=3, activation_modes=modes, **knobs
    )
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    with carry_out(model, plan, workload) as training:
        for _ in range(2):
            model(batch).backward()
            training.step()
            plain(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert training.bytes_device_to_host > 0
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, expected)
