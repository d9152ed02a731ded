"""What projections take is learnt from runs by kind: on the device and on the host, of gradients and of parameters."""

from __future__ import annotations

from typing import Any

import pytest

from protwin.calibration.fitting.fit import Pair, fit
from protwin.calibration.fitting.measurement_plans import bootstrap_plans
from protwin.calibration.validation.drawing import Draw, draw_plans
from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.record import Origin
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import DType, Parameter, Subspace, SubspaceAxis, Workload
from protwin.sim import simulate
from tests.calibration.fitting.test_fit import MACHINE, a_workload

TRUTH = {
    TaskKind.GRADIENT_PROJECTION: (1.7, 2e-4),
    TaskKind.PARAMETER_PROJECTION: (1.3, 1e-4),
    TaskKind.HOST_GRADIENT_PROJECTION: (0.7, 3e-4),
    TaskKind.HOST_PARAMETER_PROJECTION: (2.5, 1e-4),
}
"""Factors, and seconds of every task."""
HOST = MACHINE.host.model_copy(update={"matrix_flop_per_s": 2e10})
BOX = MACHINE.model_copy(update={"host": HOST})


def orthogonal_workload() -> Workload:
    """Blocks whose projections take milliseconds, of sizes that differ by up to seven times."""
    model = a_workload(4)
    pairs: list[Parameter] = []
    for block in range(model.num_blocks):
        for name, columns in (("frozen", 600), ("trained", 100 + 200 * block)):
            pairs.append(
                Parameter(
                    name=f"{block}.{name}",
                    shape=(1000, columns),
                    dtype=DType.FLOAT32,
                    trainable=name == "trained",
                    block=block,
                )
            )
    subspaces = tuple(
        Subspace(frozen=2 * block, trained=2 * block + 1, axis=SubspaceAxis.COLUMNS)
        for block in range(model.num_blocks)
    )
    fields: dict[str, Any] = {name: getattr(model, name) for name in Workload.model_fields}
    return Workload(**fields | {"parameters": tuple(pairs), "subspaces": subspaces})


def test_what_projections_take_comes_back() -> None:
    workload = orthogonal_workload()
    factors = {kind: Factor(value=value) for kind, (value, _) in TRUTH.items()}
    overheads = {kind: seconds for kind, (_, seconds) in TRUTH.items()}
    truth = Calibration(hardware_name=BOX.name, machine="here", factors=factors, overhead_s=overheads)
    records = [simulate(plan, workload, BOX, truth) for plan in bootstrap_plans(workload)]
    pairs = [Pair(workload, record.model_copy(update={"origin": Origin.MEASURED})) for record in records]
    found = fit(pairs, BOX, machine="here", software={})
    for kind, (factor, seconds) in TRUTH.items():
        assert found.calibration.factor(kind) == pytest.approx(factor, rel=0.02), kind
        assert found.calibration.overhead(kind) == pytest.approx(seconds, abs=1e-4), kind
        assert found.estimates[kind].num_rows > 0
    drawn = draw_plans(workload, Draw(), number=4, without=[pair.measured.plan for pair in pairs])
    # The wrong variant: a calibration that knows everything but projections.
    others = {kind: factor for kind, factor in found.calibration.factors.items() if kind not in TRUTH}
    blind = found.calibration.model_copy(update={"factors": others, "overhead_s": {}})
    errors = {
        name: max(
            abs(simulate(plan, workload, BOX, known).iteration_s / simulate(plan, workload, BOX, truth).iteration_s - 1)
            for plan in drawn
        )
        for name, known in (("found", found.calibration), ("blind", blind))
    }
    assert errors["found"] < 1e-3
    assert errors["blind"] > 0.05


def test_a_kind_without_runs_counts_as_the_other_projection_on_its_lane() -> None:
    known = {TaskKind.GRADIENT_PROJECTION: Factor(value=2.0), TaskKind.HOST_GRADIENT_PROJECTION: Factor(value=3.0)}
    found = Calibration(hardware_name="x", machine="x", factors=known)
    assert found.factor(TaskKind.PARAMETER_PROJECTION) == 2.0
    assert found.factor(TaskKind.HOST_PARAMETER_PROJECTION) == 3.0
    assert found.model_copy(update={"factors": {}}).factor(TaskKind.PARAMETER_PROJECTION) == 1.0
