"""Low-rank maps beside the maps of state-space layers, some of which such layers hand to functions by their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from protwin.runtime import CpuDevice, add_lora, carry_out
from protwin.runtime.model.adapters import LowRankLinear
from tests.runtime.models import SEED, Case, adamw, differences, token_batches
from tests.runtime.packaged.test_reference_kernels import MAMBA
from tests.runtime.packaged.test_traced import FIRST, HYBRID
from tests.runtime.resuming import offloaded


@pytest.mark.parametrize("config", [FIRST, MAMBA, HYBRID], ids=["mamba", "mamba2", "bamba"])
def test_they_train_as_in_the_plain_loop(config: Any) -> None:
    def build() -> nn.Module:
        torch.manual_seed(SEED)
        model: nn.Module = AutoModelForCausalLM.from_config(config)
        assert any(path.endswith("out_proj") for path in add_lora(model, rank=2))
        return model

    case = Case(build, token_batches(2))
    model, losses = case.build(), []
    with carry_out(model, offloaded(case.workload), case.workload, optimizer=adamw, device=CpuDevice()) as training:
        torch.manual_seed(SEED)
        for batch in case.batches:
            loss = case.loss(model, batch)
            loss.backward()
            training.step()
            losses.append(loss.item())
    assert losses == case.plain.losses
    assert differences(model, case.plain.weights[-1]) == []
    adapted = {path: part for path, part in model.named_modules() if isinstance(part, LowRankLinear)}
    assert all(part.bias is part.base.bias for part in adapted.values())
    # A Mamba layer's dt_proj is never called: the reference multiplies by its weight.
    assert all(part.lora_b.abs().sum() > 0 for path, part in adapted.items() if not path.endswith("dt_proj"))
