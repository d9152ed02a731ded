"""What blocks with dropout save when they are traced as a GPU runs them."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import peft
import pytest
import torch
from torch import nn

from protwin.runtime import trace
from protwin.runtime.model.adapters import add_lora
from protwin.shared.phases.block_profile import BlockProfile
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.workload import Workload
from protwin.shared.workloads.check import has_kernels_of_gpus
from tests.runtime.models import gpt2, token_batches

LENGTH = 96
NO_OTHER_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
GENERATOR_BYTES = 64
"""The state of the generator that a fused kernel saves, at most."""


class Dropped(nn.Module):
    """A residual block whose saved bytes can be counted by hand: those of one product and one dropout."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.map = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(rate)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(tokens, width) in and out."""
        return hidden + self.dropout(self.map(hidden))


def chain(
    tokens: int,
    width: int,
    dtype: torch.dtype,
    rate: float,
    device_kind: DeviceKind = DeviceKind.CUDA,
    around: AbstractContextManager[Any] | None = None,
) -> BlockProfile:
    """The profile of a block between others."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, width), nn.Sequential(*(Dropped(width, rate) for _ in range(3))))
        batch = {"input": torch.empty(tokens, 3, dtype=dtype)}
    with around or nullcontext():
        workload = trace(model.to(dtype), batch, loss=lambda output, _: output.sum(), device_kind=device_kind)
    return workload.profile_of(1)


@pytest.mark.parametrize("seed", range(4))
def test_a_block_saves_what_is_counted_by_hand(seed: int) -> None:
    """Its output and the mask; the product's input is the output of the block before."""
    draw = random.Random(seed)
    tokens, width, dtype = draw.randrange(2, 90), draw.randrange(2, 90), (torch.bfloat16, torch.float32)[seed % 2]
    elements = tokens * width
    kept = chain(tokens, width, dtype, 0.1)
    assert kept.forward.net_bytes == elements * (dtype.itemsize + 1)
    assert kept.checkpoint_forward.net_bytes == elements * dtype.itemsize
    assert kept.recompute.net_bytes == elements
    (selective, *_) = kept.selective
    assert selective.kept_bytes == elements * dtype.itemsize
    assert [one.name for one in selective.recompute.operations] == ["native_dropout"]
    on_cpu = chain(tokens, width, dtype, 0.1, DeviceKind.CPU)
    assert on_cpu.forward.net_bytes == 2 * elements * dtype.itemsize
    assert on_cpu.recompute.net_bytes == elements * dtype.itemsize
    assert chain(tokens, width, dtype, 0.0).forward.net_bytes == elements * dtype.itemsize
    # A rate of 1 multiplies by one zero, which is saved.
    assert chain(tokens, width, dtype, 1.0).forward.net_bytes == (elements + 1) * dtype.itemsize


def test_a_block_in_autocast_drops_in_the_narrow_type() -> None:
    tokens, width = 40, 24
    counted = {
        kind: chain(tokens, width, torch.float32, 0.1, kind, torch.autocast("cpu", dtype=torch.bfloat16))
        for kind in (DeviceKind.CUDA, DeviceKind.CPU)
    }
    outside = 2 * tokens * width + 2 * width * width  # output, cast weight
    assert counted[DeviceKind.CUDA].forward.net_bytes == outside + tokens * width
    assert counted[DeviceKind.CPU].forward.net_bytes == outside + 2 * tokens * width


class TwoMaps(nn.Module):
    """A residual block of two maps that read one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.value = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(tokens, width) in and out."""
        total: torch.Tensor = hidden + self.query(hidden) + self.value(hidden)
        return total


