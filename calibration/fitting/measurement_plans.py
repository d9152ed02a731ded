"""Plans for measuring: a few to fit a calibration to, others that span the knobs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ...shared.layout.layout import Layout, largest_block_bytes, layout_of, why_not_on_device
from ...shared.layout.travelling_inputs import input_bytes
from ...shared.methods.known import method_named
from ...shared.schema.plan import ParallelMode, Plan, ProjectionPlace
from ...shared.schema.workload import Workload

RANK_MODES: Final = (ParallelMode.DDP, ParallelMode.REPLICATED, ParallelMode.SHARDED)
"""What several ranks can do together."""


def bootstrap_plans(workload: Workload, *, has_disk: bool = False, num_ranks: int = 1) -> tuple[Plan, ...]:
    """Plans that between them run every kind of task, in chunks of different sizes.

    Of one rank: all on the device, half of it, nothing kept there; small chunks with half of the blocks swapped, where
    the method has modes (all inputs offloaded, where nothing can be swapped); and two micro-batches under a limit of
    the norm, with chunks that the host steps and the device keeps.  Where gradients are projected, those of small
    chunks are on the device, before they leave.  ``has_disk``: one more has half of the chunks on the disk, and the
    parameters of half of these.  Of several ranks: DDP, replicated, sharded, and one that has all chunks sharded over
    the devices.
    """
    layout, blocks = layout_of(workload, largest_block_bytes(workload)), _num_with_modes(workload)
    half, all_chunks = len(layout.chunks) // 2, len(layout.chunks)

    def plan(n_persist: int, more_buffers: int, *, within: Layout = layout, **knobs: Any) -> Plan:
        fewest = within.min_buffers(n_persist + knobs.get("n_host_stepped", 0))
        return Plan(
            workload_id=workload.identity,
            method=workload.method,
            chunk_bytes=within.chunk_bytes,
            n_persist=n_persist,
            n_buffer=_buffers(fewest, more_buffers),
            num_ranks=num_ranks,
            **knobs,
        )

    ddp, replicated, sharded = RANK_MODES if num_ranks > 1 else (ParallelMode.SINGLE,) * 3
    n_shard = layout.enough_sharded(0, 0) if num_ranks > 1 else 0
    plans = (
        plan(all_chunks, 0, parallel=ddp),
        plan(half, 1, n_checkpoint=blocks // 2, parallel=replicated),
        plan(0, 1, n_checkpoint=blocks, prefetch_depth=2, parallel=sharded, n_shard=n_shard),
    )
    if num_ranks > 1:
        return *plans, plan(0, 1, n_shard=all_chunks, parallel=sharded)
    small = layout_of(workload, max(1, round(largest_block_bytes(workload) * _SMALL)))
    more = (
        plan(0, 1, within=small, **_travelling(workload), projects_gradients_on=_place(workload, small)),
        plan(0, 1, n_host_stepped=all_chunks // 3, micro_batches=2, max_gradient_norm=_NORM),
    )
    if not has_disk:
        return *plans, *more
    state = all_chunks - half
    on_disk: dict[str, Any] = {"n_disk_state": state, "n_disk": state - state // 2, "n_staging": 2}
    return *plans, *more, plan(0, 1, n_checkpoint=blocks // 2, **on_disk)


def _place(workload: Workload, layout: Layout) -> ProjectionPlace:
    """On the device, where anything is projected and can be there."""
    can = bool(workload.subspaces) and why_not_on_device(layout) is None
    return ProjectionPlace.DEVICE if can else ProjectionPlace.HOST


def _travelling(workload: Workload) -> dict[str, int]:
    """Half of the blocks swapped; or all inputs of blocks, where nothing else of them may travel."""
    blocks = _num_with_modes(workload)
    if blocks and not any(profile.swappable_bytes for profile in workload.profiles) and any(input_bytes(workload)):
        return {"n_checkpoint": blocks, "n_offload_input": blocks}
    return {"n_swap": blocks // 2}


def _num_with_modes(workload: Workload) -> int:
    """Blocks whose activations may be checkpointed: none where the method keeps nothing of them."""
    return workload.num_blocks if method_named(workload.method).policies.sections.has_modes else 0


def _buffers(fewest: int, more: int) -> int:
    return fewest + more if fewest else 0


class _Knobs(NamedTuple):
    """The knobs of a plan for any workload, most of them as shares."""

    chunk: float
    """Of the largest block."""
    kept: float
    """Of the chunks, on the device."""
    checkpointed: float
    """Of the blocks."""
    more_buffers: int
    """Than the fewest."""
    prefetch_depth: int
    host_stepped: float = 0.0
    """Of the chunks on the device."""
    disk_state: float = 0.0
    """Of the offloaded chunks, with their optimizer state on the disk."""
    disk: float = 0.0
    """Of these, with their parameters there too."""
    n_staging: int = 0
    sharded: float = 0.0
    """Of the chunks that are not kept, over the devices of all ranks."""
    parallel: ParallelMode = ParallelMode.SINGLE


_WHOLE: Final = 1.0
_HALF: Final = 0.55
_SMALL: Final = 0.4
_NORM: Final = 1.0
_DOUBLE: Final = 2.0
_ALL_BUFFERS: Final = 2**20
_SPANNING: Final[Mapping[str, _Knobs]] = MappingProxyType(
    {
        "all kept, nothing persistent, few buffers": _Knobs(_WHOLE, 0, 0, 1, 1),
        "all kept, nothing persistent, all buffers": _Knobs(_WHOLE, 0, 0, _ALL_BUFFERS, 3),
        "all kept, half persistent": _Knobs(_WHOLE, 0.5, 0, 2, 2),
        "all kept, small chunks": _Knobs(_HALF, 0, 0, 3, 2),
        "all checkpointed, everything persistent": _Knobs(_WHOLE, 1, 1, 0, 1),
        "all checkpointed, nothing persistent, fewest buffers": _Knobs(_WHOLE, 0, 1, 0, 1),
        "all checkpointed, nothing persistent, prefetch 3": _Knobs(_WHOLE, 0, 1, 3, 3),
        "all checkpointed, half persistent": _Knobs(_WHOLE, 0.5, 1, 2, 2),
        "half checkpointed, everything persistent": _Knobs(_WHOLE, 1, 0.5, 0, 1),
        "half checkpointed, nothing persistent": _Knobs(_WHOLE, 0, 0.5, 2, 2),
        "half checkpointed, small chunks, quarter persistent": _Knobs(_HALF, 0.25, 0.5, 2, 1),
        "quarter checkpointed, double chunks": _Knobs(_DOUBLE, 0, 0.25, 1, 2),
        "three quarters checkpointed, quarter persistent": _Knobs(_WHOLE, 0.25, 0.75, 2, 3),
        "all kept, all stepped on the host alone": _Knobs(_WHOLE, 1, 0, 0, 1, host_stepped=1),
        "half checkpointed, a third in each residency": _Knobs(_WHOLE, 2 / 3, 0.5, 1, 2, host_stepped=0.5),
    }
)
_SPANNING_DISK: Final[Mapping[str, _Knobs]] = MappingProxyType(
    {
        "all kept, state on the disk": _Knobs(_WHOLE, 0, 0, 1, 1, disk_state=1, n_staging=2),
        "all kept, half persistent, the rest on the disk": _Knobs(
            _WHOLE, 0.5, 0, 2, 2, disk_state=1, disk=1, n_staging=2
        ),
        "all checkpointed, everything on the disk": _Knobs(_WHOLE, 0, 1, 1, 2, disk_state=1, disk=1, n_staging=2),
        "all checkpointed, everything on the disk, one place": _Knobs(
            _WHOLE, 0, 1, 0, 1, disk_state=1, disk=1, n_staging=1
        ),
        "half checkpointed, small chunks, half on the disk": _Knobs(
            _HALF, 0, 0.5, 3, 3, disk_state=0.5, disk=1, n_staging=3
        ),
        "half checkpointed, a quarter in each place": _Knobs(
            _WHOLE, 0.5, 0.5, 1, 2, host_stepped=0.5, disk_state=0.5, disk=0.5, n_staging=2
        ),
    }
)
_DDP, _REPLICATED, _SHARDED = RANK_MODES
_SPANNING_RANKS: Final[Mapping[str, _Knobs]] = MappingProxyType(
    {
        "ddp, all checkpointed": _Knobs(_WHOLE, 1, 1, 0, 1, parallel=_DDP),
        "ddp, half checkpointed, small chunks": _Knobs(_HALF, 1, 0.5, 0, 1, parallel=_DDP),
        "replicated, all kept, nothing persistent": _Knobs(_WHOLE, 0, 0, 2, 2, parallel=_REPLICATED),
        "replicated, all checkpointed, half persistent": _Knobs(_WHOLE, 0.5, 1, 1, 1, parallel=_REPLICATED),
        "replicated, half checkpointed, all stepped on the host": _Knobs(
            _WHOLE, 1, 0.5, 0, 1, host_stepped=1, parallel=_REPLICATED
        ),
        "sharded on hosts, all kept, all buffers": _Knobs(_WHOLE, 0, 0, _ALL_BUFFERS, 2, parallel=_SHARDED),
        "sharded on hosts, half checkpointed, small chunks": _Knobs(_HALF, 0, 0.5, 3, 2, parallel=_SHARDED),
        "sharded on hosts, all checkpointed, half persistent": _Knobs(_WHOLE, 0.5, 1, 1, 1, parallel=_SHARDED),
        "sharded on devices, all checkpointed": _Knobs(_WHOLE, 0, 1, 1, 1, sharded=1, parallel=_SHARDED),
        "sharded on devices, all kept, prefetch 3": _Knobs(_WHOLE, 0, 0, 3, 3, sharded=1, parallel=_SHARDED),
        "a third persistent, on devices, on hosts; half checkpointed": _Knobs(
            _WHOLE, 1 / 3, 0.5, 2, 2, sharded=0.5, parallel=_SHARDED
        ),
    }
)


def spanning_plans(workload: Workload, *, has_disk: bool = False, num_ranks: int = 1) -> dict[str, Plan]:
    """Plans that span the knobs, by name: residencies, checkpoints, buffers, prefetch and chunk size.

    ``has_disk``: plans that have chunks on the disk beside those that have none.  Of several ranks, all modes.  Plans
    that a calibration fits to (``bootstrap_plans``) are left out.
    """
    fitted = set(bootstrap_plans(workload, has_disk=has_disk, num_ranks=num_ranks))
    spanning = {**_SPANNING, **_SPANNING_DISK} if has_disk else _SPANNING
    plans: dict[str, Plan] = {}
    for name, knobs in (spanning if num_ranks == 1 else _SPANNING_RANKS).items():
        plan = _plan_of(knobs, workload, num_ranks)
        if knobs.disk_state and not plan.n_disk_state:
            continue  # too few chunks for some on the disk and some elsewhere
        if plan not in fitted and plan not in plans.values():
            plans[name] = plan
    return plans


def _plan_of(knobs: _Knobs, workload: Workload, num_ranks: int) -> Plan:
    chunk_bytes = max(1, round(largest_block_bytes(workload) * knobs.chunk))
    layout = layout_of(workload, chunk_bytes)
    num_kept = _prefix(layout, knobs.kept)
    n_host_stepped = round(knobs.host_stepped * num_kept)
    fewest = layout.min_buffers(num_kept)
    offloaded = len(layout.chunks) - num_kept
    n_disk_state, n_shard = round(knobs.disk_state * offloaded), round(knobs.sharded * offloaded)
    return Plan(
        workload_id=workload.identity,
        method=workload.method,
        chunk_bytes=chunk_bytes,
        n_persist=num_kept - n_host_stepped,
        n_host_stepped=n_host_stepped,
        n_shard=layout.enough_sharded(num_kept, n_shard) if knobs.parallel is ParallelMode.SHARDED else n_shard,
        n_disk_state=n_disk_state,
        n_disk=round(knobs.disk * n_disk_state),
        n_staging=knobs.n_staging if n_disk_state else 0,
        n_buffer=min(fewest + knobs.more_buffers, offloaded) if fewest else 0,
        prefetch_depth=knobs.prefetch_depth,
        n_checkpoint=round(knobs.checkpointed * _num_with_modes(workload)),
        parallel=knobs.parallel,
        num_ranks=num_ranks,
    )


def _prefix(layout: Layout, share: float) -> int:
    """So many chunks are ``share`` of them."""
    return round(share * len(layout.chunks))
