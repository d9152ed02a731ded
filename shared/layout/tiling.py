"""The workload as a plan runs it: shared among ranks, tile by tile over tokens, and with results kept.

A share of each sequence, tiles, and results that blocks keep are other ways to compute what a section computes: its
phases are others, and nothing else of the workload is.  Compiler and verifier see a workload whose phases are those of
the plan, and know nothing of tiles, nor of which results are kept: a block in mode SELECTIVE is checkpointed there,
and has ``BlockProfile.kept_bytes``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..basics.errors import PlanError
from ..phases.activation_modes import why_no_product_stride
from ..schema.plan import ActivationMode, Plan
from ..schema.workload import BlockProfile, Workload


def tiled(workload: Workload, plan: Plan) -> Workload:
    """``workload`` with the phases of ``plan``'s share, tiles and modes, of the same identity; itself if it has them.

    Raises PlanError if the workload does not know so many ranks that share a sequence, so many tiles, or which results
    blocks may keep.
    """
    found = workload.shared_among(plan.sequence_ranks).tiled(plan.mlp_tiles, plan.loss_tiles)
    if not plan.n_selective:
        return found
    keeps = [mode is ActivationMode.SELECTIVE for mode in plan.modes(found.num_blocks)]
    return keeping_results(found, keeps, plan.product_stride)


def keeping_results(workload: Workload, keeps: Sequence[bool], product_stride: int) -> Workload:
    """``workload``, in which mode CHECKPOINT of those blocks is SELECTIVE; of its identity, and itself if it is so.

    Made once for each choice.  Raises PlanError if nobody knows what one of them may keep.
    """
    key = (tuple(keeps), product_stride)
    if key not in workload.derived:
        made = _keeping_results(workload, keeps, product_stride)
        workload.derived[key] = made.derived[key] = made
    return workload.derived[key]


def _keeping_results(workload: Workload, keeps: Sequence[bool], product_stride: int) -> Workload:
    profiles: list[BlockProfile] = []
    numbers: dict[tuple[int, bool], int] = {}
    blocks = []
    for block, is_selective in zip(workload.blocks, keeps, strict=True):
        profile, key = workload.profiles[block.profile], (block.profile, is_selective)
        if key not in numbers:
            if is_selective:
                known = tuple(of.product_stride for of in profile.selective)
                if (reason := why_no_product_stride(product_stride, known, workload.model_name)) is not None:
                    raise PlanError(f"{reason}.")
            numbers[key] = len(profiles)
            profiles.append(profile.selecting(product_stride) if is_selective else profile)
        blocks.append(block.model_copy(update={"profile": numbers[key]}))
    return workload.changed({"profiles": tuple(profiles), "blocks": tuple(blocks)})