@pytest.mark.parametrize("kind", ["own", "PEFT"])
def test_each_adapter_saves_what_it_reads_and_a_mask(kind: str) -> None:
    """Without dropout all read the output of the block before, which goes where nobody does."""
    tokens, width, itemsize = 16, 32, 4

    def saved_bytes(rate: float, device_kind: DeviceKind = DeviceKind.CUDA) -> int:
        with torch.device("meta"):
            model: Any = nn.Sequential(nn.Linear(3, width), nn.Sequential(*(TwoMaps(width) for _ in range(3))))
            if kind == "own":
                add_lora(model, rank=4, dropout=rate)
            else:
                asked = peft.LoraConfig(r=4, target_modules=["query", "value"], lora_dropout=rate)
                model = peft.get_peft_model(model, asked)
        batch = {"input": torch.empty(tokens, 3, device="meta")}
        traced = trace(model, batch, loss=lambda output, _: output.sum(), device_kind=device_kind)
        return traced.profile_of(1).forward.net_bytes

    elements = tokens * width
    without = saved_bytes(0.0) - elements * itemsize
    assert saved_bytes(0.1) - without == 2 * elements * (itemsize + 1)
    assert saved_bytes(0.1, DeviceKind.CPU) - without == 2 * elements * 2 * itemsize


def test_tiles_drop_in_the_kernel_too() -> None:
    with torch.device("meta"):
        model = gpt2(n_positions=LENGTH)
    batch = {name: torch.empty(2, LENGTH, dtype=torch.long, device="meta") for name in ("input_ids", "labels")}
    found = trace(model, batch, mlp_tiles=2)
    for profile in (found.profile_of(1), found.tilings[0].profiles[found.tilings[0].profile_of[1]]):
        names = {one.name for phase in profile.phases for one in phase.operations}
        assert {"native_dropout", "native_dropout_backward"} <= names
        assert "bernoulli_" not in names


# -- whole models ----------------------------------------------------------------------------------------------------


def traced(device_kind: DeviceKind, **changes: Any) -> Workload:
    with torch.device("meta"):
        model = gpt2(n_positions=LENGTH, **changes)
    batch = {name: torch.empty(2, LENGTH, dtype=torch.long, device="meta") for name in ("input_ids", "labels")}
    return trace(model, batch, device_kind=device_kind)


def test_a_model_for_a_gpu_saves_what_it_saves_without_dropout() -> None:
    with_dropout, without = (
        traced(DeviceKind.CUDA, attn_pdrop=rate, **NO_OTHER_DROPOUT).profile_of(1) for rate in (0.1, 0.0)
    )
    for ours, theirs in zip(with_dropout.phases, without.phases, strict=True):
        # Saved tensors come and go: two states of generators in a block.
        assert abs(ours.net_bytes - theirs.net_bytes) <= GENERATOR_BYTES
        assert 0 <= ours.peak_bytes - theirs.peak_bytes <= GENERATOR_BYTES
        assert ours.flops == theirs.flops
    scores = 2 * 2 * LENGTH * LENGTH
    unfused = traced(DeviceKind.CPU, attn_pdrop=0.1, **NO_OTHER_DROPOUT).profile_of(1)
    assert unfused.forward.net_bytes - with_dropout.forward.net_bytes > scores * 4


def test_a_model_for_a_cpu_is_what_real_tensors_do() -> None:
    batch = token_batches(1)[0]
    with torch.device("meta"):
        model = gpt2(num_layers=6, **NO_OTHER_DROPOUT)
    fake_batch = {name: tensor.to("meta") for name, tensor in batch.items()}
    fake = trace(model, fake_batch, device_kind=DeviceKind.CPU)
    real = trace(gpt2(num_layers=6, **NO_OTHER_DROPOUT), batch, repeats=0)
    for block in range(6):
        for ours, theirs in zip(fake.profile_of(block).phases, real.profile_of(block).phases, strict=True):
            assert (ours.net_bytes, ours.peak_bytes) == (theirs.net_bytes, theirs.peak_bytes)
    assert not has_kernels_of_gpus(fake)
    assert not has_kernels_of_gpus(real)
    assert has_kernels_of_gpus(trace(model, fake_batch))
