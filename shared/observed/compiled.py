"""What a section does where torch.compile has fused its element-wise calls.

[Note: Fused kernels]
Inductor keeps matrix products, attention and lookups as they are, and writes kernels for what is between them.  A value
is kept in memory where one of these reads it, or where it outlives its section; all others are computed again wherever
they are needed, from values that are kept, unless that takes more than ``_MOST_READS`` of these.  Kernels that compute
kept values of one place between products from common ones are one kernel.  Sums over tokens go the other way through
memory and are kernels of their own.  So each kernel reads what it needs once, and writes what is kept.

[Note: What compiled blocks save]
Forward and backward are one graph, which is cut where least is saved (``min_cut_rematerialization_partition`` in
``torch/_functorch/partitioners.py``): what products and attention read again, and of the rest whichever is less, the
value itself or those that are kept and that it is computed from.  Of dropout one byte per element is saved.  What is
saved in part is held whole: of a map that makes queries, keys and values at once, values are a view.

A product in float8 that torchao scales reads no value itself but a cast of it, which is element-wise.  So what such
products alone read is not saved where backward computes it again from what is saved anyway: norms and activations ahead
of linear maps.  Torch's compiler saves a third less of a Llama's block so (``tests/runtime/tracing/test_compiled.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..schema.workload import OperationClass
from .flow import DRAWN, Flow, Number, drawn_apart
from .observation import Observation, OperatorCall

FUSED: Final = "fused"
"""What a kernel that inductor writes is called in a workload."""
_MOST_READS: Final = 4
"""``realize_reads_threshold`` in ``torch/_inductor/config.py``."""
_LARGE: Final = 8
"""A value is large beside another of which it has at least this part."""
_SHARED: Final = 4
"""Kernels have values in common where these have at least this part of the largest that they read."""


_MOST_BEFORE: Final = 8
"""Calls between a block's output and its recomputation, as ``selective.py`` has it."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that is left of several calls."""

    place: int
    """Index of the call that it comes before."""
    reads: tuple[Number, ...]
    writes: tuple[Number, ...]
    reduces: bool
    """Whether it sums or looks for the largest of something."""
    flops: int


class Fused:
    """A forward and its backward as compiled: what is kept, what is saved, and the kernels of both."""

    def __init__(self, flow: Flow, casts: Callable[[OperatorCall], bool] | None = None) -> None:
        """``casts``: whether a product reads casts of its operands; None: none does."""
        self._flow = flow
        made = flow.made[flow.num_forward - 1] if flow.num_forward else []
        self._output = made[0] if made else None
        """What forward hands on."""
        self._num_calls = len(flow.calls)
        self._kept: set[Number] = set()
        self._sources: dict[Number, frozenset[Number]] = {}
        self._places = self._counted_products()
        self._keep_first()
        self._resolve()
        self._keep_instead()
        self._sources.clear()
        self._resolve()
        self._again = frozenset[Number]() if casts is None else self._computed_again(casts)
        """What backward computes again to cast it."""
        self.saved = self._saved()
        """What forward makes and backward reads, of what it does not hand on."""
        last = [*self._kernels(flow.num_forward, self._num_calls), *self._kernels_again()]
        self.kernels = self._kernels(0, flow.num_forward), sorted(last, key=lambda kernel: kernel.place)
        """Of forward, and of backward."""

    def _counted_products(self) -> list[int]:
        """For every call, how many calls that stand apart it comes behind, one after the other."""
        flow, behind = self._flow, [0] * self._num_calls
        for _ in range(2):  # what is drawn goes with what reads it
            for index in range(self._num_calls):
                if flow.calls[index].name in DRAWN:
                    readers = [reader for value in flow.made[index] for reader in flow.values[value].readers]
                    while readers and flow.calls[readers[0]].name.endswith("_") and flow.made[readers[0]]:
                        readers = flow.values[flow.made[readers[0]][0]].readers
                    behind[index] = behind[readers[0]] if readers else 0
                    continue
                for value in flow.reads[index]:
                    maker = flow.values[value].maker
                    if maker is not None and (maker < flow.num_forward) == (index < flow.num_forward):
                        behind[index] = max(behind[index], behind[maker] + flow.stands_apart(maker))
        return behind

    def _keep_first(self) -> None:
        """What is in memory in any case."""
        flow = self._flow
        for number, value in enumerate(flow.values):
            is_drawn = value.maker is not None and flow.calls[value.maker].name in DRAWN
            is_last = number == self._output or value.maker == self._num_calls - 1 or self._is_gradient(number)
            is_operand = flow.is_operand(number) and not self._is_layout(number)
            if not flow.is_fusible(number) or is_operand or value.is_small or is_drawn or is_last:
                self._kept.add(number)

    def _is_layout(self, value: Number) -> bool:
        """Whether it is what attention gives, in the layout in which a compiled graph has it made.

        Heads behind which nothing is put (``cat`` with an empty tensor) keep the layout in which maps have made them,
        and attention gives its output in that of its queries.
        """
        flow, maker = self._flow, self._flow.values[value].maker
        if maker is None or maker >= flow.num_forward or flow.calls[maker].name != "clone":
            return False
        of = flow.values[flow.reads[maker][0]].maker
        if of is None or flow.calls[of].operation_class is not OperationClass.ATTENTION:
            return False
        makers = [flow.values[operand].maker for operand in flow.reads[of]]
        return any(made is not None and _joins_nothing(flow.calls[made]) for made in makers)

    def _is_gradient(self, value: Number) -> bool:
        """Whether it is a gradient in the parameter's own type, of one that a product made in another."""
        of = self._flow.values[value]
        if of.maker is None or of.maker < self._flow.num_forward or of.readers:
            return False
        call = self._flow.calls[of.maker]
        return call.name == "_to_copy" and not self._flow.is_fusible(self._flow.reads[of.maker][0])

    def _resolve(self) -> None:
        for made in self._flow.made:
            for value in made:
                self._sources_of(value)

    def _sources_of(self, value: Number) -> frozenset[Number]:
        """The kept values that it is read or computed from."""
        if value in self._kept:
            return frozenset((value,))
        found = self._sources.get(value)
        if found is None:
            of = self._flow.values[value]
            assert of.maker is not None, "what no call makes is kept"
            found = frozenset(s for read in self._flow.reads[of.maker] for s in self._sources_of(read))
            large = [s for s in found if not self._is_small(s) and self._flow.values[s].size * _LARGE > of.size]
            if len(large) > _MOST_READS:
                self._kept.add(value)
                return frozenset((value,))
            self._sources[value] = found
        return found

    def _is_small(self, value: Number) -> bool:
        return self._flow.values[value].is_small

    def _backward_reads(self) -> Iterator[tuple[int, Number]]:
        """(call, value) of what backward reads of forward."""
        for index in range(self._flow.num_forward, self._num_calls):
            for value in self._flow.reads[index]:
                if value < self._flow.end_of_forward:
                    yield index, value

    def _keep_instead(self) -> None:
        """Save values themselves where that takes less than what they are computed from."""
        flow = self._flow
        there = {value for index, value in self._backward_reads() if flow.stands_apart(index)}
        there |= {number for number, value in enumerate(flow.values) if value.maker is None}
        for _, value in self._backward_reads():
            if value not in self._kept:
                more = [s for s in self._sources_of(value) if s not in there and not self._is_small(s)]
                if sum(flow.values[s].size for s in more) > flow.values[value].size:
                    self._kept.add(value)

    def _computed_again(self, casts: Callable[[OperatorCall], bool]) -> frozenset[Number]:
        """Kept values of forward that only products which cast them read, of values that are there in backward."""
        flow = self._flow
        read = {source for _, value in self._backward_reads() for source in self._sources_of(value)}
        found = {
            value
            for value in read
            if value != self._output
            and flow.is_fusible(value)
            and all(casts(flow.calls[of]) for of in flow.values[value].readers if flow.stands_apart(of))
            and flow.is_operand(value)
        }
        there = read - found
        return frozenset(
            value
            for value in found
            if all(s in there or self._is_small(s) or flow.values[s].maker is None for s in self._read_for(value))
        )

    def _kernels_again(self) -> Iterator[Kernel]:
        """Of backward, ahead of the first product that casts what they compute."""
        flow = self._flow
        for value in sorted(self._again):
            maker = flow.values[value].maker
            assert maker is not None, "what no call makes is not computed again"
            yield Kernel(
                place=min(of for of in flow.values[value].readers if of >= flow.num_forward),
                reads=tuple(sorted(self._read_for(value))),
                writes=(value,),
                reduces=False,
                flops=flow.calls[maker].flops,
            )

    def _saved(self) -> frozenset[Number]:
        found = frozenset(source for _, value in self._backward_reads() for source in self._sources_of(value))
        found = found.union(*(self._read_for(value) for value in self._again)) - self._again
        made = {value for value in found if self._flow.values[value].maker is not None}
        return frozenset(made - {self._output})

    def _kernels(self, begin: int, end: int) -> list[Kernel]:
        """Of the calls from ``begin`` to before ``end``."""
        flow = self._flow
        made = [v for index in range(begin, end) for v in flow.made[index] if v in self._kept and flow.is_fusible(v)]
        reads = {value: self._read_for(value) for value in made}
        groups: list[list[Number]] = []
        for value in made:
            joined = [group for group in groups if any(self._go_together(value, other, reads) for other in group)]
            groups = [group for group in groups if group not in joined]
            groups.append([*(of for group in joined for of in group), value])
        return sorted((self._kernel(group, reads) for group in groups), key=lambda kernel: kernel.place)

    def _read_for(self, value: Number) -> frozenset[Number]:
        maker = self._flow.values[value].maker
        assert maker is not None
        return frozenset(source for read in self._flow.reads[maker] for source in self._sources_of(read))

    def _go_together(self, first: Number, second: Number, reads: dict[Number, frozenset[Number]]) -> bool:
        """Whether one kernel computes both."""
        one, other = self._flow.values[first], self._flow.values[second]
        assert one.maker is not None, "what no call makes is in no kernel"
        assert other.maker is not None, "what no call makes is in no kernel"
        if one.is_column != other.is_column:
            return False
        if not one.is_column and self._places[one.maker] != self._places[other.maker]:
            return False
        largest = max((self._flow.values[v].size for v in reads[first] | reads[second]), default=0)
        shares = any(self._flow.values[v].size * _SHARED >= largest for v in reads[first] & reads[second])
        return shares or first in reads[second] or second in reads[first]

    def _kernel(self, group: Sequence[Number], reads: dict[Number, frozenset[Number]]) -> Kernel:
        flow = self._flow
        makers = [maker for value in group if (maker := flow.values[value].maker) is not None]
        users = [r for value in group for r in flow.values[value].readers if flow.stands_apart(r) and r > min(makers)]
        place = min([max(makers) + 1, *users])
        given = frozenset(source for value in group for source in reads[value]) - frozenset(group)
        return Kernel(
            place=place,
            reads=tuple(sorted(given)),
            writes=tuple(sorted(group)),
            reduces=any(self._is_small(value) for value in group)
            or any(flow.calls[maker].operation_class is not OperationClass.ELEMENTWISE for maker in makers),
            flops=sum(flow.calls[maker].flops for maker in dict.fromkeys(makers)),
        )


def fused_pair(
    forward: Observation,
    backward: Observation,
    num_tokens: int,
    passed_bytes: int,
    *,
    whole: Sequence[OperatorCall] | None = None,
    casts: Callable[[OperatorCall], bool] | None = None,
) -> tuple[Observation, Observation]:
    """A forward, or the recomputation of one, and its backward as compiled.

    ``passed_bytes``: of a block's input; ``whole``: the calls of a forward whose recomputation ends early; ``casts``:
    whether a product reads casts of its operands, which are fused too.  Memory changes by what is saved less; what
    backward leaves stays.
    """
    again = drawn_apart(forward.calls)
    num_forward = len(again)
    calls = again if whole is None else _to_its_end(again, drawn_apart(whole))
    flow = Flow(calls, drawn_apart(backward.calls), num_tokens, passed_bytes)
    fused = Fused(flow, casts)
    sizes = sorted(flow.values[value].size for value in fused.saved)
    saved_bytes = sum(forward.saved_bytes) if forward.saved_bytes else forward.net_bytes
    less_bytes = saved_bytes - sum(sizes)
    lasting = set(fused.saved)
    kernels = [kernel for kernel in fused.kernels[0] if kernel.place <= num_forward]
    first = _rebuilt(forward, flow, kernels, (0, num_forward), lasting, frozenset())
    second = _rebuilt(backward, flow, fused.kernels[1], (flow.num_forward, len(flow.calls)), set(), fused.saved)
    first.end_bytes = forward.end_bytes - less_bytes
    second.end_bytes = backward.end_bytes + less_bytes
    if forward.saved_bytes:
        first.saved_bytes = sizes
    return first, second


def _to_its_end(again: Sequence[OperatorCall], whole: Sequence[OperatorCall]) -> Sequence[OperatorCall]:
    """A recomputation, and what ``whole`` does beyond its end; a few calls may come before it."""
    for num_before in range(min(_MOST_BEFORE, len(again)) + 1):
        rest = again[num_before:]
        if list(whole[: len(rest)]) == list(rest):
            return [*again, *whole[len(rest) :]]
    return again


def fused_alone(forward: Observation, num_tokens: int, passed_bytes: int) -> Observation:
    """A forward of which nothing is saved, as compiled."""
    flow = Flow(drawn_apart(forward.calls), (), num_tokens, passed_bytes)
    return _rebuilt(forward, flow, Fused(flow).kernels[0], (0, flow.num_forward), set(), frozenset())


def _rebuilt(
    seen: Observation,
    flow: Flow,
    kernels: Sequence[Kernel],
    span: tuple[int, int],
    lasting: set[Number],
    saved: frozenset[Number],
) -> Observation:
    """``seen`` with kernels in place of the calls of ``span`` that are no longer kernels of their own.

    ``lasting``: values that outlive it; ``saved``: values that it lets go, once nothing reads them any longer.
    """
    begin, end = span
    order: list[tuple[int, Kernel | None]] = [(k.place, k) for k in kernels]
    order += [(index, None) for index in range(begin, end) if flow.stands_apart(index)]
    order.sort(key=lambda item: (item[0], item[1] is None))
    reads = [kernel.reads if kernel else tuple(flow.reads[place]) for place, kernel in order]
    writes = [kernel.writes if kernel else tuple(flow.made[place]) for place, kernel in order]
    last_read = {value: place for place, values in enumerate(reads) for value in values}
    made = {value for values in writes for value in values}
    outcome = flow.made[end - 1][:1] if end > begin else []
    gradients = {v for v in made if v not in last_read and v not in outcome} if begin else set()
    rebuilt = replace(seen, calls=[], operations=[], levels=[], adding_levels=[])
    level = final = 0
    for step, (place, kernel) in enumerate(order):
        level += sum(flow.values[value].size for value in writes[step])
        call = flow.calls[place] if kernel is None else _call_of(kernel, flow)
        rebuilt.calls.append(call)
        rebuilt.operations.append(call.operation())
        final += sum(flow.values[value].size for value in writes[step] if value in gradients)
        gone = {v for v in reads[step] if last_read[v] == step and (v in made or v in saved)}
        gone |= {v for v in writes[step] if v not in last_read}
        level -= sum(flow.values[v].size for v in gone - lasting - gradients - set(outcome))
        rebuilt.levels.append(level)
        rebuilt.adding_levels.append(level - final)
    return rebuilt


def _joins_nothing(call: OperatorCall) -> bool:
    return call.name == "cat" and any(size == 0 for _, size in call.reads)


def _call_of(kernel: Kernel, flow: Flow) -> OperatorCall:
    makers = [maker for value in kernel.writes if (maker := flow.values[value].maker) is not None]
    return OperatorCall(
        name=FUSED,
        operation_class=OperationClass.REDUCTION if kernel.reduces else OperationClass.ELEMENTWISE,
        dtype=flow.calls[makers[-1]].dtype,
        flops=kernel.flops,
        reads=tuple(enumerate(flow.values[value].size for value in kernel.reads)),
        writes_bytes=tuple(flow.values[value].size for value in kernel.writes),
    )
