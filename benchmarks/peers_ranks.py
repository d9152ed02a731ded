"""Our contestants of several ranks in the peers' bench: a fixed plan in every mode, and the searched one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from peers_ours import MAKE_OPTIMIZER, Ours, guaranteed_bytes
from peers_subject import MODEL_NAME, make_batches, make_model

from protwin.runtime.devices.cpu_device import CpuDevice
from protwin.runtime.devices.machine import name_of_ranks
from protwin.runtime.ranks.rank_probe import probe_ranks
from protwin.runtime.tracing.tracing import trace
from protwin.runtime.training.carry_out import carry_out
from protwin.shared.basics.units import format_bytes
from protwin.shared.layout.layout import largest_block_bytes, layout_of
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.workload import Workload
from protwin.sim.searching.request import SearchRequest, Step
from protwin.sim.searching.search import search

_PROBE_S: Final = 14.0


def fixed_plans(workload: Workload, num_ranks: int) -> dict[str, Plan]:
    """A plan in every mode, with a chunk per block and nothing recomputed.

    Sharded, blocks are gathered for forward and again for backward, as FSDP2 does.
    """
    chunk_bytes = largest_block_bytes(workload)
    layout = layout_of(workload, chunk_bytes)
    num_chunks, fewest = len(layout.chunks), layout.min_buffers(0)

    def plan(parallel: ParallelMode, *, n_persist: int = 0, n_shard: int = 0, n_buffer: int = fewest + 1) -> Plan:
        return Plan(
            workload_id=workload.identity,
            chunk_bytes=chunk_bytes,
            n_persist=n_persist,
            n_shard=n_shard,
            n_buffer=n_buffer,
            prefetch_depth=1,
            n_checkpoint=0,
            parallel=parallel,
            num_ranks=num_ranks,
        )

    return {
        "ddp": plan(ParallelMode.DDP, n_persist=num_chunks, n_buffer=0),
        "replicated": plan(ParallelMode.REPLICATED),
        "sharded-on-hosts": plan(ParallelMode.SHARDED),
        "sharded-on-devices": plan(ParallelMode.SHARDED, n_shard=num_chunks),
    }


def make_plans(folder: Path, num_ranks: int) -> None:
    """To be called on all ranks: rank 0 writes the workload, the fixed plans and the searched one into ``folder``.

    The searched plan may be of any mode; its budget is what the plan sharded on devices may need.
    """
    hardware = probe_ranks(num_ranks, seconds=_PROBE_S, device=CpuDevice())
    batch = next(make_batches(dist.get_rank(), num_ranks))
    dist.barrier()
    # All at once: they share the machine when they train.
    traced = trace(make_model(), batch, name=MODEL_NAME, repeats=3)
    dist.barrier()
    if dist.get_rank() == 0:
        _write(folder, traced.model_copy(update={"measured_on": name_of_ranks(num_ranks)}), hardware, num_ranks)
    dist.barrier()


def _write(folder: Path, workload: Workload, hardware: Hardware, num_ranks: int) -> None:
    plans = fixed_plans(workload, num_ranks)
    request = SearchRequest(
        workload=workload,
        hardware=hardware,
        step=Step(num_ranks=num_ranks),
        device_budget_bytes=guaranteed_bytes(plans["sharded-on-devices"], workload),
    )
    plans["searched"] = search(request).plan
    folder.mkdir()
    workload.save(folder / "workload.json")
    for name, plan in plans.items():
        plan.save(folder / f"{name}.json")


class OurRank(Ours):
    """One of several ranks that carry a plan out."""

    def __init__(self, name: str, folder: Path, num_ranks: int) -> None:
        """Makes the plans if they are not there yet, together with the other ranks of the default group."""
        folder = folder.with_name(f"{folder.name}-of-{num_ranks}")
        is_there = torch.tensor(int(folder.exists()))
        dist.all_reduce(is_there, op=dist.ReduceOp.MIN)
        if not is_there:
            make_plans(folder, num_ranks)
        workload = Workload.load(folder / "workload.json")
        plan = Plan.load(folder / f"{name}.json")
        self._training = carry_out(make_model(), plan, workload, optimizer=MAKE_OPTIMIZER, device=CpuDevice())
        self.about = (
            f"parallel {plan.parallel}, n_persist {plan.n_persist}, n_host_stepped {plan.n_host_stepped}, n_shard "
            f"{plan.n_shard}, n_buffer {plan.n_buffer}, prefetch_depth {plan.prefetch_depth}, n_checkpoint "
            f"{plan.n_checkpoint}, chunks of {format_bytes(plan.chunk_bytes)}; needs at most "
            f"{format_bytes(guaranteed_bytes(plan, workload))} of device memory on every rank"
        )

    def close(self) -> None:
        """End the lanes, and leave the group."""
        super().close()
        dist.destroy_process_group()
