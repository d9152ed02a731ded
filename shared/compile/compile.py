"""From a plan to the schedule that carries it out.  All policy lives here.

[Note: Steps]
A *step* is one block's forward, or one block's backward with its recomputation: the stretches of the compute lane that
need chunks.  A micro-batch of n blocks has 2n steps, forward ones first, and an iteration has those of all its
micro-batches.  The policies are written in steps:

- A chunk is gathered for the step that first needs it, not before the step ``prefetch_depth`` earlier has begun.
- A chunk is freed when the last step that uses its stay ends (``slots.assign_slots``).  It has one place at a time: its
  next stay begins after that, whichever slot it gets.
- The gradients of a chunk leave when its last backward step has ended, and have left before the step
  ``prefetch_depth + 1`` later begins: that bounds the gradients that wait on the device.
- Gradients of later micro-batches are added on the host to those that have arrived before.
- CPU Adam steps a chunk as soon as its last gradients have arrived; the chunk's next gather waits for that.  Where the
  norm of all gradients is limited, it waits for the norm, and that for all gradients.
- Gradients of persistent chunks stay until device Adam, which ends the iteration.
- What a block in mode SWAP saved leaves when its forward has ended, and comes back like a chunk: not before the step
  ``prefetch_depth`` before its backward has begun.

``compile_gathers``, ``compile_updates`` and ``compile_swaps`` hold these policies.

[Note: Ranks]
Several ranks run one and the same schedule, each on a device and with micro-batches of its own, and meet in the tasks
of the collective lane.  Since that lane has one order, all ranks enter its tasks in the same order.

- Gradients that stay on the device are added up over all ranks (all-reduced) when the last micro-batch's backward of
  their chunk has ended, once per step; device Adam waits for that.  Those outside every block follow the backward of
  the prologue, which is the last to add to them.
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
- Chunks that no block owns are persistent in every mode: the parts before the first and after the last block use them
  at both ends of every micro-batch.

[Note: Memory of compute tasks]
A phase's curve already contains what the task allocates and frees while it runs, so the buffers of a compute task
count from its end on, and those that it frees count until its end.  What a backward leaves behind beyond saved
activations, outputs and gradients (above all the gradient that it hands to the section before) is measured, and is
the INCOMING_GRADIENT buffer; ``activations.py`` keeps the account.

In a later micro-batch, a section whose gradients all stay on the device has its phase's other curve
(``Phase.adding``).  Where some of a block's chunks are offloaded and others are not, its curve is an upper bound.

Inputs that several sections share go with the one that needs them last, which depends on the modes of all blocks
(``shared_inputs``).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..layout.layout import Layout, build_layout, check_layout
from ..layout.shards import stepped_bytes
from ..schema.plan import ActivationMode, ParallelMode, Plan
from ..schema.schedule import AllocationId, Content, Memory, OuterSection, Schedule, TaskId, TaskKind
from ..schema.shared_inputs import SharedBytes
from ..schema.workload import BlockId, Phase, Workload, check_plan
from .activations import Activations
from .builder import ScheduleBuilder
from .gathers import Gathers, allocate_homes
from .swaps import Swaps
from .updates import Updates

__all__ = ["check_plan", "compile_schedule", "stepped_bytes"]


def compile_schedule(plan: Plan, workload: Workload, layout: Layout | None = None) -> Schedule:
    """The schedule of one steady-state iteration of ``workload`` under ``plan``.

    ``layout`` spares building it again; it must be the one of ``plan.chunk_bytes``.
    Raises PlanError if the plan belongs to another workload or its knobs contradict the layout.
    """
    check_plan(plan, workload)
    if layout is None:
        layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
    check_layout(layout, plan, workload)
    return _Compiler(plan, workload, layout).run()


@dataclass(frozen=True, slots=True)
class _Coming:
    """What comes to the device for one step."""

    awaited: tuple[TaskId, ...]
    swapped: tuple[AllocationId, ...]
    """The buffers for what its block had swapped."""


class _Compiler:
    """Builds one schedule; the order of the calls is the order of the schedule."""

    def __init__(self, plan: Plan, workload: Workload, layout: Layout) -> None:
        self.plan = plan
        self.workload = workload
        self.num_blocks = workload.num_blocks
        self.modes = plan.modes(self.num_blocks)
        persistent = layout.persistent(plan.n_persist)
        self.builder = ScheduleBuilder()
        self.builder.buffer(Content.RESIDENT, Memory.DEVICE, workload.resident_bytes, is_static=True)
        homes = allocate_homes(self.builder, plan, workload.parameters, layout, persistent)
        self.gathers = Gathers(self.builder, plan, layout, homes, persistent)
        self.updates = Updates(self.builder, plan, workload.parameters, layout, homes, persistent)
        self.activations = Activations(self.builder)
        self.swaps = Swaps(self.builder, plan, workload, self.modes)
        self.coming: list[_Coming] = []
        """What comes to the device for each step, as far as it has been added."""
        self.shared = SharedBytes(workload.shared_inputs, self.modes)

    def run(self) -> Schedule:
        for micro_batch in range(self.plan.micro_batches):
            self.builder.micro_batch = micro_batch
            first_step = 2 * self.num_blocks * micro_batch
            self._prologue_forward()
            for block in range(self.num_blocks):
                self._forward(BlockId(block), step=first_step + block)
            self._epilogue()
            for block in reversed(range(self.num_blocks)):
                self._backward(BlockId(block), step=first_step + 2 * self.num_blocks - 1 - block)
            end = self._prologue_backward()
        self.updates.reduce_outer(self.activations.left_over, after=end)
        self.builder.micro_batch = 0
        self.updates.limit_norm(self.activations.left_over, after=end)
        self.updates.device_adam(self.activations.left_over)
        self.gathers.link_previous_iteration(self.updates.adam_of)
        self.updates.link_previous_iteration()
        return Schedule(
            plan_id=self.plan.identity,
            tasks=tuple(self.builder.tasks),
            buffers=tuple(self.builder.buffers),
            num_slots=self.plan.n_buffer,
            num_blocks=self.num_blocks,
            prefetch_depth=self.plan.prefetch_depth,
            micro_batches=self.plan.micro_batches,
            num_ranks=self.plan.num_ranks,
            parallel=self.plan.parallel,
        )

    # -- what comes to the device ------------------------------------------------------------------------------------

    def _coming_for(self, step: int) -> _Coming:
        """What comes for ``step``, added now unless it was added ahead."""
        while len(self.coming) <= step:
            self._send_next()
        return self.coming[step]

    def _send_ahead(self, step: int) -> None:
        """Add what comes for the steps that the end of ``step`` opens the way for; see [Note: Ranks]."""
        num_steps = 2 * self.num_blocks * self.plan.micro_batches
        is_sharded = self.plan.parallel is ParallelMode.SHARDED
        while is_sharded and len(self.coming) < num_steps and self._opened_by(len(self.coming)) <= step:
            self._send_next()

    def _opened_by(self, step: int) -> int:
        """The step after whose end all that comes for ``step`` may be added: it names no task that is not there yet."""
        block = self._fetching_block(step)
        micro_batch = step // (2 * self.num_blocks)
        saved = -1 if block is None else 2 * self.num_blocks * micro_batch + block
        return max(saved, self.gathers.opened_by(step))

    def _fetching_block(self, step: int) -> BlockId | None:
        """The block in mode SWAP whose backward the step is."""
        place = step % (2 * self.num_blocks)
        block = BlockId(2 * self.num_blocks - 1 - place)
        return block if place >= self.num_blocks and self.modes[block] is ActivationMode.SWAP else None

    def _send_next(self) -> None:
        step = len(self.coming)
        now, self.builder.micro_batch = self.builder.micro_batch, step // (2 * self.num_blocks)
        block = self._fetching_block(step)
        fetches, swapped = ([], []) if block is None else self.swaps.fetch(block, step=step)
        self.coming.append(_Coming((*self.gathers.begin(step), *fetches), tuple(swapped)))
        self.builder.micro_batch = now

    # -- forward -----------------------------------------------------------------------------------------------------

    def _prologue_forward(self) -> None:
        phase = self.workload.prologue_forward
        self.activations.run_phase(phase)
        self.builder.task(
            TaskKind.FORWARD,
            section=OuterSection.PROLOGUE,
            reads=self.gathers.unowned_parameters(),
            makes=(self.activations.make_output(OuterSection.PROLOGUE, phase.net_bytes),),
            phase=phase,
        )

    def _forward(self, block: BlockId, *, step: int) -> None:
        wait = (*self._coming_for(step).awaited, *self.swaps.gone_before(step))
        if self.builder.micro_batch:
            wait += self.updates.gone_before(step)
        profile = self.workload.profile_of(block)
        mode = self.modes[block]
        phase = profile.forward_in(mode).with_shared(held_bytes=self.shared.let_go_later[block])
        self.activations.run_phase(phase)
        reads = (*self.gathers.parameters(block, step=step), self.activations.input_of(block))
        swapped: list[AllocationId] = []
        if mode is not ActivationMode.CHECKPOINT:
            swapped = self.swaps.save(block) if mode is ActivationMode.SWAP else []
            swapped_bytes = sum(self.builder.buffers[buffer].size_bytes for buffer in swapped)
            # What a forward frees that was there before, its input if nobody saves that, is taken off its output.
            made = [
                self.activations.make_output(block, min(profile.output_bytes, phase.net_bytes - swapped_bytes)),
                self.activations.save(block, phase.net_bytes - profile.output_bytes, swapped_bytes=swapped_bytes),
                *swapped,
            ]
        else:
            # Whatever a checkpointed forward leaves beside its output (the random generator's state) goes with it.
            made = [self.activations.make_output(block, phase.net_bytes)]
        task = self.builder.task(
            TaskKind.FORWARD,
            section=block,
            after=wait,
            makes=made,
            frees=self.gathers.released_by(step),
            reads=reads,
            phase=phase,
        )
        self.builder.end_step(task, task)
        self.swaps.offload(block, swapped, step=step)
        self._send_ahead(step)

    def _epilogue(self) -> None:
        """Forward and backward of the part after the last block; they follow each other."""
        parameters = self.gathers.unowned_parameters()
        last = self.activations.output_of(BlockId(self.num_blocks - 1))
        forward = self.workload.epilogue_forward.with_shared(held_bytes=self.shared.let_go_later[None])
        backward = self.workload.epilogue_backward
        self.activations.run_phase(forward)
        saved = self.activations.save(OuterSection.EPILOGUE, forward.net_bytes)
        self.builder.task(
            TaskKind.FORWARD, section=OuterSection.EPILOGUE, makes=(saved,), reads=(*parameters, last), phase=forward
        )
        self.builder.task(
            TaskKind.BACKWARD,
            section=OuterSection.EPILOGUE,
            makes=(
                self.activations.hand_over(
                    OuterSection.EPILOGUE, backward, drops=(saved, last), gradient_bytes=self._added_bytes(backward)
                ),
            ),
            frees=(saved, last),
            reads=(*parameters, saved, last),
            phase=backward.adding if self.builder.micro_batch else backward,
        )

    # -- backward ----------------------------------------------------------------------------------------------------

    def _backward(self, block: BlockId, *, step: int) -> None:
        coming = self._coming_for(step)
        swapped = coming.swapped
        wait = (*coming.awaited, *self.updates.gone_before(step), *self.swaps.gone_before(step))
        profile = self.workload.profile_of(block)
        parameters, before = self.gathers.parameters(block, step=step), self.activations.input_of(block)
        recompute = None
        if self.modes[block] is ActivationMode.CHECKPOINT:
            self.activations.run_phase(profile.recompute)
            recompute = self.builder.task(
                TaskKind.RECOMPUTE,
                section=block,
                after=wait,
                makes=(self.activations.save(block, profile.recompute.net_bytes),),
                reads=(*parameters, before),
                phase=profile.recompute,
            )
            wait = ()
        phase = profile.backward_in(self.modes[block]).with_shared(
            held_bytes=self.shared.freed_later[block], freed_bytes=self.shared.freed_now[block]
        )
        saved, handed = self.activations.saved_by(block), self.activations.incoming
        assert handed is not None
        # The first block's input is the prologue's output, which the prologue's backward needs.
        drops = (saved, before) if block > 0 else (saved,)
        gradients, added, gradient_bytes = self.updates.make_gradients(block)
        incoming = self.activations.hand_over(
            block, phase, drops=drops, gradient_bytes=self._own_gradient_bytes(phase, gradient_bytes)
        )
        end = self.builder.task(
            TaskKind.BACKWARD,
            section=block,
            after=wait,
            makes=(incoming, *gradients),
            frees=(*drops, *swapped, handed, *self.gathers.released_by(step)),
            reads=(*parameters, before, saved, *swapped, handed, *added),
            updates=added,
            phase=phase.adding if self.builder.micro_batch and not gradients else phase,
        )
        self.builder.end_step(end if recompute is None else recompute, end)
        self.updates.end_backward(block, step=step)
        self._send_ahead(step)

    def _own_gradient_bytes(self, phase: Phase, buffers_bytes: int) -> int:
        """Gradients among what a block's backward leaves that have buffers of their own, or were added to others.

        Parameters that nothing uses, or that a block under ``torch.no_grad()`` uses, have room in ``buffers_bytes`` but
        no gradient; a phase that does not say how much it leaves of gradients leaves all.
        """
        if phase.gradient_bytes is None:
            return buffers_bytes
        return phase.gradient_bytes if self.builder.micro_batch else min(buffers_bytes, phase.gradient_bytes)

    def _added_bytes(self, phase: Phase) -> int:
        """Gradients that a backward adds to those of earlier micro-batches, where its phase left new ones."""
        return phase.stated_gradient_bytes if self.builder.micro_batch else 0

    def _prologue_backward(self) -> TaskId:
        handed, output = self.activations.incoming, self.activations.output_of(OuterSection.PROLOGUE)
        assert handed is not None
        phase = self.workload.prologue_backward
        made = self.activations.hand_over(
            OuterSection.PROLOGUE, phase, drops=(output,), gradient_bytes=self._added_bytes(phase)
        )
        added = self.activations.left_over[:1]
        self.activations.end_micro_batch()
        return self.builder.task(
            TaskKind.BACKWARD,
            section=OuterSection.PROLOGUE,
            makes=(made,),
            frees=(output, handed),
            reads=(*self.gathers.unowned_parameters(), output, handed, *added),
            updates=added,
            phase=phase.adding if self.builder.micro_batch else phase,
        )
