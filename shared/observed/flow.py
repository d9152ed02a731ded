"""Which call reads what which other call made, as far as sizes and order tell.

[Note: Flow by sizes]
A trace keeps of each call how many bytes it reads of every tensor, and not which call made them.  Autograd runs
backward in reverse, and models are chains, so that sizes and order tell nearly always: what a call reads was made last
by a call that nothing has read from yet; weights come last in a linear map; what backward reads besides gradients, the
forward calls before the matching product have saved, the latest first.  Where two tensors of one size could be meant,
either costs the same bytes.  ``tests/runtime/tracing/test_compiled.py`` counts the same blocks with torch's compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ..schema.workload import OperationClass
from .observation import OperatorCall

Number = int
"""Of a value: its index in ``Flow.values``."""
APART: Final = frozenset({OperationClass.MATMUL, OperationClass.ATTENTION, OperationClass.EMBEDDING})
"""Classes whose calls stay kernels of their own."""
DRAWN: Final = frozenset({"bernoulli_"})
"""Calls that draw, and read nothing; what is kept of them is whether a value is dropped, one byte each."""
DROPOUT: Final = "native_dropout"
"""The kernel of a GPU that draws and drops, and its derivative with ``_backward`` behind."""
_ADDS: Final = frozenset({"add", "add_"})
_PASSES_ON: Final = _ADDS | {"sub", "cat", "copy_", "clone", "_to_copy", "neg", "slice_backward", "stack"}
"""Calls whose derivative reads nothing that they read or made."""
_SAVES_RESULT: Final = frozenset({"rsqrt", "tanh", "sigmoid", "exp", "sqrt", "reciprocal"})
_ROTATION: Final = (("mul",), ("neg",), ("cat",), ("mul",), ("add", "add_"))
"""Calls that turn queries or keys: times cosines; a half negated, put ahead of the other, times sines; their sum."""
_REDUCED: Final = 8
"""A reduction makes less than this part of what it reads."""


@dataclass(slots=True)
class Value:
    """A tensor."""

    size: int
    """Bytes of it that a fused kernel moves."""
    read_as: int
    """Bytes of it that calls read."""
    maker: int | None
    """Index of the call that makes it; None: it is there before, as are weights."""
    readers: list[int] = field(default_factory=list)
    """Indices of calls."""
    is_small: bool = False
    """Whether it is what a reduction leaves."""
    is_column: bool = False
    """Whether that is over tokens, as gradients of biases and norms are."""
    is_used: bool = False
    """Whether an element-wise backward has read it as saved."""


class Flow:
    """Values of a forward and its backward, and who reads them; see [Note: Flow by sizes].

    ``passed_bytes``: of what a section is given, and of what it hands on.
    """

    def __init__(
        self, forward: Sequence[OperatorCall], backward: Sequence[OperatorCall], num_tokens: int, passed_bytes: int
    ) -> None:
        self.calls = [*forward, *backward]
        self.num_forward = len(forward)
        self.values: list[Value] = []
        self.reads: list[list[Number]] = []
        """Of every call, the values that it reads."""
        self.made: list[list[Number]] = []
        """Of every call, the values that it makes."""
        self._num_tokens = num_tokens
        self._outside: dict[int, Number] = {}
        self._saved: list[tuple[int, Number]] = []
        """(call, value) of what element-wise calls of forward save, in order."""
        self._given = self._new(passed_bytes, None)
        self._gradient: Number | None = None
        self._rotations = set(self._found_rotations())
        """Indices of calls of forward at which rotations begin."""
        self._is_parallel = self._adds_both(passed_bytes)
        """Whether attention and MLP both read what the section is given."""
        for index in range(self.num_forward):
            self._forward(index)
        self.end_of_forward = len(self.values)
        """Number of the first value of backward."""
        self._gradient = self._new(passed_bytes, None)
        self._reached = self.num_forward
        """Backward has come to the forward call of this index."""
        self._products_undone: dict[int, int] = {}
        self._last: Number | None = None
        """The gradient that the last product of backward read."""
        for index in range(self.num_forward, len(self.calls)):
            self._backward(index)

    def _found_rotations(self) -> Iterator[int]:
        for begin in range(self.num_forward - len(_ROTATION) + 1):
            span = self.calls[begin : begin + len(_ROTATION)]
            if all(call.name in expected for call, expected in zip(span, _ROTATION, strict=True)):
                times_cosines, negated, joined, times_sines, _ = ([size for _, size in call.reads] for call in span)
                is_half = len(negated) == 1 and times_cosines[0] == 2 * negated[0] == 2 * joined[0]
                if is_half and len(times_cosines) == len(times_sines) == 2:
                    yield begin

    def _adds_both(self, passed_bytes: int) -> bool:
        last = self.calls[: self.num_forward][-2:]
        return len(last) == 2 and all(
            call.name in _ADDS and [size for _, size in call.reads] == [passed_bytes] * 2 for call in last
        )

    def stands_apart(self, index: int) -> bool:
        """Whether a call stays a kernel of its own; operators of this package are no part of any fusion either."""
        call = self.calls[index]
        return call.operation_class in APART or call.name.startswith("fused_cross_entropy")

    def is_fusible(self, value: Number) -> bool:
        """Whether a call makes it that may be part of a larger kernel."""
        maker = self.values[value].maker
        return maker is not None and not self.stands_apart(maker)

    def is_operand(self, value: Number) -> bool:
        """Whether a kernel of its own reads it."""
        return any(self.stands_apart(reader) for reader in self.values[value].readers)

    def _new(self, size: int, maker: int | None, read_as: int | None = None) -> Number:
        self.values.append(Value(size, size if read_as is None else read_as, maker))
        return len(self.values) - 1

    def _from_outside(self, size: int) -> Number:
        if size not in self._outside:
            self._outside[size] = self._new(size, None)
        return self._outside[size]

    def _is_linear(self, index: int) -> bool:
        call = self.calls[index]
        return call.operation_class is OperationClass.MATMUL and (len(call.shape) != 4 or call.shape[0] == 1)

    def _sizes(self, index: int) -> list[tuple[int, int]]:
        """Of each storage that a call reads: its largest tensor, and all of them."""
        found: dict[int, list[int]] = {}
        for storage, size in self.calls[index].reads:
            found.setdefault(storage, []).append(size)
        return [(max(sizes), sum(sizes)) for sizes in found.values()]

    def _finish(self, index: int, reads: list[Number]) -> None:
        call = self.calls[index]
        for value in reads:
            self.values[value].readers.append(index)
        read_bytes = max((size for _, size in call.reads), default=0)
        reduces = call.operation_class in (OperationClass.REDUCTION, OperationClass.NORMALIZATION)
        made = []
        for place, size in enumerate(call.writes_bytes):
            value = self._new(size // call.dtype.item_bytes if call.name in DRAWN else size, index, size)
            of = self.values[value]
            of.is_small = reduces and size * _REDUCED < read_bytes
            is_of_norm = call.name == "native_layer_norm_backward" and place > 0
            of.is_column = of.is_small and (is_of_norm or read_bytes == size * self._num_tokens)
            made.append(value)
        self.reads.append(reads)
        self.made.append(made)

    def _within(self, begin: Number) -> list[Number]:
        """Values of the section that begins with ``begin``, what it is given first."""
        rest = range(begin + 1, len(self.values))
        return [begin, *(value for value in rest if self.values[value].maker is not None)]

    def _latest(
        self, index: int, sizes: tuple[int, int], pool: Sequence[Number], taken: Sequence[Number]
    ) -> Number | None:
        """The value that a call means, among ``pool``, by its size."""
        equal = [value for value in pool if self.values[value].read_as in sizes and value not in taken]
        unread = [value for value in equal if not self.values[value].readers]
        if index in self._rotations:
            unread = [value for value in unread if not self._is_turned(value)]
        is_norm = self.calls[index].operation_class is OperationClass.NORMALIZATION
        if self._is_parallel and is_norm and self._given in equal:
            return self._given
        if unread:
            return unread[-1]
        is_small = self._is_small_read(index, sizes[0])
        joined = [value for value in pool if not is_small and self._is_joined(value, sizes[0]) and value not in taken]
        if joined and self._may_read_part(index, joined[-1]):
            return joined[-1]
        if not equal:
            return None
        if self.calls[index].name in _ADDS:
            lasting = [value for value in equal if self._may_be_residual(value)]
            apart = [value for value in lasting if not self.is_operand(value)]
            if lasting:
                return (apart or lasting)[-1]
        alike = [value for value in equal if self.is_operand(value) == self.stands_apart(index)]
        return (alike or equal)[-1]

    def _may_be_residual(self, value: Number) -> bool:
        maker = self.values[value].maker
        is_sum = maker is None or self.calls[maker].name in (*_ADDS, "native_layer_norm")
        return is_sum and not self._is_turned(value)

    def _is_turned(self, value: Number) -> bool:
        """Whether a rotation has made it; what is not turned of a head may have been put behind it."""
        maker = self.values[value].maker
        while maker is not None and self.calls[maker].name == "cat" and self.reads[maker]:
            maker = self.values[self.reads[maker][0]].maker
        return maker is not None and maker - len(_ROTATION) + 1 in self._rotations

    def _turned(self, index: int) -> list[Number] | None:
        """What a call of a rotation reads behind its first; None of any other call."""
        begin = next((index - step for step in range(1, len(_ROTATION)) if index - step in self._rotations), None)
        if begin is None:
            return None
        read, times_cosines = self.reads[begin][0], self.made[begin]
        last = self.made[index - 1]
        table = self._from_outside(self.calls[index].reads[-1][1])
        return [[read], [*last, read], [*last, table], [*last, *times_cosines]][index - begin - 1]

    def _is_joined(self, value: Number, size: int) -> bool:
        """Whether one map has made this and others like it."""
        of = self.values[value]
        is_of_map = of.maker is not None and of.maker < self.num_forward and self._is_linear(of.maker)
        return is_of_map and 0 < size < of.read_as and of.read_as % size == 0

    def _may_read_part(self, index: int, joined: Number) -> bool:
        """Whether a call reads a part of what one map has made, ahead of what has been read already.

        So it is where nothing has read that map's output, where the call before has read another part, and of attention
        and rotations.
        """
        readers = self.values[joined].readers
        is_attention = self.calls[index].operation_class is OperationClass.ATTENTION
        return not readers or readers[-1] == index - 1 or is_attention or index in self._rotations

    def _is_small_read(self, index: int, size: int) -> bool:
        return 2 * size < max(of for _, of in self.calls[index].reads)

    def _sliced(self, index: int, size: int, pool: Sequence[Number], taken: Sequence[Number]) -> Number | None:
        """A value of which a call reads an even part, which is not small beside what it reads else."""
        if self._is_small_read(index, size):
            return None
        larger = [
            value
            for value in pool
            if size < self.values[value].read_as <= _REDUCED * size
            and self.values[value].read_as % size == 0
            and value not in taken
        ]
        products = [value for value in larger if not self.is_fusible(value)]
        return (products or larger)[-1] if larger else None

    def _forward(self, index: int) -> None:
        call, reads = self.calls[index], list[Number]()
        if call.name in DRAWN:
            self._finish(index, [])
            return
        pool, sizes = self._within(self._given), self._sizes(index)
        if (turned := self._turned(index)) is not None:
            self._finish(index, turned)
            return
        for place, of_one in enumerate(sizes):
            found = None
            if not self._is_linear(index) or place == len(sizes) - 2:  # a bias, the input, the weight
                found = self._input_again(index, of_one) if self._is_linear(index) else None
                found = self._latest(index, of_one, pool, reads) if found is None else found
                found = self._sliced(index, of_one[0], pool, reads) if found is None else found
            elif place == len(sizes) - 1:
                found = self._weight_made(of_one)
            reads.append(self._from_outside(of_one[0]) if found is None else found)
        self._finish(index, reads)
        self._save(index)

    def _weight_made(self, sizes: tuple[int, int]) -> Number | None:
        """A weight that was cast or unpacked for a linear map."""
        for number in range(len(self.values) - 1, self._given, -1):
            value = self.values[number]
            if value.maker is None or value.readers or value.read_as not in sizes:
                continue
            reads = self.reads[value.maker]
            if reads and all(self.values[read].maker is None and read != self._given for read in reads):
                return number
        return None

    def _input_again(self, index: int, sizes: tuple[int, int]) -> Number | None:
        """What the linear map before reads too, if it has such an input: maps that follow one another have one."""
        if index == 0 or not self._is_linear(index - 1):
            return None
        before = self.reads[index - 1][-2:-1]
        return before[0] if before and self.values[before[0]].read_as in sizes else None

    def _save(self, index: int) -> None:
        """Note what the derivative of an element-wise call reads."""
        name, reads = self.calls[index].name.strip("_"), self.reads[index]
        is_scaled = name in ("mul", "div") and len(reads) == 1
        if self.stands_apart(index) or self.calls[index].name in _PASSES_ON or is_scaled:
            return
        masks = [value for value in reads if self._is_mask(value)]
        if masks:
            saved = masks
        elif name in _SAVES_RESULT or "softmax" in name:
            saved = list(self.made[index])
        else:
            saved = [*reads, *(value for value in self.made[index] if self.values[value].is_small)]
        self._saved += [(index, value) for value in saved]

    def _is_mask(self, value: Number) -> bool:
        """Whether it says what is dropped."""
        while (maker := self.values[value].maker) is not None and self.calls[maker].name.endswith("_"):
            if self.calls[maker].name in DRAWN:
                return True
            if len(self.reads[maker]) != 1:
                return False
            value = self.reads[maker][0]
        return False

    def _of_forward(self, index: int, sizes: tuple[int, int], taken: Sequence[Number]) -> Number | None:
        """What an element-wise call of backward reads of forward."""
        is_small = self._is_small_read(index, sizes[0])
        equal = [
            value
            for call, value in reversed(self._saved)
            if call <= self._reached
            and (self.values[value].read_as in sizes or (not is_small and self._is_joined(value, sizes[0])))
            and value not in taken
        ]
        unused = [value for value in equal if not self.values[value].is_used]
        if not equal:
            return None
        found = (unused or equal)[0]
        self.values[found].is_used = self.values[found].read_as in sizes  # parts of it may be read apart
        return found

    def _undone(self, index: int) -> int | None:
        """The forward call whose derivative a call of backward that stands apart is a part of."""
        call = self.calls[index]
        for earlier in range(min(self._reached, self.num_forward - 1), -1, -1):
            of = self.calls[earlier]
            is_alike = of.operation_class is call.operation_class and sorted(of.shape) == sorted(call.shape)
            if is_alike and self.stands_apart(earlier) and self._products_undone.get(earlier, 0) < 2:
                self._products_undone[earlier] = self._products_undone.get(earlier, 0) + 1
                self._reached = earlier
                return earlier
        return None

    def _backward(self, index: int) -> None:
        assert self._gradient is not None
        pool, sizes = self._within(self._gradient), self._sizes(index)
        if self.stands_apart(index):
            self._backward_apart(index, pool, sizes)
            return
        call, last = self.calls[index], self._last
        if call.name in DRAWN:
            self._finish(index, [])
            return
        is_of_bias = call.name == "sum" and last is not None and self.stands_apart(index - 1)
        if is_of_bias and last is not None and self.values[last].read_as == sizes[0][0]:
            self._finish(index, [last])
            return
        reads: list[Number] = []
        for place, of_one in enumerate(sizes):
            if place == 0 or call.name in _PASSES_ON:
                found = self._latest(index, of_one, pool, reads)
                found = self._sliced(index, of_one[0], pool, reads) if found is None else found
                found = self._of_forward(index, of_one, reads) if found is None else found
            else:
                found = self._of_forward(index, of_one, reads)
                found = self._latest(index, of_one, pool, reads) if found is None else found
            reads.append(self._from_outside(of_one[0]) if found is None else found)
        self._finish(index, reads)

    def _backward_apart(self, index: int, pool: Sequence[Number], sizes: Sequence[tuple[int, int]]) -> None:
        """A product's derivatives: of its input, which reads the weight, or of its weight, which reads the input."""
        call, is_linear, undone = self.calls[index], self._is_linear(index), self._undone(index)
        is_of_weight = is_linear and len(call.shape) == 4 and call.shape[3] == self._num_tokens
        known: list[Number] = []
        if undone is not None:
            known = self.reads[undone][-2:-1] if is_linear else [*self.reads[undone], *self.made[undone]]
        reads: list[Number] = []
        for place, of_one in enumerate(sizes):
            fitting = [value for value in known if self.values[value].read_as in of_one and value not in reads]
            if not is_linear:
                fitting += [value for value in known if self._is_joined(value, of_one[0]) and value not in reads]
            has_input = any(value < self.end_of_forward for value in reads)
            found: Number | None = None
            if is_of_weight:
                is_alone = place + 1 == len(sizes) or not fitting or self.values[fitting[0]].read_as != sizes[1][0]
                if fitting and is_alone and not has_input:
                    found = fitting[0]
            elif is_linear and place == len(sizes) - 1:
                weight = self.reads[undone][-1] if undone is not None else None
                is_made = weight is not None and self.values[weight].read_as in of_one and weight not in reads
                reads.append(weight if is_made and weight is not None else self._from_outside(of_one[0]))
                continue
            elif not is_linear and fitting and place > 0:
                found = fitting[0]
            found = self._gradient_of_product(index, of_one, pool, reads) if found is None else found
            reads.append(self._from_outside(of_one[0]) if found is None else found)
        self._finish(index, reads)
        if call.operation_class is OperationClass.MATMUL:
            own = [value for value in reads if value == self._gradient or value > (self._gradient or 0)]
            self._last = next((value for value in own if value not in self._outside.values()), None)

    def _gradient_of_product(
        self, index: int, sizes: tuple[int, int], pool: Sequence[Number], taken: Sequence[Number]
    ) -> Number | None:
        """Both derivatives of a product read one gradient, one after the other."""
        last = self._last
        if last is not None and self.stands_apart(index - 1) and self.values[last].read_as in sizes:
            readers = [reader for reader in self.values[last].readers if self.stands_apart(reader)]
            if len(readers) == 1 and last not in taken:
                return last
        return self._latest(index, sizes, pool, taken)


def drawn_apart(calls: Sequence[OperatorCall]) -> Sequence[OperatorCall]:
    """``calls`` in which dropout is what a fused kernel may take apart: noise that is drawn, and a product with it."""
    if not any(call.name.startswith(DROPOUT) for call in calls):
        return calls
    return [piece for call in calls for piece in _pieces(call)]


def _pieces(call: OperatorCall) -> Iterator[OperatorCall]:
    if not call.name.startswith(DROPOUT):
        yield call
        return
    noise_bytes = call.writes_bytes[0]
    (_, read_bytes), *_ = call.reads
    if call.name == DROPOUT:
        for name in ("bernoulli_", "div_"):
            yield replace(call, name=name, reads=((0, noise_bytes),), writes_bytes=(noise_bytes,))
    yield replace(call, name="mul", reads=((0, read_bytes), (1, noise_bytes)), writes_bytes=(noise_bytes,))
