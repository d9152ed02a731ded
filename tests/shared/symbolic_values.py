"""Symbolic values ("the parameters of chunk 3 after 2 steps"): what every task needs, and what it makes.

A second statement of training, written without the compiler's or the verifier's: the abstract machine fills buffers by
it.
"""

from __future__ import annotations

from typing import Any

from protwin.shared.layout.layout import Layout
from protwin.shared.layout.travelling_inputs import input_bytes
from protwin.shared.schema.optimizer import HostGradients
from protwin.shared.schema.plan import ActivationMode, ParallelMode, Plan
from protwin.shared.schema.schedule import (
    Allocation,
    ChunkId,
    Content,
    Lane,
    Memory,
    OuterSection,
    Schedule,
    Section,
    Task,
    TaskKind,
)
from protwin.shared.schema.workload import BlockId, Workload

Value = tuple[object, ...]
"""What a buffer holds: ``("parameters", chunk, steps)``, ``("output", section, iteration)`` and so on."""
TORN: Value = ("torn",)


class Violation(Exception):
    """Something that training would not survive, at the first moment at which it happens."""


RECOMPUTED = (ActivationMode.CHECKPOINT, ActivationMode.OFFLOAD_INPUT, ActivationMode.SELECTIVE)


class SymbolicValues:
    """The values of one schedule's tasks, whatever order they run in."""

    def __init__(self, schedule: Schedule, plan: Plan, workload: Workload, layout: Layout) -> None:
        self.schedule = schedule
        self.plan = plan
        self.workload = workload
        self.layout = layout
        self.modes = plan.modes(workload.num_blocks)
        # Sums of another type than what arrives begin with what arrives first.
        self.widens = plan.host_gradients is HostGradients.FLOAT32 and (
            plan.micro_batches > 1 or plan.max_gradient_norm is not None
        )
        blocks = [BlockId(block) for block in range(workload.num_blocks)]
        self.sections: list[Section] = [OuterSection.PROLOGUE, *blocks, OuterSection.EPILOGUE]
        kept = layout.chunks[: plan.n_persist + plan.n_host_stepped]
        self.host_stepped = {chunk.id for chunk in kept[plan.n_persist :] if chunk.is_trainable}
        self.persistent = {chunk.id for chunk in kept} - self.host_stepped
        self.sharded = {chunk.id for chunk in layout.chunks[len(kept) : len(kept) + plan.n_shard]}
        self.is_sharded = plan.parallel is ParallelMode.SHARDED
        self.has_groups = plan.shard_ranks is not None

    def needed(self, task: Task, iteration: int) -> list[Value]:
        """What must lie in the buffers that the task reads."""
        section = task.section
        if task.kind is TaskKind.GATHER or task.kind is TaskKind.DISK_READ:
            return []
        if task.kind is TaskKind.DISK_WRITE:
            kept = {self.schedule.buffers[b].content for b in task.writes}
            names = {Content.PARAMETERS: "parameters", Content.OPTIMIZER_STATE: "state"}
            return [(name, task.chunk, iteration + 1) for content, name in names.items() if content in kept]
        micro, last = task.micro_batch, self.plan.micro_batches - 1
        if task.kind in (TaskKind.ACTIVATION_OFFLOAD, TaskKind.ACTIVATION_FETCH):
            return self._travelling(section, iteration, micro)
        if task.chunk is not None:
            chunk = self.layout.chunks[task.chunk]
            if task.kind is TaskKind.CPU_ADAM:
                return [
                    ("staged", chunk.id, iteration, last),
                    ("state", chunk.id, iteration),
                    ("parameters", chunk.id, iteration),
                ]
            if task.kind is TaskKind.REDUCE_SCATTER and chunk.id in self.sharded:
                gradients = self._gradients(chunk.id, iteration, micro)
                return [*gradients, *([("kept", chunk.id, iteration, micro - 1)] if micro else [])]
            if task.kind is TaskKind.GRADIENT_ACCUMULATE:
                earlier: list[Value] = [("staged", chunk.id, iteration, micro - 1)] if micro else []
                return [*earlier, ("arrived", chunk.id, iteration, micro)]
            if task.kind is TaskKind.ALL_GATHER:
                return []
            part: Value = ("reduced", chunk.id, None, iteration, micro)
            if self.has_groups and task.kind is TaskKind.ALL_REDUCE and chunk.id not in self.persistent:
                return [("kept", chunk.id, iteration, micro) if chunk.id in self.sharded else part]
            if task.lane is Lane.COLLECTIVE:
                return self._gradients(chunk.id, iteration, micro)
            if self.is_sharded:
                return [self._of_all_groups(part)]
            return self._summed(self._gradients(chunk.id, iteration, micro))
        needed: list[Value] = []
        if task.kind is TaskKind.ALL_REDUCE:
            return []
        if task.kind in (TaskKind.DEVICE_ADAM, TaskKind.GRADIENT_NORM):
            if task.kind is TaskKind.DEVICE_ADAM:
                needed += [("incoming", OuterSection.PROLOGUE, iteration, m) for m in range(last + 1)]
            for chunk in self.layout.chunks:
                if chunk.is_trainable and chunk.id in self.persistent:
                    needed += self._summed(self._gradients(chunk.id, iteration, last))
                    if task.kind is TaskKind.DEVICE_ADAM:
                        needed += [("state", chunk.id, iteration), ("parameters", chunk.id, iteration)]
                elif chunk.is_trainable and chunk.id in self.sharded:
                    needed.append(self._of_all_groups(("kept", chunk.id, iteration, last)))
                    if task.kind is TaskKind.DEVICE_ADAM:
                        needed += [("state", chunk.id, iteration), ("part", chunk.id, iteration)]
                elif chunk.is_trainable and task.kind is TaskKind.GRADIENT_NORM:
                    needed.append(("staged", chunk.id, iteration, last))
            return needed
        assert section is not None
        place = self.sections.index(section)
        before = self.sections[place - 1]
        needed = self._parameters(task, iteration)
        if task.kind is TaskKind.BACKWARD and section is not OuterSection.EPILOGUE:
            needed.append(("incoming", self.sections[place + 1], iteration, micro))
        if task.kind is TaskKind.BACKWARD and section is OuterSection.PROLOGUE:
            needed.append(("output", OuterSection.PROLOGUE, iteration, micro))
        elif section is not OuterSection.PROLOGUE:
            needed.append(("output", before, iteration, micro))
            needed += self._input(section, iteration, micro)
            if task.kind in (TaskKind.RECOMPUTE, TaskKind.BACKWARD):
                needed += self._results(section, iteration, micro)
            if task.kind is TaskKind.BACKWARD:
                needed.append(("saved", section, iteration, micro))
                needed += self._swapped(section, iteration, micro)
        if task.kind is TaskKind.BACKWARD and micro:
            for chunk_id in self.persistent:
                gradients = self._gradients(chunk_id, iteration, micro - 1)
                needed += [gradient for gradient in gradients if gradient[2] == section]
        return needed

    def made(self, task: Task, buffer: Allocation, iteration: int, held: Value | None) -> Value:
        """What ``task`` puts into a buffer that has ``held`` something until then.

        Raises Violation unless the buffer's declared content is something that the task makes.
        """
        micro = task.micro_batch
        is_own = buffer.chunk == task.chunk
        match task.kind, buffer.content:
            case TaskKind.FORWARD, Content.OUTPUT if task.section is not OuterSection.EPILOGUE:
                return ("output", task.section, iteration, micro)
            case TaskKind.FORWARD, Content.ACTIVATIONS if self._keeps(task.section):
                return ("saved", task.section, iteration, micro)
            case TaskKind.FORWARD, Content.KEPT_RESULTS if self._results(task.section, iteration, micro):
                return ("results", task.section, iteration, micro)
            case TaskKind.FORWARD, Content.SWAPPED if (
                buffer.section == task.section and self._swapped(task.section, iteration, micro)  # type: ignore[arg-type]
            ):
                return ("swapped", task.section, iteration, micro)
            case TaskKind.FORWARD, Content.SWAPPED if (
                self._input(buffer.section, iteration, micro)
                and self.sections.index(buffer.section) == self.sections.index(task.section) + 1  # type: ignore[arg-type]
            ):
                return ("input", buffer.section, iteration, micro)
            case ((TaskKind.ACTIVATION_OFFLOAD | TaskKind.ACTIVATION_FETCH), Content.SWAPPED) if (
                buffer.section == task.section
            ):
                is_to_host = task.kind is TaskKind.ACTIVATION_OFFLOAD
                if (buffer.memory is Memory.PINNED_HOST) != is_to_host:
                    return TORN
                return next(iter(self._travelling(task.section, iteration, micro)), TORN)
            case TaskKind.RECOMPUTE, Content.ACTIVATIONS:
                return ("saved", task.section, iteration, micro)
            case TaskKind.BACKWARD, Content.INCOMING_GRADIENT:
                return ("incoming", task.section, iteration, micro)
            case TaskKind.BACKWARD, Content.GRADIENTS if buffer.section == task.section:
                return ("gradient", buffer.chunk, task.section, iteration, micro)
            case TaskKind.ALL_REDUCE, Content.GRADIENTS:
                if held is None or held[0] == "summed":
                    raise Violation(f"{task.name} adds up {held}")
                return ("summed", *held)
            case TaskKind.ALL_REDUCE, Content.REDUCED_GRADIENTS if self.has_groups and is_own:
                if held is None or held[0] == "of all groups":
                    raise Violation(f"{task.name} adds up {held}")
                return self._of_all_groups(held)
            case TaskKind.REDUCE_SCATTER, Content.FLAT_GRADIENTS:
                return ("flat",)
            case TaskKind.REDUCE_SCATTER, Content.REDUCED_GRADIENTS if buffer.is_static:
                return ("kept", buffer.chunk, iteration, micro) if is_own else TORN
            case TaskKind.REDUCE_SCATTER, Content.REDUCED_GRADIENTS:
                return ("reduced", buffer.chunk, None, iteration, micro) if is_own else TORN
            case TaskKind.GRADIENT_OFFLOAD, Content.GRADIENTS if (
                buffer.memory is Memory.PINNED_HOST and micro == 0 and not self.widens
            ):
                return ("staged", buffer.chunk, iteration, 0) if is_own else TORN
            case TaskKind.GRADIENT_OFFLOAD, Content.ARRIVING_GRADIENTS if micro or self.widens:
                return ("arrived", buffer.chunk, iteration, micro) if is_own else TORN
            case TaskKind.GRADIENT_ACCUMULATE, Content.GRADIENTS if buffer.memory is Memory.PINNED_HOST:
                return ("staged", buffer.chunk, iteration, micro) if is_own else TORN
            case ((TaskKind.CPU_ADAM | TaskKind.DEVICE_ADAM), Content.PARAMETERS) if (
                buffer.is_static or buffer.memory is Memory.HOST
            ) and (buffer.memory is Memory.DEVICE) is (task.kind is TaskKind.DEVICE_ADAM):
                return (self._home(buffer.chunk), buffer.chunk, iteration + 1)
            case ((TaskKind.CPU_ADAM | TaskKind.DEVICE_ADAM), Content.OPTIMIZER_STATE):
                return ("state", buffer.chunk, iteration + 1)
        raise Violation(f"{task.name} writes {buffer.content}, which it does not make")

    def gathered(self, task: Task, copied: Value | None) -> Value:
        """What a gather makes of what it copies.  Raises Violation if that is nothing that it works on."""
        if copied is None:
            return TORN
        if task.chunk in self.sharded:
            if task.kind is TaskKind.GATHER or copied[0] != "part":
                raise Violation(f"{task.name} works on {copied}")
            return ("parameters", *copied[1:])
        if not self.is_sharded:
            return copied
        # What a host has of a sharded chunk is a shard; nothing but an all-gather makes it whole.
        is_whole = task.kind is TaskKind.ALL_GATHER
        if copied[0] != ("shard" if is_whole else "parameters"):
            raise Violation(f"{task.name} works on {copied}")
        return ("parameters" if is_whole else "shard", *copied[1:])

    def initial(self, buffer: Allocation) -> Value | None:
        """What a buffer holds before the first iteration."""
        if buffer.is_static and buffer.content is Content.PARAMETERS:
            return (self._home(buffer.chunk), buffer.chunk, 0)
        if buffer.is_static and buffer.content is Content.OPTIMIZER_STATE:
            return ("state", buffer.chunk, 0)
        return None

    def _home(self, chunk: ChunkId | None) -> str:
        """What a chunk's home holds: all of its parameters, or one device's part.

        What a host has of a sharded chunk is a part too, which its gather's value says.
        """
        return "part" if chunk in self.sharded else "parameters"

    def completing(self, chunk: ChunkId) -> dict[Section, int]:
        """Bytes of a chunk's gradients by the section that completes them."""
        found: dict[Section, int] = {}
        for placed in self.layout.chunks[chunk].parameters:
            parameter = self.workload.parameters[placed.index]
            if parameter.trainable:
                section: Any = OuterSection.PROLOGUE
                if parameter.block is not None:
                    section = parameter.block
                elif parameter.uses is not None:
                    section = parameter.uses.gradient
                found[section] = found.get(section, 0) + parameter.size_bytes
        return found

    def norm_is_shared(self) -> bool:
        """Whether a rank knows no more than the norm of its own shards until all ranks have added theirs up."""
        offloaded = [c for c in self.layout.chunks if c.is_trainable and c.id not in self.persistent]
        return self.is_sharded and bool(offloaded)

    def _parameters(self, task: Task, iteration: int) -> list[Value]:
        """Of the chunks with a parameter that this pass of the section uses; the epilogue's two passes are one."""
        section, is_forward = task.section, task.kind is TaskKind.FORWARD

        def needs(index: int) -> bool:
            parameter = self.workload.parameters[index]
            if parameter.block is not None:
                return section == parameter.block
            if parameter.uses is None:
                return isinstance(section, OuterSection)
            if section is OuterSection.EPILOGUE:
                return section in (*parameter.uses.forward, *parameter.uses.backward)
            return section in (parameter.uses.forward if is_forward else parameter.uses.backward)

        chunks = [chunk for chunk in self.layout.chunks if any(needs(placed.index) for placed in chunk.parameters)]
        return [("parameters", c.id, iteration if c.is_trainable else 0) for c in chunks]

    def _gradients(self, chunk_id: ChunkId, iteration: int, micro: int) -> list[Value]:
        completing = self.completing(chunk_id)
        return [("gradient", chunk_id, section, iteration, micro) for section, size in completing.items() if size]

    def _summed(self, gradients: list[Value]) -> list[Value]:
        """Gradients as they are when all ranks' are in them."""
        return [("summed", *gradient) for gradient in gradients] if self.plan.num_ranks > 1 else gradients

    def _of_all_groups(self, part: Value) -> Value:
        """A part of the gradients as it is when those of all shard groups are in it."""
        return ("of all groups", *part) if self.has_groups else part

    def _swapped(self, section: Section, iteration: int, micro: int) -> list[Value]:
        if isinstance(section, OuterSection) or self.modes[section] is not ActivationMode.SWAP:
            return []
        if not self.workload.profile_of(section).swappable_bytes:
            return []
        return [("swapped", section, iteration, micro)]

    def _results(self, section: Section | None, iteration: int, micro: int) -> list[Value]:
        """What a block in mode SELECTIVE keeps of what its forward made."""
        if section is None or isinstance(section, OuterSection):
            return []
        if self.modes[section] is not ActivationMode.SELECTIVE:
            return []
        (chosen,) = self.workload.profile_of(section).selective
        return [("results", section, iteration, micro)] if chosen.kept_bytes else []

    def _input(self, section: Section | None, iteration: int, micro: int) -> list[Value]:
        """The input of a block in mode OFFLOAD_INPUT, beside the rest of what the block before has left."""
        if section is None or isinstance(section, OuterSection) or section == 0:
            return []
        if self.modes[section] is not ActivationMode.OFFLOAD_INPUT:
            return []
        return [("input", section, iteration, micro)] if input_bytes(self.workload)[section] else []

    def _travelling(self, section: Section | None, iteration: int, micro: int) -> list[Value]:
        assert section is not None
        return [*self._swapped(section, iteration, micro), *self._input(section, iteration, micro)]

    def _keeps(self, section: Section | None) -> bool:
        assert section is not None
        return isinstance(section, OuterSection) or self.modes[section] not in RECOMPUTED
