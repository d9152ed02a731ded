"""Plans with tiles: carried out as plain training, with the memory that they account for, and searched."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import cache, cached_property, partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from protwin.runtime import trace
from protwin.runtime.model.blocks import find_blocks
from protwin.runtime.tiles import mlp
from protwin.runtime.tiles.mlp_modules import find_mlps, in_tiles, modules_of
from protwin.shared.basics.errors import InfeasibleError, PlanError
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim import SearchRequest, SearchResult, SearchSpace, search, simulate
from tests.runtime.accounts import BAR, carried_out, error_frac, measured_peak_bytes, plan_of
from tests.runtime.eager_lanes import eager_peak
from tests.runtime.models import SEED, Case, gpt2, llama, token_batches

MACHINE = load_hardware("rtx-3090")

TILES = (3, 7)
SIZES = ((11, 11), (5, 5))
"""Tokens of the first two of so many tiles of 33."""
TOLERANCE = 1e-5
"""Of weights: three steps of 1e-2, with gradients that differ by roundings of 1e-6 of their size."""


class TiledCase(Case):
    """A case whose workload knows tiles."""

    tiles: tuple[int, ...] = TILES

    @cached_property
    def workload(self) -> Workload:
        return trace(self.build(), self.batches[0], repeats=0, mlp_tiles=self.tiles)


def mixtral() -> MixtralForCausalLM:
    """A mixture of experts that learns by an auxiliary loss of its router's logits too."""
    torch.manual_seed(SEED)
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            vocab_size=64,
            output_router_logits=True,
            router_aux_loss_coef=1.0,
        )
    )


three_layers = partial(llama, num_layers=3, intermediate_size=256)
BATCHES = token_batches(3, batch=3, length=11)


@cache
def case_of(name: str) -> TiledCase:
    build = {"llama": three_layers, "gpt2": partial(gpt2, num_layers=2), "mixtral": mixtral}[name]
    case = TiledCase(build, BATCHES, make_optimizer=partial(torch.optim.AdamW, lr=1e-2, eps=1e-2, fused=True))
    case.tiles = TILES if name == "llama" else (3,)
    return case


@pytest.mark.parametrize(
    ("name", "mixture", "residency", "mlp_tiles", "micro_batches", "max_norm"),
    [
        ("llama", "mixed", "mixed", 7, 1, None),
        ("llama", "checkpointed", "offloaded", 3, 2, 0.1),
        pytest.param("mixtral", "mixed", "mixed", 3, 1, None, marks=pytest.mark.slow),
        pytest.param("mixtral", "checkpointed", "offloaded", 3, 2, 0.1, marks=pytest.mark.slow),
        pytest.param("gpt2", "kept", "persistent", 3, 2, None, marks=pytest.mark.slow),
    ],
)
def test_tiles_train_as_plain(
    name: str, mixture: str, residency: str, mlp_tiles: int, micro_batches: int, max_norm: float | None
) -> None:
    case = case_of(name)
    plan = plan_of(case, mixture, residency, micro_batches=micro_batches)
    plan = plan.model_copy(update={"mlp_tiles": mlp_tiles, "max_gradient_norm": max_norm})
    losses, weights = carried_out(case, plan)
    plain = case.plain_with(micro_batches, max_norm)
    assert losses == pytest.approx(plain.losses, rel=1e-6)
    for key, expected in plain.weights[-1].items():
        assert float((weights[key] - expected).abs().max()) <= TOLERANCE, key


def test_router_logits_are_recorded_once_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """An auxiliary loss reads them behind the model; hooks that ran in every tile would give it other ones."""

    def gradients(num_tiles: int) -> dict[str, torch.Tensor]:
        model = mixtral()
        model(**BATCHES[0])  # the hooks are there from the first forward on
        blocks = find_blocks(model)
        with in_tiles(modules_of(blocks, mlps), num_tiles):
            model(**BATCHES[0]).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def difference() -> float:
        tiled = gradients(4)
        return max(float((tiled[name] - value).abs().max() / value.abs().max()) for name, value in whole.items())

    mlps = find_mlps(find_blocks(mixtral()))
    whole = gradients(1)
    assert difference() <= 1e-5
    monkeypatch.setattr(mlp, "recording", lambda module: nullcontext([]))
    with pytest.raises((RuntimeError, AssertionError)):
        assert difference() <= 1e-5


@pytest.mark.parametrize(
    ("name", "mixture"),
    [
        ("llama", "kept"),
        ("llama", "mixed"),
        *(pytest.param("gpt2", mixture, marks=pytest.mark.slow) for mixture in ("kept", "checkpointed", "mixed")),
        *(pytest.param("llama", mixture, marks=pytest.mark.slow) for mixture in ("checkpointed", "swapped")),
    ],
)
def test_the_peak_is_what_is_accounted_for(name: str, mixture: str) -> None:
    case = case_of(name)
    plan = plan_of(case, mixture, "mixed").model_copy(update={"mlp_tiles": 3})
    measured_bytes = measured_peak_bytes(case, plan)
    assert abs(error_frac(measured_bytes, eager_peak(compile_schedule(plan, case.workload)))) <= BAR
    whole = plan.model_copy(update={"mlp_tiles": 1})
    if name == "llama" and mixture == "kept":
        # The wrong account: blocks as they are without tiles.
        assert abs(error_frac(measured_bytes, eager_peak(compile_schedule(whole, case.workload)))) > BAR


