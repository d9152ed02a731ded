"""Searches for what others compile, or multiply in float8: the best plan by brute force, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from protwin.shared.answers.advice import Advice
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.catalogue.machines import machine
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.phases.operations import Compiled, Float8
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.training_options import TrainingOptions
from protwin.shared.schema.workload import Workload
from protwin.shared.sweeps.sweep import Sweep
from protwin.shared.sweeps.tables import sweep_tables
from protwin.shared.tables.advice import advice_tables
from protwin.shared.tables.search import search_tables
from protwin.shared.tables.terminal import as_text
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.workloads.source import WorkloadRequest, untraced_workload
from protwin.sim.engine.simulator import simulate
from protwin.sim.searching.request import Effort, SearchRequest
from protwin.sim.searching.search import search
from protwin.sim.space.space import SearchSpace

BOX = machine("h100-80gb")
EVERYWHERE = TrainingOptions(compiled=Compiled.BLOCKS, float8=Float8.TENSORWISE)
SAID = "no plan of which is carried out here"


def workload_of(options: TrainingOptions) -> Workload:
    found = untraced_workload(
        WorkloadRequest(
            "llama-3.2-1b", batch_size=2, sequence_length=1024, dtype="bfloat16", options=options, device=BOX.device
        )
    )
    assert found is not None, "nothing is traced"
    return found


def request_of(workload: Workload, budget_bytes: int | None = None) -> SearchRequest:
    space = SearchSpace(chunk_bytes=(2**30,), prefetch_depth=(1,), n_buffer=(0,), product_stride=(0, 1, 2))
    return SearchRequest(
        workload=workload,
        hardware=BOX,
        device_budget_bytes=budget_bytes,
        margin_frac=None,
        space=space,
        effort=Effort(tolerance_frac=0.0),
    )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(EVERYWHERE, id="blocks"),
        pytest.param(TrainingOptions(compiled=Compiled.MODEL), id="model", marks=pytest.mark.slow),
    ],
)
def test_the_plan_is_the_fastest_that_fits(options: TrainingOptions) -> None:
    workload, plain = workload_of(options), workload_of(TrainingOptions())
    assert workload.identity == plain.identity, "a plan may be asked about in either way"
    largest = search(request_of(workload)).plan
    # Everything is on the device: so many blocks are recomputed, and keep so many results, that it fits.
    plans = [largest.model_copy(update={"n_checkpoint": n}) for n in range(workload.num_blocks + 1)]
    plans += [
        plan.model_copy(update={"n_selective": plan.n_checkpoint, "product_stride": stride})
        for plan in plans[1:]
        for stride in (1, 2)
    ]
    peaks = [guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes for plan in plans]
    budget_bytes = (min(peaks) + max(peaks)) // 2
    fitting = [plan for plan, peak in zip(plans, peaks, strict=True) if peak <= budget_bytes]
    times = {plan.identity: simulate(plan, workload, BOX).iteration_s for plan in fitting}
    found = search(request_of(workload, budget_bytes))
    assert found.prediction.iteration_s == pytest.approx(min(times.values()), rel=1e-9)
    assert times[found.plan.identity] == pytest.approx(found.prediction.iteration_s, rel=1e-9)
    assert found.prediction.iteration_s < simulate(found.plan, plain, BOX).iteration_s


def test_tables_and_files_say_that_nobody_carries_it_out(tmp_path: Path) -> None:
    found = search(request_of(workload_of(EVERYWHERE)))
    assert found.prediction.emulated == simulate(found.plan, workload_of(EVERYWHERE), BOX).emulated
    assert SAID in " ".join(as_text(search_tables(found)).split())
    note = found.noted_plan.note
    assert note is not None
    assert SAID in note
    assert "float8, scaled tensorwise" in note
    found.noted_plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found.noted_plan
    plain = search(request_of(workload_of(TrainingOptions())))
    assert plain.noted_plan == plain.plan
    assert plain.prediction.emulated == ()
    told = (f"blocks compiled ({SAID})",)
    advice = Advice(model="m", sequence_length=8, global_batch_size=4, machines=(), emulated=told)
    sweep = Sweep(
        model="m",
        model_name="m",
        hardware_name="h",
        device_budget_bytes=None,
        sequence_lengths=(8,),
        batch_sizes=(1,),
        points=(),
        crossovers=(),
        emulated=told,
    )
    for parts in (advice_tables(advice), sweep_tables(sweep)):
        assert SAID in " ".join(as_text(parts).split())


def test_a_device_without_float8_is_refused_before_the_search() -> None:
    asked = request_of(workload_of(EVERYWHERE))
    older = machine("a100-80gb")
    with pytest.raises(WorkloadError, match=r"float8 tensorwise is asked for, but a100-80gb .* Leave --float8 out"):
        search(SearchRequest(workload=asked.workload, hardware=older, space=asked.space))
