"""What ``train`` gives: the plan, the losses, and what was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...shared.answers.search_result import SearchResult
from ...shared.basics.documents import write_atomically
from ...shared.basics.units import format_bytes, format_seconds
from ...shared.compile.compile import compile_schedule
from ...shared.records.comparison import Comparison, compare_records
from ...shared.report.page import Report
from ...shared.report.report import Facts, report
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ...shared.tables.comparison import comparison_tables
from ...shared.tables.explain import explain_plan
from ...shared.tables.shown import screenful
from ...shared.tables.table import Heading, Table


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished training; ``print`` shows it in a screen."""

    workload: Workload
    hardware: Hardware
    plans: tuple[Plan, ...]
    """The plan that training began with, and those that it changed to."""
    losses: tuple[float, ...]
    """Of every step of this call: the mean of its micro-batches, on this rank."""
    evaluations: tuple[tuple[int, float], ...]
    """The step and the mean loss of every evaluation."""
    first_prediction: Record
    """Of the first plan, before anything was measured."""
    prediction: Record
    """Of the last plan, with what was learnt."""
    measured: Record | None
    """Of the last plan; None where too few steps could be timed."""
    calibration: Calibration | None
    """What the steps have told of the machine; None where that is nothing."""
    search: SearchResult | None
    """Of the first plan; None where it was given."""
    notes: tuple[str, ...] = ()
    """What was told on the way."""

    @property
    def plan(self) -> Plan:
        """The last plan."""
        return self.plans[-1]

    @property
    def comparison(self) -> Comparison | None:
        """Predicted beside measured, of the last plan; None where nothing was measured."""
        return None if self.measured is None else compare_records(self.prediction, self.measured)

    def explain(self) -> str:
        """What every iteration of the last plan does with each block and chunk, in words."""
        return explain_plan(self.plan, self.workload)

    def __str__(self) -> str:
        """Losses, predictions and measurements."""
        model = self.workload.model_name
        parts: list[str | Table] = [
            Heading(f"{model}: {len(self.losses):,} steps"),
            self._losses(),
            self._predictions(),
        ]
        parts += self.notes
        return screenful(tuple(parts))

    def save_report(self, path: str | Path) -> None:
        """Write an HTML page: the prediction beside what was measured, memory, lanes, losses, the plan.

        Raises FileError if it cannot be written.
        """
        write_atomically(Path(path), self._page().html)

    def _page(self) -> Report:
        facts = Facts(
            predicted=self.prediction,
            measured=self.measured,
            losses={"trained": self.losses},
            notes=self.notes,
            schedule=compile_schedule(self.plan, self.workload),
            search=self.search if self.search is not None and self.search.plan == self.plan else None,
        )
        return report(f"{self.workload.model_name}: trained by a plan", facts)

    def comparison_text(self) -> str:
        """Predicted beside measured, task kind by task kind; empty where nothing was measured."""
        found = self.comparison
        return "" if found is None else screenful(comparison_tables(found))

    def _losses(self) -> Table:
        rows = [("trained", f"{self.losses[0]:.4f}", f"{self.losses[-1]:.4f}")] if self.losses else []
        if self.evaluations:
            rows.append(("evaluated", f"{self.evaluations[0][1]:.4f}", f"{self.evaluations[-1][1]:.4f}"))
        return Table(title="Losses", columns=("", ">first", ">last"), rows=rows)

    def _predictions(self) -> Table:
        columns = ("", ">first prediction", ">last prediction", ">measured")
        records: Sequence[Record | None] = (self.first_prediction, self.prediction, self.measured)
        times = [None if one is None else format_seconds(one.iteration_s) for one in records]
        peaks = [None if one is None else format_bytes(one.peak_device_bytes) for one in records]
        rows = [("time", *(one or "–" for one in times)), ("device peak", *(one or "–" for one in peaks))]
        return Table(title="One iteration", columns=columns, rows=rows)
