"""From a plan to the schedule that carries it out.  All policy lives here.

[Note: Steps]
A *step* is one section's forward, or one section's backward with its recomputation: the stretches of the compute lane
that need chunks.  Forward and backward of the epilogue follow each other, and are one step.  A micro-batch of n blocks
has 2n + 3 steps: n + 1 forwards, the epilogue, n + 1 backwards; an iteration has those of all its micro-batches.  A
parameter that several sections use is needed by the steps of all of them (``Uses``), and its gradient is complete with
the last backward that adds to it.  The policies are written in steps:

- A chunk is gathered for the step that first needs it, not before the step ``prefetch_depth`` earlier has begun.
- A chunk is freed when the last step that uses its stay ends (``slots.assign_slots``).  It has one place at a time: its
  next stay begins after that, whichever slot it gets.
- The gradients of a chunk leave when its last backward step has ended, and have left before the step
  ``prefetch_depth + 1`` later begins: that bounds the gradients that wait on the device.
- Gradients of later micro-batches are added on the host to those that have arrived before.  Those that are projected on
  the device are added up there instead, and leave once (``projections.py``).
- CPU Adam steps a chunk as soon as its last gradients have arrived; the chunk's next gather waits for that.  Where the
  norm of all gradients is limited, it waits for the norm, and that for all gradients.
- Gradients of persistent chunks stay until device Adam, which ends the iteration.
- A chunk that the host steps and the device keeps (``Plan.n_host_stepped``) has its parameters in a place of its own on
  the device.  Its gradients leave and are stepped as an offloaded chunk's are.  Its new values are gathered into that
  place once per iteration, for the step that first needs them, when the last step of the iteration before that needs
  the old ones has ended.  They take no room, so that no window holds them back; among gathers they keep the order of
  the steps.
- What a block in mode SWAP saved leaves when its forward has ended, and comes back like a chunk: not before the step
  ``prefetch_depth`` before its backward has begun.  So does the input of a block in mode OFFLOAD_INPUT, which the block
  before has made, ahead of the recomputation.

``FullTraining`` and ``Pairs`` (``sections.py``, ``pairs.py``), ``Residency`` and ``Updates`` hold these policies.

Projections of orthogonal subspace fine-tuning are those of [Note: Order of projections] in ``projections.py``.

Steps of bypass distillation are those of [Note: Pairs] in ``pairs.py``.

[Note: Norms of blocks]
In bypass distillation a limit of the norm is one of each student block's gradients by itself.  A block's norm waits for
that block's gradients alone, CPU Adam of a chunk for its block's norm, and device Adam for all norms.  So a block is
stepped while the next one computes.  No chunk has trained parameters of two blocks.

[Note: Disk]
The last offloaded chunks may have their optimizer state on the host's disk (``Plan.n_disk_state``), and the last of
these their parameters too (``Plan.n_disk``).  What lies there takes turns at ``n_staging`` places of host memory:

- Every gather of parameters on the disk is preceded by a read into a place, as soon as the gather that had it before
  has ended.  It takes no device memory, so that no window holds it back.
- Optimizer state, and parameters if they lie there, are read into a place before CPU Adam and written when that has
  ended.  In the disk's order a write stands right before the read of the next chunk in its place.
- Gradients arrive in such a place too, if they are final and nobody has to see all of them first; otherwise each chunk
  has a place of its own for them on the host.
- Reads and writes share one lane, so that a chunk's next read comes after its write.

[Note: Ranks]
Several ranks run one and the same schedule, each on a device and with micro-batches of its own, and meet in the tasks
of the collective lane.  Since that lane has one order, all ranks enter its tasks in the same order.

- Gradients that stay on the device are added up over all ranks (all-reduced) when the last micro-batch's backward of
  their chunk has ended, once per step; device Adam waits for that.
- Gradients that leave are added up in every micro-batch, before they leave: on the host nobody could.  REPLICATED:
  all-reduced where they lie; every rank then has all of them on its host, and steps all of the chunk.  SHARDED: laid
  flat in the order of the shards (``shards.py``) and reduce-scattered; the rank's shard leaves, and its CPU Adam steps
  that.
- SHARDED, offloaded chunks: a gather copies the rank's shard to its place in the buffer, and an all-gather fills in
  the others.
- SHARDED, chunks that are sharded over the devices (``Plan.n_shard``): every device has its shard of the parameters,
  of the gradients and of the optimizer state for good.  The all-gather alone is the gather, in the same windows and
  places; the gradients leave by the reduce-scatter alone, which puts the rank's shard of them where it stays, and adds
  those of later micro-batches to it.  Device Adam steps the shard, and the chunk's next gather waits for that.
- In the lane's order an all-gather stands where its slot and its window are open, ahead of the reductions of the steps
  that run before its own, since these wait for their backward.
- A norm of gradients that are sharded, on hosts or devices, is known when the sums of squares of all ranks have been
  added up.

[Note: Shard groups]
SHARDED ranks may form equal groups of neighbours (``Plan.shard_ranks``; hybrid sharding, HSDP): rank r is member
r % shard_ranks of group r // shard_ranks.  A chunk is cut into as many parts as a group has ranks, and every group has
a replica of all parts.  So what chunks need of each other passes between neighbours, in a node for instance, and the
network carries nothing but one part of the gradients per rank:

- All-gathers and reduce-scatters have the ranks of one group (``RankAxis.SHARD``), and so has the norm: groups know
  the same one.
- The part that a reduce-scatter leaves is all-reduced over the ranks that have the same part (``RankAxis.REPLICA``):
  what leaves the device in every micro-batch, before it leaves; what stays there once, after the last micro-batch's
  reduce-scatter, before the norm and device Adam.
- Gradients of chunks that stay whole are all-reduced over all ranks (``RankAxis.WORLD``).  On hosts that goes by way
  of the same two axes: every gradient is added up within the groups first, whatever its chunk's residency.  NCCL adds
  them up over all ranks in place, in an order of its own.

[Note: Memory of compute tasks]
A phase's curve already contains what the task allocates and frees while it runs, so the buffers of a compute task
count from its end on, and those that it frees count until its end.  What a backward leaves behind beyond saved
activations, outputs and gradients (above all the gradient that it hands to the section before) is measured, and is
the INCOMING_GRADIENT buffer; ``activation_levels.py`` keeps the account.

In a later micro-batch, a section whose gradients all stay on the device has its phase's other curve
(``Phase.adding``).  Where some of a block's chunks are offloaded and others are not, its curve is an upper bound.

Inputs that several sections share go with the one that needs them last, which depends on the modes of all blocks
(``shared_inputs``).  Those that no block holds go with the epilogue's forward: of the prologue's output, they are an
ACTIVATIONS buffer of its own.  What the model makes between two blocks goes with the second one's backward, and counts
as the first one's output where no block is checkpointed; where one is, the account is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ..drafts.program import Draft
from ..layout.keeping import AS_PLANNED, Keeping
from ..layout.layout import Layout, check_layout, layout_of
from ..layout.looked_up import as_planned
from ..layout.shards import stepped_bytes
from ..layout.tiling import tiled
from ..schema.plan import Plan, TrainingMethod
from ..schema.plan_check import check_plan
from ..schema.schedule import Schedule
from ..schema.workload import Workload
from .family import Family, family_of
from .homes import add_buckets, add_cached_keys, add_held_inputs, add_homes
from .pairs import Pairs
from .projections import ProjectedResidency, ProjectedSections, ProjectedStaging, ProjectedUpdates
from .residency import Residency
from .sections import FullTraining, Sections
from .staging import Staging
from .updates import Updates
from .views import tasks_and_buffers

__all__ = [
    "BYPASS",
    "FULL_TRAINING",
    "OSFT",
    "POLICIES",
    "Policies",
    "check_plan",
    "compile_schedule",
    "drafted",
    "stepped_bytes",
]


_MOST_BEGUN: Final = 128
"""Drafts of one micro-batch that are kept of a layout; of several, as many fewer."""


@dataclass(frozen=True)
class Policies:
    """Who answers the compiler's three questions; a training method replaces or extends one of them."""

    sections: type[Sections] = FullTraining
    """What computes, in which order."""
    residency: type[Residency] = Residency
    """What lies where, when."""
    updates: type[Updates] = Updates
    """What happens to a gradient until its parameter is new."""
    staging: type[Staging] = Staging
    """What passes between the host's disk and the rest."""
    keeping: Keeping = AS_PLANNED
    """What lies otherwise than plans have it."""

    @property
    def begin_alike(self) -> bool:
        """Whether what computes and the updates depend on nothing but the residencies of chunks."""
        return (self.sections, self.residency, self.updates) == (FullTraining, Residency, Updates)

    @property
    def move_plainly(self) -> bool:
        """Whether chunks come, gradients leave and parameters are stepped as [Note: Steps] says, whatever computes.

        Projections are tasks beside these and stays that last until them: what a bound leaves out, it stays below.
        """
        return (self.residency, self.updates) in ((Residency, Updates), (ProjectedResidency, ProjectedUpdates))


