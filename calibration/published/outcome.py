"""Everything that is predicted of published runs, as one document, and the comparisons and memories that follow."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Final, Self

from ...shared.basics.documents import FrozenModel, write_atomically
from ...shared.catalogue.machines import machine
from .comparisons import Comparison, comparisons, modes_of_r1, published_comparisons, timed_plans
from .measured_runs import MemoryKind
from .memory_margin import MemoryOfRun, memory_of_runs
from .predictions import measured
from .run_predictions import PredictedRun
from .runs import DATA_PARALLEL, ON_DEVICE, PLAN_OF_130_CHUNKS, REPLICATED, SHARDED, Prediction, Quantity

_KNOWN_PLANS: Final = (("R1", ON_DEVICE), ("R1", DATA_PARALLEL), ("R2", PLAN_OF_130_CHUNKS))
"""Runs of ``runs.toml`` whose plan is known, so that their memory can be held against a prediction."""
_SHIPPED: Final = "outcome.json"
"""A copy of the newest in ``benchmarks/results``."""
_BOARD: Final = "rtx-3090"
"""On which those ran."""


class Outcome(FrozenModel):
    """Predictions of all published runs, by one version of the simulator."""

    date: str
    """Year, month and day."""
    machine: str = "data sheets and configurations alone"
    """What was measured: nothing."""
    software: dict[str, str]
    predictions: tuple[Prediction, ...]
    """Of ``PUBLISHED_RUNS``."""
    runs: tuple[PredictedRun, ...]
    """Of ``MEASURED_RUNS``."""

    @classmethod
    def of(cls, predictions: Iterable[Prediction], runs: Iterable[PredictedRun]) -> Self:
        """Of today, by the installed software."""
        from ...runtime.model.identity import software_versions

        return cls(
            date=datetime.date.today().isoformat(),
            software=software_versions(),
            predictions=tuple(predictions),
            runs=tuple(runs),
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """A kept outcome."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))

    def keep(self, folder: Path) -> Path:
        """Write it into ``folder``, by its date."""
        path = folder / f"published-{self.date}.json"
        write_atomically(path, self.model_dump_json(indent=1) + "\n")
        return path

    @classmethod
    def shipped(cls) -> Self:
        """The outcome that comes with protwin."""
        return cls.model_validate_json(files(__package__).joinpath(_SHIPPED).read_text(encoding="utf-8"))

    def ship(self) -> None:
        """Make it the one that comes with protwin; of a checkout."""
        write_atomically(Path(__file__).with_name(_SHIPPED), self.model_dump_json(indent=1) + "\n")

    @property
    def predicted(self) -> dict[str, PredictedRun]:
        """The training runs by id."""
        return {run.id: run for run in self.runs}

    def pairs(self) -> tuple[list[Comparison], list[Comparison]]:
        """Published pairs of plans at one shape, R1's modes among them, and at different micro-batches."""
        at_one_shape, on_one_machine = published_comparisons(self.predicted)
        cases = (DATA_PARALLEL, REPLICATED, SHARDED)
        measured_s = {case: measured("R1", case, Quantity.ITERATION)[0] for case in cases}
        return [*at_one_shape, *comparisons(modes_of_r1(self.predictions, measured_s))], on_one_machine

    def memories(self) -> list[MemoryOfRun]:
        """Every run whose plan is known and whose memory was published."""
        device_bytes = machine(_BOARD).device.memory_bytes
        figures = [
            MemoryOfRun(
                run=f"{one.row}, {one.case}",
                kind=MemoryKind.ALLOCATED,
                measured_bytes=round(measured(one.row, one.case, one.quantity)[0]),
                predicted_bytes=round(one.likely),
                device_bytes=device_bytes,
                differs=None,
            )
            for one in self.predictions
            if one.quantity is Quantity.DEVICE_PEAK and (one.row, one.case) in _KNOWN_PLANS
        ]
        return [*memory_of_runs(self.predicted), *figures]


def calibrated_comparisons(path: Path) -> list[Comparison]:
    """All pairs of plans of one model in a kept result of bench-fidelity."""
    return comparisons(timed_plans(json.loads(path.read_text(encoding="utf-8"))))
