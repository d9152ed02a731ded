"""Small models of several families, with what a test needs to train them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from protwin.runtime import project_gradients, trace
from protwin.runtime.osft.orthogonal_model import orthogonal_maps
from protwin.runtime.osft.projection import project_, subspaces_of
from protwin.shared.schema.workload import Workload

SEED = 0
STEPS = 4
VOCABULARY = 64

Batch = Mapping[str, torch.Tensor]
Groups = Callable[[nn.Module], list[dict[str, Any]]]


def token_batches(steps: int = STEPS, *, batch: int = 2, length: int = 12) -> list[dict[str, torch.Tensor]]:
    """Batches of random tokens, each to be continued by itself."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, VOCABULARY, (batch, length), generator=generator) for _ in range(steps)]
    return [{"input_ids": tokens, "labels": tokens.clone()} for tokens in rows]


def llama(*, num_layers: int = 4, **changes: Any) -> PreTrainedModel:
    """A Llama with grouped key-value heads."""
    torch.manual_seed(SEED)
    settings = {
        "hidden_size": 32,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 56,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | changes)))


def gpt2(*, num_layers: int = 3, **changes: Any) -> PreTrainedModel:
    """A GPT-2 with dropout everywhere and tied embeddings."""
    torch.manual_seed(SEED)
    settings = {
        "n_embd": 32,
        "n_layer": num_layers,
        "n_head": 2,
        "n_positions": 32,
        "vocab_size": VOCABULARY,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return GPT2LMHeadModel(GPT2Config(**(settings | changes)))


class Layer(nn.Module):
    """A residual block with dropout, a parameter that nothing uses, and batch statistics if wanted."""

    def __init__(self, width: int, *, has_statistics: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if has_statistics else nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.unused = nn.Parameter(torch.randn(7))
        self.down = nn.Linear(3 * width, width, bias=False)
        self.dropout = nn.Dropout(0.2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, width) in and out."""
        return hidden + self.dropout(self.down(torch.tanh(self.up(self.norm(hidden)))))


class HandWritten(nn.Module):
    """No configuration, no names that anybody expects; takes one tensor and gives logits."""

    def __init__(self, *, num_layers: int = 4, width: int = 24, has_statistics: bool = False) -> None:
        super().__init__()
        self.entry = nn.Linear(5, width)
        self.stack = nn.Sequential(*(Layer(width, has_statistics=has_statistics) for _ in range(num_layers)))
        self.exit = nn.Linear(width, 3)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """(batch, 5) to (batch, 3)."""
        return self.exit(self.stack(self.entry(points)))


class RunTwice(HandWritten):
    """Its first blocks run a second time before the last one runs: each of them is two blocks of the schedule."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """(batch, 5) to (batch, 3)."""
        *first, last = self.stack
        hidden = self.entry(points)
        for layer in [*first, *first, last]:
            hidden = layer(hidden)
        return self.exit(hidden)


def hand_written(**changes: Any) -> HandWritten:
    """A ``HandWritten`` with fixed weights."""
    torch.manual_seed(SEED)
    return HandWritten(**changes)


def point_batches(steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """Batches of points with the class of each."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "points": torch.randn(6, 5, generator=generator),
            "classes": torch.randint(0, 3, (6,), generator=generator),
        }
        for _ in range(steps)
    ]


def frozen(model: nn.Module, *prefixes: str) -> nn.Module:
    """``model`` with the parameters frozen whose names begin with one of ``prefixes``."""
    for name, parameter in model.named_parameters():
        if name.startswith(prefixes):
            parameter.requires_grad_(False)
    assert any(not parameter.requires_grad for parameter in model.parameters())
    return model


def uncached(model: nn.Module) -> nn.Module:
    """``model``, with key-value caches off, as a plan trains it: the model of every plain loop to compare with.

    A cache gives attention a copy of its keys with other strides, over which kernels may add in another order.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
    return model


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    """All trainable parameters."""
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def three_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for the rest, another rate for embeddings."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    embeddings = [p for name, p in named if "embed" in name or "wte" in name or "entry" in name]
    rest = [(name, p) for name, p in named if all(p is not e for e in embeddings)]
    return [
        {"params": [p for _, p in rest if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for _, p in rest if p.dim() <= 1], "weight_decay": 0.0, "betas": (0.8, 0.9)},
        {"params": embeddings, "lr": 3e-3},
    ]


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW with a rate at which every step shows in every bit."""
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)


