"""Layers of transformers that have kernels in other packages: their reference is traced, and the packages are named."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Mamba2Config, Qwen3NextConfig
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from protwin.runtime import trace
from protwin.shared.phases.operations import left_out_words
from protwin.shared.schema.workload import Workload

PACKAGE = "fast_layers"
QWEN = Qwen3NextConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_experts=0,
    mlp_only_layers=[0, 1],
)
MAMBA = Mamba2Config(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, head_dim=16, num_heads=4, n_groups=1, chunk_size=8
)


def built(config: Any, *, is_meta: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    with torch.device("meta" if is_meta else "cpu"):
        return AutoModelForCausalLM.from_config(config), {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("is_meta", [True, False], ids=["meta", "real"])
@pytest.mark.parametrize(
    ("config", "packages"),
    [(QWEN, ("causal-conv1d", "flash-linear-attention")), (MAMBA, ("causal-conv1d", "mamba-ssm"))],
    ids=["qwen3-next", "mamba2"],
)
def test_packages_are_named(config: Any, packages: tuple[str, ...], is_meta: bool) -> None:
    model, batch = built(config, is_meta=is_meta)
    functions = dict(vars(sys.modules[type(model).__module__]))
    found = trace(model, batch, repeats=0)
    assert found.kernels_left_out == packages
    assert functions == vars(sys.modules[type(model).__module__])
    assert Workload.from_mapping(json.loads(found.to_json()), origin="test").kernels_left_out == packages


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.stack:
            x = doubled(layer(x))
        return x.sum()


def _reference(x: torch.Tensor) -> torch.Tensor:
    return x + x


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Replaced by one with a kernel, in tests that need one."""
    return _reference(x)


def _kernel(x: torch.Tensor) -> torch.Tensor:
    assert not isinstance(x, torch._subclasses.FakeTensor), "kernels take no fake tensors"
    return x * 2


def with_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType(PACKAGE)
    package.doubled = _kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, PACKAGE, package)
    decorated = use_kernel_func_from_hub_with_fallback("doubled", PACKAGE)(_reference)
    monkeypatch.setattr(sys.modules[__name__], "doubled", decorated)


def operations(found: Workload) -> set[str]:
    return {operation.name for profile in found.profiles for operation in profile.forward.operations}


def test_kernels_that_are_installed_run_with_weights_and_not_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernel(monkeypatch)
    real = trace(Scaled(), torch.ones(2, 8), repeats=0)
    assert real.kernels_left_out == ()
    with torch.device("meta"):
        meta = trace(Scaled(), torch.ones(2, 8))
    assert meta.kernels_left_out == (PACKAGE,)
    assert any("add" in name for name in operations(meta) - operations(real))


def test_models_without_such_layers_name_nothing() -> None:
    assert trace(Scaled(), torch.ones(2, 8), repeats=0).kernels_left_out == ()
    assert left_out_words((), "mine") is None
    words = left_out_words(("mamba-ssm",), "mine")
    assert words is not None
    assert "where mamba-ssm is not installed. With its kernels" in words
