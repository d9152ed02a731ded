"""What a bypass run follows from, and its fingerprint: over everything that changes the result and nothing else.

[Note: Nothing else]
Runs of equal fingerprints give equal weights, so that a finished one need not be run again.  A plan changes none: any
plan gives the same weights as any other with these micro-batches and this limit of gradients.  Two ways to write down
the same student are one student, and a choice that nothing depends on does not count: how key-value heads are
initialised where none are left out, or how often a run is validated whose last weights are kept.

[Note: Continued runs]
The learning rate of a step follows from all steps of the budget.  So a run that is continued with more tokens has had
other rates than one that was given as many at once, and it was validated when the first budget was used up: it gives
other weights, and has another fingerprint.  That covers the schedule of every earlier budget, and until which step it
was followed.  A budget that no step was trained under, or one of as many steps, leaves no trace in either.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from ...shared.basics.documents import FrozenModel
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.workload import DType
from ...shared.students.shapes import student_shapes, teacher_shapes
from ...shared.students.student import ExpertInitialization, FfnInitialization, Student, Subblock
from .token_budget import TokenBudget

Fraction = Annotated[float, Field(ge=0, le=1)]
_PROVENANCE: Final = ("_name_or_path", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Fields of a model's configuration that say where it comes from, or how it is stored and asked."""


class KeptWeights(StrEnum):
    """Which weights a run ends with."""

    BEST = "best"
    """Those of the validation with the lowest loss."""
    FINAL = "final"
    """Those of the last step."""


class EarlierBudget(FrozenModel):
    """A budget under which some steps were trained before the run was continued with another one."""

    num_tokens: PositiveInt
    until_step: PositiveInt
    """Completed steps when another budget took its place."""


class RunSettings(FrozenModel):
    """All that a bypass run is asked for."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"name", "save_every", "log_every"})
    """Fields that the result does not depend on."""
    BUDGET: ClassVar[frozenset[str]] = frozenset({"num_tokens"})
    """Fields that may grow while a run goes on (``series``)."""

    teacher_weights: str
    """Fingerprint of the teacher's weights (``SavedWeights.fingerprint``)."""
    teacher_configuration: dict[str, Any]
    """Its ``config.json``, with all of its sizes."""
    teacher_code: str | None = None
    """Fingerprint of the files that it is made by (``OwnCode.fingerprint``); None: transformers' own code makes it."""
    student: Student
    dtype: DType
    """Element type of the weights."""
    autocast: DType | None = None
    """Element type that forwards compute in; None: that of the weights."""
    data: str
    """Fingerprint of what is trained on, its tokenizer and packing included."""
    statistics_batches: PositiveInt = 8
    """Batches of the data that activation statistics come from."""
    sequence_length: PositiveInt
    micro_batch_size: PositiveInt
    micro_batches: PositiveInt = 1
    """Of every step."""
    num_tokens: PositiveInt
    """To train on."""
    seed: NonNegativeInt = 0
    """Of random values."""
    data_seed: NonNegativeInt = 0
    """Of the order of the data."""
    optimizer: Optimizer = Optimizer.ADAMW
    learning_rate: PositiveFloat = 1e-4
    """At its peak."""
    least_rate_frac: Fraction = 1e-5
    """Of the peak."""
    warmup_frac: Fraction = 0.05
    """Of all steps."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.1
    max_gradient_norm: PositiveFloat | None = 1.0
    """Of every block by itself; None: any."""
    kept_weights: KeptWeights = KeptWeights.BEST
    validate_every: PositiveInt | None = None
    """Steps between two validations; None: after the last alone."""
    validation_batches: PositiveInt = 8
    name: str = ""
    """What its folder is called; empty: after its student."""
    save_every: PositiveInt | None = None
    """Steps between two checkpoints; None: after the last alone."""
    log_every: PositiveInt = 5
    """Steps between two reports."""

    @field_validator("teacher_configuration")
    @classmethod
    def _plain(cls, value: dict[str, Any]) -> dict[str, Any]:
        return {name: _without_infinities(part) for name, part in value.items()}

    @property
    def budget(self) -> TokenBudget:
        """The tokens in terms of batches and steps."""
        return TokenBudget(self.num_tokens, self.sequence_length, self.micro_batch_size, self.micro_batches)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that the result depends on (Note: Nothing else).  Raises WorkloadError as shapes do."""
        return _hash(self._identity())

    def fingerprint_after(self, earlier: Sequence[EarlierBudget]) -> str:
        """``fingerprint``, of a run that had these budgets before (Note: Continued runs)."""
        if not earlier:
            return self.fingerprint
        parts = [[*self._schedule(one.num_tokens), one.until_step] for one in earlier]
        return _hash({**self._identity(), "earlier": parts})

    def continued(self, before: RunSettings, earlier: Sequence[EarlierBudget], step: int) -> tuple[EarlierBudget, ...]:
        """The budgets before these settings of a run that is continued from ``before`` after ``step`` steps.

        ``earlier``: those before ``before``.  Only budgets that the result depends on are left.
        """
        parts = [(one.num_tokens, min(one.until_step, step)) for one in earlier] + [(before.num_tokens, step)]
        made: list[EarlierBudget] = []
        for num_tokens, until in parts:
            if until <= (made[-1].until_step if made else 0):
                continue
            if made and self._schedule(made[-1].num_tokens) == self._schedule(num_tokens):
                made.pop()
            made.append(EarlierBudget(num_tokens=num_tokens, until_step=until))
        if made and self._schedule(made[-1].num_tokens) == self._schedule(self.num_tokens):
            made.pop()
        return tuple(made)

    def _schedule(self, num_tokens: int) -> tuple[int, int]:
        """Steps, and those of the warm-up: what rates and the last validation of a budget follow from."""
        budget = replace(self.budget, num_tokens=num_tokens)
        return budget.num_steps, budget.warmup_steps(self.warmup_frac)

    @property
    def series(self) -> str:
        """The same without the budget: runs that one can be continued to."""
        return _hash({field: value for field, value in self._identity().items() if field not in self.BUDGET})

    @property
    def label(self) -> str:
        """The folder's name: ``name``, or what differs from the teacher and the head of ``series``."""
        return self.name or f"{_words(self.student)}-{self.series[:8]}"

    def differences(self, other: RunSettings) -> dict[str, tuple[Any, Any]]:
        """Fields that the result depends on, where they differ: own and other value."""
        own, others = self._identity(), other._identity()
        return {
            field: (own.get(field), others.get(field))
            for field in {**own, **others}
            if own.get(field) != others.get(field)
        }

    def _identity(self) -> dict[str, Any]:
        fields = self.model_dump(mode="json", exclude=set(self.WITHOUT_EFFECT))
        fields["teacher_configuration"] = {
            name: value for name, value in self.teacher_configuration.items() if name not in _PROVENANCE
        }
        fields["student"] = student_identity(self.student, self.teacher_configuration)
        if self.teacher_code is None:
            del fields["teacher_code"]
        if not fields["student"]["is_measured"]:
            del fields["statistics_batches"]
        if self.kept_weights is KeptWeights.FINAL:
            del fields["validate_every"], fields["validation_batches"]
        return fields


