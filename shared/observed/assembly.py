"""Observations put together to a workload: phases, and one profile for blocks that do the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..phases.packing import Packing
from ..phases.sequence_sharing import SequenceSharing
from ..phases.tiling import LossHead
from ..schema.plan import ActivationMode
from ..schema.schedule import OuterSection, Section, TaskKind
from ..schema.workload import (
    Block,
    BlockId,
    BlockProfile,
    Compiled,
    DType,
    Float8,
    Float8Gather,
    OperationClass,
    Parameter,
    Phase,
    QuadraticMemory,
    RowLookups,
    Subspace,
    Workload,
)
from .float8 import gathered_narrow
from .observation import Observation
from .observed_inputs import ObservedInput, PhaseKey, unshared, while_frames_return
from .row_lookups import Observed, looking_up, lookups_of, tables_of
from .selective import selective_recomputations

Seconds = Mapping[ActivationMode, Mapping[PhaseKey, float]]
_PHASES: Final = ("forward", "backward", "checkpoint_forward", "recompute", "checkpoint_backward")


@dataclass(frozen=True, slots=True)
class TracedModel:
    """What a trace says of a model at every shape."""

    model_name: str
    model_hash: str
    compute_dtype: DType
    parameters: tuple[Parameter, ...]
    block_names: tuple[str, ...]
    stands_for: tuple[int, ...]
    """For every block, the observed one that does the same."""
    traced_with: str
    software: dict[str, str]
    subspaces: tuple[Subspace, ...] = ()
    """Trained matrices that are kept orthogonal to frozen ones."""
    row_lookups: tuple[str, ...] = ()
    """The embedding of each lookup of the prologue's forward, in order, if it reads nothing but rows of any."""


_LOSSES_OF_LOOPS: Final = 4
"""Numbers of the loss's size that loops hold beside it: ``loss / n``, its product with a scaler's factor, and the same
of the micro-batch before, or a running sum."""
_LOSS_BYTES: Final = 4
"""At most, of models that compute in 32 bits or fewer."""


@dataclass(frozen=True, slots=True)
class TracedShape:
    """What a trace sees at one shape of the batch."""

    batch_shapes: dict[str, tuple[int, ...]]
    num_samples: int
    num_tokens: int
    resident_bytes: int
    observed: Mapping[ActivationMode, Mapping[PhaseKey, Observation]]
    shared_inputs: tuple[ObservedInput, ...] = ()
    staying_inputs: tuple[int, ...] = ()
    """Observed blocks whose input does not travel in mode OFFLOAD_INPUT (``Workload.staying_inputs``)."""
    packing: Packing | None = None
    """How samples lie in rows."""
    sequence_ranks: int = 1
    """Ranks that share each sequence: what is observed is one rank's."""
    loss_head: LossHead = LossHead.EAGER
    """How the loss is made of hidden states."""
    compiled: Compiled | None = None
    """What of it torch.compile has compiled."""
    float8: Float8 | None = None
    """How products of linear maps are computed in float8."""
    float8_gather: Float8Gather | None = None
    """Who scales their weights where these are gathered in float8."""
    keeps_outputs: bool = False
    """Whether the loop holds what the model gives until the next micro-batch's is there; it is resident then."""


