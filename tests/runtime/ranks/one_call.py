"""``protwin.train`` on a rank, beside the loop with DistributedDataParallel that it stands for."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import protwin
from protwin.calibration.one_call.streams import StreamShape, stream_of
from protwin.runtime import trace
from protwin.runtime.ranks.collective_probe import measure_collectives
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import ParallelMode, Plan
from tests.runtime.life_cycle import plan_for
from tests.runtime.models import SEED, differences, gpt2, snapshot, token_batches, uncached
from tests.runtime.ranks.beside_ddp import in_default_group
from tests.runtime.small_language import make_tokenizer

STEPS, RATE = 10, 1e-2


def factor(step: int) -> float:
    return 1 - step / 20


def batches_of(rank: int, num_ranks: int = 2) -> list[dict[str, torch.Tensor]]:
    """Ten steps of one micro-batch."""
    return token_batches(num_ranks * STEPS)[rank::num_ranks]


def with_ddp(rank: int, limit: float | None, *, wrong: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loop that everybody writes; ``wrong``: without the mean over ranks."""
    model = uncached(gpt2())
    wrapped = model if wrong else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, fused=True)
    scheduler = LambdaLR(optimizer, factor)
    losses = []
    torch.manual_seed(SEED + rank)
    for batch in batches_of(rank):
        loss = wrapped(**batch).loss
        loss.backward()
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses, snapshot(model)


def train(rank: int, model: nn.Module, limit: float | None, **options: Any) -> protwin.Trained:
    """The same in one call."""
    torch.manual_seed(SEED + rank)
    usual: dict[str, Any] = {
        "steps": STEPS,
        "max_gradient_norm": limit,
        "learning_rate": RATE,
        "optimizer_options": {"weight_decay": 0.1},
        "scheduler": partial(LambdaLR, lr_lambda=factor),
        "tell": None,
        "probe_s": 0.05,
    }
    with patch("protwin.runtime.ranks.rank_probe.measure_collectives", partial(measure_collectives, sizes=(2**12,))):
        return protwin.train(model, batches_of(rank), **usual | options)


def given(mode: ParallelMode, limit: float | None, **knobs: Any) -> dict[str, Any]:
    """A plan of two ranks with something of everything."""
    workload = trace(gpt2(), batches_of(0)[0], repeats=0)
    plan = plan_for(workload)
    if mode is ParallelMode.DDP:
        knobs["n_persist"] = len(layout_of(workload, plan.chunk_bytes).chunks)
    changes = {"parallel": mode, "num_ranks": 2, "max_gradient_norm": limit, "n_host_stepped": 0, **knobs}
    return {"plan": Plan.model_validate(plan.model_dump() | changes), "workload": workload}


@in_default_group
def ten_steps(rank: int, mode: str, limit: float | None) -> None:
    """Losses and weights of DDP to the bit, by a given plan, whose chunks move."""
    losses, weights = with_ddp(rank, limit)
    model = gpt2()
    found = train(rank, model, limit, **given(ParallelMode(mode), limit))
    assert list(found.losses) == losses
    assert differences(model, weights) == []
    assert found.plan.num_ranks == 2
    assert with_ddp(rank, limit, wrong=True)[0] != losses


@in_default_group
def searched_and_resumed(rank: int, folder: Path, limit: float | None) -> None:
    """Six steps by a searched plan, and the rest by another one, in other processes' place: DDP's bits."""
    losses, weights = with_ddp(rank, limit)
    first = train(rank, gpt2(), limit, steps=6, budget="250KiB", checkpoint=folder)
    assert first.plan.num_ranks == 2
    model = gpt2()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    knobs = {"n_checkpoint": 3 - first.plan.n_checkpoint}
    second = train(rank, model, limit, budget="400KiB", checkpoint=folder, resume=True, knobs=knobs)
    assert second.plan != first.plan
    assert [*first.losses, *second.losses] == losses
    assert differences(model, weights) == []


class Samples(Dataset[dict[str, torch.Tensor]]):
    """As many as fill three batches of two, and one more."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 300, (80,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


@in_default_group
def shared_data(rank: int, path: Path | None) -> None:
    """Ranks that share sequences take the same batches of a text, or of samples: those of one rank's plain loop."""
    text = {"sequence_length": 80, "tokenizer": make_tokenizer()}
    data, shape = (Samples(), {"batch_size": 2}) if path is None else (path, {"batch_size": 2, **text})
    batches = list(islice(stream_of(data, StreamShape(**shape)).batches(), STEPS))
    workload = trace(_small(), batches[0], repeats=0, sequence_ranks=2)
    layout = layout_of(workload, 20_000)
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=20_000,
        n_persist=1,
        n_buffer=layout.min_buffers(1),
        parallel=ParallelMode.SHARDED,
        num_ranks=2,
        sequence_ranks=2,
    )
    plain, losses = uncached(_small()), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-3)
    batch: Any
    for batch in batches:
        loss = plain(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model = _small()
    options: dict[str, Any] = {"learning_rate": 1e-3, "optimizer_options": {"eps": 1e-3, "weight_decay": 1e-2}}
    fixed: dict[str, Any] = {"steps": STEPS, "tell": None, "probe_s": 0.05, "plan": plan, "workload": workload}
    with patch("protwin.runtime.ranks.rank_probe.measure_collectives", partial(measure_collectives, sizes=(2**12,))):
        found = protwin.train(model, data, **shape, **options, **fixed)
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(losses), rtol=4e-6, atol=0)
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        if not value.is_meta:
            torch.testing.assert_close(value, expected[name], rtol=0, atol=4e-6 * float(expected[name].abs().max()))


def _small() -> nn.Module:
    torch.manual_seed(SEED)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=304, **shape))
