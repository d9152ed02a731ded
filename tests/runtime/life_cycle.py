"""What tests of a training's beginning and end share: a plan with something of everything, and what is ordinary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from protwin.runtime import Training, carry_out
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from tests.runtime.models import Case
from tests.runtime.watchdog import lanes_alive

CHUNK_BYTES = 9_000


def hooks_of(model: nn.Module) -> list[list[Any]]:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [list(getattr(module, kind).values()) for module in model.modules() for kind in kinds]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor | np.ndarray):
        return bool((first == second).all())
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def plan_for(workload: Workload, *, n_persist: int = 2, more_buffers: int = 1) -> Plan:
    """Something of everything: persistent and offloaded chunks, kept and checkpointed blocks."""
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=CHUNK_BYTES)
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=n_persist,
        n_buffer=layout.min_buffers(n_persist) + more_buffers,
        prefetch_depth=2,
        n_checkpoint=2,
    )


def start(case: Case, model: nn.Module, **settings: Any) -> Training:
    return carry_out(model, plan_for(case.workload), case.workload, **({"optimizer": case.make_optimizer} | settings))


def train(case: Case, model: nn.Module, training: Training, steps: int | None = None) -> list[float]:
    losses = []
    for batch in case.batches[:steps]:
        loss = case.loss(model, batch)
        loss.backward()
        training.step()
        losses.append(loss.item())
    return losses


def ordinary_facts(model: nn.Module) -> dict[str, Any]:
    return {
        "parameters": [(name, id(p), p.requires_grad, p.shape, p.dtype) for name, p in model.named_parameters()],
        "hooks": hooks_of(model),
        "state hooks": [
            (list(m._state_dict_pre_hooks.values()), list(m._load_state_dict_pre_hooks.values()))
            for m in model.modules()
        ],
        "gradient hooks": [list((p._post_accumulate_grad_hooks or {}).values()) for p in model.parameters()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "flags": [module.training for module in model.modules()],
        "use_cache": model.config.use_cache,  # type: ignore[union-attr]
        "threads": torch.get_num_threads(),
    }


def check_ordinary(model: nn.Module, facts: dict[str, Any]) -> None:
    """The model is as it was but for its weights, and nothing of the runtime goes on."""
    after = ordinary_facts(model)
    assert [name for name in facts if not same(facts[name], after[name])] == []
    assert lanes_alive() == []
    assert _get_current_dispatch_mode_stack() == []
    assert all(p.grad is None for p in model.parameters())
    storages = [p.untyped_storage() for p in model.parameters()]
    assert len({storage._cdata for storage in storages}) == len(storages)
    assert [s.nbytes() for s in storages] == [p.numel() * p.element_size() for p in model.parameters()]


def blocks_between(case: Case, model: nn.Module, step: int) -> set[int]:
    """For each parameter the step that it is at, which must be ``step`` or the next one, bit for bit."""
    before, after = case.plain.weights[step], case.plain.weights[step + 1]
    found = set()
    for name, parameter in model.state_dict().items():
        if torch.equal(parameter, before[name]):
            found.add(step)
        elif torch.equal(parameter, after[name]):
            found.add(step + 1)
        else:
            raise AssertionError(f"{name} is at no step")
    return found