def student_identity(student: Student, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """What tells a student of this teacher from others, in plain values; choices that nothing depends on are None.

    Raises WorkloadError as ``student_shapes`` does.
    """
    shapes, teacher = student_shapes(student, configuration), teacher_shapes(configuration)
    pairs = list(zip(shapes, teacher, strict=True))
    narrower = any(own.intermediate_size != before.intermediate_size for own, before in pairs)
    fewer_heads = any(own.num_key_value_heads != before.num_key_value_heads for own, before in pairs)
    fewer_experts = any(own.num_local_experts != before.num_local_experts for own, before in pairs)
    has_linear = any(Subblock.LINEAR in (own.ffn, own.attention) for own in shapes)
    modes = student.initialization
    used = {
        "ffn": modes.ffn if narrower else None,
        "key_value_heads": modes.key_value_heads if fewer_heads else None,
        "experts": modes.experts if fewer_experts else None,
        "linear": modes.linear if has_linear else None,
    }
    return {
        "blocks": [shape.fields for shape in shapes],
        "keys_to_learn": list(student.keys_to_learn),
        "loss": student.loss,
        "initialization": used,
        "is_measured": used["ffn"] is FfnInitialization.PRUNE or used["experts"] is ExpertInitialization.ROUTER,
    }


def _without_infinities(value: Any) -> Any:
    """A part of a configuration as transformers writes it: in words for the numbers that JSON has no sign for."""
    if isinstance(value, Mapping):
        return {name: _without_infinities(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")}
    return value


def _words(student: Student) -> str:
    """What differs in all blocks, in short."""
    if student.block:
        return "custom"
    stated = student.all
    words = [
        f"{word}-{value}"
        for word, value in (
            ("ffn", stated.intermediate_size or stated.ffn),
            ("heads", stated.num_key_value_heads),
            ("experts", stated.num_local_experts),
            ("attention", stated.attention),
        )
        if value is not None
    ]
    return "-".join(words) or "full"


def _hash(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
