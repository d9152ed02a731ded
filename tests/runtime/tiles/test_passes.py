"""Passes over tiles that do the same run seldom in a trace without values, which sees what it sees where all run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.nn import functional

from protwin.runtime import trace
from protwin.runtime.tiles import mlp
from protwin.runtime.tiles.passes import in_passes
from protwin.runtime.tracing import fake_subject
from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.schema.training_options import LoraOptions, TrainingOptions
from protwin.shared.schema.workload import Workload
from tests.runtime.tiles.small_families import SMALL

T5 = {"model_type": "t5", "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 1, "vocab_size": 96}
KINDS: Final[dict[str, dict[str, Any]]] = {
    "llama": SMALL | {"model_type": "llama"},
    "gemma2": SMALL | {"model_type": "gemma2", "sliding_window": 16, "max_position_embeddings": 4096},
    "mixtral": SMALL | {"model_type": "mixtral", "output_router_logits": True, "sliding_window": None},
    "t5": T5 | {"decoder_start_token_id": 0, "dropout_rate": 0.1},
}


def with_all(monkeypatch: pytest.MonkeyPatch, traced: Callable[[], Workload]) -> Workload:
    """What ``traced`` gives where every pass runs."""
    with monkeypatch.context() as patched:
        patched.setattr(fake_subject, "passes_spared", nullcontext)
        return traced()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_sees_what_it_sees_where_all_passes_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of two lengths, of one of which there is one alone."""
    options = TrainingOptions(lora=LoraOptions(rank=2, dropout=0.1)) if kind == "llama" else TrainingOptions()

    def traced() -> Workload:
        return workload_of_configuration(
            KINDS[kind],
            name=kind,
            batch_size=3,
            sequence_length=21,
            options=options,
            mlp_tiles=(10,),
            loss_tiles=(8,),
        )

    assert traced() == with_all(monkeypatch, traced)


class Block(nn.Module):
    """One whose MLP does something else in every other pass, if ``is_changing``."""

    def __init__(self, *, is_changing: bool) -> None:
        super().__init__()
        self.mlp = _Mlp(is_changing=is_changing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class _Mlp(nn.Module):
    def __init__(self, *, is_changing: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.is_changing, self.count = is_changing, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        hidden = functional.silu(self.up(x))
        return self.down(hidden.clone() if self.is_changing and self.count % 2 else hidden)


class Model(nn.Module):
    """A model whose loss is a mean of what tokens lose: its tiles are joined, and all are needed."""

    def __init__(self, *, is_changing: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Block(is_changing=is_changing)])

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").mean()


@pytest.mark.parametrize(("is_changing", "num_tiles", "num_run"), [(False, 8, 4), (False, 13, 5), (True, 8, 8)])
def test_few_passes_run_and_all_that_differ(
    is_changing: bool, num_tiles: int, num_run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of passes of one length run the loop's first, two that are alike, and the last one."""
    ran: list[int] = []

    def heard(tiles: Sequence[slice]) -> Iterator[slice]:
        ran.append(0)
        for tile in in_passes(tiles):
            ran[-1] += 1
            yield tile

    def traced() -> Workload:
        tokens = torch.empty((4, 16), dtype=torch.long, device="meta")
        model = Model(is_changing=is_changing).to("meta")
        return trace(
            model,
            {"input_ids": tokens, "labels": tokens},
            mlp_tiles=num_tiles,
            mlp_modules="*.mlp",
            loss_tiles=num_tiles,
        )

    monkeypatch.setattr(mlp, "in_passes", heard)
    found = traced()
    assert set(ran[1:]) == {num_run}, ran  # behind the trial in three tiles
    assert found == with_all(monkeypatch, traced)