FULL_TRAINING: Final = Policies()
BYPASS: Final = Policies(sections=Pairs)
OSFT: Final = Policies(
    sections=ProjectedSections, residency=ProjectedResidency, updates=ProjectedUpdates, staging=ProjectedStaging
)
POLICIES: Final = {TrainingMethod.FULL: FULL_TRAINING, TrainingMethod.BYPASS: BYPASS, TrainingMethod.OSFT: OSFT}


def compile_schedule(
    plan: Plan, workload: Workload, layout: Layout | None = None, *, policies: Policies | None = None
) -> Schedule:
    """The schedule of one steady-state iteration of ``workload`` under ``plan``.

    ``layout`` spares building it again; it must be the one of ``plan.chunk_bytes``.  ``policies``: of the training
    method, where it is another than the plan names.
    Raises PlanError if the plan belongs to another workload or its knobs contradict the layout.
    """
    check_plan(plan, workload)
    if layout is None:
        layout = layout_of(workload, plan.chunk_bytes)
    check_layout(layout, plan, workload)
    workload, layout = as_planned(plan, tiled(workload, plan), layout)
    family = family_of(plan, workload, layout)
    draft = drafted(family, policies or POLICIES[plan.method], with_operands=True)
    tasks, buffers = tasks_and_buffers(draft, family)
    return Schedule(
        plan_id=plan.identity,
        tasks=tasks,
        buffers=buffers,
        num_slots=plan.n_buffer,
        num_blocks=workload.num_blocks,
        prefetch_depth=plan.prefetch_depth,
        micro_batches=plan.micro_batches,
        num_ranks=plan.num_ranks,
        parallel=plan.parallel,
        shard_ranks=plan.shard_ranks,
        sequence_ranks=plan.sequence_ranks,
        optimizer=plan.optimizer,
        projects_gradients_on=plan.projects_gradients_on,
    )


