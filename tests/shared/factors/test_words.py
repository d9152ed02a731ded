"""What explanations say of weights in factors."""

from __future__ import annotations

from protwin.shared.compile.compile import compile_schedule
from protwin.shared.factors.words import projection_sentences
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan, ProjectionPlace, TrainingMethod
from protwin.shared.tables.explain import explain_plan
from tests.shared.laid_out import decoder_workload
from tests.shared.verify.test_osft import factorised

WORKLOAD = factorised()


def plan_of(**knobs: object) -> Plan:
    layout = layout_of(WORKLOAD, 2**8)
    offloaded = {"n_persist": 0, "n_buffer": layout.min_buffers(0)}
    return Plan.model_validate(
        {"workload_id": WORKLOAD.identity, "method": TrainingMethod.OSFT, "chunk_bytes": 2**8} | offloaded | knobs
    )


def sentences(plan: Plan) -> list[str]:
    return projection_sentences(compile_schedule(plan, WORKLOAD), WORKLOAD)


def test_it_says_where_gradients_are_projected_and_why() -> None:
    frozen, on_host = sentences(plan_of())
    assert "stay frozen beside" in frozen
    assert "on the host, which steps them, for" in on_host
    assert "on the device" not in on_host
    _, before = sentences(plan_of(projects_gradients_on=ProjectionPlace.DEVICE))
    assert "on the device before they leave, while their frozen factors are there, for" in before
    assert "on the host" not in before
    num_chunks = len(layout_of(WORKLOAD, 2**8).chunks)
    _, staying = sentences(plan_of(n_persist=num_chunks, n_buffer=0))
    assert "on the device where chunks stay there;" in staying


def test_it_says_how_much_work_that_is() -> None:
    """4 n k r and 4 m k r FLOPs, of gradients and of parameters."""
    total = sum(
        2 * 4 * length * frozen * trained
        for length, frozen, trained in (
            (side, *(min(WORKLOAD.parameters[number].shape) for number in (pair.frozen, pair.trained)))
            for pair in WORKLOAD.subspaces
            for side in [max(WORKLOAD.parameters[pair.frozen].shape)]
        )
    )
    assert f"; {total:.3g} FLOPs a step" in sentences(plan_of())[1]
    assert "Projections: of gradients" in explain_plan(plan_of(), WORKLOAD)


def test_nothing_is_said_where_nothing_is_factorised() -> None:
    dense = decoder_workload(2)
    chosen = Plan(workload_id=dense.identity, chunk_bytes=2**26, n_persist=0, n_buffer=4)
    assert projection_sentences(compile_schedule(chosen, dense), dense) == []
    assert "rojection" not in explain_plan(chosen, dense)
