"""Training in tiles on several ranks, in their processes, and what one process in plain PyTorch makes of all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn

from protwin.runtime import CpuDevice, carry_out
from protwin.runtime.tiles import mlp
from protwin.runtime.tiles.loss_function import _Sums
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.models import SEED, Batch, frozen, llama, snapshot, uncached
from tests.runtime.ranks.beside_ddp import in_default_group
from tests.runtime.tiles.random_tiles import weighted

NUM_RANKS, NUM_STEPS, LENGTH = 2, 2, 11
make_sgd = partial(torch.optim.SGD, lr=0.2, momentum=0.9, fused=True)
Trained = tuple[list[float], dict[str, torch.Tensor]]


def weighted_llama() -> nn.Module:
    model = llama(num_layers=2)
    model.loss_function = weighted
    return frozen(model, "model.layers.0.mlp.gate", "model.embed")


def mixtral() -> nn.Module:
    """A mixture of experts with a router's loss, partly frozen."""
    torch.manual_seed(SEED)
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=64,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    )
    return frozen(transformers.MixtralForCausalLM(config), "model.layers.0.self_attn", "model.norm")


BUILDERS: dict[str, Callable[[], nn.Module]] = {"llama": weighted_llama, "mixtral": mixtral}


def batches_of(rank: int, micro_batches: int) -> list[Sequence[Batch]]:
    """Of every step: three samples each, other tokens on each rank, and other labels that do not count."""
    generator = torch.Generator().manual_seed(100 + rank)
    steps: list[Sequence[Batch]] = []
    for _ in range(NUM_STEPS):
        of_step: list[Batch] = []
        for _ in range(micro_batches):
            tokens = torch.randint(3, 64, (3, LENGTH), generator=generator)
            labels = tokens.clone()
            labels[rank, : 4 + rank] = -100
            of_step.append({"input_ids": tokens, "labels": labels if rank else tokens.clone()})
        steps.append(of_step)
    return steps


def plain(name: str, micro_batches: int, max_norm: float | None) -> list[Trained]:
    """Losses of each rank, and the weights that all have in the end, by whole tensors in one process."""
    model = uncached(BUILDERS[name]())
    optimizer = make_sgd([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses: list[list[float]] = [[] for _ in range(NUM_RANKS)]
    batches = [batches_of(rank, micro_batches) for rank in range(NUM_RANKS)]
    for step in range(NUM_STEPS):
        for rank in range(NUM_RANKS):
            for batch in batches[rank][step]:
                loss = model(**batch).loss
                (loss / NUM_RANKS).backward()
                losses[rank].append(loss.item())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return [(of_rank, snapshot(model)) for of_rank in losses]


def _shared_by_tiles() -> AbstractContextManager[Any]:
    """Wrong: what a tile adds to a gradient is divided by the number of tiles."""
    own = mlp._Backward.run

    def run(backward: Any, gradients: Any) -> Any:
        found, of_inputs = own(backward, gradients), len(backward._inputs)
        num_tiles = backward._run.tiled.num_tiles
        return [g if g is None or place < of_inputs else g.div_(num_tiles) for place, g in enumerate(found)]

    return mock.patch.object(mlp._Backward, "run", run)


def _shared_loss() -> AbstractContextManager[Any]:
    """Wrong: the same of the head's."""
    own = _Sums.gradients.fget  # type: ignore[attr-defined]
    assert own is not None
    return mock.patch.object(
        _Sums, "gradients", property(lambda sums: [None if g is None else g.div_(3) for g in own(sums)])
    )


WRONG = {"": nullcontext, "mlp": _shared_by_tiles, "loss": _shared_loss}


@in_default_group
def trained(rank: int, name: str, plan: Plan, workload: Workload, wrong: str) -> tuple[Trained, dict[str, int], bool]:
    """Losses and weights, how often each gradient became final, and whether the memory was that of the guarantee."""
    model, events = BUILDERS[name](), dict.fromkeys((n for n, _ in BUILDERS[name]().named_parameters()), 0)
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, key=key: events.update({key: events[key] + 1}))
    most_bytes = guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes
    losses = []
    with WRONG[wrong](), carry_out(model, plan, workload, optimizer=make_sgd, device=CpuDevice(most_bytes)) as training:
        for batches in batches_of(rank, plan.micro_batches):
            for batch in batches:
                loss = model(**batch).loss
                loss.backward()
                losses.append(loss.item())
                del loss
            training.step()
        fits = training.peak_device_bytes <= most_bytes
    return (losses, snapshot(model)), events, fits
