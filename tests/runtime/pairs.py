"""Methods of training, each by what it does to a model, a batch and a plan, so that any two can be combined."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import torch
from torch import nn

from protwin.runtime import CpuDevice, LossScaling, add_lora, carry_out, make_orthogonal, project_gradients, trace
from protwin.runtime.model.blocks import find_blocks
from protwin.runtime.optimizers.named import named_optimizer
from protwin.runtime.tiles.loss_installing import final_of_loss, tiled_loss
from protwin.runtime.tiles.mlp_modules import find_mlps, in_tiles, modules_of
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import Plan
from tests.runtime.models import Masters, llama, one_group, snapshot, token_batches, uncached
from tests.runtime.packed import packed_batch

METHODS: Final = (
    "offloaded",
    "swap",
    "checkpoint",
    "offloaded inputs",
    "MLPs in tiles",
    "loss in tiles",
    "packed",
    "LoRA",
    "OSFT",
    "float16",
    "8-bit Adam",
    "compiled block",
)
PAIRS: Final = tuple(combinations(METHODS, 2))
REFUSED: Final[Mapping[str, tuple[str, str]]] = {
    "compiled block": ("is compiled", "a compiled part is refused by its name: nobody has seen what it saves"),
}
"""Methods that go with no plan at all: the message, and why, for readers."""
STEPS: Final = 3
MLP_TILES, LOSS_TILES = 2, 3
MAX_NORM: Final = 0.5
SCALING: Final = LossScaling(initial_scale=2.0**19)
"""So high that the first step overflows."""


def refusal(pair: tuple[str, str]) -> tuple[str, str] | None:
    """What is said of two methods that cannot be combined, and why; None if they can."""
    return next((REFUSED[method] for method in pair if method in REFUSED), None)


@dataclass(frozen=True)
class Combined:
    """Some methods, all in one training."""

    methods: tuple[str, ...]

    def build(self) -> nn.Module:
        model: nn.Module = llama(num_layers=4)
        if "LoRA" in self.methods:
            torch.manual_seed(0)
            add_lora(model, rank=2, targets=["q_proj", "v_proj"])
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(std=0.1)
        if "OSFT" in self.methods:
            make_orthogonal(model, unfreeze_rank_ratio=0.4, targets=["up_proj", "down_proj", "o_proj"])
        if "float16" in self.methods:
            model.to(torch.float16)
        if "compiled block" in self.methods:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler's own, where it is imported first
                find_blocks(model)[0].module.compile()
        return model

    def batches(self) -> list[dict[str, torch.Tensor]]:
        if "packed" in self.methods:
            return [packed_batch((5, 12, 7), seed=step) for step in range(STEPS)]
        return token_batches(STEPS)

    @property
    def optimizer(self) -> Optimizer:
        return Optimizer.ADAMW_8BIT if "8-bit Adam" in self.methods else Optimizer.ADAMW

    @property
    def is_scaled(self) -> bool:
        return "float16" in self.methods

    def _make_optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return named_optimizer(self.optimizer, lr=1e-2)(groups)

    def tiles(self) -> tuple[int, int]:
        """Of MLPs, and of the loss."""
        return MLP_TILES if "MLPs in tiles" in self.methods else 1, LOSS_TILES if "loss in tiles" in self.methods else 1

    def plan(self, workload: Any) -> Plan:
        layout = layout_of(workload, 12_000)
        is_offloaded, num_chunks = "offloaded" in self.methods, len(layout.chunks)
        has_inputs = "offloaded inputs" in self.methods
        mlp_tiles, loss_tiles = self.tiles()
        return Plan(
            workload_id=workload.identity,
            method=workload.method,
            chunk_bytes=12_000,
            n_persist=0 if is_offloaded else num_chunks,
            n_buffer=layout.min_buffers(0) + 1 if is_offloaded else 0,
            n_swap=int("swap" in self.methods),
            n_checkpoint=int("checkpoint" in self.methods) + int(has_inputs),
            n_offload_input=int(has_inputs),
            mlp_tiles=mlp_tiles,
            loss_tiles=loss_tiles,
            max_gradient_norm=MAX_NORM if self.is_scaled else None,
            optimizer=self.optimizer,
        )

    def by_plan(self) -> tuple[list[float], dict[str, torch.Tensor], Any]:
        """Losses, weights and the training."""
        model, batches = self.build(), self.batches()
        mlp_tiles, loss_tiles = self.tiles()
        counts: dict[str, Any] = {
            "mlp_tiles": [mlp_tiles] if mlp_tiles > 1 else [],
            "loss_tiles": [loss_tiles] if loss_tiles > 1 else [],
        }
        workload = trace(model, batches[0], repeats=0, **counts)
        losses = []
        with carry_out(
            model,
            self.plan(workload),
            workload,
            optimizer=self._make_optimizer,
            device=CpuDevice(),
            loss_scaling=SCALING if self.is_scaled else None,
        ) as training:
            for batch in batches:
                loss = model(**batch).loss
                losses.append(loss.item())
                (training.scale(loss) if self.is_scaled else loss).backward()
                training.step()
        return losses, snapshot(model), training

    def plainly(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        """The loop that everybody writes; MLPs and the loss run in the same tiles."""
        model = uncached(self.build())
        masters = Masters(model)
        optimizer = self._make_optimizer(masters.groups(one_group(model)))
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALING.initial_scale, enabled=self.is_scaled)
        of_name = {id(parameter): master for parameter, master in masters._pairs}
        losses = []
        with ExitStack() as stack:
            for context in self._in_tiles(model):
                stack.enter_context(context)
            for batch in self.batches():
                loss = model(**batch).loss
                losses.append(loss.item())
                scaler.scale(loss).backward()
                project_gradients(model)
                masters.take_gradients()
                if self.is_scaled:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_([of_name[id(p)] for p in model.parameters() if p.requires_grad], MAX_NORM)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                masters.project(model)
                masters.give_weights()
        return losses, snapshot(model)

    def _in_tiles(self, model: nn.Module) -> Iterator[Any]:
        mlp_tiles, loss_tiles = self.tiles()
        blocks = find_blocks(model)
        if mlp_tiles > 1:
            yield in_tiles(modules_of(blocks, find_mlps(blocks, None)), mlp_tiles)
        if loss_tiles > 1:
            yield tiled_loss(model, loss_tiles, final_of_loss(model, blocks, loss_tiles))


RANKS, SHARED, BYPASS = "several ranks", "shared sequences", "bypass"
_SHARING: Final = "tests/runtime/ranks/test_sharing_methods.py"
_OF_RANKS: Final = "tests/runtime/ranks/test_tiles_of_ranks.py"
_BESIDE_DDP: Final = "tests/runtime/ranks/test_beside_ddp.py"
ELSEWHERE: Final[Mapping[tuple[str, str], str]] = {
    **{(method, SHARED): _SHARING for method in ("checkpoint", "packed", "LoRA", "OSFT", "float16")},
    **{(method, SHARED): _SHARING for method in ("offloaded", "MLPs in tiles", "loss in tiles", RANKS)},
    **{(method, SHARED): "tests/runtime/ranks/test_sequences.py" for method in ("swap", "offloaded inputs")},
    **{(method, RANKS): _BESIDE_DDP for method in ("offloaded", "swap", "checkpoint", "OSFT")},
    **{(method, RANKS): _OF_RANKS for method in ("MLPs in tiles", "loss in tiles")},
    ("offloaded", BYPASS): "tests/runtime/distillation/test_pairs.py",
    (RANKS, BYPASS): "tests/runtime/ranks/test_distillation_stages.py",
}
"""Pairs that need processes or a teacher, and the tests that hold them."""
NOT_OF_BYPASS: Final[Mapping[str, dict[str, int]]] = {
    "swap": {"n_swap": 1},
    "checkpoint": {"n_checkpoint": 1},
    "offloaded inputs": {"n_checkpoint": 1, "n_offload_input": 1},
    "MLPs in tiles": {"mlp_tiles": 2},
    "loss in tiles": {"loss_tiles": 2},
    SHARED: {"sequence_ranks": 2, "num_ranks": 2},
}
"""Knobs that contradict a distillation block by block."""
ALL_METHODS: Final = (*METHODS, RANKS, SHARED, BYPASS)


def verdict(one: str, other: str) -> str:
    """What becomes of a pair, in a word."""
    if (one, other) in ELSEWHERE or (other, one) in ELSEWHERE:
        return "yes"
    if "compiled block" in (one, other) or (BYPASS in (one, other) and {one, other} & {*NOT_OF_BYPASS, "LoRA", "OSFT"}):
        return "refused"
    return "yes" if one in METHODS and other in METHODS else "not tried"
