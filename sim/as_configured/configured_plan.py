"""The plan here that does what a run of another tool does.

[Note: Runs as plans]
A unit of FSDP is a block, so that every block is a chunk ([Note: Other systems as plans] in
``sim/searching/baselines.py``).  What ranks have in parts decides the rest:

| in parts | on devices | optimizer on the host | all on the host |
| --- | --- | --- | --- |
| nothing | DDP, all chunks persistent | host-stepped on one rank | offloaded on one rank |
| optimizer state or gradients | sharded, a place for every chunk | offloaded parts, a place for every chunk | - |
| parameters | sharded, places for a window | offloaded parts, places for a window | the same |

With a place for every chunk nothing has to be gathered twice, so that a chunk is gathered once per step, as ZeRO-1 and
ZeRO-2 gather what they have stepped.  Gradients are reduced and scattered, as ZeRO-2 has it.  DeepSpeed's runtime
profiles say what is otherwise there: ZeRO-1 keeps gradients whole until the step, parts stay on devices whose hosts
step them, and nothing overlaps with a step; of others that is told apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from ...shared.basics.errors import PlanError
from ...shared.basics.units import format_bytes
from ...shared.catalogue.models import hidden_size, load_model_configuration
from ...shared.foreign.asked_run import Checkpointing, Place, Split, Tool
from ...shared.layout.layout import Layout, largest_block_bytes, largest_block_elements, layout_of
from ...shared.methods.runtime_profile import OF_FLAT_PARAMETERS, Runtime, RuntimeProfile
from ...shared.optimizers.state import master_bytes
from ...shared.schema.optimizer import HostGradients
from ...shared.schema.plan import ParallelMode, Plan
from ...shared.schema.workload import DType, Workload
from ...shared.workloads.source import is_saved_workload
from ..searching.baselines import NORM_LIMIT
from .question import Settled

_OF_ONE_RANK: Final = (
    Runtime.DEEPSPEED_ZERO1,
    Runtime.DEEPSPEED_ZERO2,
    Runtime.DEEPSPEED_ZERO3,
    Runtime.DEEPSPEED_OFFLOAD,
)
"""They copy, wait and step otherwise on one rank too."""
_EVERY_SECOND: Final = 2
"""``Plan.product_stride`` of a run that keeps every second product."""


@dataclass(frozen=True)
class ConfiguredPlan:
    """A plan that does what the run does, and in what it differs."""

    plan: Plan
    differences: tuple[str, ...]
    runtime: RuntimeProfile
    """Whose copies around collectives the prediction has."""
    masters_bytes: int = 0
    """Of float32 masters on every device, which the plan has and the run has not."""
    other_plans: tuple[tuple[str, Plan], ...] = ()
    """Ends of what the run may be, with words, where a plan has no choice as fine."""
    notes: tuple[str, ...] = ()
    """What was taken in the place of what the file leaves to others."""


def configured_plan(settled: Settled, workload: Workload, tool: Tool) -> ConfiguredPlan:
    """The plan of the run.  Raises PlanError, which names the setting, if there is none."""
    notes: list[str] = []
    differences: list[str] = []
    settled = _filled_in(settled, notes, differences)
    run = settled.run
    layout = layout_of(workload, largest_block_bytes(workload))
    knobs = _residency(settled, workload, layout, differences)
    moves = run.parameters_on is not Place.DEVICE or run.optimizer_on is not Place.DEVICE
    limit = run.max_gradient_norm or None
    if limit is None and moves:
        limit = NORM_LIMIT
        differences.append("the host's steps wait for the last gradient there, as for a limit of the gradients' norm.")
    checkpointing, others = _checkpointed(settled, workload, differences)
    fields: dict[str, Any] = {
        "workload_id": workload.identity,
        "method": workload.method,
        "chunk_bytes": layout.chunk_bytes,
        "micro_batches": settled.micro_batches,
        "max_gradient_norm": limit,
        "optimizer": settled.optimizer,
        "num_ranks": settled.num_ranks,
        **checkpointing,
        "mlp_tiles": settled.mlp_tiles,
        "loss_tiles": settled.loss_tiles,
        **knobs,
    }
    if moves and tool is Tool.DEEPSPEED and _has_narrow(workload):
        fields["host_gradients"] = HostGradients.FLOAT32
    plan = Plan.model_validate(fields)
    other_plans = tuple((words, plan.model_copy(update={"n_checkpoint": number})) for words, number in others)
    masters_bytes = _masters_bytes(settled, workload)
    if settled.steps_own:
        more = f", {format_bytes(masters_bytes)} of each device" if masters_bytes else ""
        differences.append(
            f"{settled.optimizer.words} steps float32 masters here{more}, and bfloat16 weights themselves there."
        )
    return ConfiguredPlan(
        plan, tuple(differences), _runtime(settled), masters_bytes, other_plans=other_plans, notes=tuple(notes)
    )


def _masters_bytes(settled: Settled, workload: Workload) -> int:
    """Bytes of masters on each device that the run has not; 0 where the hosts have them."""
    run = settled.run
    if not settled.steps_own or run.optimizer_on is not Place.DEVICE:
        return 0
    trained = (one for one in workload.parameters if one.trainable)
    whole = sum(one.num_elements * master_bytes(one.dtype, settled.optimizer) for one in trained)
    return whole // settled.num_ranks if run.split not in (None, Split.NOTHING) else whole


def _filled_in(settled: Settled, notes: list[str], differences: list[str]) -> Settled:
    """``settled`` with the numbers that transformers fills in from the model's hidden size."""
    run = settled.run
    has_buckets = run.bucket_follows_model and _runtime(settled).runtime in _OF_ONE_RANK
    is_ahead = run.prefetch_follows_model and (settled.num_ranks > 1 or run.parameters_on is not Place.DEVICE)
    if not has_buckets and not is_ahead:
        return settled
    keys = ["reduce_bucket_size"] * has_buckets + ["stage3_prefetch_bucket_size"] * is_ahead
    size = None if is_saved_workload(settled.model) else hidden_size(load_model_configuration(settled.model).config)
    if size is None:
        usual = {"reduce_bucket_size": "5e8", "stage3_prefetch_bucket_size": "5e7"}
        told = " and ".join(f"{key} {usual[key]}" for key in keys)
        differences.append(
            f"sizes that are filled in from the model's hidden size, which its configuration does not say, are here "
            f"DeepSpeed's own: {told}."
        )
        return settled
    found = {"reduce_bucket_size": size**2, "stage3_prefetch_bucket_size": int(0.9 * size * size)}
    told = " and ".join(f"{key} {found[key]:,}" for key in keys)
    notes.append(f'{told} for "auto": of the hidden size {size:,}, as transformers fills them in.')
    changes: dict[str, int] = {}
    if has_buckets:
        changes["bucket_scalars"] = found["reduce_bucket_size"]
    if is_ahead:
        changes["prefetched_parameters"] = found["stage3_prefetch_bucket_size"]
    return replace(settled, run=run.model_copy(update=changes))


