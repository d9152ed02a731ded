"""Two processes train adapters on long sequences in tiles, stop, and go on by another plan: a part of ``demo_all``.

``demo_all`` starts it on each of them.  It reads the model from a folder and leaves there the merged one, plans,
records and losses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from ...runtime.data.byte_text import byte_batches, python_reference
from ...runtime.devices.cpu_device import CpuDevice
from ...runtime.devices.ledger import MemoryLedger
from ...runtime.devices.process_settings import leave_a_core_for_lanes
from ...runtime.model.adapters import LowRankLinear, add_lora
from ...runtime.model.pretrained import no_progress_bar
from ...runtime.planning.planned import Planned, planned
from ...runtime.planning.request import PlanRequest
from ...runtime.timing.plain_loop import train_plainly
from ...runtime.tracing.tracing import trace
from ...runtime.training.carry_out import carry_out
from ...shared.basics.documents import write_atomically
from ...shared.layout.layout import layout_of
from ...shared.schema.plan import ParallelMode, Plan
from ...shared.schema.workload import Workload
from .demo import predictions_held

NUM_RANKS: Final = 2
_SEED: Final = 0
_MAKE_OPTIMIZER: Final = partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.0, fused=True)
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LongSize:
    """How large this part is."""

    sequence_length: int = 512
    """Of each rank, one a step."""
    num_tiles: int = 4
    """Of MLPs and of the loss."""
    lora_rank: int = 8
    steps: int = 12
    """Half of them by each plan."""
    budget_fracs: tuple[float, float] = (0.3, 0.5)
    """Of what plain training needs, on every rank: of the first plan, and of the second one."""
    probe_seconds: float = 1.0


def main() -> None:
    """Train as one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds the model, as base, and gets the rest")
    parser.add_argument("size", type=json.loads, help="fields of LongSize, as JSON")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        leave_a_core_for_lanes()
        run_long(given.folder, LongSize(**given.size))
    finally:
        dist.destroy_process_group()


def run_long(folder: Path, size: LongSize) -> None:
    """All of it, on both ranks of torch.distributed's default group; rank 0 writes."""
    batches = _batches(size)
    tiles = [size.num_tiles]
    model = _adapted(folder, size)
    workload = trace(model, batches[0], name="demo-llama, LoRA", repeats=2, mlp_tiles=tiles, loss_tiles=tiles)
    need_bytes = train_plainly(_adapted(folder, size), batches[:2], _MAKE_OPTIMIZER, ledger=MemoryLedger()).peak_bytes
    knobs = {"mlp_tiles": size.num_tiles, "loss_tiles": size.num_tiles}
    asked: dict[str, Any] = {"workload": workload, "knobs": knobs, "probe_s": size.probe_seconds}
    budgets = [int(frac * need_bytes) for frac in size.budget_fracs]
    first = planned(model, batches[0], PlanRequest(budget_bytes=budgets[0], modes=[ParallelMode.SHARDED], **asked))
    asked |= {"hardware": first.hardware, "modes": [ParallelMode.REPLICATED]}
    second = planned(model, batches[0], PlanRequest(budget_bytes=budgets[1], **asked))
    half = size.steps // 2
    done = _by_plan(model, first, batches[:half], folder)
    # As another process would: other adapters, until the checkpoint is read.
    model = _adapted(folder, size, seed=_SEED + 1)
    rest = _by_plan(model, second, batches[half:], folder, resumes=True)
    expected = _adapted(folder, size)
    whole = _by_plan(
        expected, None, batches, folder, resident=_resident(first.plan, first.workload), workload=first.workload
    )
    losses = [*done.losses, *rest.losses]
    same = losses == whole.losses and all(
        torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True)
    )
    of_ranks: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(of_ranks, (losses, whole.losses, same))
    if dist.get_rank() == 0:
        _write(folder, (first, second), (done, rest), of_ranks, {"needs_bytes": need_bytes, "budgets_bytes": budgets})
        _merge(model)
        with no_progress_bar():
            model.save_pretrained(folder / "merged")


