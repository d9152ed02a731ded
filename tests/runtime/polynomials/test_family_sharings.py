"""What families do where ranks share sequences equals traces of one of these ranks."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from protwin.runtime.polynomials.families import family_of_configuration, tilings_of_family
from protwin.runtime.polynomials.sharings import sharings_of_family
from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.catalogue.models import model_configuration, model_names
from protwin.shared.families import sharings as sharings_module
from protwin.shared.families.family import OutsideFamilyError, WorkloadFamily
from protwin.shared.families.sharings import FamilySharings
from protwin.shared.families.shipped import shipped_family, shipped_sharings, shipped_tilings
from protwin.shared.families.tilings import FamilyTilings
from protwin.shared.schema.workload import DType, Workload
from protwin.shared.workloads.source import load_workload
from tests.runtime.polynomials.test_families import LLAMA, same

GROUPED = LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 4}
EXPERTS = GROUPED | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
WINDOW = GROUPED | {"model_type": "mistral", "sliding_window": 96}
CAPPED = GROUPED | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 4096, "num_hidden_layers": 2}
PLAIN = {"model_type": "gpt2", "n_layer": 1, "n_head": 4, "n_embd": 32, "vocab_size": 96, "n_positions": 512}
KINDS: dict[str, dict[str, Any]] = {
    "grouped": GROUPED,
    "experts": EXPERTS,
    "window": WINDOW,
    "capped": CAPPED,
    "plain": PLAIN,
}
Known = tuple[WorkloadFamily, FamilyTilings | None, FamilySharings]


@cache
def fitted(kind: str) -> Known:
    family = family_of_configuration(KINDS[kind], name="x", dtype="bfloat16")
    tilings, _ = tilings_of_family(family, KINDS[kind], name="x")
    sharings, reasons = sharings_of_family(family, tilings, KINDS[kind], name="x")
    assert sharings is not None, reasons
    return family, tilings, sharings


def shared(known: Known, ranks: int, batch_size: int, sequence_length: int, **tiles: Any) -> Workload:
    family, tilings, sharings = known
    shape: dict[str, Any] = {"batch_size": batch_size, "sequence_length": sequence_length}
    whole = family.at(**shape) if tilings is None else tilings.workload(family, **shape, **tiles)
    return sharings.workload(whole, family, tilings, sequence_ranks=[ranks], **tiles)


def check(configuration: dict[str, Any], known: Known, *, seed: int, times: int = 1, has_tiles: bool = True) -> None:
    """Compare at shapes, numbers of ranks and of tiles by ``seed``."""
    rng = random.Random(seed)
    family, tilings, sharings = known
    for _ in range(times):
        piece = rng.choice(sharings.pieces)
        ranks, batch = rng.choice(piece.ranks), 1 if piece.most[0] == 1 else rng.randint(2, 5)
        longest = min(90, (piece.most[1] or 2**40) // ranks)
        tokens = max(-(-piece.least[1] // ranks), rng.randint(min(20, longest), longest))
        tiles: dict[str, Any] = {"mlp_tiles": [rng.randint(2, 7)], "loss_tiles": [rng.randint(2, 10)]}
        if not has_tiles or tilings is None or tilings.why_no_mlp_tiles or not piece.has_mlp_tiles:
            tiles["mlp_tiles"] = []
        if not has_tiles or tilings is None or tilings.why_no_loss_tiles or piece.loss is None:
            tiles["loss_tiles"] = []
        traced = workload_of_configuration(
            configuration,
            name=family.model_name,
            dtype=str(family.compute_dtype),
            batch_size=batch,
            sequence_length=tokens * ranks,
            sequence_ranks=[ranks],
            **tiles,
        )
        found = shared(known, ranks, batch, tokens * ranks, **tiles)
        assert same(found, traced), (ranks, batch, tokens, tiles)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_of_a_family_equals_the_trace(kind: str) -> None:
    known = fitted(kind)
    pieces = known[2].pieces
    heads = KINDS[kind].get("num_attention_heads") or KINDS[kind]["n_head"]
    assert {ranks for piece in pieces for ranks in piece.ranks} == {n for n in range(2, heads + 1) if heads % n == 0}
    assert all(piece.has_mlp_tiles and piece.loss is not None for piece in pieces)
    check(KINDS[kind], known, seed=1, times=3)


# -- shipped ---------------------------------------------------------------------------------------------------------


def shipped(name: str) -> Known:
    family, tilings = shipped_family(name, DType.BFLOAT16), shipped_tilings(name, DType.BFLOAT16)
    sharings = shipped_sharings(name, DType.BFLOAT16)
    assert family is not None
    assert sharings is not None
    return family, tilings, sharings


SHIPPED = [name for name in model_names() if shipped_sharings(name, DType.BFLOAT16) is not None]


def test_shipped_sharings_are_those_of_shipped_families() -> None:
    assert {"llama-3-8b", "llama-3.1-8b"} <= set(SHIPPED)
    for name in SHIPPED:
        family, _, sharings = shipped(name)
        assert sharings.model_hash == family.model_hash
        assert {piece.least for piece in sharings.pieces} == {piece.least for piece in family.pieces}
        assert all(piece.has_mlp_tiles and piece.loss is not None for piece in sharings.pieces)


def test_a_shipped_rank_equals_the_trace() -> None:
    name = "llama-3-8b"
    check(dict(model_configuration(name).config), shipped(name), seed=3, has_tiles=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_rank_equals_the_trace(name: str) -> None:
    check(dict(model_configuration(name).config), shipped(name), seed=sum(map(ord, name)))


def test_ranks_exchange_what_ulysses_exchanges() -> None:
    """Queries, keys and values ahead of attention and its output behind, with the replicas of key-value heads.

    Source: arXiv 2309.14509, section 3.
    """
    config = model_configuration("llama-3-8b").config
    heads, key_heads, layers = (config[f"num_{n}"] for n in ("attention_heads", "key_value_heads", "hidden_layers"))
    width = config["hidden_size"] // heads
    for ranks in (2, 4, 8, 16, 32):
        own = 1000
        known = shipped("llama-3-8b")
        (sharing,) = shared(known, ranks, 1, own * ranks, mlp_tiles=[], loss_tiles=[]).sequence_sharings
        replicated = max(key_heads, ranks)
        sizes = [2 * own * width * (heads + 2 * replicated), 2 * own * width * heads]
        for profile in sharing.profiles:
            assert list(profile.forward.exchanges) == sizes
            assert sorted(profile.backward.exchanges) == sorted(sizes)
        attention = [
            op
            for block in sharing.profile_of
            for op in sharing.profiles[block].forward.operations
            if op.operation_class == "attention"
        ]
        assert len(attention) == layers
        pairs = (own * ranks) ** 2 // 2
        assert {op.flops * op.count for op in attention} == {4 * pairs * width * heads // ranks}


def test_wrong_edits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit made where the section without tiles has it is not what a trace sees."""
    known = shipped("llama-3-8b")
    asked = {"mlp_tiles": [5], "loss_tiles": []}
    right = shared(known, 4, 2, 4 * 63, **asked).sequence_sharings
    monkeypatch.setattr(sharings_module, "_place_of", lambda edit, *_: edit.begin)
    assert shared(known, 4, 2, 4 * 63, **asked).sequence_sharings != right


