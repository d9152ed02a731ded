"""Plans for measuring: a few to fit a calibration to, many others to judge it by."""

from __future__ import annotations

from collections.abc import Mapping

from ...shared.layout.layout import Layout, aligned, build_layout
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload


def bootstrap_plans(workload: Workload) -> tuple[Plan, ...]:
    """Three plans that between them run every kind of task: all on the device, half of it, and nothing kept there."""
    chunk_bytes = largest_block_bytes(workload)
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=chunk_bytes)
    half = len(layout.chunks) // 2
    blocks = workload.num_blocks

    def plan(n_persist: int, n_buffer: int, n_checkpoint: int, prefetch_depth: int) -> Plan:
        return Plan(
            workload_id=workload.identity,
            chunk_bytes=chunk_bytes,
            n_persist=n_persist,
            n_buffer=n_buffer,
            n_checkpoint=n_checkpoint,
            prefetch_depth=prefetch_depth,
        )

    return (
        plan(len(layout.chunks), 0, 0, 1),
        plan(half, _buffers(layout.min_buffers(half), 1), blocks // 2, 1),
        plan(0, _buffers(layout.min_buffers(0), 1), blocks, 2),
    )


def _buffers(fewest: int, more: int) -> int:
    return fewest + more if fewest else 0


def largest_block_bytes(workload: Workload) -> int:
    """Bytes of the largest block's parameters as a chunk would hold them; at least 1."""
    sizes = [0] * workload.num_blocks
    for parameter in workload.parameters:
        if parameter.block is not None:
            sizes[parameter.block] += aligned(parameter.size_bytes)
    return max(*sizes, 1)


def spanning_plans(workload: Workload) -> dict[str, Plan]:
    """Plans that span the knobs, by name: residencies, checkpoints, buffers, prefetch and chunk size.

    Plans that a calibration fits to (``bootstrap_plans``) are left out.
    """
    block_bytes = largest_block_bytes(workload)
    whole, half, double = (max(1, round(block_bytes * share)) for share in (1, 0.55, 2))
    blocks = workload.num_blocks
    wanted: Mapping[str, tuple[int, float, float, int, int]] = {
        # name: (chunk_bytes, share on the device, share checkpointed, buffers above the fewest, prefetch depth)
        "all kept, nothing persistent, few buffers": (whole, 0, 0, 1, 1),
        "all kept, nothing persistent, all buffers": (whole, 0, 0, blocks, 3),
        "all kept, half persistent": (whole, 0.5, 0, 2, 2),
        "all kept, small chunks": (half, 0, 0, 3, 2),
        "all checkpointed, everything persistent": (whole, 1, 1, 0, 1),
        "all checkpointed, nothing persistent, fewest buffers": (whole, 0, 1, 0, 1),
        "all checkpointed, nothing persistent, prefetch 3": (whole, 0, 1, 3, 3),
        "all checkpointed, half persistent": (whole, 0.5, 1, 2, 2),
        "half checkpointed, everything persistent": (whole, 1, 0.5, 0, 1),
        "half checkpointed, nothing persistent": (whole, 0, 0.5, 2, 2),
        "half checkpointed, small chunks, quarter persistent": (half, 0.25, 0.5, 2, 1),
        "quarter checkpointed, double chunks": (double, 0, 0.25, 1, 2),
        "three quarters checkpointed, quarter persistent": (whole, 0.25, 0.75, 2, 3),
    }
    host_stepped = {
        # name: the same, then the share stepped on the host of what is on the device
        "all kept, all stepped on the host alone": (whole, 1, 0, 0, 1, 1.0),
        "half checkpointed, a third in each residency": (whole, 2 / 3, 0.5, 1, 2, 0.5),
    }
    fitted = set(bootstrap_plans(workload))
    plans: dict[str, Plan] = {}
    for name, (chunk_bytes, kept, checkpointed, more_buffers, depth, stepped) in {
        **{name: (*knobs, 0.0) for name, knobs in wanted.items()},
        **host_stepped,
    }.items():
        layout = build_layout(workload.parameters, num_blocks=blocks, chunk_bytes=chunk_bytes)
        num_kept = _prefix(layout, kept)
        n_host_stepped = round(stepped * num_kept)
        fewest = layout.min_buffers(num_kept)
        offloaded = len(layout.chunks) - len(layout.persistent(num_kept))
        plan = Plan(
            workload_id=workload.identity,
            chunk_bytes=chunk_bytes,
            n_persist=num_kept - n_host_stepped,
            n_host_stepped=n_host_stepped,
            n_buffer=min(fewest + more_buffers, offloaded) if fewest else 0,
            prefetch_depth=depth,
            n_checkpoint=round(checkpointed * blocks),
        )
        if plan not in fitted and plan not in plans.values():
            plans[name] = plan
    return plans


def _prefix(layout: Layout, share: float) -> int:
    """So many chunks are ``share`` of them."""
    return round(share * len(layout.chunks))
