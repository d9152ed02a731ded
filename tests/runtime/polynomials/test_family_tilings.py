"""What families do in tiles equals traces with these tiles."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from protwin.runtime.polynomials.families import family_of_configuration, tilings_of_family
from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.catalogue.models import model_configuration, model_names
from protwin.shared.families import tilings as tilings_module
from protwin.shared.families.family import WorkloadFamily
from protwin.shared.families.shipped import shipped_family, shipped_tilings
from protwin.shared.families.tilings import FamilyTilings
from protwin.shared.schema.workload import DType, Workload
from protwin.shared.workloads.source import load_workload
from tests.runtime.polynomials.test_families import LLAMA, same

TIED = LLAMA | {"tie_word_embeddings": True}
EXPERTS = LLAMA | {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "sliding_window": None,
}
CAPPED = LLAMA | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 4096, "num_hidden_layers": 2}
PLAIN = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 96, "n_positions": 512}
OPT = {
    "model_type": "opt",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 512,
}
KINDS: dict[str, dict[str, Any]] = {
    "gated": LLAMA,
    "tied": TIED,
    "experts": EXPERTS,
    "capped": CAPPED,
    "plain": PLAIN,
    "no module": OPT,
}


@cache
def fitted(kind: str, dtype: str = "bfloat16") -> tuple[WorkloadFamily, FamilyTilings]:
    family = family_of_configuration(KINDS[kind], name="x", dtype=dtype)
    tilings, _ = tilings_of_family(family, KINDS[kind], name="x")
    assert tilings is not None
    return family, tilings


def check(
    configuration: dict[str, Any], family: WorkloadFamily, tilings: FamilyTilings, *, seed: int, times: int = 1
) -> None:
    """Compare at shapes and numbers of tiles by ``seed``."""
    rng = random.Random(seed)
    for _ in range(times):
        shape: dict[str, Any] = {"batch_size": rng.choice((1, 2, 5)), "sequence_length": rng.randint(20, 90)}
        asked: dict[str, Any] = {
            "mlp_tiles": [rng.randint(2, 7)] if tilings.why_no_mlp_tiles is None else [],
            "loss_tiles": [rng.randint(2, 10)] if tilings.why_no_loss_tiles is None else [],
        }
        traced = workload_of_configuration(
            configuration, name=family.model_name, dtype=str(family.compute_dtype), **shape, **asked
        )
        assert same(tilings.workload(family, **shape, **asked), traced), (shape, asked)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_a_family_equal_the_trace(kind: str) -> None:
    family, tilings = fitted(kind)
    has_mlp, has_loss = tilings.why_no_mlp_tiles is None, tilings.why_no_loss_tiles is None
    assert (has_mlp, has_loss) == (kind != "no module", True), (tilings.why_no_mlp_tiles, tilings.why_no_loss_tiles)
    check(KINDS[kind], family, tilings, seed=1, times=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gated", "experts"])
def test_float32_is_another_family(kind: str) -> None:
    check(KINDS[kind], *fitted(kind, "float32"), seed=2, times=2)


def test_wrong_passes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of one length each, or a first pass like the others, are not what a trace sees."""
    family, tilings = shipped("llama-3-8b")
    asked: dict[str, Any] = {"mlp_tiles": [5], "loss_tiles": [4], "batch_size": 1, "sequence_length": 63}
    right = tilings.workload(family, **asked)
    passes = tilings_module._passes

    def equal(loop: Any, num_tokens: int, num_tiles: int) -> Any:
        return passes(loop, num_tokens // num_tiles * num_tiles, num_tiles)

    def no_first(loop: Any, num_tokens: int, num_tiles: int) -> Any:
        return passes(loop.model_copy(update={"first": loop.later}), num_tokens, num_tiles)

    for wrong in (equal, no_first):
        monkeypatch.setattr(tilings_module, "_passes", wrong)
        made = tilings.workload(family, **asked)
        assert made.tilings != right.tilings, wrong
        assert made.loss_tilings != right.loss_tilings, wrong


# -- shipped ---------------------------------------------------------------------------------------------------------


def shipped(name: str, dtype: DType = DType.BFLOAT16) -> tuple[WorkloadFamily, FamilyTilings]:
    family, tilings = shipped_family(name, dtype), shipped_tilings(name, dtype)
    assert family is not None
    assert tilings is not None
    return family, tilings


def test_shipped_tilings_are_those_of_shipped_families() -> None:
    found = [(name, dtype) for name in model_names() for dtype in DType if shipped_tilings(name, dtype) is not None]
    assert {("llama-3-8b", DType.BFLOAT16), ("mixtral-8x7b", DType.BFLOAT16), ("gpt2", DType.BFLOAT16)} <= set(found)
    for name, dtype in found:
        family, tilings = shipped(name, dtype)
        assert tilings.model_hash == family.model_hash
        assert len(tilings.pieces) == len(family.pieces)
        for piece in tilings.pieces:
            assert bool(piece.mlp_places) == (tilings.why_no_mlp_tiles is None), name
            assert bool(piece.loss_places) == (tilings.why_no_loss_tiles is None), name


def test_a_shipped_model_in_tiles_equals_the_trace() -> None:
    name = "gpt2"
    check(dict(model_configuration(name).config), *shipped(name), seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
@pytest.mark.parametrize("name", model_names())
def test_every_shipped_model_in_tiles_equals_the_trace(name: str, dtype: DType) -> None:
    if shipped_tilings(name, dtype) is None:
        pytest.skip(f"nothing is known of {name} in tiles in {dtype}")
    check(dict(model_configuration(name).config), *shipped(name, dtype), seed=sum(map(ord, name)))


def resolve(model: str, **asked: Any) -> Workload:
    return load_workload(model, **({"batch_size": 1, "sequence_length": 131_072} | asked))


def test_shipped_models_are_in_tiles_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protwin.shared.workloads.source.plugin", None)
    found = resolve("llama-3-8b", mlp_tiles=[4, 64, 1024], loss_tiles=[65_536])
    assert [tiling.mlp_tiles for tiling in found.tilings] == [4, 64, 1024]
    assert len(found.tilings[0].modules) == 32
    assert [tiling.loss_tiles for tiling in found.loss_tilings] == [65_536]
    whole = resolve("llama-3-8b")
    assert found.identity == whole.identity or found.profiles == whole.profiles
    tiled = found.loss_tilings[0].epilogue_forward
    assert tiled.peak_bytes < whole.epilogue_forward.peak_bytes / 20, "the logits are never whole"
    assert tiled.flops > 0.99 * whole.epilogue_forward.flops


def test_what_is_not_known_in_tiles_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors, float16, tiles of one token."""
    asked: list[dict[str, Any]] = []
    whole = resolve("gpt2", sequence_length=16)

    def traced(*_: Any, **told: Any) -> Workload:
        asked.append(told)
        return whole

    monkeypatch.setattr("protwin.shared.workloads.source.plugin", lambda *_: traced)
    for changes in ({"dtype": "float16", "mlp_tiles": (2,)}, {"mlp_tiles": (9,)}, {"loss_tiles": (17,)}):
        resolve("gpt2", sequence_length=16, **changes)
        assert {name: asked[-1][name] for name in changes} == changes
    assert len(asked) == 3
