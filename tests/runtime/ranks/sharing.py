"""Training by plans whose ranks share sequences, in the processes of the ranks, beside one rank with whole batches."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, Final
from unittest import mock

import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

import protwin.runtime
from protwin.runtime import CpuDevice, carry_out
from protwin.runtime.ranks.collectives import Collectives
from protwin.runtime.ranks.sequence_peers import SequencePeers
from protwin.runtime.recording.metering import METERED_ITERATIONS
from protwin.runtime.sequences import attention, exchange, sharing
from protwin.shared.basics.errors import ProtwinError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.accounts import error_frac
from tests.runtime.eager_lanes import WATCHED, eager_peak, excesses, settled_lanes, watched_stretches
from tests.runtime.ranks.beside_ddp import in_default_group

SEED: Final = 5
STEPS: Final = 3
LEVEL_STEPS: Final = METERED_ITERATIONS + 1
"""In the last one claims stand for operations."""
TOKENS: Final = 48
_SHAPE: Final = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
Batch = dict[str, torch.Tensor]


def build(name: str) -> nn.Module:
    torch.manual_seed(SEED)
    if name == "sliding windows":
        config = Gemma2Config(**_SHAPE, head_dim=8, sliding_window=9, attn_implementation="eager", pad_token_id=None)
        return Gemma2ForCausalLM(config)
    return LlamaForCausalLM(LlamaConfig(**_SHAPE, attn_implementation="eager" if name == "eager" else "sdpa"))


def batches(name: str, count: int = 12) -> list[Batch]:
    """Many labels are ignored, in other numbers on every stretch of a sequence."""
    generator = torch.Generator().manual_seed(SEED)
    found = []
    for number in range(count):
        tokens = torch.randint(0, 96, (2, TOKENS), generator=generator)
        labels = tokens.clone()
        labels[0, 5 : 17 + number] = -100
        labels[1, 40:] = -100
        batch = {"input_ids": tokens, "labels": labels}
        if name == "padded":
            mask = torch.ones_like(tokens)
            mask[0, 41:], mask[1, :3] = 0, 0
            batch["attention_mask"] = mask
        if name == "packed":
            positions = torch.cat([torch.arange(length) for length in (7, 30, 11)])
            batch["position_ids"] = positions.expand(2, -1)
        found.append(batch)
    return found


@cache
def workload(name: str) -> Workload:
    tiles: dict[str, Any] = {"mlp_tiles": (2,), "loss_tiles": (3,)} if name == "tiled" else {}
    ranks = {"llama": (2, 4), "sliding windows": (4,), "padded": (2, 4)}.get(name, (2,))
    return protwin.runtime.trace(build(name), batches(name)[0], repeats=0, sequence_ranks=ranks, **tiles)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


def optimizer_of(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-3, fused=True)


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    weights: dict[str, torch.Tensor]


@cache
def plainly(name: str, num_groups: int, micro_batches: int, max_norm: float | None, dtype: torch.dtype) -> Trained:
    """One rank with whole batches, the mean over those of a step."""
    model: Any = build(name).to(dtype)
    model.config.use_cache = False
    optimizer = optimizer_of(groups(model))
    losses, of_step = [], num_groups * micro_batches
    for step in range(STEPS):
        for batch in batches(name)[step * of_step : (step + 1) * of_step]:
            loss = model(**batch).loss
            (loss / num_groups).backward()
            losses.append(loss.item())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, {key: value.detach().clone() for key, value in model.state_dict().items()})


@in_default_group
def train(rank: int, name: str, plan: Plan, workload: Workload, wrong: str | None = None) -> Trained:
    """Losses and weights of a rank, on a device of just the memory that is guaranteed to be enough."""
    model, group = build(name), rank // plan.sequence_ranks
    num_groups = plan.num_ranks // plan.sequence_ranks
    budget = guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes
    losses = []
    with (
        wrongly(wrong),
        carry_out(
            model,
            plan,
            workload,
            optimizer=optimizer_of,
            parameter_groups=groups(model),
            device=CpuDevice(budget_bytes=budget),
        ) as training,
    ):
        of_step = num_groups * plan.micro_batches
        for step in range(STEPS):
            own = batches(name)[step * of_step : (step + 1) * of_step][group::num_groups]
            for batch in own:
                loss = model(**batch).loss
                loss.backward()
                losses.append(loss.item())
                del loss
            training.step()
    state = {key: value.detach().clone() for key, value in model.state_dict().items() if not value.is_meta}
    return Trained(losses, state)


def short() -> tuple[nn.Module, Batch]:
    """Of few tokens: gradients take more memory than activations."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**_SHAPE)).to(torch.bfloat16)
    return model, {key: value[:, :16] for key, value in batches("llama")[0].items()}