def assemble(
    model: TracedModel, shape: TracedShape, *, seconds: Seconds | None = None, measured_on: str | None = None
) -> Workload:
    """The workload of a model at a shape; ``seconds`` are medians measured on ``measured_on``.

    Raises pydantic's ValidationError if a figure exceeds what a workload holds, WorkloadError if weights are to be
    gathered in float8 and it is not known which.
    """
    num_observed = 1 + max(model.stands_for)
    observed = unshared(while_frames_return(shape.observed), shape.shared_inputs)
    assembly = _Assembly(num_observed, observed, seconds or {}, shape)
    profiles, profile_of_observed = assembly.profiles()
    profile_of = [profile_of_observed[observed] for observed in model.stands_for]
    does: dict[str, Any] = {
        "profiles": profiles,
        "prologue_forward": assembly.outer_phase(TaskKind.FORWARD, OuterSection.PROLOGUE),
        "epilogue_forward": assembly.outer_phase(TaskKind.FORWARD, OuterSection.EPILOGUE),
        "epilogue_backward": assembly.outer_phase(TaskKind.BACKWARD, OuterSection.EPILOGUE),
        "prologue_backward": assembly.outer_phase(TaskKind.BACKWARD, OuterSection.PROLOGUE),
        "shared_inputs": tuple(one for given in shape.shared_inputs for one in given.shared_inputs(model.stands_for)),
        "resident_bytes": shape.resident_bytes + _LOSSES_OF_LOOPS * max(_LOSS_BYTES, model.compute_dtype.item_bytes),
    }
    is_shared = shape.sequence_ranks > 1
    one_of_ranks = {"sequence_ranks": shape.sequence_ranks, "profile_of": profile_of, **does}
    return Workload(
        model_name=model.model_name,
        model_hash=model.model_hash,
        batch_shapes=shape.batch_shapes,
        num_samples=shape.num_samples,
        num_tokens=shape.num_tokens,
        compute_dtype=model.compute_dtype,
        parameters=model.parameters if shape.float8_gather is None else _gathered(model, shape),
        subspaces=model.subspaces,
        blocks=tuple(Block(name=n, profile=p) for n, p in zip(model.block_names, profile_of, strict=True)),
        row_lookups=None if is_shared else _row_lookups(model, num_observed, observed, seconds or {}),
        staying_inputs=tuple(b for b, seen in enumerate(model.stands_for) if seen in shape.staying_inputs),
        packing=shape.packing,
        quadratic=_quadratic(model, shape.observed),
        loss_head=shape.loss_head,
        keeps_outputs=shape.keeps_outputs,
        compiled=shape.compiled,
        float8=shape.float8,
        float8_gather=shape.float8_gather,
        traced_with=model.traced_with,
        measured_on=measured_on,
        software=model.software,
        sequence_sharings=(SequenceSharing(**one_of_ranks),) if is_shared else (),
        **does,
    )


def _gathered(model: TracedModel, shape: TracedShape) -> tuple[Parameter, ...]:
    """The parameters, with the type that weights of products in float8 are gathered in."""
    keep = shape.observed[ActivationMode.KEEP]
    forwards = {seen: keep[TaskKind.FORWARD, BlockId(seen)].calls for seen in set(model.stands_for)}
    return gathered_narrow(model.parameters, model.stands_for, forwards)


def _quadratic(
    model: TracedModel, observed: Mapping[ActivationMode, Mapping[PhaseKey, Observation]]
) -> QuadraticMemory | None:
    """What attention has that grows with the square of the sequence; None where it has nothing."""
    keep = observed[ActivationMode.KEEP]
    kept = [max(0, keep[TaskKind.FORWARD, BlockId(block)].square_bytes) for block in range(1 + max(model.stands_for))]
    of_blocks = [
        seen for sections in observed.values() for (_, section), seen in sections.items() if isinstance(section, int)
    ]
    found = QuadraticMemory(
        lasting_bytes=max(0, keep[TaskKind.FORWARD, OuterSection.PROLOGUE].square_bytes),
        kept_bytes=sum(kept[block] for block in model.stands_for),
        most_kept_bytes=max(kept),
        within_bytes=max(seen.square_peak_bytes for seen in of_blocks),
        has_kernel=any(c.operation_class is OperationClass.ATTENTION for seen in of_blocks for c in seen.calls),
    )
    return found if found.is_any else None


def _row_lookups(model: TracedModel, num_blocks: int, observed: Observed, seconds: Seconds) -> RowLookups | None:
    """What the prologue does where it looks rows up on the host; None where it has no lookups of rows alone."""
    lookups = lookups_of(model.parameters, model.row_lookups, observed)
    if not lookups:
        return None
    assembly = _Assembly(num_blocks, looking_up(observed, lookups, model.parameters), seconds)
    forward = assembly.outer_phase(TaskKind.FORWARD, OuterSection.PROLOGUE)
    return RowLookups(
        tables=tables_of(lookups, model.parameters),
        prologue_forward=forward.model_copy(update={"looked_up_bytes": sum(lookup.row_bytes for lookup in lookups)}),
        prologue_backward=assembly.outer_phase(TaskKind.BACKWARD, OuterSection.PROLOGUE),
    )


