"""Blocks that keep results: the plain loop's bits, and what torch's own selective checkpointing keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import (
    FalconConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from protwin.runtime import carry_out, family_of_configuration, trace
from protwin.runtime.devices.ledger import MemoryLedger
from protwin.runtime.hooks.section_walker import Recomputing, SectionWalker
from protwin.runtime.hooks.selective import draws_dropout
from protwin.runtime.model.adapters import add_lora
from protwin.runtime.model.blocks import find_blocks
from protwin.runtime.model.snapshot import left_as_found
from protwin.runtime.osft.orthogonal_model import make_orthogonal
from protwin.runtime.tracing import observing
from protwin.runtime.tracing.observing import observe_sections
from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.observed.observation import Observation
from protwin.shared.phases.activation_modes import KeptResults
from protwin.shared.schema.plan import ActivationMode, Plan, mode_counts
from protwin.shared.schema.schedule import Content, TaskKind
from protwin.shared.schema.workload import BlockId, Phase, Workload
from tests.proof_size import some_quick
from tests.runtime.accounts import CHUNK_BYTES, error_frac, measured_peak_bytes
from tests.runtime.eager_lanes import eager_peak
from tests.runtime.equality import miscounted, trained
from tests.runtime.models import Case, cases

KEEP, CHECKPOINT, SWAP = ActivationMode.KEEP, ActivationMode.CHECKPOINT, ActivationMode.SWAP
SELECTIVE = ActivationMode.SELECTIVE
MIXTURES = ((SELECTIVE,), (SWAP, SELECTIVE, KEEP, CHECKPOINT, SELECTIVE))
NAMES = ("gpt2 with dropout, tied", "llama in bfloat16", "llama, frozen prologue and blocks", "llama, tied")


def plan_of(workload: Workload, modes: tuple[ActivationMode, ...], product_stride: int, **knobs: Any) -> Plan:
    """A third of the chunks on the device for good, a third stepped by the host, a third offloaded."""
    layout = layout_of(workload, CHUNK_BYTES)
    third = len(layout.chunks) // 3
    every = tuple(modes[block % len(modes)] for block in range(workload.num_blocks))
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=third,
        n_host_stepped=third,
        n_buffer=layout.min_buffers(2 * third) + 1,
        prefetch_depth=2,
        **mode_counts(every),
        activation_modes=every,
        product_stride=product_stride,
        **knobs,
    )


@some_quick(
    ("name", "modes", "product_stride"),
    [(name, modes, stride) for name in NAMES for modes in MIXTURES for stride in (1, 2)],
    quick=[(NAMES[0], MIXTURES[0], 2), (NAMES[1], MIXTURES[1], 1)],
)
def test_every_mixture_equals_the_plain_loop_within_the_guarantee(
    name: str, modes: tuple[ActivationMode, ...], product_stride: int
) -> None:
    """Two micro-batches; the budget is the guaranteed peak, to the byte, and what is measured is the account's peak."""
    case = cases()[name]
    plan = plan_of(case.workload, modes, product_stride, micro_batches=2)
    outcome = trained(case, plan)
    assert outcome.losses == case.plain_with(2, None).losses
    assert outcome.different == []
    assert miscounted(case, plan, outcome) == []
    if "frozen" not in name:
        schedule, measured_bytes = compile_schedule(plan, case.workload), measured_peak_bytes(case, plan)
        assert error_frac(measured_bytes, eager_peak(schedule)) == pytest.approx(0, abs=1e-3)
        left_out = (replace(b, size_bytes=0) if b.content is Content.KEPT_RESULTS else b for b in schedule.buffers)
        assert error_frac(measured_bytes, eager_peak(replace(schedule, buffers=tuple(left_out)))) > 0.01


# -- beside what torch keeps -----------------------------------------------------------------------------------------

SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2}
TOKENS = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": TOKENS, "labels": TOKENS}
KEPT_BY_TORCH = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def with_lora(model: nn.Module) -> nn.Module:
    add_lora(model, rank=4, targets=("q_proj", "v_proj", "down_proj"))
    return model


def in_factors(model: nn.Module) -> nn.Module:
    make_orthogonal(model, unfreeze_rank_ratio=0.5)
    return model


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "llama in bfloat16, eager attention": lambda: LlamaForCausalLM(
        LlamaConfig(**GROUPED, attn_implementation="eager")
    ).bfloat16(),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0, attn_pdrop=0
        )
    ),
    "llama, LoRA": lambda: with_lora(LlamaForCausalLM(LlamaConfig(**GROUPED))),
    "llama, OSFT": lambda: in_factors(LlamaForCausalLM(LlamaConfig(**GROUPED))),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**SIZES, ffn_dim=96, word_embed_proj_dim=64, max_position_embeddings=64, dropout=0.0)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=16)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**GROUPED, num_local_experts=4)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=256,
            d_model=64,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            d_kv=16,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    ),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return BUILDS[name]().train()