def _runtime(settled: Settled) -> RuntimeProfile:
    """Who carries the plan out, as far as it is known what that copies."""
    run, is_whole = settled.run, settled.run.recomputes_whole
    if settled.num_ranks > 1 and run.split in (None, Split.NOTHING):
        return RuntimeProfile(Runtime.DDP, recomputes_whole=is_whole)
    uses_disk = Place.DISK in (run.parameters_on, run.optimizer_on)
    knows_one_rank = run.runtime in _OF_ONE_RANK and not uses_disk
    if run.runtime is None or (settled.num_ranks == 1 and not knows_one_rank):
        return RuntimeProfile(recomputes_whole=is_whole)  # of one rank, nothing is gathered or reduced
    return RuntimeProfile(
        run.runtime,
        run.reduce_dtype,
        recomputes_whole=is_whole,
        holds_inputs=is_whole and run.frozen_apart and run.lora is not None and run.runtime in OF_FLAT_PARAMETERS,
        bucket_scalars=run.bucket_scalars,
        has_two_buckets=run.has_two_buckets,
    )


def _has_narrow(workload: Workload) -> bool:
    return any(parameter.trainable and parameter.dtype is not DType.FLOAT32 for parameter in workload.parameters)


def _residency(settled: Settled, workload: Workload, layout: Layout, differences: list[str]) -> dict[str, Any]:
    """Where chunks lie and what ranks do together."""
    run, num_ranks, num_chunks = settled.run, settled.num_ranks, len(layout.chunks)
    split = run.split or Split.NOTHING
    is_stepped_on_host = run.optimizer_on is not Place.DEVICE
    is_on_disk = Place.DISK in (run.parameters_on, run.optimizer_on)
    if is_on_disk and num_ranks > 1:
        raise PlanError(
            f"the run has {run.optimizer_on if run.optimizer_on is Place.DISK else run.parameters_on} (NVMe) in "
            f"{num_ranks} ranks, but plans of one rank alone have chunks on a disk. Ask with --ranks 1, or about the "
            f"host's memory in its place."
        )
    if num_ranks == 1:
        if run.parameters_on is Place.DEVICE and is_stepped_on_host and not is_on_disk:
            return {"n_persist": 0, "n_host_stepped": num_chunks, "n_buffer": 0}
        if run.parameters_on is Place.DEVICE and not is_stepped_on_host:
            return {"n_persist": num_chunks, "n_buffer": 0}
        return {"n_persist": 0, **_window(settled, workload, layout), **_disk(settled, num_chunks)}
    if split is Split.NOTHING:
        if is_stepped_on_host or run.parameters_on is not Place.DEVICE:
            raise PlanError(
                "the run has optimizer state on the hosts, whole on every rank, which no plan of several ranks in mode "
                "ddp has. Split it (ZeRO stage 1, 2 or 3)."
            )
        return {"parallel": ParallelMode.DDP, "n_persist": num_chunks, "n_buffer": 0}
    knobs: dict[str, Any] = {"parallel": ParallelMode.SHARDED, "n_persist": 0, "shard_ranks": _group(settled)}
    knobs["n_shard"] = 0 if is_stepped_on_host or run.parameters_on is not Place.DEVICE else num_chunks
    if split is Split.PARAMETERS:
        knobs |= _window(settled, workload, layout)
        keeps_parts = run.runtime is Runtime.DEEPSPEED_OFFLOAD
        if is_stepped_on_host and run.parameters_on is Place.DEVICE and not keeps_parts:
            part = sum(p.size_bytes for p in workload.parameters) // num_ranks
            differences.append(
                f"each rank's part of the parameters stays on its device there, {format_bytes(part)} more; here it "
                f"lies on the host, and is copied for each gather."
            )
    else:
        knobs |= {"n_buffer": num_chunks, "prefetch_depth": 1}
        if split is Split.OPTIMIZER and run.runtime is not Runtime.DEEPSPEED_ZERO1:
            whole = sum(p.size_bytes for p in workload.parameters if p.trainable)
            differences.append(
                f"ZeRO-1 keeps gradients whole until the step, {format_bytes(whole - whole // num_ranks)} more on each "
                f"device; here each rank keeps its part of them, as ZeRO-2 does."
            )
    return knobs


