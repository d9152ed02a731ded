"""What a training asks for before it begins: its step, its limits, and what of the answer is known already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ...shared.basics.documents import Document
from ...shared.basics.errors import PlanError
from ...shared.basics.units import as_bytes
from ...shared.catalogue.machines import load_hardware
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.optimizer import HostGradients, Optimizer
from ...shared.schema.plan import ParallelMode, Plan
from ...shared.schema.workload import DType, Workload
from ..model.batches import Loss

_D = TypeVar("_D", bound=Document)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a plan is wanted for.  Sizes may be text (``"10GiB"``), documents may be paths; both are read at once.

    Raises PlanError if the fields contradict each other, and what reading the files raises.
    """

    budget_bytes: int | str | None = None
    """Device memory that training may fill; None for all that the device has."""
    host_budget_bytes: int | str | None = None
    """Host memory of one rank that training may fill; None for its share of the host."""
    hardware: Hardware | str | Path | None = None
    """The machine, by name or file; None: it is measured."""
    calibration: Calibration | str | Path | None = None
    """Factors that were fitted on that machine; None for none."""
    plan: Plan | str | Path | None = None
    """What is carried out; None: it is searched."""
    workload: Workload | str | Path | None = None
    """What the model does with one batch; None: it is traced and timed."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Knobs of the plan that are not left to the search, by name: one value, or several (``{"n_persist": 4}``)."""
    modes: Sequence[ParallelMode] | None = None
    """Parallel modes that several ranks may use; None for all."""
    micro_batches: int = 1
    """Forwards and backwards per step and rank, each on a batch of its own."""
    max_gradient_norm: float | None = None
    """Limit of the norm of all gradients; None for none."""
    optimizer: Optimizer = Optimizer.ADAMW
    """What steps the weights."""
    host_gradients: HostGradients = HostGradients.PARAMETERS
    """In which element type the host adds up gradients."""
    loss: Loss | None = None
    """The scalar loss of an output and a batch; None: the output has its own."""
    blocks: str | Sequence[str] | None = None
    """The blocks, where they are not found."""
    autocast: DType | None = None
    """The element type that forward computes in; None: that of the parameters."""
    weights: str | Path | None = None
    """The folder of the values of parameters on the meta device; None: all have values."""
    name: str | None = None
    """What the model is called in tables; None: its class."""
    probe_s: float = 1.0
    """Seconds that the machine is measured for, where it is."""
    rank_timeout_s: float = 600.0
    """Seconds that a rank waits for the others."""

    def __post_init__(self) -> None:
        """Read what is named."""
        for size in ("budget_bytes", "host_budget_bytes"):
            if isinstance(given := getattr(self, size), str):
                object.__setattr__(self, size, as_bytes(given))
        if isinstance(self.hardware, str | Path):
            object.__setattr__(self, "hardware", load_hardware(self.hardware))
        for kind, name in ((Calibration, "calibration"), (Plan, "plan"), (Workload, "workload")):
            object.__setattr__(self, name, _document(kind, getattr(self, name), name))
        if self.plan is not None and self.knobs:
            raise PlanError(
                f"a plan is given, and {', '.join(self.knobs)} beside it, which a search would need. Leave one of the "
                f"two out."
            )

    @property
    def given_plan(self) -> Plan | None:
        """The plan, if it is not to be searched."""
        assert self.plan is None or isinstance(self.plan, Plan)
        return self.plan

    @property
    def sequence_ranks(self) -> int:
        """Neighbouring ranks that share each sequence: of the given plan, or as the knobs have it.

        Raises PlanError if they have several numbers, whose steps would have other micro-batches.
        """
        if self.given_plan is not None:
            return self.given_plan.sequence_ranks
        named = self.knobs.get("sequence_ranks", 1)
        numbers = [named] if isinstance(named, int) else list(named)
        if len(numbers) != 1 or not isinstance(numbers[0], int):
            raise PlanError(
                f"knobs: sequence_ranks is {named}, but a training has to know which ranks have the same batches. "
                f"Name one number."
            )
        found: int = numbers[0]
        return found

    def check_plan(self, plan: Plan, num_ranks: int) -> None:
        """Raise PlanError, which names both, if the step of ``plan`` is not the one that is asked for."""
        for name, planned, asked in (
            ("micro_batches", plan.micro_batches, self.micro_batches),
            ("max_gradient_norm", plan.max_gradient_norm, self.max_gradient_norm),
            ("optimizer", str(plan.optimizer), str(self.optimizer)),
            ("num_ranks", plan.num_ranks, num_ranks),
        ):
            if planned != asked:
                raise PlanError(
                    f"the plan has {name} = {planned}, but training asks for {asked}. Search a plan for this training "
                    f"(leave the plan out), or train as the plan does."
                )

    def within(self, budget_bytes: int | None) -> PlanRequest:
        """The same with this budget, where none is given."""
        return self if self.budget_bytes is not None else replace(self, budget_bytes=budget_bytes)


def _document(kind: type[_D], given: _D | str | Path | None, name: str) -> _D | None:
    if given is None or isinstance(given, kind):
        return given
    if not isinstance(given, str | Path):
        raise PlanError(f"{name} is a {type(given).__name__}; it must be a {kind.__name__}, or the path of its file.")
    return kind.load(given)


Tell = Callable[[str], None]
"""Hears a line about what is being done."""