def phase_of(observation: Observation, measured_s: float | None) -> Phase:
    """What was observed of one section, as a workload has it."""
    return Phase(
        operations=observation.counted(),
        net_bytes=observation.net_bytes,
        gradient_bytes=max(0, observation.gradient_bytes),
        curve=observation.curve(),
        adding_curve=observation.adding_curve(),
        changes=observation.changes(),
        staying_tensors=observation.staying_tensors(),
        adding_changes=observation.adding_changes(),
        exchanges=tuple(observation.exchanges),
        num_graphs=observation.num_graphs,
        measured_s=measured_s,
    )


class _Assembly:
    """Observations and times as phases and profiles."""

    def __init__(
        self,
        num_blocks: int,
        observed: Mapping[ActivationMode, Mapping[PhaseKey, Observation]],
        seconds: Seconds,
        shape: TracedShape | None = None,
    ) -> None:
        self._is_compiled = shape is not None and shape.compiled is not None
        self._has_casts = shape is not None and shape.float8 is not None
        self._num_blocks = num_blocks
        self._observed = observed
        self._seconds = seconds

    def phase(self, mode: ActivationMode, kind: TaskKind, section: Section) -> Phase:
        """One section's phase."""
        return phase_of(self._observed[mode][kind, section], self._seconds.get(mode, {}).get((kind, section)))

    def outer_phase(self, kind: TaskKind, section: OuterSection) -> Phase:
        """A phase outside the blocks.

        Once shared inputs are counted alike it depends on no mode; where a difference remains, the phase that frees
        less holds for all mixtures.
        """
        keep, again = (self.phase(mode, kind, section) for mode in (ActivationMode.KEEP, ActivationMode.CHECKPOINT))
        larger = max(keep, again, key=lambda phase: (phase.net_bytes, phase.peak_bytes))
        return larger.model_copy(update={"measured_s": keep.measured_s})

    def profiles(self) -> tuple[tuple[BlockProfile, ...], list[int]]:
        """Distinct profiles and the profile of each block; equal blocks share the median of their times."""
        members: dict[BlockProfile, list[BlockProfile]] = {}
        keys: list[BlockProfile] = []
        for index in range(self._num_blocks):
            profile = self._profile(index)
            key = _map_phases(profile, lambda phase: phase.model_copy(update={"measured_s": None}))
            members.setdefault(key, []).append(profile)
            keys.append(key)
        order = list(members)
        return tuple(_merge(members[key]) for key in order), [order.index(key) for key in keys]

    def _profile(self, index: int) -> BlockProfile:
        keep, again = ActivationMode.KEEP, ActivationMode.CHECKPOINT
        section = BlockId(index)
        forward, checkpointed = self._observed[keep][TaskKind.FORWARD, section], self._observed[again]
        return BlockProfile(
            output_bytes=forward.output_bytes,
            forward=self.phase(keep, TaskKind.FORWARD, section),
            backward=self.phase(keep, TaskKind.BACKWARD, section),
            checkpoint_forward=self.phase(again, TaskKind.FORWARD, section),
            recompute=self.phase(again, TaskKind.RECOMPUTE, section),
            checkpoint_backward=self.phase(again, TaskKind.BACKWARD, section),
            swappable_bytes=forward.swappable_bytes,
            selective=selective_recomputations(
                *(checkpointed[kind, section] for kind in (TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD)),
                is_compiled=self._is_compiled,
                has_casts=self._has_casts,
            ),
        )


def _map_phases(profile: BlockProfile, change: Callable[[Phase], Phase]) -> BlockProfile:
    return profile.model_copy(update={name: change(getattr(profile, name)) for name in _PHASES})


def _merge(profiles: Sequence[BlockProfile]) -> BlockProfile:
    """One profile for equal blocks, with the median of each phase's times."""
    updates = {}
    for name in _PHASES:
        phases = [getattr(profile, name) for profile in profiles]
        times = [phase.measured_s for phase in phases if phase.measured_s is not None]
        updates[name] = phases[0].model_copy(update={"measured_s": median(times) if times else None})
    return profiles[0].model_copy(update=updates)


def median(times: Sequence[float]) -> float:
    """Of at least one time.  A shipped workload has none, and does without the module and what that imports."""
    import statistics

    return statistics.median(times)