def _group(settled: Settled) -> int | None:
    """Ranks that have one set of parts between them; None: all."""
    run, num_ranks = settled.run, settled.num_ranks
    group = run.shard_ranks
    if group is None and run.replicas is not None and run.replicas > 1:
        if num_ranks % run.replicas:
            raise PlanError(
                f"the run has {run.replicas} replicas, which {num_ranks} ranks do not form evenly. Ask with a multiple "
                f"of it (--ranks {run.replicas * max(2, num_ranks // run.replicas)})."
            )
        group = num_ranks // run.replicas
    if group is None and run.shards_within_node:
        group = min(num_ranks, settled.machine.devices_per_node)
    return None if group in (None, num_ranks) else group


def _window(settled: Settled, workload: Workload, layout: Layout) -> dict[str, int]:
    """Places for gathered chunks: two blocks', or as many parameters as ZeRO-3 has live."""
    run, num_chunks, fewest = settled.run, len(layout.chunks), layout.min_buffers(0)
    if run.live_parameters is None or run.prefetched_parameters is None:
        return {"n_buffer": min(2 * fewest, num_chunks), "prefetch_depth": 1}
    largest = largest_block_elements(workload)
    return {
        "n_buffer": min(max(fewest, run.live_parameters // largest), num_chunks),
        "prefetch_depth": min(max(1, -(-run.prefetched_parameters // largest)), workload.num_blocks),
    }


def _disk(settled: Settled, num_chunks: int) -> dict[str, int]:
    run = settled.run
    if Place.DISK not in (run.parameters_on, run.optimizer_on):
        return {}
    # Two places: one is read while another is stepped.
    n_disk = num_chunks if run.parameters_on is Place.DISK else 0
    return {"n_disk_state": num_chunks, "n_disk": n_disk, "n_staging": 2}


def _checkpointed(
    settled: Settled, workload: Workload, differences: list[str]
) -> tuple[dict[str, int], list[tuple[str, int]]]:
    """Knobs of what is recomputed, and the ends of it where a compiler chooses operations one by one."""
    run, num_blocks = settled.run, workload.num_blocks
    match run.checkpointing:
        case Checkpointing.FULL:
            return _recomputed(num_blocks, settled), []
        case Checkpointing.EVERY_NTH:
            return _recomputed(num_blocks // run.checkpointed_every, settled), []
        case Checkpointing.SELECTIVE if all(
            _EVERY_SECOND in [of.product_stride for of in profile.selective] for profile in workload.profiles
        ):
            return {"n_checkpoint": num_blocks, "n_selective": num_blocks, "product_stride": _EVERY_SECOND}, []
        case Checkpointing.SELECTIVE | Checkpointing.BY_COMPILATION:
            differences.append(
                "what is recomputed is chosen operation by operation there; here half of the blocks are recomputed, "
                "and the ends, none of them and all, are told beside it."
            )
            ends = [("nothing recomputed", 0), ("every block recomputed", num_blocks)]
            return _recomputed(num_blocks // 2, settled), ends
        case _:
            return _recomputed(0, settled), []


def _recomputed(n_checkpoint: int, settled: Settled) -> dict[str, int]:
    n_offload_input = max(0, n_checkpoint - 1) if settled.run.offloads_inputs else 0
    return {"n_checkpoint": n_checkpoint, "n_offload_input": n_offload_input}
