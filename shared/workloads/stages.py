"""The part of a distillation that one stage of a pipeline carries out: the prologue, and some pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..basics.errors import WorkloadError
from ..phases.distillation import Distillation, StagePlace
from ..schema.workload import Block, OuterSection, Parameter, Uses, Workload, in_forward_order


def stage_workload(workload: Workload, first_pair: int, num_pairs: int, num_stages: int) -> Workload:
    """What the ranks of one of ``num_stages`` stages do: ``num_pairs`` pairs of ``workload`` from ``first_pair`` on.

    Its blocks and parameters are those of these pairs, numbered from 0, and the prologue's.  The one stage of all pairs
    is ``workload`` itself.  Buffers of modules count as those of the whole, an upper bound.

    Raises WorkloadError if the workload is none of a whole distillation, if there are no such pairs or too few for the
    stages, or if the teacher's activation before the stage does not fit into what the prologue leaves.
    """
    distillation = _checked(workload, first_pair, num_pairs, num_stages)
    if num_stages == 1:
        return workload
    blocks = workload.blocks[2 * first_pair : 2 * (first_pair + num_pairs)]
    own_profiles = sorted({block.profile for block in blocks})
    place_of = {profile: place for place, profile in enumerate(own_profiles)}
    place = StagePlace(
        num_stages=num_stages,
        first_pair=first_pair,
        of_pairs=workload.num_blocks // 2,
        receives_bytes=_activation_bytes(workload, first_pair) if first_pair else 0,
        sends_bytes=_sent_bytes(workload, first_pair + num_pairs),
    )
    own = distillation.model_copy(
        update={"losses": tuple(distillation.losses[profile] for profile in own_profiles), "stage": place}
    )
    fields: dict[str, Any] = {name: getattr(workload, name) for name in Workload.model_fields}
    fields |= {
        "parameters": tuple(_own_parameters(workload.parameters, 2 * first_pair, len(blocks))),
        "blocks": tuple(Block(name=block.name, profile=place_of[block.profile]) for block in blocks),
        "profiles": tuple(workload.profiles[profile] for profile in own_profiles),
        "distillation": own,
    }
    return Workload(**fields)


def stage_workloads(workload: Workload, num_pairs: Sequence[int]) -> tuple[Workload, ...]:
    """The workloads of all stages, of these numbers of pairs in order.  Raises WorkloadError as ``stage_workload``."""
    if sum(num_pairs) != workload.num_blocks // 2:
        raise WorkloadError(
            f"stages of {', '.join(map(str, num_pairs))} pairs have {sum(num_pairs)} in all, {workload.model_name} has "
            f"{workload.num_blocks // 2}. Every pair belongs to one stage."
        )
    firsts = [sum(num_pairs[:stage]) for stage in range(len(num_pairs))]
    return tuple(
        stage_workload(workload, first, number, len(num_pairs)) for first, number in zip(firsts, num_pairs, strict=True)
    )


def _checked(workload: Workload, first_pair: int, num_pairs: int, num_stages: int) -> Distillation:
    distillation, of_pairs = workload.distillation, workload.num_blocks // 2
    if distillation is None:
        raise WorkloadError(
            f"{workload.model_name} is a workload of full training; stages of a pipeline are known of distillations "
            f"alone. Name a student, or train data parallel."
        )
    if distillation.stage is not None:
        raise WorkloadError(f"{workload.model_name} is one stage of a pipeline already. Give the whole distillation.")
    if num_stages > of_pairs:
        raise WorkloadError(
            f"{num_stages} stages of {of_pairs} pairs: each needs one at least. Use {of_pairs} stages at most."
        )
    if first_pair < 0 or num_pairs < 1 or first_pair + num_pairs > of_pairs or num_stages < 1:
        raise WorkloadError(
            f"{num_pairs} pairs from pair {first_pair} on are no stage of {of_pairs} pairs in {num_stages} stages."
        )
    if num_pairs > of_pairs - num_stages + 1 or (num_stages == 1 and num_pairs < of_pairs):
        raise WorkloadError(f"a stage of {num_pairs} of {of_pairs} pairs leaves no {num_stages - 1} others one each.")
    return distillation


def _activation_bytes(workload: Workload, pair: int) -> int:
    """Bytes of the teacher's activation before a pair, which takes the place of the prologue's hidden state."""
    activation_bytes = workload.profile_of(2 * pair - 2).output_bytes
    made_bytes = max(0, workload.prologue_forward.net_bytes)
    if not 0 < activation_bytes <= made_bytes:
        raise WorkloadError(
            f"the teacher's activation before pair {pair} of {workload.model_name} has {activation_bytes:,} B, and all "
            f"that its prologue leaves {made_bytes:,} B. A stage that begins there has no place for it: use one stage."
        )
    return activation_bytes


def _sent_bytes(workload: Workload, end: int) -> int:
    """Bytes of the teacher's activation before pair ``end``, with which the next stage begins; 0 where none follows."""
    return _activation_bytes(workload, end) if 2 * end < workload.num_blocks else 0


def _own_parameters(parameters: Sequence[Parameter], first_block: int, num_blocks: int) -> list[Parameter]:
    """Those that the prologue or the stage's blocks use, which are numbered from 0."""
    own = range(first_block, first_block + num_blocks)
    found = []
    for parameter in parameters:
        if parameter.block is not None:
            if parameter.block in own:
                found.append(parameter.model_copy(update={"block": parameter.block - first_block}))
            continue
        assert parameter.uses is not None, "a distillation's parameters without a block name their uses"
        users = [user for user in parameter.uses.forward if isinstance(user, OuterSection) or user in own]
        if users:
            forward = tuple(user if isinstance(user, OuterSection) else user - first_block for user in users)
            uses = Uses(forward=forward, backward=(), gradient=min(forward, key=in_forward_order))
            found.append(parameter.model_copy(update={"uses": uses}))
    return found
