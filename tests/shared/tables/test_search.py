"""What a search says in words."""

from __future__ import annotations

import pytest

from protwin.shared.answers.plan_kind import PlanKind
from protwin.shared.answers.search_result import Baseline, Certificate, PlanOutcome, SearchResult
from protwin.shared.basics.units import format_seconds
from protwin.shared.tables.answer import recommendation
from protwin.shared.tables.search import certificate_sentence, search_tables
from protwin.shared.tables.terminal import as_text
from protwin.sim.searching.confidence import DATA_SHEETS
from tests.shared.laid_out import laid_out


def result(*, bound_over_best: float | None, num_alternatives: int = 2, num_undecided: int = 0) -> SearchResult:
    """A result whose proof leaves ``bound_over_best`` times the best time to unsimulated plans."""
    prediction = laid_out().predicted
    outcome = PlanOutcome(
        plan=prediction.plan,
        plan_kind=PlanKind.OFFLOADED,
        iteration_s=prediction.iteration_s * 1.25,
        is_simulated=True,
        guaranteed_peak_device_bytes=prediction.guaranteed_peak_device_bytes,
        pinned_host_bytes=2**30,
        host_bytes=2**31,
    )
    return SearchResult(
        model_name="decoder",
        hardware_name="machine",
        device_budget_bytes=2 * prediction.guaranteed_peak_device_bytes,
        host_budget_bytes=2**36,
        plan=prediction.plan,
        plan_kind=PlanKind.OFFLOADED,
        prediction=prediction,
        survives=True,
        margin_frac=0.05,
        uncertainty=DATA_SHEETS,
        certificate=Certificate(
            num_candidates=12_000 + num_undecided,
            num_undecided=num_undecided,
            num_bounded_by_memory=10_000,
            num_bounded_by_time=1_990,
            num_simulated=10,
            best_iteration_s=prediction.iteration_s,
            best_unsimulated_bound_s=None if bound_over_best is None else prediction.iteration_s * bound_over_best,
            tolerance_frac=0.01,
        ),
        alternatives=(outcome,) * num_alternatives,
        pareto=(outcome,),
    )


@pytest.mark.parametrize(
    ("bound_over_best", "proof"),
    [
        (None, "No plan of the space is faster."),
        (1.5, "No plan of the space is faster."),
        (0.992, "No plan of the space is more than 0.8 % faster."),
    ],
)
def test_the_proof_in_words(bound_over_best: float | None, proof: str) -> None:
    sentence = certificate_sentence(result(bound_over_best=bound_over_best))
    assert sentence == f"12,000 plans in the space: 10,000 cannot fit, 1,990 cannot be faster, 10 simulated. {proof}"


def test_the_simplest_of_the_fastest_is_told_of_these_alone() -> None:
    """A plan of a simpler kind may take longer than the tolerance; the wrong variant looks at neither."""
    found = result(bound_over_best=0.9)
    faster = found.alternatives[0].model_copy(update={"iteration_s": found.prediction.iteration_s * 0.995})
    near = found.model_copy(update={"alternatives": (faster,)})
    assert "1.0 % of the fastest, this is the simplest" in certificate_sentence(near)
    best_s = found.prediction.iteration_s * 0.95
    far = near.model_copy(
        update={"certificate": near.certificate.model_copy(update={"best_iteration_s": best_s})},
    )
    sentence = certificate_sentence(far)
    assert "simplest" not in sentence
    assert f"The fastest that was found takes {format_seconds(best_s)}." in sentence


def test_what_segments_left_out_is_not_proven_slower() -> None:
    found = result(bound_over_best=0.99)
    changes = {"num_bounded_by_memory": 9_000, "num_bounded_by_segments": 1_000}
    sentence = certificate_sentence(
        found.model_copy(update={"certificate": found.certificate.model_copy(update=changes)})
    )
    assert sentence == (
        "12,000 plans in the space: 9,000 cannot fit, 1,000 expected to take too much in segments, 1,990 cannot be "
        "faster, 10 simulated. Of the others none is more than 1.0 % faster."
    )


@pytest.mark.parametrize(
    ("times", "said", "unsaid"),
    [
        # Of a comparison by data sheets one is as likely as the other where they differ by a few percent.
        (2.0, "offloaded to the host; 2.00 times the tokens per second of FSDP2, the best", "uncertainty"),
        (1.04, "offloaded to the host; 1.04 times the tokens per second of FSDP2, the best", "worth a change"),
        (0.96, "offloaded to the host. FSDP2 fits, too, and gives 1.04 times its tokens per second, which is", "0.96"),
        (0.5, "FSDP2 fits, too, and gives 2.00 times its tokens per second: with it at hand no plan", "uncertainty"),
    ],
)
def test_who_is_faster_than_the_recommended_plan_is_said_to_be(times: float, said: str, unsaid: str) -> None:
    told = result(bound_over_best=None)
    record = told.prediction
    other = Baseline(
        name="FSDP2",
        how="everything offloaded",
        plan=record.plan,
        plan_kind=PlanKind.OFFLOADED,
        num_samples=record.num_samples,
        num_tokens=record.num_tokens,
        iteration_s=record.iteration_s * times,
        guaranteed_peak_device_bytes=2**30,
        pinned_host_bytes=2**30,
        host_bytes=2**30,
    )
    words = recommendation(told.model_copy(update={"baselines": (other,)}))
    assert said in words
    assert unsaid not in words


def test_an_early_end_proves_nothing() -> None:
    sentence = certificate_sentence(result(bound_over_best=None, num_undecided=7))
    assert "7 left undecided" in sentence
    assert "No plan of the space" not in sentence


def test_the_tables_hold_the_plan_the_budget_and_what_comes_next() -> None:
    text = as_text(search_tables(result(bound_over_best=None)))
    assert "50.0 % of it" in text
    assert text.count("+25.0 %") == 2
    assert "Time against device memory" not in text, "one plan is no choice"


def test_no_alternatives_leave_no_empty_table() -> None:
    assert "Next best" not in as_text(search_tables(result(bound_over_best=None, num_alternatives=0)))


def test_no_line_is_wider_than_the_terminal() -> None:
    assert max(map(len, as_text(search_tables(result(bound_over_best=0.9))).splitlines())) <= 100


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_figure_is_cut(width: int) -> None:
    """Rows as long as they get; the wrong variant is any table that shortens with an ellipsis."""
    found = result(bound_over_best=0.9999)
    plan = found.plan.model_copy(
        update={"chunk_bytes": 1023 * 2**20 + 5, "n_persist": 353, "n_buffer": 120, "n_swap": 40, "prefetch_depth": 3}
    )
    rows = tuple(
        found.alternatives[0].model_copy(
            update={
                "plan": plan.model_copy(update={"n_checkpoint": number, "n_swap": number, "n_buffer": 100 + number}),
                "iteration_s": found.prediction.iteration_s * (0.9996 + number),
                "guaranteed_peak_device_bytes": 1001 * 2**20 + number,
                "pinned_host_bytes": 1002 * 2**20 + number * 2**30,
            }
        )
        for number in range(3)
    )
    text = as_text(search_tables(found.model_copy(update={"alternatives": rows, "pareto": rows})), width=width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for figure in ("1001 MiB", "0.0 %", "353", "102"):
        assert figure in text
    assert "chunk_bytes 1023 MiB" in text
    for wrong in ("−0.0 %", "-0.0 %", "more than 0.0 %", "e+0"):
        assert wrong not in text
    assert "No plan of the space is faster by 0.1 %." in " ".join(text.split())
