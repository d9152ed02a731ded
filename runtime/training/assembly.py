"""What a training is made of: every part, built in the order in which parts need each other, with how to undo it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...shared.compile.compile import compile_schedule
from ...shared.layout.layout import Layout, layout_of
from ...shared.layout.looked_up import as_planned
from ...shared.layout.residencies import chunk_counts
from ...shared.layout.shards import stepped_members
from ...shared.optimizers.state import state_tensors
from ...shared.schema.plan import Plan
from ...shared.schema.schedule import Content, Schedule, TaskKind
from ...shared.schema.workload import Workload
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ...shared.verify.verify import verify_schedule
from ..adapters.changes import WatchedParts, watched_parts
from ..checkpoints.saved_part import SavedPart
from ..checkpoints.state import CheckpointState, configuration_text
from ..chunks.chunk_store import ChunkStore, chunk_store
from ..chunks.gradient_watch import refusing_late_gradients
from ..chunks.model_optimizers import StepPolicy
from ..chunks.placed_model import PlacedModel
from ..devices.device import TrainingDevice
from ..hooks.autocast import following_autocast
from ..hooks.held_outputs import HeldOutputs
from ..hooks.offloaded_inputs import offloaded_inputs
from ..hooks.section_walker import Recomputing, SectionWalker
from ..hooks.swapping import SwappedActivations, swapped_blocks
from ..lanes.compute_lane import ComputeLane
from ..lanes.progress import Progress
from ..lanes.stage_work import StageWork
from ..lanes.transfer_lanes import TransferLanes
from ..model.blocks import NamedBlock, find_blocks
from ..model.identity import note_empty_buffers
from ..model.kept_tensors import kept_tensors
from ..model.ownership import check_model, taken_over
from ..model.snapshot import without_cache
from ..optimizers.chunk_optimizer import group_options
from ..optimizers.facade import ParameterStates, TrainingOptimizer
from ..optimizers.loss_scaling import BlockScalers, LossScaler, scaler_for
from ..optimizers.named import check_made, check_runs_on, on_host
from ..quantized.states import states_as_parameters
from ..ranks.agreement import agree, agreed
from ..ranks.collectives import Collectives
from ..ranks.own_device import check_own_device
from ..ranks.sequence_peers import sharing_sequences
from ..ranks.shard_groups import between_steps, of_lane
from ..ranks.world import exchanged
from ..ranks.wrappers import check_unwrapped
from ..recording.allocator_metering import AllocatorMetering
from ..recording.ledger_metering import LedgerMetering
from ..recording.metering import Metering
from ..recording.recorder import Recorder
from ..sequences import sharing
from ..tiles.fused_loss import check_loss_of_plan, loss_of_plan
from ..tiles.mlp_modules import as_planned as in_tiles_of
from .consensus import check_ranks_on, facts_of_optimizer, facts_of_pipeline, facts_of_plan
from .evaluation import Evaluation, whole_model
from .guards import (
    OffloadedWeights,
    StateAccess,
    check_devices,
    check_disk_folder,
    refusing_access,
    refusing_other_optimizers,
)
from .initial_values import check_values, fill_buffers, values_for
from .module_buffers import SharedBuffers, buffers_on
from .settings import TrainingSettings, Walker


@dataclass(frozen=True, kw_only=True, slots=True)
class Callbacks:
    """What the parts ask of the training that they are assembled for."""

    enter_model: Callable[[nn.Module, Any, Any], None]
    step: Callable[[], None]
    has_gradients: Callable[[], bool]
    optimizer_state: Callable[[], ParameterStates]
    set_optimizer_state: Callable[[list[dict[str, Any]], ParameterStates], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kept:
    """What users and schedulers hold of a training while its plan changes."""

    optimizer: TrainingOptimizer
    scaler: LossScaler | BlockScalers | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldModel:
    """The model's weights in their chunks, who steps and saves them, and who sees to it that nobody else does."""

    placed: PlacedModel
    optimizer: TrainingOptimizer
    state: CheckpointState
    access: StateAccess
    offloaded_weights: OffloadedWeights
    taken_over: WatchedParts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parts:
    """Of one training."""

    layout: Layout
    schedule: Schedule
    loss_scaler: LossScaler | BlockScalers | None
    metering: Metering
    recorder: Recorder
    held: HeldModel
    lanes: TransferLanes
    compute: ComputeLane
    evaluation: Evaluation
    walker: Walker
    outputs: HeldOutputs | None
    """Looks whether the loop holds what the model gives; None where it may, or the device has no limit."""
    buffers: SharedBuffers | None
    """What forward changes and ranks share; None where there is one rank, or nothing of that kind."""
    undo: ExitStack
    """Gives the model back, as it was but for its weights."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """What follows from plan, workload and settings while the model is still the user's."""

    layout: Layout
    schedule: Schedule
    policy: StepPolicy
    blocks: Sequence[NamedBlock]


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembly:
    """What the parts are made from."""

    model: nn.Module
    plan: Plan
    workload: Workload
    settings: TrainingSettings
    progress: Progress
    owner: object
    """Whose the model is meanwhile (``owner_of``)."""
    callbacks: Callbacks
    kept: Kept | None = None
    """What of an earlier plan's parts stays; None: training begins."""

    def going_on(self, plan: Plan, *, progress: Progress, kept: Kept) -> Assembly:
        """The same for another plan, in the middle of training: what was on the meta device has values by now."""
        settings = replace(self.settings, weights=None, returning=frozenset())
        return replace(self, plan=plan, settings=settings, progress=progress, kept=kept)

    def check_plan(self) -> Layout:
        """The layout of the plan.  Raises PlanError if it cannot be carried out on this device, whoever has the model.

        What is to be checked of a model that nobody has is left to ``build``.
        """
        self._check_device()
        prepared = self._planned()
        check_devices(prepared.schedule, [self.settings.device.limit_bytes])
        return prepared.layout

    def build(self) -> Parts:
        """Take the model over, and start the lanes; of several ranks, on all or on none.

        Raises PlanError if plan, workload, model and settings do not belong together, the device is smaller than the
        plan or ranks differ, FileError if weights cannot be read, and the device's out-of-memory error if what else it
        holds leaves no room.  The model is as it was then, but for the weights of rank 0, which other ranks may have
        by then; if a rank has ended meanwhile, weights that were in parts are NaN.
        """
        world, saved, everybody = self.settings.world, self.settings.weights, self.settings.everybody
        prepared = agreed(everybody, self._prepare)
        self._agree(prepared)
        self._open_lanes()
        with ExitStack() as unbegun:
            undo_buffers = agreed(everybody, lambda: fill_buffers(self.model, saved, world), undo=lambda undo: undo())
            unbegun.callback(undo_buffers)
            # Ranks that have given their whole weights up give them back together, once all know why.
            with ExitStack() as undo:
                parts = agreed(everybody, lambda: self._assemble(undo, prepared))
                facts = facts_of_optimizer(parts.held.placed.optimizers.name, prepared.policy.options)
                agreed(everybody, lambda: agree(world, facts))
                whole = ExitStack()
                if everybody is not None:
                    # From here on lanes may meet.
                    parts.lanes.meet()
                    whole.callback((self.settings.stages or everybody).leave)
                parts.held.placed.keep(self.settings.returning)
                unbegun.pop_all()
                whole.push(undo.pop_all())
                return replace(parts, undo=whole)

    def _agree(self, prepared: Prepared) -> None:
        """Raise PlanError, on all ranks alike, if they differ in what they are to have in common, or one is too small.

        All ranks of a pipeline have the same pipeline; those of one stage do the same.
        """
        world, stages, device = self.settings.world, self.settings.stages, self.settings.device
        everybody = self.settings.everybody
        if stages is not None:
            named = agreed(everybody, self._named_settings)
            agree(everybody, facts_of_pipeline(stages.pipeline, device, settings=named))
        facts = agreed(everybody, lambda: self._facts(prepared))
        agreed(everybody, lambda: agree(world, facts))
        limit_bytes = device.limit_bytes
        limits_bytes = [limit_bytes] if world is None else exchanged(world, limit_bytes)
        agreed(everybody, lambda: check_devices(prepared.schedule, limits_bytes))

    def _open_lanes(self) -> None:
        """Connect the ranks for what their lanes do together."""
        device, everybody = self.settings.device, self.settings.everybody
        if everybody is None:
            return
        check_own_device(everybody, device)
        shard_ranks = self.plan.shard_ranks if self.settings.stages is None else None
        everybody.open_lane(device.torch_device, shard_ranks, self.plan.sequence_ranks)
        if self.settings.stages is not None and self.settings.stages.peers is not None:
            self.settings.stages.peers.open_lane(device.torch_device, self.plan.shard_ranks)

    def _named_settings(self) -> dict[str, Any]:
        named = {name: getattr(self.settings, name) for name in ("check_gradients", "loss_scaling", "keep_last_step")}
        return named | {"weights": None if self.settings.weights is None else self.settings.weights.fingerprint()}

    def _facts(self, prepared: Prepared) -> dict[str, str]:
        """What ranks have to have in common before anything moves."""
        named = self._named_settings()
        return facts_of_plan(self.plan, self.workload, prepared.schedule, self.settings.device, settings=named)

    def _prepare(self) -> Prepared:
        """Check everything that can be checked before anything moves."""
        model, workload = self.model, self.workload
        self._check_device()
        check_unwrapped(model)
        with states_as_parameters(model):
            check_model(model, workload, traced_hash=self.settings.traced_hash)
            check_values(model, self.settings.weights, self.settings.world)
        return self._planned()

    def _check_device(self) -> None:
        check_ranks_on(self.plan, self.settings.device.torch_device)
        check_runs_on(self.plan.optimizer, self.settings.device.torch_device)

    def _planned(self) -> Prepared:
        model, plan, workload = self.model, self.plan, self.workload
        self.settings.check(plan)
        check_loss_of_plan(model, plan, workload)
        sharing.check_model(model, plan.sequence_ranks)
        check_disk_folder(plan, self.settings.disk_folder)
        scaler = self.kept.scaler if self.kept else scaler_for(self.settings.loss_scaling, plan, workload)
        layout = layout_of(workload, plan.chunk_bytes)
        schedule = compile_schedule(plan, workload, layout)
        verify_schedule(schedule, plan, workload, layout)
        _, layout = as_planned(plan, workload, layout)
        return Prepared(
            layout=layout,
            schedule=schedule,
            policy=self._policy(scaler),
            blocks=find_blocks(model, [block.name for block in workload.blocks]),
        )

    def _assemble(self, undo: ExitStack, prepared: Prepared) -> Parts:
        model, plan, workload, device = self.model, self.plan, self.workload, self.settings.device
        layout, schedule, blocks = prepared.layout, prepared.schedule, prepared.blocks
        metering = _metering(device, self.settings.meter_every, model)
        if device.ledger is not None:
            undo.enter_context(device.ledger.planning(guaranteed_device_peak(schedule).size_bytes))
        # Undone in the opposite order: hooks go before lanes, lanes before chunks, and the model has an owner until its
        # parameters are ordinary again.
        held = self._hold(undo, layout, schedule, prepared.policy)
        undo.enter_context(in_tiles_of(model, plan, workload))
        modes = plan.modes(workload.num_blocks)
        swapping = swapped_blocks(model, blocks, modes, schedule, device)
        inputs = offloaded_inputs(blocks, modes, schedule, device)
        travelling = {**swapping, **inputs}
        world, stages = self.settings.world, self.settings.stages
        collectives = None if world is None else of_lane(world, device.pace_collective)
        stage = None if stages is None else StageWork(stages, device.pace_collective)
        lanes = TransferLanes(schedule, held.placed, device, travelling, collectives, stage)
        undo.callback(lanes.close)
        compute = ComputeLane(schedule, held.placed, lanes, metering, device, travelling, self.progress)
        undo.enter_context(loss_of_plan(model, plan, workload, blocks))
        compute.peers = undo.enter_context(sharing_sequences(model, world, device))
        walker = self._follow(blocks, compute, swapping, Recomputing.of(inputs, plan, workload))
        undo.callback(walker.remove)
        for handle in self._hooks(held.placed, compute):
            undo.callback(handle.remove)
        undo.callback(metering.stop)
        chunks = chunk_counts(plan, layout)
        return Parts(
            layout=layout,
            schedule=schedule,
            loss_scaler=prepared.policy.scaler,
            metering=metering,
            recorder=Recorder(schedule, plan, workload, device, chunks=chunks, meter_every=self.settings.meter_every),
            held=held,
            lanes=lanes,
            compute=compute,
            evaluation=Evaluation(
                self.settings.evaluated or [whole_model(model, blocks)], held.placed.chunks, device, held.placed.rows
            ),
            walker=walker,
            outputs=self._outputs(undo, schedule),
            buffers=self._shared_buffers(held.placed.ranks),
            undo=undo,
        )

    def _follow(
        self,
        blocks: Sequence[NamedBlock],
        compute: ComputeLane,
        swapping: Mapping[int, SwappedActivations],
        recomputing: Recomputing,
    ) -> Walker:
        if self.settings.follow is not None:
            return self.settings.follow(compute)
        modes = self.plan.modes(self.workload.num_blocks)
        return SectionWalker(self.model, blocks, modes, compute, swapping, recomputing=recomputing, is_training=True)

    def _outputs(self, undo: ExitStack, schedule: Schedule) -> HeldOutputs | None:
        device, ledger = self.settings.device, self.settings.device.ledger
        if device.limit_bytes is None or self.workload.keeps_outputs or self.settings.follow is not None:
            return None
        peak_bytes = guaranteed_device_peak(schedule).size_bytes
        outputs = HeldOutputs(self.model, peak_bytes=peak_bytes, limit_bytes=device.limit_bytes)
        undo.callback(outputs.remove)
        if ledger is not None:
            ledger.hint = lambda: outputs.hint
            undo.callback(setattr, ledger, "hint", None)
        return outputs

    def _shared_buffers(self, ranks: Collectives | None) -> SharedBuffers | None:
        if ranks is None or next(self.model.buffers(), None) is None:
            return None
        return SharedBuffers(self.model, self.settings.device, ranks)

    def _policy(self, scaler: LossScaler | BlockScalers | None) -> StepPolicy:
        settings, plan = self.settings, self.plan
        if self.kept is None:
            options = group_options(self.model, settings.parameter_groups, self.workload)
        else:
            options = self.kept.optimizer.options.anew()
        return StepPolicy(
            options,
            settings.optimizer,
            on_host(plan.optimizer, settings.optimizer),
            check_gradients=settings.check_gradients,
            scaler=scaler,
            keep_last_step=settings.keep_last_step,
        )

    def _hold(self, undo: ExitStack, layout: Layout, schedule: Schedule, policy: StepPolicy) -> HeldModel:
        """Move the model into its chunks, and let nobody else step, save or convert it."""
        model, plan, workload, device = self.model, self.plan, self.workload, self.settings.device
        # As the user made it: while a plan is carried out, its cache is off.
        saved = self.settings.saved or SavedPart(configuration_text(model))
        undo.enter_context(without_cache(model))
        undo.enter_context(states_as_parameters(model))
        undo.enter_context(taken_over(model, self.owner))
        note_empty_buffers(model)
        undo.enter_context(buffers_on(device.torch_device, model))
        if device.ledger is not None:
            device.ledger.adopt(model.buffers(), Content.RESIDENT)
        store = self._store(undo, layout, schedule)
        ranks = None if self.settings.world is None else between_steps(self.settings.world)
        values = values_for(model, self.settings.weights, self.settings.world)
        placed = PlacedModel(
            model, workload, layout, device, plan=plan, policy=policy, store=store, ranks=ranks, values=values
        )
        undo.callback(placed.move_out)
        if store is not None and self.settings.stated_disk is not None:
            store.check_speed(self.settings.stated_disk)
        # Steps of an iteration that was not completed, if what they overwrote was kept; no lane runs any more.
        undo.callback(lambda: placed.take_back_steps(num_completed=self.progress.iteration))
        offloaded_weights = OffloadedWeights(placed.named_offloaded())
        ownership = undo.enter_context(watched_parts(model, offloaded_weights.but_for_wrapping))
        optimizer = self._optimizer(policy, schedule)
        state = CheckpointState(model, workload, placed, optimizer, device, plan=plan, part=saved, scaler=policy.scaler)
        access = undo.enter_context(refusing_access(model))
        steppers = [stepper.optimizer for stepper, _, _ in placed.optimizers.steppers()]
        for stepper in steppers:
            check_made(plan.optimizer, stepper)
        undo.enter_context(refusing_other_optimizers(model, [optimizer, *steppers]))
        return HeldModel(
            placed=placed,
            optimizer=optimizer,
            state=state,
            access=access,
            offloaded_weights=offloaded_weights,
            taken_over=ownership,
        )

    def _optimizer(self, policy: StepPolicy, schedule: Schedule) -> TrainingOptimizer:
        is_ahead = any(task.kind is TaskKind.CPU_ADAM for task in schedule.tasks)
        if self.kept is not None:
            self.kept.optimizer.go_on_with(policy.options, is_ahead=is_ahead)
            return self.kept.optimizer
        return TrainingOptimizer(
            policy.options,
            step=self.callbacks.step,
            has_gradients=self.callbacks.has_gradients,
            is_ahead=is_ahead,
            read_state=self.callbacks.optimizer_state,
            write_state=self.callbacks.set_optimizer_state,
        )

    def _store(self, undo: ExitStack, layout: Layout, schedule: Schedule) -> ChunkStore | None:
        """What the plan has on the disk; the space that it takes there is given back in the end."""
        num_tensors = {
            chunk.id: sum(
                1 + len(state_tensors(stepped, self.plan.optimizer))
                for stepped in stepped_members(chunk, self.workload.parameters)
            )
            for chunk in layout.chunks
        }
        store = chunk_store(schedule, self.settings.device, self.settings.disk_folder, num_tensors)
        if store is not None:
            undo.callback(store.close)
        return store

    def _hooks(self, placed: PlacedModel, compute: ComputeLane) -> list[Any]:
        """The training's own, beside the walker's; the one on entering runs before the walker's."""
        enter = self.model.register_forward_pre_hook(self.callbacks.enter_model, prepend=True, with_kwargs=True)
        autocast = following_autocast(self.model, self.workload, self.settings.device.torch_device.type)
        # Lanes bring parameters back meanwhile: their classes must not be asked ([Note: Parameters that are away]).
        with torch._C.DisableTorchFunctionSubclass():
            late = refusing_late_gradients(placed.chunks, compute.has_left, num_ranks=self.plan.num_ranks)
            return [enter, *autocast, *late]


def _metering(device: TrainingDevice, meter_every: int | None, model: nn.Module) -> Metering:
    """The device's ledger, or its allocator."""
    if device.ledger is not None:
        # No part of a training may keep its model alive: a training that is dropped with its model says so and ends.
        held = weakref.ref(model)

        def kept() -> Iterable[torch.Tensor]:
            found = held()
            return kept_tensors(found.modules()) if found is not None else ()

        return LedgerMetering(device.ledger, meter_every, kept)
    return AllocatorMetering(device, meter_every)
