"""What ranks cannot share is refused by one message that names the numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import protwin.runtime
from protwin.runtime.sequences.exchange import EmulatedPeers, check_heads
from protwin.runtime.sequences.sharing import shared_sequences
from protwin.shared.basics.errors import PlanError, ProtwinError, ScheduleError, WorkloadError

SHAPE = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1}


def llama(heads: int = 4, key_heads: int = 2) -> nn.Module:
    shape = SHAPE | {"num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": 6}
    return LlamaForCausalLM(LlamaConfig(**shape))


def batch(tokens: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 32, (1, tokens))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("heads", "key_heads", "allowed"),
    [(4, 2, [1, 2, 4]), (6, 3, [1, 3, 6]), (8, 8, [1, 2, 4, 8]), (12, 4, [1, 2, 4, 12])],
)
def test_ranks_divide_heads_or_replicate_them(heads: int, key_heads: int, allowed: list[int]) -> None:
    """Every query of a rank must find its key-value head there, one contiguous part of them for each rank."""
    for ranks in range(1, heads + 2):
        is_possible = heads % ranks == 0
        if is_possible:
            own = heads // ranks
            groups = [{query // (heads // key_heads) for query in range(r * own, (r + 1) * own)} for r in range(ranks)]
            shares = max(1, key_heads // ranks)
            is_possible = all(len(found) == shares for found in groups) and (key_heads % ranks == 0 or shares == 1)
        assert is_possible == (ranks in allowed)
        if is_possible:
            check_heads(heads, key_heads, ranks, "it")
        else:
            with pytest.raises(PlanError, match=f"{ranks} ranks.*{heads} query.*{key_heads} key-value"):
                check_heads(heads, key_heads, ranks, "it")


class _Mixing(LlamaForCausalLM):  # type: ignore[misc]
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.layers[0].mixing = nn.Conv1d(24, 24, 3)


class _OwnLoss(LlamaForCausalLM):  # type: ignore[misc]
    def forward(self, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        output.loss = nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        return output


def _of(kind: type[LlamaForCausalLM]) -> nn.Module:
    return kind(LlamaConfig(**SHAPE, num_attention_heads=4))


def _mixtral() -> nn.Module:
    config = MixtralConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=2, output_router_logits=True)
    return MixtralForCausalLM(config)


def _camembert() -> nn.Module:
    config = transformers.CamembertConfig(**SHAPE, num_attention_heads=4, is_decoder=True)
    return transformers.CamembertForCausalLM(config)


def _biogpt() -> nn.Module:
    return transformers.BioGptForCausalLM(transformers.BioGptConfig(**SHAPE, num_attention_heads=4))


def _falcon() -> nn.Module:
    shape = {"vocab_size": 32, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**shape))


def _minimax() -> nn.Module:
    shape = SHAPE | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    layers = ["full_attention", "linear_attention"]
    config = transformers.MiniMaxConfig(**shape, num_local_experts=2, layer_types=layers)
    return transformers.MiniMaxForCausalLM(config)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(2, 2), "Linear is no model of transformers"),
        (lambda: BertForMaskedLM(BertConfig(**SHAPE, num_attention_heads=4)), "has the loss ForMaskedLMLoss"),
        (_mixtral, "auxiliary loss of its router"),
        (lambda: _of(_Mixing), r"layers.0.mixing \(Conv1d\)"),
        (lambda: _of(_OwnLoss), "computes its loss by itself"),
        (_camembert, "counts positions from the number of its padding token"),
        (_biogpt, "makes a mask of its own for 6 of the 12 tokens"),
        (_falcon, "takes its attention from elsewhere"),
        (_minimax, r"takes its attention from elsewhere .* in model.layers.\d"),
        (lambda: llama(3, 3), "2 ranks cannot divide the 3 query heads and 3 key-value heads .* Choose from 1, 3"),
    ],
)
def test_models_that_cannot_share_are_named(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ProtwinError, match=message):
        protwin.runtime.trace(build(), batch(), repeats=0, sequence_ranks=2)


@pytest.mark.parametrize(
    ("given", "ranks", "message"),
    [
        (batch(13), 2, "2 ranks do not divide the 13 tokens of a sequence. Pad it to 14"),
        ({"input_ids": batch()["input_ids"]}, 2, "has no labels"),
        (batch(), 0, "sequence_ranks is 0"),
        (batch(), 2**40, "sequence_ranks is 1099511627776"),
    ],
)
def test_batches_that_cannot_be_shared_are_named(given: dict[str, torch.Tensor], ranks: int, message: str) -> None:
    with pytest.raises((PlanError, WorkloadError), match=re.escape(message)):
        protwin.runtime.trace(llama(), given, repeats=0, sequence_ranks=ranks)


def test_a_loss_of_ones_own_needs_whole_sequences() -> None:
    with pytest.raises(PlanError, match="function of whole logits"):
        protwin.runtime.trace(llama(), batch(), loss=lambda output, _: output.logits.sum(), sequence_ranks=2)
    model = llama()
    with shared_sequences(model, EmulatedPeers(2)):
        with pytest.raises(ScheduleError, match="without labels"):
            model(batch()["input_ids"])
        for name, value in (("use_cache", True), ("logits_to_keep", 1)):
            with pytest.raises(ScheduleError, match=name):
                model(**batch(), **{name: value})


def test_afterwards_everything_is_as_it_was() -> None:
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def seen() -> list[Any]:
        masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
        found = [masking_utils.find_packed_sequence_indices, dict(masks), dict(ALL_ATTENTION_FUNCTIONS)]
        return [*found, {**model.__dict__, "_modules": None}, model.loss_function]

    model, other = llama(), llama()
    before, given = seen(), batch()
    expected = other(**given).loss
    with shared_sequences(model, EmulatedPeers(2)), shared_sequences(_of(LlamaForCausalLM), EmulatedPeers(2)):
        shared = model(**given)
        assert shared.logits.shape == (1, 6, 32)
        # Another model beside it, and this one without labels and gradients, run whole.
        assert torch.equal(other(**given).loss, expected)
        with torch.no_grad():
            assert model(given["input_ids"]).logits.shape == (1, 12, 32)
    assert seen() == before
