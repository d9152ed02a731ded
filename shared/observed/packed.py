"""Packed rows: what attention computes where its kernel knows the samples of each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..basics.errors import WorkloadError
from ..phases.packing import Packing
from ..schema.plan import ActivationMode
from ..schema.workload import OperationClass
from .observation import Observation, OperatorCall
from .observed_inputs import PhaseKey

Observed = Mapping[ActivationMode, Mapping[PhaseKey, Observation]]


def attending_within_samples(observed: Observed, packing: Packing, model_name: str) -> Observed:
    """``observed``, of rows of one sample each, where samples are packed as ``packing`` says and no mask is needed.

    A kernel that is told lengths computes for each sample what it computes for a row of that length, so that its
    arithmetic is the row's times ``squares`` / ``row_tokens``**2, under a causal mask or not.  What it reads, writes
    and keeps has one element per token, and stays; so does everything else, and a kernel that was seen to be told.
    Raises WorkloadError if attention is no such kernel, or is between two sequences.
    """
    packed = {
        mode: {key: _within_samples(seen, packing, model_name) for key, seen in sections.items()}
        for mode, sections in observed.items()
    }
    calls = (call for sections in observed.values() for seen in sections.values() for call in seen.calls)
    if not any(_is_own(call, packing.row_tokens) or _is_told(call, packing) for call in calls):
        raise WorkloadError(
            f"packed lengths: {model_name} runs no attention kernel over the tokens of a row that could be told where "
            f"samples end. Leave them out, or trace the model with a packed batch in Python: "
            f"protwin.runtime.trace(model, batch)."
        )
    if any(seen.square_bytes or seen.square_peak_bytes for sections in observed.values() for seen in sections.values()):
        raise WorkloadError(
            f"packed lengths: attention of {model_name} adds a bias or a mask of a row's length squared, which no "
            f"kernel takes that is told lengths. Leave them out, or trace the model with a packed batch in Python: "
            f"protwin.runtime.trace(model, batch)."
        )
    return packed


def _is_own(call: OperatorCall, row_tokens: int) -> bool:
    """Whether a call is attention of the tokens of a row to each other."""
    return call.operation_class is OperationClass.ATTENTION and call.shape[1:3] == (row_tokens, row_tokens)


def _is_told(call: OperatorCall, packing: Packing) -> bool:
    """Whether a call was seen to be told lengths."""
    equal = packing.equal_length
    return call.operation_class is OperationClass.ATTENTION and call.shape[1:3] == (equal, equal)


def _within_samples(seen: Observation, packing: Packing, model_name: str) -> Observation:
    if not any(call.operation_class is OperationClass.ATTENTION for call in seen.calls):
        return seen
    made: dict[OperatorCall, OperatorCall] = {}
    calls = [made.setdefault(call, _call(call, packing, model_name)) for call in seen.calls]
    return replace(seen, calls=calls, operations=[call.operation() for call in calls])


def _call(call: OperatorCall, packing: Packing, model_name: str) -> OperatorCall:
    if call.operation_class is not OperationClass.ATTENTION or len(call.shape) != 4:
        return call
    heads, queries, keys, width = call.shape
    if queries != keys and packing.row_tokens in (queries, keys):
        raise WorkloadError(
            f"packed lengths: {model_name} attends from {queries} tokens to {keys} of another sequence, and only "
            f"samples that attend to themselves are packed. Leave them out."
        )
    if queries != packing.row_tokens:
        return call
    equal = packing.equal_length
    return replace(
        call,
        flops=packing.packed_flops(call.flops),
        shape=(-(-heads * queries // equal), equal, equal, width),
    )