def _batches(size: LongSize) -> list[Batch]:
    made = byte_batches(
        python_reference(),
        batch_size=1,
        sequence_length=size.sequence_length,
        num_batches=NUM_RANKS * size.steps,
        seed=_SEED,
    )
    return list(made)[dist.get_rank() :: NUM_RANKS]


def _adapted(folder: Path, size: LongSize, seed: int = _SEED) -> Any:
    torch.manual_seed(seed)
    with no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    add_lora(model, rank=size.lora_rank)
    return model.train()


@dataclass(frozen=True)
class _Done:
    """Steps by one plan."""

    losses: list[float]
    record: Any
    counts: dict[str, int]


def _by_plan(
    model: nn.Module,
    found: Planned | None,
    batches: Sequence[Batch],
    folder: Path,
    *,
    resumes: bool = False,
    resident: Plan | None = None,
    workload: Workload | None = None,
) -> _Done:
    """Steps by the plan of ``found`` within its budget, saved afterwards; or by ``resident`` without one."""
    plan, subject = (found.plan, found.workload) if found is not None else (resident, workload)
    assert subject is not None
    device = CpuDevice() if found is None else CpuDevice(found.device.budget_bytes)
    losses = []
    with carry_out(model, plan, subject, optimizer=_MAKE_OPTIMIZER, device=device) as training:
        if resumes:
            training.resume(folder / "checkpoint")
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            training.step()
            losses.append(loss.item())
        if found is not None and not resumes:
            training.save(folder / "checkpoint")
        record = None if found is None else training.record(hardware_name=found.hardware.name)
        counts = asdict(training.counts)
    return _Done(losses, record, counts)


def _resident(plan: Plan, workload: Workload) -> Plan:
    """A plan in the same tiles that has everything on every device and recomputes nothing."""
    return Plan(
        workload_id=plan.workload_id,
        chunk_bytes=plan.chunk_bytes,
        n_persist=len(layout_of(workload, plan.chunk_bytes).chunks),
        n_buffer=0,
        mlp_tiles=plan.mlp_tiles,
        loss_tiles=plan.loss_tiles,
        num_ranks=NUM_RANKS,
        parallel=ParallelMode.DDP,
    )


@torch.no_grad()
def _merge(model: Any) -> None:
    """Add what adapters learned to the maps that they lie beside, which take their places."""
    for path, module in list(model.named_modules()):
        if isinstance(module, LowRankLinear):
            module.weight.add_(module.lora_b @ module.lora_a, alpha=module.scale)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, module.base)


def _write(
    folder: Path,
    found: tuple[Planned, Planned],
    done: tuple[_Done, _Done],
    of_ranks: Sequence[tuple[list[float], list[float], bool]],
    sizes: Mapping[str, Any],
) -> None:
    found[0].workload.save(folder / "workload.json")
    described = []
    for number, (one, trained) in enumerate(zip(found, done, strict=True), 1):
        one.plan.save(folder / f"plan-{number}.json")
        one.prediction.save(folder / f"predicted-{number}.json")
        trained.record.save(folder / f"measured-{number}.json")
        held = predictions_held(one.prediction, trained.record)
        described.append({**held, "parallel": str(one.plan.parallel), **trained.counts})
    by_plans, in_one_go, same = zip(*of_ranks, strict=True)
    result = {
        **sizes,
        "parts": described,
        "losses": _means(by_plans),
        "losses_in_one_go": _means(in_one_go),
        "is_identical": all(same),
    }
    write_atomically(folder / "long.json", json.dumps(result, indent=1) + "\n")


def _means(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """Over ranks, of every step."""
    return [sum(step) / len(step) for step in zip(*of_ranks, strict=True)]


if __name__ == "__main__":
    main()