def test_intermediates_fall_with_the_number_of_tiles() -> None:
    workload = case_of("llama").workload
    forwards = [workload.tiled(number).profile_of(0).checkpoint_forward.peak_bytes for number in TILES]
    # Three intermediates of 256 features are there at once; from the second tile on the output of 33 tokens is too.
    by_hand = [max(first * 3 * 256 * 4, second * 3 * 256 * 4 + 33 * 32 * 4) for first, second in SIZES]
    assert {one - other for one, other in zip(forwards, by_hand, strict=True)} == {forwards[0] - by_hand[0]}
    assert workload.profile_of(0).checkpoint_forward.peak_bytes - forwards[-1] >= (33 - 5) * 3 * 256 * 4 - 33 * 32 * 4


def test_intermediates_of_long_sequences_fall_as_one_over_tiles() -> None:
    """In forward and in backward, traced without memory for them: each halving of a tile halves what it adds."""
    tokens, features = 8192, 4096
    sizes = {"hidden_size": 16, "intermediate_size": features, "num_hidden_layers": 1, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=tokens)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        row = torch.zeros(1, tokens, dtype=torch.long)
    workload = trace(model, {"input_ids": row, "labels": row}, repeats=0, mlp_tiles=(2, 4, 8, 16))
    one_bytes = tokens * features * 2
    for phase, num_tensors in (("forward", 3), ("checkpoint_forward", 3), ("backward", 6), ("checkpoint_backward", 6)):
        whole, *peaks = [
            getattr(known.profile_of(0), phase).peak_bytes
            for known in (workload, *(workload.tiled(number) for number in (2, 4, 8, 16)))
        ]
        for number, (more, fewer) in zip((2, 4, 8), itertools.pairwise(peaks), strict=True):
            assert more - fewer == pytest.approx(num_tensors * one_bytes / (2 * number), rel=0.01), (phase, number)
        assert phase.endswith("backward") or whole - peaks[0] > 1.4 * one_bytes
    saved = [known.profile_of(0).recompute.net_bytes for known in (workload, workload.tiled(2))]
    assert saved[0] - saved[1] > 3.9 * one_bytes, "a block keeps none of its MLP's intermediates"


def test_files_and_identities_keep_their_meaning() -> None:
    workload = case_of("llama").workload
    plain = trace(three_layers(), BATCHES[0], repeats=0)
    assert plain.identity == workload.identity == workload.tiled(3).identity
    assert "tilings" not in plain.to_json()
    assert Workload.from_mapping(workload.model_dump(mode="json") | _kind(workload), origin="x") == workload
    plan = Plan(workload_id=workload.identity, chunk_bytes=2**20, n_persist=0, n_buffer=2)
    assert "mlp_tiles" not in plan.to_json()
    assert plan.model_copy(update={"mlp_tiles": 3}).to_json() != plan.to_json()
    assert workload.tiled(3).tiled(3).profiles == workload.tiled(3).profiles


def _kind(document: Workload) -> dict[str, object]:
    return {"kind": document.KIND, "schema_version": document.SCHEMA_VERSION}


@pytest.mark.parametrize("mlp_tiles", [4, 2**40])
def test_tiles_that_the_workload_does_not_know(mlp_tiles: int) -> None:
    case = case_of("llama")
    plan = plan_of(case, "kept", "persistent").model_copy(update={"mlp_tiles": mlp_tiles})
    with pytest.raises(PlanError, match=r"knows 1, 3, 7\. Trace the model with that number"):
        simulate(plan, case.workload, MACHINE)


def test_the_search_weighs_tiles_where_memory_is_short() -> None:
    """Tiles cost time: where everything fits they are not chosen, and where nothing else fits they are."""
    workload = case_of("llama").workload
    whole = workload.model_copy(update={"tilings": ()})

    def found(of: Workload, budget_bytes: int | None, **allowed: object) -> SearchResult:
        space = SearchSpace.model_validate({"chunk_bytes": (9_000,), "prefetch_depth": (1,), **allowed})
        return search(SearchRequest(workload=of, hardware=MACHINE, device_budget_bytes=budget_bytes, space=space))

    assert found(workload, None).plan.mlp_tiles == 1
    few_bytes = _least_bytes(workload, 7)
    assert few_bytes < _least_bytes(workload, 1)
    with pytest.raises(InfeasibleError):
        found(whole, few_bytes)
    chosen = found(workload, few_bytes)
    assert chosen.plan.mlp_tiles > 1
    # Brute force: the space of each number of tiles by itself holds nothing faster.
    alone = [found(workload.tiled(number), few_bytes, mlp_tiles=(number,)) for number in (7,)]
    assert chosen.prediction.iteration_s <= min(one.prediction.iteration_s for one in alone) * 1.01
    with pytest.raises(PlanError, match="knows 1, 3, 7"):
        found(workload, None, mlp_tiles=(5,))


def _least_bytes(workload: Workload, mlp_tiles: int) -> int:
    """What a plan with nothing on the device for good and every block checkpointed is guaranteed to need."""
    case = case_of("llama")
    plan = plan_of(case, "checkpointed", "offloaded")
    plan = plan.model_copy(update={"mlp_tiles": mlp_tiles, "prefetch_depth": 1, "n_buffer": plan.n_buffer - 1})
    return guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes
