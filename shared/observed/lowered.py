"""What an iteration does where torch.compile has compiled it, or where products are computed in float8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from ..basics.errors import WorkloadError
from ..phases.operations import lowering_words
from ..schema.plan import ActivationMode
from ..schema.schedule import OuterSection, Section, TaskKind
from ..schema.workload import Compiled, Float8, Float8Gather
from .assembly import TracedShape
from .compiled import fused_alone, fused_pair
from .float8 import MULTIPLE, backward_in_float8, forward_in_float8, is_eligible
from .observation import Observation
from .observed_inputs import PhaseKey, while_frames_return

_CHOOSES: Final = frozenset({"topk", "nonzero", "_grouped_mm"})
"""Calls by which blocks choose among experts."""


@dataclass(frozen=True, slots=True)
class Lowering:
    """How the operations of a trace are computed, where it is not one by one, in their own element types."""

    compiled: Compiled | None = None
    float8: Float8 | None = None
    float8_gather: Float8Gather | None = None

    @classmethod
    def asked(
        cls,
        compiled: Compiled | str | None,
        float8: Float8 | str | None,
        float8_gather: Float8Gather | str | None,
        *,
        is_run: bool,
        is_shared: bool,
    ) -> Self:
        """What a trace is asked for.

        Raises WorkloadError if there is none such, if it traces what it runs, or if ranks share its sequences.
        """
        try:
            found = cls(
                None if compiled is None else Compiled(compiled),
                None if float8 is None else Float8(float8),
                None if float8_gather is None else Float8Gather(float8_gather),
            )
        except ValueError:
            raise WorkloadError(
                f"compiled is {compiled!r}, float8 {float8!r} and float8_gather {float8_gather!r}; compiled is one of "
                f"{', '.join(Compiled)}, float8 one of {', '.join(Float8)}, float8_gather one of "
                f"{', '.join(Float8Gather)}, or None."
            ) from None
        found.check()
        if found.is_any and (is_run or is_shared):
            reason = "the model has weights, and runs as it is" if is_run else "ranks share its sequences"
            words = lowering_words(found.compiled, found.float8, gather=found.float8_gather)
            raise WorkloadError(
                f"{words}: so it is to be traced, but {reason}. Leave compiled and float8 out, or trace it on the meta "
                f"device, with whole sequences."
            )
        return found

    @property
    def is_any(self) -> bool:
        """Whether anything is computed otherwise."""
        return self.compiled is not None or self.float8 is not None

    def check(self) -> None:
        """Raise WorkloadError if scaling is asked for that only compiled code has fused, or gathers that nobody has."""
        if self.float8_gather is not None and self.float8 is not Float8.TENSORWISE:
            how = "nothing multiplies in float8" if self.float8 is None else f"products are scaled {self.float8}"
            raise WorkloadError(
                f"weights are to be gathered in float8 (--float8-gather {self.float8_gather}), but {how}: torchao "
                f"gathers those alone that one scale goes with (--float8 tensorwise). Leave --float8-gather out."
            )
        if self.float8 in (Float8.TENSORWISE, Float8.ROWWISE) and self.compiled is None:
            raise WorkloadError(
                f"float8 {self.float8} is asked for, but nothing is compiled: torchao's scaling and casts are tens of "
                f"operations for each tensor unless torch.compile fuses them. Write --compile blocks beside it, or "
                f"--float8 delayed, whose casts are kernels of Transformer Engine."
            )


AS_TRACED: Final = Lowering()


def lowered(shape: TracedShape, lowering: Lowering) -> TracedShape:
    """``shape`` as ``lowering`` has it.

    Raises WorkloadError if blocks choose among experts, run in tiles or share sequences, of which it is not known, or
    if no product may be computed in float8.
    """
    lowering.check()
    if not lowering.is_any:
        return shape
    _check(shape, lowering)
    shape = replace(shape, observed=while_frames_return(shape.observed))
    observed = {mode: _lowered_mode(shape, mode, lowering) for mode in shape.observed}
    return replace(
        shape,
        observed=observed,
        compiled=lowering.compiled,
        float8=lowering.float8,
        float8_gather=lowering.float8_gather,
    )


def _check(shape: TracedShape, lowering: Lowering) -> None:
    of_blocks = [
        seen for sections in shape.observed.values() for (_, place), seen in sections.items() if isinstance(place, int)
    ]
    called = {call.name for seen in of_blocks for call in seen.calls}
    what = "compiled blocks" if lowering.compiled is not None else f"float8 {lowering.float8}"
    if found := sorted(called & _CHOOSES):
        raise WorkloadError(
            f"{what} are asked for, but blocks choose among experts ({found[0]}), where what is fused depends on "
            f"values. Leave --compile and --float8 out."
        )
    if any(seen.repeated for seen in of_blocks) or shape.sequence_ranks > 1:
        how = "run their MLPs in tiles" if shape.sequence_ranks == 1 else "share their sequences with other ranks"
        raise WorkloadError(f"{what} are asked for, but blocks {how}. Leave one of the two out.")
    if lowering.float8 is not None and not any(is_eligible(call) for seen in of_blocks for call in seen.calls):
        raise WorkloadError(
            f"float8 {lowering.float8} is asked for, but no linear map of the blocks computes in 16 bits with sizes "
            f"that are multiples of {MULTIPLE}, tokens of a micro-batch among them. Leave --float8 out, or ask about a "
            f"batch whose tokens are such a multiple."
        )


def _lowered_mode(shape: TracedShape, mode: ActivationMode, lowering: Lowering) -> Mapping[PhaseKey, Observation]:
    found = dict(shape.observed[mode])
    blocks = [place for kind, place in found if isinstance(place, int) and kind is TaskKind.FORWARD]
    for place in blocks:
        _lower_section(found, place, shape.num_tokens, found[TaskKind.FORWARD, place].output_bytes, lowering)
    if lowering.compiled in (Compiled.MODEL, Compiled.BLOCKS_AND_LOSS):
        head = found[TaskKind.FORWARD, OuterSection.EPILOGUE], found[TaskKind.BACKWARD, OuterSection.EPILOGUE]
        if not any(seen.repeated for seen in head):
            passed_bytes = found[TaskKind.FORWARD, blocks[-1]].output_bytes
            plain = replace(lowering, float8=None, float8_gather=None)
            _lower_section(found, OuterSection.EPILOGUE, shape.num_tokens, passed_bytes, plain)
    return found


def _lower_section(
    found: dict[PhaseKey, Observation], place: Section, num_tokens: int, passed_bytes: int, lowering: Lowering
) -> None:
    """Lower a section's forward, its recomputation if it has one, and its backward, in place."""
    first, last = (TaskKind.FORWARD, place), (TaskKind.BACKWARD, place)
    again = (TaskKind.RECOMPUTE, place)
    saving = again if again in found else first
    maps = found[first].calls
    if lowering.compiled is not None:
        found[saving], found[last] = fused_pair(
            found[saving],
            found[last],
            num_tokens,
            passed_bytes,
            whole=found[first].calls,
            casts=is_eligible if lowering.float8 in (Float8.TENSORWISE, Float8.ROWWISE) else None,
        )
        if saving is again:
            found[first] = fused_alone(found[first], num_tokens, passed_bytes)
        # A graph of the whole model begins outside of the blocks; what is recomputed is part of the backward's.
        of_its_own = lowering.compiled is not Compiled.MODEL or place is OuterSection.EPILOGUE
        for key in {first, saving, last}:
            found[key] = replace(found[key], num_graphs=int(of_its_own and not (key == again == saving)))
    if lowering.float8 is not None:
        how = {"is_compiled": lowering.compiled is not None, "is_gathered": lowering.float8_gather is not None}
        found[saving] = forward_in_float8(found[saving], lowering.float8, is_saved=True, **how)
        if saving is again:
            found[first] = forward_in_float8(found[first], lowering.float8, is_saved=False, **how)
        found[last] = backward_in_float8(found[last], maps, lowering.float8, num_tokens, is_gathered=how["is_gathered"])