@contextmanager
def checkpointed_by_torch(model: nn.Module, contexts: Callable[[], Any] | None) -> Iterator[None]:
    """Every block under torch's own checkpointing."""
    more: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    blocks = [block.module for block in find_blocks(model)]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **more)
    yield
    for block in blocks:
        del block.forward


def held_after_forward(model: nn.Module, contexts: Callable[[], Any] | None) -> tuple[int, list[torch.Tensor]]:
    """Device bytes behind the forward, and the gradients."""
    ledger = MemoryLedger(device_type="cpu")
    ledger.adopt([*model.parameters(), *model.buffers(), *BATCH.values()])
    torch.manual_seed(1)
    with left_as_found(model), checkpointed_by_torch(model, contexts), ledger.metering():
        loss = model(**BATCH).loss
        held_bytes = ledger.watched_bytes
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return held_bytes, gradients


@some_quick("name", list(BUILDS), quick=["gpt2", "llama in bfloat16, eager attention"])
def test_blocks_keep_what_torch_keeps_by_a_list_of_operators(name: str) -> None:
    model = built(name)
    plain_bytes, plain = held_after_forward(model, None)
    kept_bytes, selected = held_after_forward(model, partial(create_selective_checkpoint_contexts, KEPT_BY_TORCH))
    assert all(map(torch.equal, plain, selected))
    workload = trace(model, BATCH, repeats=0)
    profiles = [workload.profile_of(block) for block in range(workload.num_blocks)]
    every, second = (sum(profile.selective[i].kept_bytes for profile in profiles) for i in (0, 1))
    assert kept_bytes - plain_bytes == every
    assert 0 < second < every


def phases_of(workload: Workload, product_stride: int) -> Iterator[tuple[tuple[TaskKind, BlockId], Phase, Phase]]:
    """Of every block: the phase in mode SELECTIVE, and that in mode CHECKPOINT."""
    names = ("checkpoint_forward", "recompute", "checkpoint_backward")
    kinds = (TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD)
    for block in range(workload.num_blocks):
        profile = workload.profile_of(block)
        selective = profile.selecting(product_stride)
        for kind, name in zip(kinds, names, strict=True):
            yield (kind, BlockId(block)), getattr(selective, name), getattr(profile, name)


def peak(seen: Observation | Phase) -> int:
    levels = seen.levels if isinstance(seen, Observation) else [level for _, level in seen.curve]
    return max([0, *levels])


