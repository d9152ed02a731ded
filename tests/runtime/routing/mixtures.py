"""Small mixtures of experts whose memory depends on routing, and routers that are skewed by chance."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from protwin.runtime import trace
from protwin.runtime.model.configurations import build_model
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload

WIDTH, VOCABULARY, TOKENS, BLOCKS = 32, 64, (2, 64), 2
_COMMON: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "experts_implementation": "eager",
}
_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"model_type": "olmoe", "intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 3},
}


class MaskedExperts(nn.Module):
    """A plain block: experts by boolean masks, or by a threshold of their scores."""

    def __init__(self, *, num_experts: int = 4, num_chosen: int | None = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, num_experts, bias=False)
        self.num_chosen = num_chosen
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(num_experts)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Its input with what the experts add."""
        rows = self.norm(hidden).reshape(-1, WIDTH)
        scores = self.gate(rows).sigmoid()
        if self.num_chosen is None:
            is_chosen = scores > 0.5
        else:
            chosen = scores.topk(self.num_chosen, dim=-1).indices
            is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        added = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            own = is_chosen[:, number]
            if own.any():
                added[own] += expert(rows[own]) * scores[own, number, None]
        return hidden + added.reshape(hidden.shape)


class PlainMixture(nn.Module):
    """Blocks of ``MaskedExperts`` between an embedding and a head."""

    def __init__(self, num_chosen: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MaskedExperts(num_chosen=num_chosen) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss."""
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return {"loss": nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def built(name: str) -> nn.Module:
    """A mixture: ``mixtral`` or ``olmoe`` with a loop over experts, ``masks``, or ``threshold``."""
    torch.manual_seed(0)
    if name in _CONFIGURATIONS:
        return build_model(_COMMON | _CONFIGURATIONS[name], name, torch.float32, device="cpu")
    return PlainMixture(2 if name == "masks" else None)


def skewed(name: str, skew: float, seed: int) -> nn.Module:
    """The mixture with routers that prefer some experts: 0 none of them, 100 the same ones for every token.

    All embeddings share a direction, along which routers see how much each expert is preferred.
    """
    model = built(name)
    chance = torch.Generator().manual_seed(seed)
    along = torch.nn.functional.normalize(torch.randn(WIDTH, generator=chance), dim=0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "embed" in parameter_name:
                parameter.add_(2 * along)
            elif "gate.weight" in parameter_name:
                preference = torch.randn(len(parameter), 1, generator=chance)
                # Of experts that pass a threshold each by itself, the worst case is that all pass.
                parameter.add_(skew * (preference.abs() if name == "threshold" else preference) * along)
    return model


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    """Random tokens."""
    tokens = torch.randint(VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


@lru_cache
def workload_of(name: str) -> Workload:
    """The mixture, traced without times, with a router that is not skewed."""
    return trace(built(name), batch_of(0), repeats=0)


def random_plan(workload: Workload, chance: random.Random) -> Plan:
    """Any residency, modes and micro-batches."""
    chunk_bytes = chance.choice((4_000, 20_000, 100_000))
    layout = layout_of(workload, chunk_bytes)
    n_persist = chance.randint(0, len(layout.chunks))
    n_swap = chance.randint(0, BLOCKS)
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=chunk_bytes,
        n_persist=n_persist,
        n_buffer=layout.min_buffers(n_persist) + chance.randint(0, 2),
        prefetch_depth=chance.randint(1, 3),
        n_swap=n_swap,
        n_checkpoint=chance.randint(0, BLOCKS - n_swap),
        micro_batches=chance.choice((1, 2)),
    )