@in_default_group
def peaks_beside_late_sums(rank: int, plan: Plan, workload: Workload) -> tuple[int, int]:
    """The peak of ``short`` where gradients are added up late, and the guaranteed one."""
    (model, batch), device, scatter = short(), CpuDevice(), Collectives.scatter

    def late(self: Collectives, part: torch.Tensor, whole: torch.Tensor) -> None:
        time.sleep(0.05)
        scatter(self, part, whole)

    with mock.patch.object(Collectives, "scatter", late), carry_out(model, plan, workload, device=device) as training:
        for _ in range(2):
            for _ in range(plan.micro_batches):
                model(**batch).loss.backward()
            training.step()
    return training.peak_device_bytes, guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes


@in_default_group
def peak_error(rank: int, name: str, plan: Plan, workload: Workload) -> float:
    """How far the peak with settled lanes is outside the schedule's account, as a part of it."""
    model, device = build(name), CpuDevice()
    with carry_out(
        model, plan, workload, optimizer=optimizer_of, parameter_groups=groups(model), device=device
    ) as training:
        with settled_lanes(training):
            for batch in batches(name)[:WATCHED]:
                model(**batch).loss.backward()
                training.step()
        peak_bytes = training.peak_device_bytes
    return error_frac(peak_bytes, eager_peak(compile_schedule(plan, workload)))


@in_default_group
def excesses_of(rank: int, name: str, plan: Plan, workload: Workload) -> dict[str, int]:
    """By compute task, the bytes that it held beyond its account, with settled lanes."""
    model, device, given = build(name), CpuDevice(), batches(name)
    with (
        carry_out(
            model, plan, workload, optimizer=optimizer_of, parameter_groups=groups(model), device=device
        ) as training,
        watched_stretches(training, device.ledger) as found,
    ):
        for _ in range(LEVEL_STEPS):
            for batch in given[: plan.micro_batches]:
                model(**batch).loss.backward()
                del batch
            training.step()
    return excesses(compile_schedule(plan, workload), found, LEVEL_STEPS)


# -- wrong variants --------------------------------------------------------------------------------------------------


def _cut_before_shift(labels: torch.Tensor) -> torch.Tensor:
    """Each rank's own last token learns nothing."""
    own = sharing_ranks()
    return torch.cat([_SHIFTED(part) for part in labels.chunk(own, dim=1)], dim=1)


_SHIFTED = sharing.shifted_labels
_SCATTER = exchange._scatter_tokens


def sharing_ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