@dataclass
class Case:
    """A model, its data, its optimizer, and what plain training makes of them."""

    build: Callable[[], nn.Module]
    batches: Sequence[Batch]
    groups: Groups = one_group
    has_loss: bool = True
    """Whether the model gives its own loss."""
    make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = field(default=adamw)
    has_masters: bool = True
    """Whether narrow parameters are stepped through float32 masters."""
    _plain: dict[tuple[int, float | None], PlainResult] = field(default_factory=dict)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The scalar that training minimises."""
        if self.has_loss:
            return model(**batch).loss
        return nn.functional.cross_entropy(model(batch["points"]), batch["classes"])

    @cached_property
    def workload(self) -> Workload:
        """The model, traced without times."""
        if self.has_loss:
            return trace(self.build(), self.batches[0], repeats=0)
        classes = self.batches[0]["classes"]
        return trace(
            self.build(),
            self.batches[0]["points"],
            loss=lambda output, _: nn.functional.cross_entropy(output, classes),
            repeats=0,
        )

    @cached_property
    def plain(self) -> PlainResult:
        """The loop that everybody writes, on a model of its own."""
        return self.plain_with(1, None)

    def steps(self, micro_batches: int) -> list[Sequence[Batch]]:
        """The batches of as many steps as there are batches, each on ``micro_batches`` of them."""
        row = [*self.batches] * micro_batches
        return [row[begin : begin + micro_batches] for begin in range(0, len(row), micro_batches)]

    def plain_with(self, micro_batches: int, max_norm: float | None) -> PlainResult:
        """The loop with gradients of several micro-batches added up, and their norm limited."""
        key = (micro_batches, max_norm)
        if key not in self._plain:
            self._plain[key] = self._train(micro_batches, max_norm)
        return self._plain[key]

    def _train(self, micro_batches: int, max_norm: float | None) -> PlainResult:
        model = uncached(self.build())
        masters = Masters(model if self.has_masters else nn.Module())
        optimizer = self.make_optimizer(masters.groups(self.groups(model)))
        losses, weights, norms = [], [snapshot(model)], []
        torch.manual_seed(SEED)
        for batches in self.steps(micro_batches):
            for batch in batches:
                loss = self.loss(model, batch)
                loss.backward()
                losses.append(loss.item())
            project_gradients(model)
            if max_norm is not None:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
            masters.take_gradients()
            optimizer.step()
            optimizer.zero_grad()
            masters.project(model)
            masters.give_weights()
            weights.append(snapshot(model))
        return PlainResult(losses, weights, norms)


class Masters:
    """Float32 weights for an optimizer to step in place of narrow parameters; wide parameters are their own."""

    def __init__(self, model: nn.Module) -> None:
        narrow = [p for p in model.parameters() if p.element_size() < 4]
        self._pairs = [(parameter, parameter.detach().float()) for parameter in narrow]

    def groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same groups, of masters."""
        master_of = {id(parameter): master for parameter, master in self._pairs}
        return [group | {"params": [master_of.get(id(p), p) for p in group["params"]]} for group in groups]

    def take_gradients(self, wide: Mapping[nn.Parameter, torch.Tensor] | None = None) -> None:
        """Widen the gradients; ``wide``: those of parameters that are added up in float32."""
        for parameter, master in self._pairs:
            own = (wide or {}).get(parameter, parameter.grad)
            master.grad = own.float() if own is not None else None
            parameter.grad = None

    def project(self, model: nn.Module) -> None:
        """Project what was stepped, where ``model`` has factors: masters, and parameters that are their own."""
        master_of = {id(parameter): master for parameter, master in self._pairs}
        for module in orthogonal_maps(model).values():
            for of, trained, axis in subspaces_of(module):
                project_(master_of.get(id(trained), trained.data), of, axis)

    def give_weights(self) -> None:
        """Round the masters to their parameters."""
        with torch.no_grad():
            for parameter, master in self._pairs:
                if parameter.requires_grad:
                    parameter.copy_(master)


@dataclass(frozen=True)
class PlainResult:
    """What plain training gave."""

    losses: list[float]
    weights: list[dict[str, torch.Tensor]]
    """The state of the model before the first step and after every step."""
    norms: list[float] = field(default_factory=list)
    """Of all gradients before they were limited, if they were."""


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def differences(model: nn.Module, expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of parameters and buffers that are not bit for bit as expected."""
    state = model.state_dict()
    assert state.keys() == expected.keys()
    return [name for name, tensor in state.items() if not torch.equal(tensor, expected[name])]


def _half_frozen_llama() -> nn.Module:
    return frozen(llama(), "model.embed_tokens", "model.layers.0.", "model.layers.1.", "model.layers.3.mlp")


def _narrow_blocks() -> nn.Module:
    """Blocks in bfloat16 between ends in float32, as mixed models have them."""
    model: Any = hand_written()
    for layer in model.stack:
        layer.up.to(torch.bfloat16).register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
        layer.up.register_forward_hook(lambda _, args, output: output.float())
    return model


def _run_twice() -> nn.Module:
    torch.manual_seed(SEED)
    return RunTwice(num_layers=3)


def _frozen_tail() -> nn.Module:
    return frozen(hand_written(), "stack.2", "stack.3.up", "exit")


@lru_cache
def cases(steps: int = STEPS) -> dict[str, Case]:
    """Everything that a plan must not change the result of, by name, with batches for so many steps."""
    tokens, points = token_batches(steps), point_batches(steps)
    return {
        "llama": Case(llama, tokens),
        "gpt2 with dropout, tied": Case(gpt2, tokens),
        "llama, tied": Case(lambda: llama(tie_word_embeddings=True, num_layers=3), tokens),
        "llama, frozen prologue and blocks": Case(_half_frozen_llama, tokens),
        "llama, groups": Case(llama, tokens, groups=three_groups),
        "gpt2, groups": Case(gpt2, tokens, groups=three_groups),
        "llama in bfloat16": Case(lambda: llama().to(torch.bfloat16), tokens, groups=three_groups),
        "hand-written, partly narrow": Case(_narrow_blocks, points, has_loss=False),
        "hand-written, unused parameters": Case(hand_written, points, has_loss=False),
        "hand-written, blocks run twice": Case(_run_twice, points, has_loss=False),
        "hand-written, frozen tail": Case(_frozen_tail, points, has_loss=False),
        "hand-written, batch statistics": Case(
            lambda: hand_written(has_statistics=True), points, has_loss=False, groups=three_groups
        ),
    }


def held(case: Case, batches: Sequence[Batch]) -> Iterator[Batch]:
    """Batches as a loop keeps them; what a loss beside the model reads of them counts as long as it is kept."""
    for batch in batches:
        yield batch if case.has_loss else {name: tensor.clone() for name, tensor in batch.items()}


def copy_of(model: nn.Module) -> nn.Module:
    """A model of its own with equal weights."""
    return copy.deepcopy(model)
