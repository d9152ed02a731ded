"""Masks of fake models: what a batch without padding gets, in classes that compare the attention's name, too."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, create_causal_mask, sdpa_mask

from protwin.runtime import trace
from protwin.runtime.fakes.models import plain_batches
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.workload import OperationClass, Workload
from tests.proof_size import some_quick

BATCH, LENGTH = 2, 24
RENAMED = "renamed_sdpa"
CACHE = next(name for name in ("cache", "past_key_values") if name in inspect.signature(create_causal_mask).parameters)
"""What this version of transformers calls it."""


def falcon(**changes: Any) -> nn.Module:
    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**(shape | changes)))


def tokens(device: str = "cpu") -> dict[str, torch.Tensor]:
    ids = torch.arange(BATCH * LENGTH, device=device).reshape(BATCH, LENGTH) + 5
    return {"input_ids": ids, "labels": ids}


def faked(model: nn.Module) -> Workload:
    return trace(copy.deepcopy(model).to("meta"), tokens("meta"), device_kind=DeviceKind.CPU)


@some_quick(
    ("changes", "num_fused"),
    # One key for all heads is what no fused kernel takes unless told of groups, which Falcon does not tell.
    [({}, 0), ({"multi_query": False}, 1), ({"new_decoder_architecture": True, "num_kv_heads": 2}, 1)],
    quick=1,
)
def test_a_class_that_compares_the_name_is_traced_as_it_trains(changes: dict[str, Any], num_fused: int) -> None:
    model = falcon(**changes)
    fake, real = faked(model), trace(model, tokens(), repeats=0)
    for block in range(3):
        ours, theirs = fake.profile_of(block), real.profile_of(block)
        assert [phase.net_bytes for phase in ours.phases] == [phase.net_bytes for phase in theirs.phases]
        assert [phase.operations for phase in ours.phases] == [phase.operations for phase in theirs.phases]
        found = [one.operation_class for one in ours.forward.operations]
        assert found.count(OperationClass.ATTENTION) == num_fused


def test_under_another_name_it_would_not_be() -> None:
    """What the tracer must not do: Falcon then takes its eager path, and adds a mask that is not there."""
    transformers.AttentionInterface.register(RENAMED, sdpa_attention_forward)
    AttentionMaskInterface.register(RENAMED, lambda **_: None)
    model: Any = falcon()
    model.config._attn_implementation = RENAMED
    try:
        with pytest.raises(WorkloadError, match="NoneType"):
            faked(model)
    finally:
        del transformers.AttentionInterface._global_mapping[RENAMED]
        del AttentionMaskInterface._global_mapping[RENAMED]


def test_real_masks_keep_their_padding_meanwhile() -> None:
    model: Any = falcon()
    embedded = torch.empty(BATCH, LENGTH, 64)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, -3:] = 0
    asked = {"config": model.config, "inputs_embeds": embedded, CACHE: None}
    plain = create_causal_mask(attention_mask=mask, **asked)
    with plain_batches():
        assert torch.equal(create_causal_mask(attention_mask=mask, **asked), plain)


def test_masks_are_made_where_values_could_not_spare_them() -> None:
    model: Any = falcon()
    with FakeTensorMode():
        asked = {
            "config": model.config,
            "inputs_embeds": torch.empty(BATCH, LENGTH, 64),
            "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long),
            CACHE: None,
        }
        assert create_causal_mask(**asked) is not None
        with plain_batches():
            assert create_causal_mask(**asked) is None
            made = create_causal_mask(allow_is_causal_skip=False, **asked)
    assert made.shape == (BATCH, 1, LENGTH, LENGTH)


def test_transformers_is_left_as_it_was() -> None:
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), plain_batches():
        fails()
    with plain_batches():
        assert AttentionMaskInterface()["sdpa"] is not sdpa_mask
    assert AttentionMaskInterface()["sdpa"] is sdpa_mask
