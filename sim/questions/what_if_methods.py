"""What-if questions about the method: the optimizer, its gradients, LoRA, the limit of the norm, the batch's shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Final

from ...shared.basics.errors import PlanError, WorkloadError
from ...shared.basics.units import parse_tokens
from ...shared.optimizers.names import host_gradients_named, optimizer_named
from ...shared.schema.optimizer import HostGradients, Optimizer
from ...shared.schema.workload import Workload
from ..searching.request import GlobalBatch, SearchRequest, Step

FIELDS: Final = ("optimizer", "host-gradients", "lora", "max-gradient-norm", "sequence-length", "batch-size")
"""What a question may change of the method, as ``optimizer=adamw-8bit``."""
NONE: Final = "none"
"""Stands for no LoRA and no limit."""
_LARGEST: Final = 10**9


@dataclass(frozen=True)
class MethodChange:
    """What a question changes of the method; the fields that it names, and no others."""

    given: tuple[str, ...] = ()
    """Of ``FIELDS``."""
    optimizer: Optimizer = Optimizer.ADAMW
    host_gradients: HostGradients = HostGradients.PARAMETERS
    lora_rank: int | None = None
    max_gradient_norm: float | None = None
    sequence_length: int | None = None
    batch_size: int | None = None

    @property
    def changes_workload(self) -> bool:
        """Whether the model does something else in an iteration."""
        return any(field in self.given for field in ("lora", "sequence-length", "batch-size"))

    def step_of(self, step: Step) -> Step:
        """``step`` with what is changed of it."""
        changes: dict[str, object] = {}
        if "optimizer" in self.given:
            changes["optimizer"] = self.optimizer
        if "host-gradients" in self.given:
            changes["host_gradients"] = self.host_gradients
        if "max-gradient-norm" in self.given:
            changes["max_gradient_norm"] = self.max_gradient_norm
        return replace(step, **changes) if changes else step  # type: ignore[arg-type]


AS_IT_IS: Final = MethodChange()
WorkloadWith = Callable[[MethodChange], Workload | GlobalBatch]
"""The workload that a method would have."""


def method_change(question: str, changes: Mapping[str, str]) -> MethodChange:
    """The change that ``changes``, by field, ask for.  Raises PlanError if a value makes no sense."""
    found: dict[str, object] = {}
    for field, value in changes.items():
        match field:
            case "optimizer":
                found["optimizer"] = optimizer_named(value)
            case "host-gradients":
                found["host_gradients"] = host_gradients_named(value)
            case "lora":
                found["lora_rank"] = None if value == NONE else _count(question, field, value, "the rank, or none")
            case "max-gradient-norm":
                found["max_gradient_norm"] = None if value == NONE else _limit(question, value)
            case "sequence-length":
                found["sequence_length"] = _tokens(question, value)
            case "batch-size":
                found["batch_size"] = _count(question, field, value, "samples per micro-batch")
    return MethodChange(tuple(changes), **found)  # type: ignore[arg-type]


def with_method(request: SearchRequest, change: MethodChange, workload_with: WorkloadWith | None) -> SearchRequest:
    """``request`` as it would be with the change.

    Raises PlanError if a global batch has its micro-batches searched, or the optimizer cannot step the workload, and
    WorkloadError if the request's workload is one that nothing makes again.
    """
    if "batch-size" in change.given and isinstance(request.workload, GlobalBatch):
        raise PlanError(
            "a global batch has the size of its micro-batches searched, but --what-if batch-size fixes it. Leave one "
            "of the two out."
        )
    changed = replace(request, step=change.step_of(request.step))
    if not change.changes_workload:
        return changed
    if workload_with is None:
        raise WorkloadError(
            f"a saved workload has its shape and method, so that --what-if {change.given[0]} cannot change them. Name "
            f"a model instead."
        )
    return replace(changed, workload=workload_with(change))


def tokens_per_step(request: SearchRequest) -> float:
    """Tokens, or positions, of all ranks in one step."""
    workload = request.smallest_workload()
    if isinstance(request.workload, GlobalBatch):
        num_samples = request.workload.num_samples
    else:
        num_groups = request.step.num_ranks // request.sequence_unit
        num_samples = workload.num_samples * request.step.micro_batches * num_groups
    return num_samples * workload.num_tokens / workload.num_samples


def _count(question: str, field: str, value: str, meaning: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 11 and 1 <= int(value) <= _LARGEST):
        raise PlanError(f"--what-if {question} gives {field} {value!r}. Write {meaning}, as in {field}=16.")
    return int(value)


def _tokens(question: str, value: str) -> int:
    tokens = parse_tokens(value)
    if tokens is None or not 1 <= tokens <= _LARGEST:
        raise PlanError(
            f"--what-if {question} gives sequence-length {value!r}. Write tokens per sample, as in "
            f"sequence-length=8192 or sequence-length=8k."
        )
    return tokens


def _limit(question: str, value: str) -> float:
    try:
        limit = float(value)
    except ValueError:
        limit = 0.0
    if not (limit > 0 and isfinite(limit)):
        raise PlanError(
            f"--what-if {question} gives max-gradient-norm {value!r}. Write a limit above 0, as in "
            f"max-gradient-norm=1, or {NONE}."
        )
    return limit
