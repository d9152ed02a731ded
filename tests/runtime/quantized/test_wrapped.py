"""Weights that wrap other tensors are refused by name: torchao's, where it is installed, and torch's own for tests."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from protwin.runtime import CpuDevice, add_lora, carry_out, trace
from protwin.shared import WorkloadError
from tests.runtime.models import llama, token_batches
from tests.runtime.resuming import offloaded


def wrapped_by_torch(model: nn.Module) -> None:
    for module in model.model.layers.modules():
        if type(module) is nn.Linear:
            weight = module.weight.detach()
            module.weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)


def wrapped_by_torchao(model: nn.Module, kind: str) -> None:
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchao: Any = pytest.importorskip("torchao.quantization")
        torchao.quantize_(model.model.layers, getattr(torchao, kind)())


WRAPPED: dict[str, Callable[[nn.Module], None]] = {
    "torch": wrapped_by_torch,
    "torchao, int8": partial(wrapped_by_torchao, kind="Int8WeightOnlyConfig"),
    "torchao, float8": partial(wrapped_by_torchao, kind="Float8WeightOnlyConfig"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", WRAPPED)
def test_a_weight_that_wraps_others_is_refused_and_the_plain_loop_goes_on(kind: str) -> None:
    """It trains without a plan; with one, nothing of it is touched."""
    plain, batch = llama(num_layers=2), token_batches(1)[0]
    add_lora(plain, rank=2)
    workload = trace(plain, batch, repeats=0)

    model = llama(num_layers=2)
    WRAPPED[kind](model)
    add_lora(model, rank=2)
    before = model(**batch, use_cache=False).loss
    before.backward()
    weight: Any = model.model.layers[0].self_attn.q_proj.base.weight
    assert hasattr(weight, "__tensor_flatten__")
    for attempt in (
        lambda: trace(model, batch, repeats=0),
        lambda: carry_out(model, offloaded(workload), workload, device=CpuDevice()),
    ):
        model.zero_grad()
        with pytest.raises(WorkloadError, match=r"q_proj\.base\.weight is a .* of torch.*: tensors that wrap others"):
            attempt()
    assert model.model.layers[0].self_attn.q_proj.base.weight is weight
    assert torch.equal(model(**batch, use_cache=False).loss, before)