def drafted(family: Family, policies: Policies = FULL_TRAINING, *, with_operands: bool = False) -> Draft:
    """What ``policies`` say about ``family``; with what tasks read and write if it is of one plan alone.

    Raises PlanError if a section needs more buffers than there are.
    """
    if not with_operands and policies.begin_alike and not family.num_staging:
        draft, sections, updates = _begun(family, policies)
        residency = policies.residency(family, draft, sections)
    else:
        draft = Draft(policies.keeping)
        sections = policies.sections(family, draft)
        residency = policies.residency(family, draft, sections)
        updates = policies.updates(family, draft, sections)
    residency.follow(updates.stepped_by)
    staging = policies.staging(family, draft, sections, residency, updates)
    draft.at_end_bytes = updates.widened_bytes
    if with_operands:
        homes = add_homes(family, draft, policies.keeping)
        homes = replace(homes, gradients=np.maximum(homes.gradients, updates.parts))
        add_buckets(family, draft, sections.forwards[:, -1], sections.backwards[:, -1])
        add_held_inputs(family, draft, sections.backwards)
        add_cached_keys(family, draft, sections.forwards)
        sections.wire(updates.device_adam)
        residency.wire(homes, staging.passing)
        updates.wire(staging.wire(homes))
    return draft


def _begun(family: Family, policies: Policies) -> tuple[Draft, Sections, Updates]:
    """A draft of what computes and of the updates, which are the same for any number of buffers, and for all trips.

    The latest are kept: a search drafts families that differ in these alone by the hundred.  Tasks are numbered in
    another order than in a schedule, which nothing depends on: no task of a residency stands where one of the updates
    does ([Note: Task groups]).
    """
    kept = family.layout.derived.setdefault((_begun, policies, family.step), {})
    key = family.residency.tobytes(), family.depths.tobytes(), id(family.workload), id(family.facts)
    found: tuple[Draft, Sections, Updates] | None = kept.pop(key, None)
    if found is None:
        draft = Draft(policies.keeping)
        sections = policies.sections(family, draft)
        found = draft, sections, policies.updates(family, draft, sections)
        while len(kept) * family.step.micro_batches >= _MOST_BEGUN:
            del kept[next(iter(kept))]
    kept[key] = found
    draft, sections, updates = found
    return draft.fork(), sections, updates
