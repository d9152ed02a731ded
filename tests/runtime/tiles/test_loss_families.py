"""Every causal language model of transformers that can be built small has the loss and gradients of whole logits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from protwin.runtime.model.blocks import find_blocks
from protwin.runtime.tiles import deferred_hidden
from protwin.runtime.tiles.loss_installing import final_of_loss, tiled_loss
from protwin.shared.basics.errors import PlanError, ScheduleError, WorkloadError

WORDS, MOST_PARAMETERS = 96, 20_000_000
SMALL: Final[dict[str, Any]] = {
    **dict.fromkeys(("vocab_size",), WORDS),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "d_inner", "d_ff"), 48),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "d_kv", "d_head"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop"), 0.0),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}
"""What many configurations call the same sizes."""
TOLERANCE, GRADIENT_TOLERANCE = 2e-6, 1e-4


class _TooLongError(Exception):
    pass


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def small(name: str) -> nn.Module:
    """A model of that family; skips the test if there is none of this size."""
    try:
        with within(20):
            kind = CONFIG_MAPPING[name]
            known = kind()
            config = kind(**{key: value for key, value in SMALL.items() if hasattr(known, key)})
            build = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in build(config).parameters())
            if size > MOST_PARAMETERS:
                pytest.skip(f"{size:,} parameters are the least that it could be given")
            torch.manual_seed(0)
            return build(config).eval()  # type: ignore[no-any-return]
    except Exception as error:
        pytest.skip(f"not built: {type(error).__name__}: {error}"[:200])


def ran(model: nn.Module, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    loss = model(**given).loss
    (loss * 3).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), found


def compared(name: str) -> str:
    """What came of one family: ``final`` modules ran by tiles, or whole."""
    model = small(name)
    tokens = torch.randint(3, WORDS, (3, 11), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 2:6] = -100
    given = {"input_ids": tokens, "labels": labels}
    try:
        with within(60):
            loss, wanted = ran(model, given)
            again, _ = ran(model, given)
    except Exception as error:
        pytest.skip(f"does not train plain: {type(error).__name__}: {error}"[:200])
    if not (torch.equal(loss, again) and loss.isfinite()):
        pytest.skip("is not the same twice")
    try:
        final = final_of_loss(model, find_blocks(model), 2)
    except (PlanError, ScheduleError) as error:
        return f"refused: {error}"
    except WorkloadError as error:
        pytest.skip(str(error)[:200])
    made: list[deferred_hidden.DeferredHidden] = []
    for tiles in (2, 7):
        with tiled_loss(model, tiles, final), noting(made):
            try:
                found, tiled = ran(model, given)
            except ScheduleError as error:
                return f"refused: {error}"
        torch.testing.assert_close(found, loss, rtol=TOLERANCE, atol=0)
        assert tiled.keys() == wanted.keys()
        largest = max(float(gradient.norm()) for gradient in wanted.values())
        for key, gradient in wanted.items():
            distance = float((tiled[key] - gradient).norm())
            assert distance <= GRADIENT_TOLERANCE * max(float(gradient.norm()), 1e-3 * largest), key
    if not made:
        return "whole"
    return "whole: the norm was wanted" if any(one.if_computed() is not None for one in made) else "tiles"


@contextmanager
def noting(made: list[deferred_hidden.DeferredHidden]) -> Iterator[None]:
    """Within the block, stand-ins are noted."""
    own = deferred_hidden._made

    def note(*args: Any) -> Any:
        result = own(*args)
        made.append(result)
        return result

    deferred_hidden._made = note
    try:
        yield
    finally:
        deferred_hidden._made = own


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_no_family_is_silently_another_one(name: str) -> None:
    if (outcome := compared(name)).startswith("refused"):
        assert "loss_tiles" in outcome
