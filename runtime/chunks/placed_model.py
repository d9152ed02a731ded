"""A model's parameters in their chunks, with the optimizers that step them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from ...shared.basics.errors import FileError, ProtwinError, RanksError
from ...shared.layout.layout import Chunk, Layout
from ...shared.layout.owners import Ownership
from ...shared.layout.uses import numbered_section, numbered_uses
from ...shared.schema.plan import ParallelMode, Plan, num_shards
from ...shared.schema.schedule import Section
from ...shared.schema.workload import Workload
from ..devices.device import TrainingDevice
from ..optimizers.gradient_norms import ClippedNorm, clipped_by, clipped_norm, sum_of_squares
from ..optimizers.non_finite import GradientLooks, refuse_non_finite, refuse_overflow
from ..optimizers.step_undo import LastStep, StepGate
from ..ranks.collectives import Collectives
from .chunk import DeviceChunk
from .chunk_maker import ChunkMaker
from .chunk_store import ChunkStore
from .clipping import ClippedNorms, Clipping, Limited
from .gradient_stand_ins import GradientStandIns, Norms, held_gradient
from .gradient_watch import GradientWatch
from .model_optimizers import ModelOptimizers, StepPolicy
from .parameter_values import OwnValues, ParameterValues
from .projections import OwnedProjections, Projections
from .row_lookups import LookedUpRows
from .sharded_chunk import ShardedChunk


class PlacedModel:
    """Owns the memory of all parameters from construction until ``move_out``."""

    owned: OwnedProjections | None = None
    """What keeps factors orthogonal that lie in parts on the devices; None: no such chunk has any."""

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        layout: Layout,
        device: TrainingDevice,
        *,
        plan: Plan,
        policy: StepPolicy,
        store: ChunkStore | None = None,
        ranks: Collectives | None = None,
        values: ParameterValues | None = None,
    ) -> None:
        """Move every parameter into its chunk, as ``plan`` says.

        ``store`` has what lies on the disk, if anything does; ``ranks`` are those that chunks are shared among, for use
        between two steps; ``values`` says where values come from, by default from the parameters.  Raises the device's
        out-of-memory error if the persistent chunks exceed the budget, and FileError if the disk or ``values`` fail.
        After any error the model has ordinary parameters, or such on the meta device again.
        """
        self._store = store
        self.ranks = ranks
        """Those that chunks are shared among, for the compute thread; None: there is one."""
        self._device = device
        self._scaler = policy.scaler
        self.clipping = Clipping(plan, workload)
        """Which gradients keep a limit of their norm together."""
        self.held_blocks: tuple[str, ...] = ()
        """The blocks that the last completed step has held ([Note: Held blocks] in ``clipping``)."""
        # Scaled gradients may overflow, and blocks be held; the norm decides then.
        self.is_checking = policy.check_gradients and policy.scaler is None and not self.clipping.holds
        """Whether gradients must be finite."""
        self.chunks: list[DeviceChunk] = []
        self.rows = LookedUpRows(device)
        """Embeddings whose rows are looked up on the host."""
        self.last_step = LastStep() if policy.keep_last_step else None
        """Keeps what host steps overwrite, where that is wanted."""
        self.gate = StepGate()
        """What every step on the host passes."""
        self.optimizers = ModelOptimizers(policy, plan.optimizer, device)
        """Who steps the chunks."""
        self._watch = GradientWatch(device.ledger)
        self._max_norm = plan.max_gradient_norm
        self._stand_ins: GradientStandIns | None = None
        self._looks: GradientLooks | None = None
        self._received: dict[nn.Parameter, torch.Tensor] = {}
        """Gradients that stay, of parameters for which other ranks have one: from the lane of collectives to the norm
        (cpu_optim) and to the step on the device (compute thread), which come after it."""
        self._staying: dict[Section, list[nn.Parameter]] = {}
        """The trainable parameters that stay on the device, by the section that completes their gradients."""
        self._labels = {id(p): policy.options.label_of(p) for p in model.parameters()}
        self._in_order = [parameter for parameter in model.parameters() if parameter.requires_grad]
        maker = ChunkMaker(
            parameters=dict(model.named_parameters(remove_duplicate=False)),
            workload=workload,
            layout=layout,
            plan=plan,
            device=device,
            store=store,
            ranks=ranks,
            values=values or OwnValues(),
        )
        device.begin_training()
        try:
            maker.values.made(lambda: self._begin(maker))
        except BaseException:
            self.move_out()
            raise

    def _begin(self, maker: ChunkMaker) -> None:
        plan = maker.plan
        with torch.no_grad():
            self._move_in(maker)
        self.clipping.add(self.chunks)
        self._added_up = [p for chunk in self.chunks if maker.leaves_once(chunk.chunk) for p in chunk.trainable]
        """The trainable parameters of chunks whose gradients are added up on the device before they leave."""
        self.projections = Projections(self.chunks, self.optimizers.masters)
        """What keeps trained factors orthogonal to frozen ones; it does nothing where there are none."""
        parted = [c for c in self.chunks if isinstance(c, ShardedChunk) and c.is_on_device and c.chunk.subspaces]
        if parted:
            shards = num_shards(plan.parallel, plan.num_ranks, plan.shard_ranks)
            chunks, parameters = tuple(chunk.chunk for chunk in parted), maker.workload.parameters
            self.owned = OwnedProjections(parted, Ownership(chunks, parameters, shards, plan.optimizer), self._device)
        if self.optimizers.host or self.optimizers.parts or self._max_norm is not None:
            self._stand_ins = GradientStandIns(
                self._in_order, self._max_norm, has_parts=plan.parallel is ParallelMode.SHARDED
            )
        if self.is_checking and self.optimizers.device:
            self._looks = GradientLooks(self._device.torch_device)
            if plan.num_ranks == 1:
                self._staying = self._staying_parameters(maker.parameters, maker.workload)

    def _move_in(self, maker: ChunkMaker) -> None:
        """Make every chunk, with the optimizers that step it.

        One chunk after the other: the model's own copy of a chunk's weights goes before the next chunk takes memory;
        where they are in parts from then on, once all ranks have moved them in.
        """
        workload = maker.workload

        def move_in(chunk: Chunk) -> DeviceChunk:
            made = maker.make(chunk)
            self.chunks.append(made)
            if chunk.rows is not None:
                assert workload.row_lookups is not None
                num_rows = {table.parameter: table.num_rows for table in workload.row_lookups.tables}
                self.rows.take_over(made, [num_rows[placed.index] for placed in chunk.parameters])
            self.optimizers.add(made)
            return made

        for chunk in maker.layout.chunks:
            maker.values.made(partial(move_in, chunk)).let_originals_go()
        self.optimizers.add_whole(self.chunks)

    def keep(self, returning: Collection[nn.Parameter] = ()) -> None:
        """Training begins: parameters that began on the meta device are to be ordinary in the end.

        Those that are ``returning`` go back there.
        """
        for chunk in self.chunks:
            chunk.keep(returning)

    def origins(self) -> dict[nn.Parameter, torch.device]:
        """Where parameters are to be in the end."""
        return {p: origin for chunk in self.chunks for p, origin in zip(chunk.parameters, chunk.origins, strict=True)}

    def return_to(self, origins: Mapping[nn.Parameter, torch.device]) -> None:
        """Parameters are to be there in the end."""
        for chunk in self.chunks:
            chunk.origins = [origins[parameter] for parameter in chunk.parameters]

    def separate(self) -> None:
        """Other ranks are asked for nothing any more: weights that are in parts are lost."""
        if self.ranks is not None:
            self.ranks.close()

    def _staying_parameters(
        self, parameters: Mapping[str, nn.Parameter], workload: Workload
    ) -> dict[Section, list[nn.Parameter]]:
        stepped = {parameter for step in self.optimizers.device for parameter in step.parameters}
        found: dict[Section, list[nn.Parameter]] = {}
        for spec in workload.parameters:
            if parameters[spec.name] in stepped:
                number = numbered_uses(spec, workload.num_blocks).gradient
                section = numbered_section(number, workload.num_blocks)
                found.setdefault(section, []).append(parameters[spec.name])
        return found

    # -- stepping ----------------------------------------------------------------------------------------------------

    def step_on_device(self, clipped: ClippedNorms) -> None:
        """Step the persistent chunks with the gradients that their parameters hold, as ``clipped``, and drop these.

        Raises, with nothing stepped, ScheduleError if these were changed since ``watch_gradients``, and
        NonFiniteGradientError if one of them is not finite; norms that are limited were, or hold a block.
        """
        self.check_gradients()
        self.show_received()
        if self._device.ledger is not None:
            # They are the host's, and live until the next norms are known.
            self._device.ledger.ignore([one.factor for one in clipped.values()])
        if self.clipping.holds:
            self._step_blocks_on_device(clipped)
            return
        scale = clipped[None].factor if clipped else None
        if scale is not None and self._scaler is None:
            for gradient in (*self.gradients(), *self._gradients_of_parts()):
                gradient.mul_(scale.to(gradient.device))
        if self._looks is not None and scale is None:
            self._looks.refuse_non_finite(*self._waiting_gradients())
        for step in self.optimizers.device:
            step.run(factor=scale if self._scaler is not None else None)
        for chunk, optimizer in self.optimizers.parts:
            gradients = chunk.waiting()
            if self.is_checking and scale is None:
                refuse_non_finite(gradients, optimizer.labels)
            optimizer.step(gradients, factor=scale if self._scaler is not None else None)
        self.optimizers.count_state()

    def _step_blocks_on_device(self, clipped: ClippedNorms) -> None:
        """Step those that are not held."""
        is_scaled = self._scaler is not None
        self.clipping.scale_blocks(self.chunks, clipped, is_scaled=is_scaled)
        narrow = {id(parameter) for chunk in self.chunks for parameter in chunk.narrow} if is_scaled else set()
        for step in self.optimizers.device:
            widens = any(id(parameter) in narrow for parameter in step.parameters)
            step.run(factor=self.clipping.factor_of(step.parameters, clipped) if widens else None)
        self.optimizers.count_state()
        self.held_blocks = self.clipping.held_blocks(clipped)

    def label_of(self, parameter: nn.Parameter) -> str:
        """A parameter's name, with its block's."""
        return self._labels[id(parameter)]

    @property
    def hands_over(self) -> bool:
        """Whether stand-ins are shown between the last backward and the step."""
        return self._stand_ins is not None

    def receive(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Parameters that have no gradient here have these means over ranks."""
        self._received.update(gradients)

    def show_received(self) -> None:
        """Parameters show what they have received.  No gradient may be handed over, and no collective under way."""
        for parameter, gradient in self._received.items():
            parameter.grad = gradient
        self._received.clear()

    def check_averaged(self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
        """Raise NonFiniteGradientError if a mean over ranks is not finite; its step need not look at it again."""
        refuse_non_finite(gradients, [self.label_of(parameter) for parameter in parameters])
        if self._looks is not None and self._max_norm is None:
            self._looks.note_finite(gradients)

    def look_at_gradients(self, section: Section | None) -> None:
        """The gradients of ``section`` are final: begin to look whether those that stay are finite."""
        if self._looks is not None and section in self._staying:
            self._looks.look([parameter.grad for parameter in self._staying[section]])

    def step_on_host(self, chunk: DeviceChunk, present: Sequence[bool], *, clipped: ClippedNorm | None = None) -> None:
        """Step a chunk whose home is on the host with its staged gradients, as ``clipped``; not if its block is held.

        ``present`` says for which parameters there was one.

        Raises NonFiniteGradientError if one of them is not finite.
        """
        gradients = [staged if there else None for staged, there in zip(chunk.staged, present, strict=True)]
        factor = None if clipped is None else clipped.factor
        if clipped is not None and self._scaler is None and not clipped.is_held:
            factor = None
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(clipped.factor)
        optimizer = self.optimizers.host[chunk.chunk.id]
        if self.is_checking:
            refuse_non_finite(gradients, optimizer.labels)
        self.gate.begin(chunk.chunk.id, optimizer.num_steps)
        if self.last_step is not None:
            self.last_step.before_step(optimizer)
        optimizer.step(gradients, factor=factor)

    def clip(self, present: Mapping[int, Sequence[bool]], section: Limited = None) -> ClippedNorm:
        """The norms of the gradients that ``section`` limits, and what keeps the norm of all of these at the limit.

        ``present`` says for which parameters of each of their chunks that the host steps there is one.  Raises
        NonFiniteGradientError if gradients are to be checked and one of them is not finite, with nothing stepped.
        """
        assert self._max_norm is not None
        staged = {
            id(parameter): gradient
            for chunk, there in present.items()
            for parameter, gradient, is_there in zip(
                self.chunks[chunk].trainable, self.chunks[chunk].staged, there, strict=True
            )
            if is_there
        }
        received = self._received
        members = self.clipping.members(self._in_order, section)
        found = {p: staged.get(id(p), received.get(p, held_gradient(p.grad))) for p in members}
        gradients = {p: gradient for p, gradient in found.items() if gradient is not None}
        labels = [self._labels[id(p)] for p in gradients]
        if self._scaler is not None:
            factor = self._scaler.of(section).factor_for(list(gradients.values()), self._max_norm, labels)
            is_held = self.clipping.holds and bool(factor.isnan())
            return ClippedNorm(torch.tensor(torch.nan), factor, {}, is_held=is_held)
        clipped = clipped_norm(gradients, self._max_norm)
        if self.clipping.holds:
            return clipped.or_held()
        if self.is_checking and not clipped.norm.isfinite():
            refuse_non_finite(list(gradients.values()), labels)
        return clipped

    def own_squares(self, present: Mapping[int, Sequence[bool]]) -> torch.Tensor:
        """The sum of the squares of what this rank has of all gradients, a float64.

        What all ranks have, the first of each shard group counts.  ``present`` says for which pieces of each chunk that
        the host steps there is one.
        """
        assert self.ranks is not None
        own = self._gradients_of_parts()
        for chunk, there in present.items():
            own += [staged for staged, is_there in zip(self.chunks[chunk].staged, there, strict=True) if is_there]
        if self.ranks.shard.rank == 0:
            found = (self._received.get(p, held_gradient(p.grad)) for p in self._in_order)
            own += [gradient for gradient in found if gradient is not None]
        return sum_of_squares(own)

    def clip_by(self, squares: torch.Tensor) -> ClippedNorm:
        """What gradients are to be multiplied by, from the sum of the squares of all of them.

        Raises NonFiniteGradientError, on all ranks, if gradients are to be checked and their mean is not finite.
        """
        assert self._max_norm is not None
        if self._scaler is not None:
            factor = self._scaler.of(None).factor_from(squares, self._max_norm)
            return ClippedNorm(torch.tensor(torch.nan), factor, {})
        clipped = clipped_by(squares, self._max_norm)
        if self.is_checking and not clipped.norm.isfinite():
            refuse_overflow()
        return clipped

    def _gradients_of_parts(self) -> list[torch.Tensor]:
        """What parts on the device are to be stepped with."""
        return [gradient for chunk, _ in self.optimizers.parts for gradient in chunk.waiting() if gradient is not None]

    def _waiting_gradients(self) -> tuple[list[torch.Tensor | None], list[str]]:
        """The gradients that device Adam consumes, and whose they are; each once, however many steps consume it."""
        labels = {
            parameter: label
            for step in self.optimizers.device
            for parameter, label in zip(step.parameters, step.optimizer.labels, strict=True)
        }
        return [parameter.grad for parameter in labels], list(labels.values())

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that parameters hold now."""
        return [p.grad for chunk in self.chunks for p in chunk.trainable if p.grad is not None]

    def drop_gradients(self) -> None:
        """Drop what gradients are left: nothing steps them, and they must not survive into the next iteration."""
        self._watch.end()
        self._received.clear()
        if self._stand_ins is not None:
            self._stand_ins.forget()
        for of_parts, _ in self.optimizers.parts:
            of_parts.present = []
        for chunk in self.chunks:
            chunk.stepped_next.clear()
            for parameter in chunk.parameters:
                parameter.grad = None

    # -- giving an iteration up --------------------------------------------------------------------------------------

    def has_begun_device_step(self, iteration: int) -> bool:
        """Whether persistent chunks may have been stepped with the gradients of ``iteration``."""
        return any(stepper.num_steps > iteration for stepper in self.optimizers.on_device)

    def leave_device(self) -> None:
        """Whatever comes and goes on the device goes: gradients and chunks.  No copy may be under way."""
        if self._looks is not None:
            self._looks.forget()
        self.rows.forget()
        self.drop_gradients()
        if self.owned is not None:
            self.owned.forget()
        for chunk in self.chunks:
            chunk.leave()

    def take_back_steps(self, *, num_completed: int) -> None:
        """Undo steps on the host of an iteration that was not completed, if what they overwrote was kept."""
        if self.last_step is not None:
            self.last_step.take_back(self.optimizers.host.values(), num_completed=num_completed)

    def named_offloaded(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters whose home is on the host."""
        return [named for chunk in self.chunks if not chunk.is_persistent for named in chunk.named_parameters()]

    # -- what must not change ----------------------------------------------------------------------------------------

    def check_parameters(self) -> None:
        """Raise ScheduleError if a parameter was taken out of its chunk, frozen or thawed."""
        for chunk in self.chunks:
            chunk.check_parameters()

    def check_gradients(self) -> None:
        """Raise ScheduleError if gradients were changed since ``watch_gradients`` or ``hand_over``.

        After it parameters have their gradients again, as far as these are on the device.
        """
        if self._stand_ins is not None:
            self._stand_ins.take_back()
        self._watch.check()
        self._watch.end()

    def watch_gradients(self, after: str) -> None:
        """Note the gradients that stay for the next micro-batch, if those of other chunks leave.

        Until then nobody else may read or change any: those that have left are not there to be seen.  ``after``: the
        last one, in words.
        """
        if self.optimizers.host or self.optimizers.parts:
            stepped = [parameter for step in self.optimizers.device for parameter in step.parameters]
            self._watch.begin([*stepped, *self._added_up])
            self._show_stand_ins(None, after)

    def hand_over(self, norms: Callable[[], Norms] | None) -> None:
        """All gradients of the step are final: from here on nobody else may read or change them.

        ``norms`` waits for their norms, if the plan limits these; see [Note: Gradients that were handed over] in
        ``gradient_stand_ins``.
        """
        if self._stand_ins is not None:
            self._show_stand_ins(norms)

    def _show_stand_ins(self, norms: Callable[[], Norms] | None, after: str = "") -> None:
        assert self._stand_ins is not None, "of chunks whose gradients leave"
        left = [p for chunk in self.chunks for p in chunk.trainable if p in chunk.stepped_next]
        waiting = {p: p.grad for p in self._in_order if p.grad is not None}
        self._stand_ins.show({**dict.fromkeys(left), **waiting}, norms, after=after)

    # -- leaving -----------------------------------------------------------------------------------------------------

    def let_end(self) -> None:
        """Let threads end by themselves, without waiting; the memory goes with whoever holds it."""
        if self._looks is not None:
            self._looks.let_end()

    def move_out(self) -> None:
        """Give every parameter a tensor of its own again.  No lane may run any more.  Idempotent.

        Raises FileError if the disk fails, and RanksError if a rank does not come: the parameters that these have are
        NaN then, all others are what they were.
        """
        failures: list[ProtwinError] = []
        if self._looks is not None:
            self._looks.close()
        self.drop_gradients()
        if self._stand_ins is not None:
            self._stand_ins.close()
            self._stand_ins = None
        self.clipping.clear()
        # Before parameters go back to where they came from: that may be the device, whatever the budget was.
        self._device.end_training()
        self.rows.close()
        if self.owned is not None:
            self.owned.forget()
            self.owned = None
        with torch.no_grad():
            for chunk in self.chunks:
                try:
                    chunk.move_out()
                except (FileError, RanksError) as error:
                    failures.append(error)
        self.chunks.clear()
        self.last_step = None
        self.optimizers.clear()
        if failures:
            raise failures[0]