def _first_replica(peers: Any, tensors: Any, num_heads: Any) -> Any:
    """Of heads that several ranks have, one gradient counts."""
    ranks = peers.num_ranks
    found = []
    for tensor, total in zip(tensors, num_heads, strict=True):
        (whole,) = _SCATTER(peers, [tensor], [tensor.shape[1] * ranks])
        found.append(whole[:, :: whole.shape[1] // total].contiguous())
    return found


class _LocalMeans(sharing._State):
    """Each rank's loss is the mean over its own tokens."""

    @contextmanager
    def _loss_of(self, labels: torch.Tensor, counted: Any) -> Iterator[None]:
        with super()._loss_of(labels, (labels != -100).sum()):
            yield


class _OwnPositions(sharing._State):
    def _own(self, *args: Any) -> dict[str, Any]:
        own = super()._own(*args)
        return {**own, "position_ids": own["position_ids"] - own["position_ids"][:, :1]}


class _OwnMask(attention.SharedAttention):
    """No mask: padding of the row is seen."""

    def run(self, inner: Any, module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        return super().run(inner, module, q, k, v, None, **kwargs)


@contextmanager
def wrongly(how: str | None) -> Iterator[None]:
    patches: dict[str, Any] = {
        "labels cut before the shift": (sharing, "shifted_labels", _cut_before_shift),
        "means of means": (sharing, "_State", _LocalMeans),
        "positions from 0": (sharing, "_State", _OwnPositions),
        "one gradient of replicas": (exchange, "_scatter_tokens", _first_replica),
        "no mask of padding": (sharing, "SharedAttention", _OwnMask),
    }
    if how is None:
        yield
        return
    with mock.patch.object(*patches[how]):
        yield


def differ(found: Trained, expected: Trained) -> float:
    """The largest difference of a weight, as a part of the largest weight of its tensor."""
    return max(
        float((value.double() - expected.weights[key].double()).abs().max() / expected.weights[key].abs().max())
        for key, value in found.weights.items()
    )


@in_default_group
def recorded(rank: int, name: str, plan: Plan, workload: Workload) -> tuple[Record, float]:
    """The Record, and the mean seconds of a typical iteration that exchanges took by another clock."""
    model, seconds = build(name), [0.0]
    exchange_all = SequencePeers.exchange

    def timed(self: SequencePeers, *args: Any) -> None:
        since_s = time.perf_counter()
        exchange_all(self, *args)
        seconds[-1] += time.perf_counter() - since_s

    with (
        mock.patch.object(SequencePeers, "exchange", timed),
        carry_out(model, plan, workload, optimizer=optimizer_of, parameter_groups=groups(model)) as training,
    ):
        for batch in batches(name, 16):
            model(**batch).loss.backward()
            training.step()
            seconds.append(0.0)
        return training.record(), statistics.fmean(seconds[3:-1])


@in_default_group
def trouble(rank: int, name: str, plan: Plan, workload: Workload, moment: int) -> tuple[str, float]:
    """Rank 1 fails when it comes to its exchange of that number: what this rank is told, and after how many seconds."""
    model, calls = build(name), count()
    exchange_all = SequencePeers.exchange

    def failing(self: SequencePeers, *args: Any) -> None:
        if next(calls) == moment and rank == 1:
            raise ValueError("trouble on the way")
        exchange_all(self, *args)

    since_s = time.perf_counter()
    try:
        with (
            mock.patch.object(SequencePeers, "exchange", failing),
            carry_out(model, plan, workload, optimizer=optimizer_of, parameter_groups=groups(model)) as training,
        ):
            for batch in batches(name):
                model(**batch).loss.backward()
                training.step()
    except (ValueError, ProtwinError) as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - since_s
    return "", time.perf_counter() - since_s


@in_default_group
def with_others(rank: int, name: str, plan: Plan, workload: Workload, changed: str) -> None:
    """The last rank has another of the second step's batches, by one number of ``changed``, or by its length."""
    model = build(name)
    with carry_out(model, plan, workload, optimizer=optimizer_of, parameter_groups=groups(model)) as training:
        for step, batch in enumerate(batches(name)[:3]):
            given = dict(batch)
            if step == 1 and rank == plan.num_ranks - 1:
                if changed == "length":
                    given = {key: value[:, 2:] for key, value in batch.items()}
                else:
                    given[changed] = batch[changed].clone()
                    given[changed][0, 3:5] = batch[changed][0, 3:5].flip(0)
            model(**given).loss.backward()
            training.step()


@in_default_group
def evaluated(rank: int, name: str, plan: Plan, workload: Workload) -> tuple[list[float], list[float]]:
    """Losses in an evaluation between two steps, and those of one rank with the same weights afterwards."""
    model = build(name)
    given = batches(name)
    with carry_out(model, plan, workload, optimizer=optimizer_of, parameter_groups=groups(model)) as training:
        for batch in given[:2]:
            model(**batch).loss.backward()
            training.step()
        with training.evaluation():
            found = [model(**batch).loss.item() for batch in given[2:5]]
    with torch.no_grad():
        return found, [model(**batch).loss.item() for batch in given[2:5]]
