"""What the epilogue does where its cross-entropy is fused or narrow, from what a trace saw of it eager.

[Note: A fused loss without a trace]
Eager cross-entropy is a run of operations that every model of causal language has in one form: logits are widened (if
they are narrower than float32), their log-softmax is taken, and the labels' losses are picked; backward undoes the
three.  A narrow one leaves the first out: log-softmax and its gradient have the type of the logits.  A fused one
(``runtime/tiles/fused_cross_entropy.py``) takes one operation for forward and one for backward.  It keeps the logits
where the eager one keeps their log-softmax, and the gradient takes their place.  All else stays, so that levels behind
change by what is alive then.  Where a model does not have that form, nothing is known without a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Final, Self

from ..phases.tiling import LossHead
from ..schema.plan import ActivationMode
from ..schema.schedule import OuterSection, TaskKind
from ..schema.workload import DType, OperationClass
from .assembly import TracedShape
from .observation import Observation, OperatorCall
from .observed_inputs import PhaseKey

SCRATCH_BYTES: Final = 16 * 2**20
"""Of rows that are widened at once: well within the cache of a GPU (40 MB of an A100, 50 MB of an H100; NVIDIA's
architecture papers)."""
FORWARD: Final = "fused_cross_entropy"
BACKWARD: Final = "fused_cross_entropy_backward_"
_WIDENED: Final = "_to_copy"
_SOFTMAX: Final = "_log_softmax"
_PICKED: Final = "nll_loss_forward"
_UNDONE: Final = ("nll_loss_backward", "_log_softmax_backward_data")
_PRODUCTS: Final = ("mm", "addmm")
_LEFT_ALONE: Final = (*_PRODUCTS, _WIDENED, "mul", "div", "add", "clone")
"""What may make logits: their backward reads none of them."""
_ITEM_BYTES: Final = DType.FLOAT32.item_bytes
"""Of the loss, and of what is kept of each token: the logarithm of the sum of exponentials."""
_LABEL_BYTES: Final = DType.INT64.item_bytes
_SEED: Final = "ones_like"
"""The gradient of the loss, which backward begins with: from here on nobody has the model's output."""


class UnknownLossError(Exception):
    """The epilogue has no cross-entropy of the known form."""


def scratch_rows(num_tokens: int, vocabulary: int, item_bytes: int) -> int:
    """Rows of logits that are widened at once to elements of ``item_bytes``: at least one, if there is any token."""
    return min(num_tokens, max(1, SCRATCH_BYTES // (vocabulary * item_bytes)))


def with_loss(shape: TracedShape, loss_head: LossHead) -> TracedShape:
    """``shape`` where its loss is fused or narrow.  Raises UnknownLossError if its epilogue does not have that form."""
    observed: dict[ActivationMode, Mapping[PhaseKey, Observation]] = {}
    for mode, sections in shape.observed.items():
        forward = sections[TaskKind.FORWARD, OuterSection.EPILOGUE]
        backward = sections[TaskKind.BACKWARD, OuterSection.EPILOGUE]
        loss = _Loss.of(forward, backward, shape.batch_shapes.get("labels", ()))
        observed[mode] = {
            **sections,
            (TaskKind.FORWARD, OuterSection.EPILOGUE): loss.forward(forward, loss_head),
            (TaskKind.BACKWARD, OuterSection.EPILOGUE): loss.backward(backward, loss_head),
        }
    return replace(shape, observed=observed, loss_head=loss_head)


def with_outputs_held(shape: TracedShape, eager: TracedShape) -> TracedShape:
    """``shape`` where the loop holds logits and loss until those of the next micro-batch are there.

    Those of the one before are resident, and go when the model has given these, ahead of backward's first operation.
    ``eager``: the same with an eager loss, which tells of logits.  Raises UnknownLossError as ``with_loss``.
    """
    sections = eager.observed[ActivationMode.KEEP]
    forward = sections[TaskKind.FORWARD, OuterSection.EPILOGUE]
    backward = sections[TaskKind.BACKWARD, OuterSection.EPILOGUE]
    loss = _Loss.of(forward, backward, eager.batch_shapes.get("labels", ()))
    logits_bytes = loss.logits_bytes if shape.loss_head.gives_logits else 0
    observed, loss_bytes = dict[ActivationMode, Mapping[PhaseKey, Observation]](), 0
    for mode, sections in shape.observed.items():
        seen = sections[TaskKind.FORWARD, OuterSection.EPILOGUE]
        seed = _only(seen.calls, _SEED)
        loss_bytes = seen.calls[seed - 1].writes_bytes[0]
        gone = partial(_behind, seed, -loss_bytes)
        observed[mode] = {**sections, (TaskKind.FORWARD, OuterSection.EPILOGUE): _changed(seen, {}, set(), gone)}
    resident_bytes = shape.resident_bytes + logits_bytes + loss_bytes
    return replace(shape, observed=observed, resident_bytes=resident_bytes, keeps_outputs=True)


def _behind(first: int, more_bytes: int, index: int) -> int:
    return more_bytes if index >= first else 0


@dataclass(frozen=True, slots=True)
class _Loss:
    """The cross-entropy of an epilogue: where it is, and how large."""

    made: int
    """Index of the call that gives its logits in float32: the one that widens them if ``logits_bytes`` is less."""
    softmax: int
    """Index of the call that takes their log-softmax; the one that picks the labels' losses follows, and the seed."""
    undone: slice
    """Calls of backward that undo them."""
    num_tokens: int
    vocabulary: int
    logits_bytes: int
    """As the head gives them."""
    exact_bytes: int
    """In float32."""
    dtype: DType
    """Of the logits as the head gives them."""

    @classmethod
    def of(cls, forward: Observation, backward: Observation, labels: Sequence[int]) -> Self:
        """Raises UnknownLossError."""
        calls = forward.calls
        softmax, made = _only(calls, _SOFTMAX), -1
        exact_bytes = calls[softmax].writes_bytes[0]
        for index in range(softmax):
            if calls[index].writes_bytes[:1] == (exact_bytes,):
                made = index
        product = max((i for i in range(made + 1) if calls[i].name in _PRODUCTS), default=-1)
        if min(made, product) < 0 or calls[made].name not in _LEFT_ALONE:
            raise UnknownLossError("no logits of a matrix product")
        is_widened = calls[made].name == _WIDENED
        logits_bytes = calls[made].reads[0][1] if is_widened else exact_bytes
        _, num_tokens, vocabulary, _ = calls[product].shape
        if (
            len(labels) != 2
            or prod(labels) != num_tokens
            or [call.name for call in calls[softmax + 1 : softmax + 3]] != [_PICKED, _SEED]
            or calls[softmax + 1].reads[:2] != ((0, exact_bytes), (1, _LABEL_BYTES * num_tokens))
            or calls[softmax].dtype is not DType.FLOAT32
            or num_tokens * vocabulary * _ITEM_BYTES != exact_bytes
            or any(size == exact_bytes for call in calls[made + 1 : softmax] for _, size in call.reads)
            or forward.repeated
            or backward.repeated
        ):
            raise UnknownLossError("a cross-entropy of another form")
        begin = _only(backward.calls, _UNDONE[0])
        names = (*_UNDONE, _WIDENED) if is_widened else _UNDONE
        if tuple(call.name for call in backward.calls[begin : begin + len(names)]) != names:
            raise UnknownLossError("a backward of another form")
        undone = slice(begin, begin + len(names))
        return cls(made, softmax, undone, num_tokens, vocabulary, logits_bytes, exact_bytes, calls[product].dtype)

    @property
    def is_widened(self) -> bool:
        """Whether the eager loss has a float32 copy of all logits."""
        return self.logits_bytes != self.exact_bytes

    @property
    def scratch_bytes(self) -> int:
        """Of the rows that are widened at once."""
        return scratch_rows(self.num_tokens, self.vocabulary, _ITEM_BYTES) * self.vocabulary * _ITEM_BYTES

    @property
    def _sums_bytes(self) -> int:
        return self.num_tokens * _ITEM_BYTES

    def forward(self, seen: Observation, loss_head: LossHead) -> Observation:
        """The section with the loss made so."""
        return self._fused_forward(seen) if loss_head is LossHead.FUSED else self._narrow_forward(seen)

    def backward(self, seen: Observation, loss_head: LossHead) -> Observation:
        """The section with the loss made so."""
        return self._fused_backward(seen) if loss_head is LossHead.FUSED else self._narrow_backward(seen)

    def _narrow_forward(self, seen: Observation) -> Observation:
        if not self.is_widened:
            return seen
        seed = self.softmax + 2
        narrowed = {index: self._narrowed(seen.calls[index]) for index in range(self.softmax, seed + 1)}
        scalars = self._scalar_bytes

        def more(index: int) -> int:
            """Bytes that are alive after a call, and would not be if the logits were widened."""
            if index < self.made:
                return 0
            if index < self.softmax:
                return -self.exact_bytes
            less = self.logits_bytes - self.exact_bytes
            if index < seed:
                return less - self.exact_bytes - (2 * scalars if index > self.softmax else 0)
            return less - 3 * scalars

        return _changed(seen, narrowed, {self.made}, more)

    def _narrow_backward(self, seen: Observation) -> Observation:
        if not self.is_widened:
            return seen
        begin, end = self.undone.start, self.undone.stop
        narrowed = {index: self._narrowed(seen.calls[index]) for index in range(begin, end - 1)}
        less = self.logits_bytes - self.exact_bytes

        def more(index: int) -> int:
            if index <= begin:
                return less if index == begin else 0
            # The divisor of the mean is gone.
            return (2 * less if index < end - 1 else -less) + self._scalar_bytes

        return _changed(seen, narrowed, {end - 1}, more)

    @property
    def _scalar_bytes(self) -> int:
        """What one scalar of the loss is smaller by."""
        return _ITEM_BYTES - self.logits_bytes * _ITEM_BYTES // self.exact_bytes

    def _narrowed(self, call: OperatorCall) -> OperatorCall:
        """The same call of the logits' own type."""

        def of(size_bytes: int) -> int:
            is_float = size_bytes in (self.exact_bytes, _ITEM_BYTES)
            return size_bytes * self.logits_bytes // self.exact_bytes if is_float else size_bytes

        reads = tuple((storage, of(size)) for storage, size in call.reads)
        writes = tuple(of(size) for size in call.writes_bytes)
        return replace(call, dtype=self.dtype, reads=reads, writes_bytes=writes)

    def _fused_forward(self, seen: Observation) -> Observation:
        fused = OperatorCall(
            name=FORWARD,
            operation_class=OperationClass.REDUCTION,
            dtype=seen.calls[self.softmax].dtype,
            flops=1,
            reads=((0, self.logits_bytes), (1, _LABEL_BYTES * self.num_tokens)),
            writes_bytes=(_ITEM_BYTES, self._sums_bytes, _ITEM_BYTES),
        )
        copy_bytes = self.exact_bytes if self.is_widened else 0
        picked = self.softmax + 1

        def more(index: int) -> int:
            """Bytes that are alive after a call, and would not be if the loss were eager."""
            if index < self.made or (index == self.made and not self.is_widened):
                return 0
            if index < self.softmax:
                return -copy_bytes
            if index == picked:
                return self._sums_bytes + self.scratch_bytes - copy_bytes - self.exact_bytes
            return self._sums_bytes - self.exact_bytes + self.logits_bytes

        left_out = {self.softmax, *([self.made] if self.is_widened else [])}
        return _changed(seen, {picked: fused}, left_out, more)

    def _fused_backward(self, seen: Observation) -> Observation:
        sizes = (self.logits_bytes, _LABEL_BYTES * self.num_tokens, self._sums_bytes, _ITEM_BYTES, _ITEM_BYTES)
        fused = OperatorCall(
            name=BACKWARD,
            operation_class=OperationClass.REDUCTION,
            dtype=seen.calls[self.undone.stop - 1].dtype,
            flops=self.num_tokens * self.vocabulary,
            reads=tuple(enumerate(sizes)),
            writes_bytes=(self.logits_bytes,),
        )
        begin, end = self.undone.start, self.undone.stop
        before = seen.levels[begin - 1] if begin else 0

        def more(index: int) -> int:
            if index < begin:
                return 0
            if index < end:
                return before + self.scratch_bytes - seen.levels[index]
            return self.exact_bytes - self.logits_bytes - self._sums_bytes

        return _changed(seen, {begin: fused}, set(range(begin + 1, end)), more)


def _changed(
    seen: Observation, instead: Mapping[int, OperatorCall], left_out: Set[int], more: Callable[[int], int]
) -> Observation:
    """``seen`` with other calls, without some, and with ``more(index)`` bytes alive after each."""
    kept = [index for index in range(len(seen.calls)) if index not in left_out]
    return replace(
        seen,
        calls=[instead.get(index, seen.calls[index]) for index in kept],
        operations=[instead[i].operation() if i in instead else seen.operations[i] for i in kept],
        levels=[seen.levels[index] + more(index) for index in kept],
        adding_levels=[seen.adding_levels[index] + more(index) for index in kept],
        end_bytes=seen.end_bytes + more(len(seen.calls)),
    )


def _only(calls: Sequence[OperatorCall], name: str) -> int:
    """Index of the one call of that name.  Raises UnknownLossError."""
    found = [index for index, call in enumerate(calls) if call.name == name]
    if len(found) != 1:
        raise UnknownLossError(f"{len(found)} calls of {name}")
    return found[0]