@some_quick(
    ("name", "product_stride"),
    [(name, stride) for name in BUILDS for stride in (1, 2)],
    quick=[("llama", 2), ("mixtral", 1)],
)
def test_phases_that_are_derived_are_those_of_a_run(
    name: str, product_stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations and bytes to the byte, but for levels within forward: these are upper bounds.

    Both modes run here, beside each other: what sections share goes the same way in both.
    """
    model = built(name)
    workload, blocks = trace(model, BATCH, repeats=0), find_blocks(model)
    monkeypatch.setattr(
        observing, "SectionWalker", partial(SectionWalker, recomputing=Recomputing(product_stride=product_stride))
    )
    with left_as_found(model):
        plain, seen = (
            observe_sections(model, BATCH, None, blocks, mode, lambda: None, passes=2).sections
            for mode in (CHECKPOINT, SELECTIVE)
        )
    recomputed = []
    for place, phase, before in phases_of(workload, product_stride):
        assert seen[place].net_bytes - plain[place].net_bytes == phase.net_bytes - before.net_bytes
        assert seen[place].counted() == phase.operations
        higher, bound = peak(seen[place]) - peak(plain[place]), peak(phase) - peak(before)
        assert higher == bound or (place[0] is TaskKind.FORWARD and 0 <= higher <= bound <= phase.net_bytes)
        if place[0] is TaskKind.RECOMPUTE:
            recomputed.append((phase.flops, before.flops))
    assert all(few < many for few, many in recomputed)


def test_of_products_every_second_one_is_kept_from_the_first_on() -> None:
    names = ["mm", "add", "addmm", "bmm", "mm", "_scaled_dot_product_flash_attention", "mm", "reduce_scatter_tensor"]
    every, second = ([kept.keeps(name) for name in names] for kept in (KeptResults(1), KeptResults(2)))
    assert every == [True, False, True, False, True, True, True, True]
    assert second == [True, False, False, False, True, True, False, True]


def test_attention_that_draws_dropout_runs_again() -> None:
    """Were it kept, later dropout of the recomputation would draw its numbers: torch keeps no account of these."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    query = torch.empty(1, 1, 8, 8, device="meta")
    calls = {0.0: (query, query, query, 0.0), 0.1: (query, query, query, 0.1)}
    for dropout, args in calls.items():
        assert draws_dropout(operator, args, {}) is bool(dropout)
        assert draws_dropout(operator, args[:3], {"dropout_p": dropout}) is bool(dropout)
        assert KeptResults(1).keeps("_scaled_dot_product_flash_attention", draws=bool(dropout)) is not bool(dropout)


# -- results that are changed later ----------------------------------------------------------------------------------


class Changing(nn.Module):
    """A block of three products, which adds its input to the second one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.adds = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, 16) in and out."""
        product: torch.Tensor = self.second(self.first(hidden).tanh())
        if self.adds:
            product += hidden
        return self.third(product.tanh())


@dataclass
class Result:
    loss: torch.Tensor


class Stack(nn.Module):
    def __init__(self, *, adds: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Changing() for _ in range(3))
        for layer in self.layers:
            layer.adds = adds
        self.entry = nn.Linear(16, 16)

    def forward(self, rows: torch.Tensor) -> Result:
        """(rows, 16)."""
        rows = self.entry(rows)
        for number, layer in enumerate(self.layers):
            rows = layer(rows)
            if number < 2:
                rows.mul_(0.5)
        return Result(rows.square().mean())


def rows_of_numbers(seed: int) -> dict[str, torch.Tensor]:
    return {"rows": torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize(("product_stride", "kept_by_block"), [(1, [1, 1, 2]), (2, [1, 1, 2])], ids=[1, 2])
def test_what_is_changed_in_place_later_is_computed_again(product_stride: int, kept_by_block: list[int]) -> None:
    """Of three products, the second is changed within its block, and the third behind it, but for the last block's.

    With the second stride the first and the third would be kept.
    """
    case = Case(Stack, [rows_of_numbers(seed) for seed in range(3)])
    profiles = [case.workload.profile_of(block) for block in range(3)]
    kept_bytes = [profile.selecting(product_stride).kept_bytes for profile in profiles]
    assert kept_bytes == [number * 64 * 16 * 4 for number in kept_by_block]
    plan = plan_of(case.workload, (SELECTIVE,), product_stride, micro_batches=2)
    outcome = trained(case, plan)
    assert outcome.losses == case.plain_with(2, None).losses
    assert outcome.different == []
    assert miscounted(case, plan, outcome) == []


def test_no_family_of_workloads_forgets_what_is_changed() -> None:
    """Falcon adds attention's output to its MLP's."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "bos_token_id": 1}
    family = family_of_configuration(FalconConfig(**sizes, eos_token_id=1).to_dict(), name="falcon")
    workload = family.at(batch_size=2, sequence_length=16)
    assert [of.changed for of in workload.profile_of(1).selective] == [(3,), ()]


# -- refusals --------------------------------------------------------------------------------------------------------


def test_a_block_that_changes_what_is_kept_since_it_was_traced_is_refused_by_name() -> None:
    case = Case(partial(Stack, adds=False), [rows_of_numbers(0)])
    model, workload = case.build(), case.workload
    assert isinstance(model, Stack)
    for layer in model.layers:
        layer.adds = True
    plan = plan_of(workload, (SELECTIVE,), 1)
    carrying_out = carry_out(model, plan, workload, optimizer=torch.optim.SGD)
    message = r"block layers\.0 changes what a matrix product or attention gave in place \(aten::add_\)"
    with carrying_out, pytest.raises(ScheduleError, match=message):
        model(**case.batches[0])


def test_blocks_whose_recomputation_is_another_run_are_refused() -> None:
    """Running statistics stand still then."""
    workload = cases()["hand-written, batch statistics"].workload
    with pytest.raises(PlanError, match=r"n_selective: nobody knows which operations blocks of HandWritten may keep"):
        compile_schedule(plan_of(workload, (SELECTIVE,), 1), workload)
    llama = cases()["llama"].workload
    with pytest.raises(PlanError, match=r"product_stride: 3, but it is known for 1 and 2"):
        compile_schedule(plan_of(llama, (SELECTIVE,), 3), llama)
