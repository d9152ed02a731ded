"""Tiles that cannot be: one message with the reason and what to do, and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.shared.schema.plan import Plan
from tests.cli.conftest import Protwin
from tests.cli.refusals import refusal
from tests.cli.saved import decoder
from tests.proof_size import some_quick

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
SHAPE = ("--batch-size=2", "--sequence-length=16", "--output=found.json")
PROPHET = {
    "hidden_size": 32,
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
}
LLAMA = ("llama", "LlamaForCausalLM", {})
BERT = ("bert", "BertLMHeadModel", {"is_decoder": True, "max_position_embeddings": 64})


CASES = [
    (BERT, ("--mlp-tiles=2",), "block bert.encoder.layer.0 (BertLayer) has no MLP in a module of its own"),
    (
        ("rwkv", "RwkvForCausalLM", {"attention_hidden_size": 32, "context_length": 64}),
        ("--mlp-tiles=2",),
        "rwkv.blocks.0.feed_forward (RwkvFeedForward) cannot run in tiles of tokens: it mixes tokens",
    ),
    (
        ("prophetnet", "ProphetNetForCausalLM", PROPHET | {"is_decoder": True, "is_encoder_decoder": False}),
        ("--loss-tiles=2",),
        "the model's loss needs whole logits: it uses Tensor.transpose between head and loss",
    ),
    (LLAMA, ("--mlp-tiles=0",), "mlp_tiles is 0, but the batch has 32 tokens"),
    (LLAMA, (f"--mlp-tiles={2**40}",), f"mlp_tiles is {2**40}, but the batch has 32 tokens"),
    (LLAMA, ("--loss-tiles=0",), "greater than or equal to 2"),
    (LLAMA, (f"--loss-tiles={2**40}",), "less than or equal to 1048576"),
    (LLAMA, ("--mlp-tiles=2", "--mlp-module=*.foo"), "no module of any block matches '*.foo'"),
]


@some_quick(
    ("described", "asked", "said"),
    CASES,
    quick=[CASES[0], CASES[4], CASES[7]],
    ids=["no MLP", "mixes tokens", "whole logits", "0", "2**40", "loss 0", "loss 2**40", "no such module"],
)
def test_a_trace_of_tiles_that_cannot_be(
    described: tuple[str, str, dict[str, object]],
    asked: tuple[str, ...],
    said: str,
    protwin_here: Protwin,
    work: Path,
) -> None:
    kind, architecture, more = described
    sizes = {} if kind == "prophetnet" else SIZES
    document = {"model_type": kind, "architectures": [architecture], "vocab_size": 96, **sizes, **more}
    (work / "config.json").write_text(json.dumps(document))
    assert said in refusal(protwin_here, work, ("trace", "--model=config.json", *SHAPE, *asked))


@pytest.mark.parametrize("knob", ["mlp_tiles", "loss_tiles"])
def test_a_run_with_tiles_that_nobody_traced(knob: str, protwin_here: Protwin, folder: Path) -> None:
    plan = Plan(workload_id=decoder().identity, chunk_bytes=2**26, n_persist=2, n_buffer=4, **{knob: 4})
    plan.save(folder / "plan.json")
    run = ("run", "--plan=plan.json", "--workload=workload.json", "--model=gpt2")
    said = refusal(protwin_here, folder, run)
    assert f"{knob}: 4" in said
    assert "race" in said
