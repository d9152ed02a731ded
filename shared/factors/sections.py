"""What a section does where linear maps are in factors, from what it does with dense ones.

[Note: From dense to factors]
A factorised map (``runtime/osft/linear.py``) runs a fixed sequence of operators in the place of one product forward and
of two backward.  All others stay as they are.  So does what they allocate and free, but for three things: between its
operators a factorised map has tensors of its own; where gradients are recorded it keeps two tensors of (t, r) until its
backward; and the gradient of its output, if nobody else holds it, is freed between its operators and not behind them.
Whether it is held shows in the dense trace: how much memory goes between the map's backward and the next operator.
The sequences and levels here were read off traces; tests compare whole models of the catalogue with their traces.

Sizes: t rows, m inputs, n outputs, k frozen and r trained directions, each in the element type's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..observed.observation import Observation, OperatorCall
from ..schema.plan import ActivationMode
from ..schema.schedule import TaskKind
from ..schema.workload import DType, OperationClass
from .maps import LinearMap, Place


@dataclass(frozen=True, slots=True)
class Freed:
    """What goes behind the backward of a dense map: whether nobody else holds it."""

    output_gradient: bool
    input: bool
    is_input_early: bool = False
    """Whether the input goes before the bias's gradient is there, and not behind it."""


def gone_behind(observation: Observation, place: Place) -> int:
    """Bytes that go between a dense map's calls and the end of the next operator."""
    levels = observation.levels
    if place.end < len(levels):
        return sum(observation.calls[place.end].writes_bytes) - (levels[place.end] - levels[place.end - 1])
    return levels[-1] - observation.net_bytes


def freed_behind(observation: Observation, place: Place, linear: LinearMap, *, has_own_input: bool) -> Freed:
    """What goes between a dense map's backward and the end of the next operator.

    ``has_own_input`` tells gradient and input apart where they are of one size and one of them goes: an input that
    nobody else reads always goes.
    """
    gone = gone_behind(observation, place)
    size = linear.dtype.item_bytes * place.num_tokens
    out, given = size * linear.num_out, size * linear.num_in
    last = place.end - 1
    if linear.has_bias and linear.bias_bytes - given == observation.levels[last] - observation.levels[last - 1]:
        return Freed(gone >= out, True, is_input_early=True)
    if gone == out == given:
        return Freed(not has_own_input, has_own_input)
    exact = {0: (False, False), given: (False, True), out: (True, False), out + given: (True, True)}.get(gone)
    # Others may go at the same time.
    return Freed(*(exact or (gone >= out, gone >= out + given)))


def has_own_input(forward: Observation, place: Place, linear: LinearMap) -> bool:
    """Whether a map's input is a copy that was made for it, as of an attention's output in another order."""
    if not place.first:
        return False
    before = forward.calls[place.first - 1]
    size = linear.dtype.item_bytes * place.num_tokens * linear.num_in
    return before.name == "clone" and before.writes_bytes == (size,)


@dataclass(frozen=True, slots=True)
class Step:
    """An operator, how the level changes with it, and what became a final gradient before it."""

    call: OperatorCall
    level_bytes: int
    final_bytes: int = 0


@dataclass(slots=True)
class _Written:
    """Steps that were written so far, and what the next has to add to its own."""

    steps: list[Step] = field(default_factory=list)
    owed_bytes: int = 0
    owed_final_bytes: int = 0

    def add(self, step: Step) -> None:
        level, final = step.level_bytes + self.owed_bytes, step.final_bytes + self.owed_final_bytes
        self.steps.append(replace(step, level_bytes=level, final_bytes=final))
        self.owed_bytes = self.owed_final_bytes = 0


def in_factors(
    observation: Observation,
    section: tuple[ActivationMode, TaskKind],
    maps: Sequence[LinearMap],
    places: Sequence[Place],
    frozen: Mapping[int, int],
    freed: Mapping[int, Freed],
    unfinished: tuple[Place, int] | None = None,
) -> Observation:
    """The section with the maps ``frozen`` in factors: k by the number of the map.

    ``places`` are those of all maps, ``freed`` what goes behind their backwards.  ``unfinished``: the map at whose
    input a recomputation of the dense model ends, with what goes before it is called (bytes, <= 0); in factors it goes
    on to the last product.
    """
    mode, kind = section
    starts = {place.first: place for place in places if place.number in frozen}
    steps = _steps(observation.levels)
    final = _other_gradients(observation, maps, places, frozen)
    written, index = _Written(), 0
    while index < len(steps):
        place = starts.get(index)
        call = observation.calls[index]
        if place is None:
            written.add(Step(call, steps[index], final[index]))
            index += 1
            continue
        sizes = Sizes.of(maps[place.number], frozen[place.number], place.num_tokens)
        before = Step(call, steps[index] - sum(call.writes_bytes), final[index])
        written.owed_bytes += before.level_bytes
        written.owed_final_bytes += before.final_bytes
        if kind is TaskKind.BACKWARD:
            is_recomputed = mode is ActivationMode.CHECKPOINT
            bias_sum = observation.calls[place.end - 1] if maps[place.number].has_bias else None
            _write_backward(written, sizes, freed[place.number], bias_sum, is_recomputed=is_recomputed)
        else:
            _write_forward(written, sizes, is_recorded=_is_recorded(mode, kind))
        index = place.end
    if unfinished is not None and unfinished[0].number in frozen:
        place, before_bytes = unfinished
        sizes = Sizes.of(maps[place.number], frozen[place.number], place.num_tokens)
        written.owed_bytes += before_bytes
        _write_forward(written, sizes, is_recorded=True)
        written.steps.pop()  # the last product keeps nothing of what it makes
    kept = _kept_bytes(maps, places, frozen, unfinished)
    return _observation(observation, written.steps, section, kept, maps, frozen)


def _other_gradients(
    observation: Observation, maps: Sequence[LinearMap], places: Sequence[Place], frozen: Mapping[int, int]
) -> list[int]:
    """Bytes of gradients that become final before each call, without those of the maps in factors.

    Those of a dense map are final with the next operator, or the one behind that where the next adds its input's
    gradient to others.
    """
    pairs = zip(observation.levels, observation.adding_levels, strict=True)
    final = _steps([level - adding for level, adding in pairs])
    if not any(final):
        return final
    for place in places:
        if place.number in frozen:
            size_bytes = maps[place.number].weight_bytes + maps[place.number].bias_bytes
            behind = range(place.end, min(place.end + 2, len(final)))
            at = next((index for index in behind if final[index] >= size_bytes), None)
            if at is not None:
                final[at] -= size_bytes
    return final


def _is_recorded(mode: ActivationMode, kind: TaskKind) -> bool:
    """Whether autograd records a forward."""
    return mode is not ActivationMode.CHECKPOINT or kind is TaskKind.RECOMPUTE


def _kept_bytes(
    maps: Sequence[LinearMap],
    places: Sequence[Place],
    frozen: Mapping[int, int],
    unfinished: tuple[Place, int] | None,
) -> list[int]:
    """What factorised maps keep for their backwards in addition: (t, r) two times each."""
    called = [*places, *([] if unfinished is None else [unfinished[0]])]
    sizes = [Sizes.of(maps[p.number], frozen[p.number], p.num_tokens) for p in called if p.number in frozen]
    return [size for each in sizes for size in (each.tr, each.tr)]


def _observation(
    dense: Observation,
    steps: Sequence[Step],
    section: tuple[ActivationMode, TaskKind],
    kept: Sequence[int],
    maps: Sequence[LinearMap],
    frozen: Mapping[int, int],
) -> Observation:
    mode, kind = section
    net_bytes, gradient_bytes, saved = dense.net_bytes, dense.gradient_bytes, list(dense.saved_bytes)
    if kind is TaskKind.BACKWARD:
        more = sum(Sizes.of(maps[n], k, 0).more_gradient_bytes for n, k in frozen.items())
        gradient_bytes += more
        net_bytes += more - sum(kept)
    elif _is_recorded(mode, kind):
        net_bytes += sum(kept)
        saved += kept if kind is TaskKind.FORWARD else []
    found = Observation(
        dense.start_bytes,
        end_bytes=dense.start_bytes + net_bytes,
        operations=[step.call.operation() for step in steps],
        calls=[step.call for step in steps],
        gradient_bytes=gradient_bytes,
        square_bytes=dense.square_bytes,
        square_peak_bytes=dense.square_peak_bytes,
        output_bytes=dense.output_bytes,
        saved_bytes=saved,
    )
    level = final = 0
    for step in steps:
        level, final = level + step.level_bytes, final + step.final_bytes
        found.levels.append(level)
        found.adding_levels.append(level - final)
    return found


def _steps(levels: Sequence[int]) -> list[int]:
    return [level - before for before, level in zip((0, *levels), levels, strict=False)]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Dims of a factorised map, and bytes of its tensors."""

    t: int
    n: int
    m: int
    k: int
    r: int
    dtype: DType
    bias_bytes: int

    @classmethod
    def of(cls, linear: LinearMap, frozen: int, num_tokens: int) -> Sizes:
        """Of a map with ``frozen`` directions frozen."""
        n, m = linear.num_out, linear.num_in
        return cls(num_tokens, n, m, frozen, min(n, m) - frozen, linear.dtype, linear.bias_bytes)

    def bytes_of(self, *dims: int) -> int:
        """Of a tensor of these dims."""
        size = self.dtype.item_bytes
        for dim in dims:
            size *= dim
        return size

    @property
    def tn(self) -> int:
        """Bytes of the output."""
        return self.bytes_of(self.t, self.n)

    @property
    def tm(self) -> int:
        """Bytes of the input."""
        return self.bytes_of(self.t, self.m)

    @property
    def tk(self) -> int:
        """Bytes of the frozen coefficients."""
        return self.bytes_of(self.t, self.k)

    @property
    def tr(self) -> int:
        """Bytes of the trained coefficients."""
        return self.bytes_of(self.t, self.r)

    @property
    def more_gradient_bytes(self) -> int:
        """Bytes of the trained factors' gradients less those of the dense weight's."""
        return (
            self.bytes_of(self.n, self.r)
            + self.bytes_of(self.r)
            + self.bytes_of(self.r, self.m)
            - self.bytes_of(self.n, self.m)
        )

    def product(self, rows: int, columns: int, inner: int, *, bias_bytes: int = 0) -> OperatorCall:
        """(rows, inner) times (inner, columns), plus a bias or a matrix of ``bias_bytes``."""
        factors = (self.bytes_of(rows, inner), self.bytes_of(inner, columns))
        read = (bias_bytes, *factors) if bias_bytes else factors
        return OperatorCall(
            name="addmm" if bias_bytes else "mm",
            operation_class=OperationClass.MATMUL,
            dtype=self.dtype,
            flops=2 * rows * columns * inner,
            reads=tuple(enumerate(read)),
            writes_bytes=(self.bytes_of(rows, columns),),
            shape=(1, rows, columns, inner),
        )

    def elementwise(self, name: str, columns: int, *others: int) -> OperatorCall:
        """Of (t, columns) and tensors of ``others`` bytes."""
        size = self.bytes_of(self.t, columns)
        return OperatorCall(
            name, OperationClass.ELEMENTWISE, self.dtype, self.t * columns, tuple(enumerate((size, *others))), (size,)
        )

    def summed(self) -> OperatorCall:
        """(t, r) added up over the rows."""
        return OperatorCall(
            "sum", OperationClass.REDUCTION, self.dtype, self.r, ((0, self.tr),), (self.bytes_of(self.r),)
        )


def _write_forward(written: _Written, s: Sizes, *, is_recorded: bool) -> None:
    """X V_low^T, times S_low; x V_high^T, times S_high; times U_high^T plus bias; plus the first times U_low^T."""
    dropped = 0 if is_recorded else s.tr
    written.add(Step(s.product(s.t, s.r, s.m), s.tr))
    written.add(Step(s.elementwise("mul", s.r, s.bytes_of(s.r)), s.tr))
    if s.k == 0:
        written.add(Step(s.product(s.t, s.n, s.r, bias_bytes=s.bias_bytes), s.tn - dropped))
        written.owed_bytes -= dropped
        return
    written.add(Step(s.product(s.t, s.k, s.m), s.tk - dropped))
    written.add(Step(s.elementwise("mul", s.k, s.bytes_of(s.k)), s.tk))
    written.add(Step(s.product(s.t, s.n, s.k, bias_bytes=s.bias_bytes), s.tn - s.tk))
    written.add(Step(s.product(s.t, s.n, s.r, bias_bytes=s.tn), s.tn))
    written.owed_bytes -= s.tn + s.tk + dropped


def _write_backward(
    written: _Written, s: Sizes, freed: Freed, bias_sum: OperatorCall | None, *, is_recomputed: bool
) -> None:
    """Gradients of the trained factors and of the input, those of the frozen part between.

    ``is_recomputed``: a recomputed x V_low^T goes one operator earlier than a kept one.
    """
    nr, rm, r = s.bytes_of(s.n, s.r), s.bytes_of(s.r, s.m), s.bytes_of(s.r)
    gone = s.tn if freed.output_gradient else 0
    early = s.tr if is_recomputed else 0
    # Without a frozen part the biased product is that of x V_low^T, which goes before the bias's gradient is there.
    early_low = early if s.k == 0 and bias_sum is not None else 0
    summed = [] if bias_sum is None else [Step(bias_sum, s.bias_bytes - early_low)]
    of_low, of_u = Step(s.product(s.t, s.r, s.n), s.tr), Step(s.product(s.n, s.r, s.t), nr)
    if s.k == 0:
        for step in (of_u, of_low) if bias_sum is None else (of_low, of_u, *summed):
            written.add(step)
        written.add(Step(s.elementwise("mul", s.r, s.tr), early_low - gone, nr + s.bias_bytes))
    else:
        written.add(of_low)
        written.add(of_u)
        written.add(Step(s.product(s.t, s.k, s.n), s.tk - s.tr, nr))
        for step in summed:
            written.add(step)
        written.add(Step(s.elementwise("mul", s.k, s.bytes_of(s.k)), s.tk - gone, s.bias_bytes))
        written.add(Step(s.product(s.t, s.m, s.k), s.tm - s.tk))
        written.add(Step(s.elementwise("mul", s.r, s.tr), s.tr - s.tk))
    written.add(Step(s.elementwise("mul", s.r, r), s.tr))
    written.add(Step(s.summed(), r - early))
    written.add(Step(s.product(s.r, s.m, s.t), rm - 3 * s.tr + early, r))
    written.add(Step(s.product(s.t, s.m, s.r), s.tm))
    if s.k == 0:
        written.owed_bytes += gone - s.tr - (s.tm if freed.is_input_early else 0)
    else:
        of_input = s.tm if freed.input else 0
        written.add(Step(s.elementwise("add", s.m, s.tm), s.tm - s.tr - of_input))
        written.owed_bytes += gone + (0 if freed.is_input_early else of_input) - 2 * s.tm
    written.owed_final_bytes += rm