def test_two_tiles_have_no_changes() -> None:
    """As in a trace: ``Phase.changes`` are of sections without loops, be it one of two passes that are not alike."""
    (sharing,) = shared(shipped("llama-3-8b"), 4, 2, 4 * 63, mlp_tiles=[2], loss_tiles=[]).sequence_sharings
    assert all(profile.forward.changes for profile in sharing.profiles)
    (tiling,) = sharing.tilings
    assert not any(profile.forward.changes for profile in tiling.profiles)


def test_a_million_tokens_among_eight_need_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protwin.shared.workloads.source.plugin", None)
    found = load_workload(
        "llama-3-8b",
        batch_size=1,
        sequence_length=1_000_000,
        mlp_tiles=[128],
        loss_tiles=[512],
        sequence_ranks=[8],
    )
    (sharing,) = found.sequence_sharings
    assert (sharing.sequence_ranks, found.num_tokens) == (8, 1_000_000)
    assert [tiling.mlp_tiles for tiling in sharing.tilings] == [128]
    assert [tiling.loss_tiles for tiling in sharing.loss_tilings] == [512]
    assert sharing.profiles[0].forward.net_bytes < found.profiles[0].forward.net_bytes / 7


def test_what_was_not_proven_is_outside() -> None:
    known = shipped("llama-3-8b")
    for ranks, batch, length in ((3, 1, 300), (5, 1, 500), (8, 1, 1001), (8, 1, 8)):
        with pytest.raises(OutsideFamilyError, match=r"nothing is known exactly|is outside"):
            shared(known, ranks, batch, length, mlp_tiles=[], loss_tiles=[])
