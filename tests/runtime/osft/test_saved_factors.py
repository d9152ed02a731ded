"""Models without memory: factors are made of dense files target by target, while chunks are filled."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, carry_out, make_orthogonal, parameters_on_meta, trace
from protwin.runtime.chunks.saved_weights import SavedWeights
from protwin.runtime.osft import saved_factors
from protwin.shared.basics.errors import ProtwinError
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan, TrainingMethod
from tests.runtime.models import adamw, differences, gpt2, llama, token_batches

RATIO = 0.4
MODELS = {"llama": (llama, 7), "gpt2": (gpt2, 4)}


def without_memory(name: str) -> Any:
    with parameters_on_meta():
        model = MODELS[name][0](num_layers=1)
    make_orthogonal(model, unfreeze_rank_ratio=RATIO)
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


def trained(model: nn.Module, weights: Any, chunk_bytes: int) -> nn.Module:
    """After two steps with everything offloaded."""
    batches = token_batches(2)
    workload = trace(model, batches[0], repeats=0)
    plan = Plan(
        workload_id=workload.identity,
        method=TrainingMethod.OSFT,
        chunk_bytes=chunk_bytes,
        n_persist=0,
        n_buffer=layout_of(workload, chunk_bytes).min_buffers(0),
    )
    with carry_out(
        model, plan, workload, optimizer=adamw, parameter_groups=None, device=CpuDevice(), weights=weights
    ) as training:
        torch.manual_seed(0)
        for batch in batches:
            model(**batch).loss.backward()
            training.step()
    return model


@pytest.mark.parametrize("name", MODELS)
def test_factors_made_of_files_are_those_of_the_loaded_model(name: str, tmp_path: Path) -> None:
    """In one chunk and in chunks that part the factors of a map; each weight is decomposed once, and none is kept."""
    build, num_maps = MODELS[name]
    whole = build(num_layers=1)
    whole.save_pretrained(tmp_path)
    make_orthogonal(whole, unfreeze_rank_ratio=RATIO)
    expected = trained(whole, None, 2**20).state_dict()
    for chunk_bytes in (2**20, 1):
        model = without_memory(name)
        saved = SavedWeights(tmp_path).for_model(model)
        trained(model, saved, chunk_bytes)
        assert differences(model, expected) == []
        assert saved.reader.num_made == num_maps
        assert not saved.reader._latest


def test_one_dense_weight_lies_there_at_a_time(tmp_path: Path) -> None:
    """Each is gone when the next one is read."""
    llama(num_layers=2).save_pretrained(tmp_path)
    with parameters_on_meta():
        model = llama(num_layers=2)
    make_orthogonal(model, unfreeze_rank_ratio=RATIO)
    saved = SavedWeights(tmp_path).for_model(model)
    most, factorise = [0], saved_factors.factorise

    def watched(*args: Any, **kwargs: Any) -> Any:
        most[0] = max(most[0], len(saved.reader._latest))
        return factorise(*args, **kwargs)

    with mock.patch.object(saved_factors, "factorise", watched):
        trained(model, saved, 2**14)
    assert most[0] == 0


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    llama(num_layers=1, intermediate_size=48).save_pretrained(tmp_path)
    with pytest.raises(ProtwinError, match=r"of another model: they lack .*u_high"):
        trained(without_memory("llama"), tmp_path, 2**20)
