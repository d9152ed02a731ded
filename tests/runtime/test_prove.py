"""``make prove`` can fail: one case that goes wrong, or none that was tried, ends it with code 1."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from benchmarks import prove, prove_equality, prove_faults, prove_optimizers, prove_ranks
from benchmarks.prove_claims import Claim, Settings
from protwin.shared.basics.progress import no_progress
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ParallelMode, Plan
from tests.proof_size import some_quick
from tests.runtime.equality import Outcome, trained
from tests.runtime.models import Case
from tests.runtime.ranks.beside_ddp import Found
from tests.runtime.ranks.beside_groups import Grouped

SMALL = Settings(plans=2, steps=1, kills=1, growth_steps=10, seed=0, models=("hand-written, unused parameters",))


def claims_of(*cases: Callable[[], object]) -> list[Claim]:
    claim = Claim("equality", "a model", "it holds")
    for number, case in enumerate(cases):
        with claim.case(f"case {number}"):
            case()
    return [claim]


def wrong() -> None:
    raise AssertionError("it does not hold")


@pytest.mark.parametrize(
    ("claims", "code"),
    [
        (claims_of(lambda: None), 0),
        (claims_of(lambda: None, wrong), 1),
        (claims_of(lambda: None, lambda: 1 / 0), 1),
        (claims_of(lambda: None) + claims_of(wrong), 1),
        (claims_of(), 1),
        ([], 1),
    ],
)
def test_the_code_says_whether_everything_was_shown(
    claims: list[Claim], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove, "_SECTIONS", {"equality": lambda *_: claims})
    assert prove.main(["--only", "equality"]) == code
    shown = capsys.readouterr().out
    assert ("it does not hold" in shown) == any("it does not hold" in f for c in claims for f in c.failures)


def test_what_is_kept_says_so_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prove, "_SECTIONS", {"equality": lambda *_: claims_of(lambda: None, wrong)})
    monkeypatch.setattr(prove, "__file__", str(tmp_path / "prove.py"))
    assert prove.main(["--only", "equality", "--keep"]) == 1
    (path,) = (tmp_path / "results").iterdir()
    kept = json.loads(path.read_text())
    assert kept["machine"]
    equality = kept["sections"]["equality"]
    assert equality["is_shown"] is False
    assert equality["claims"][0]["num_cases"] == 2
    assert equality["claims"][0]["failures"] == ["case 1: AssertionError: it does not hold"]


def test_sections_of_one_day_are_kept_together_unless_the_machine_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prove, "__file__", str(tmp_path / "prove.py"))
    path = tmp_path / "results" / f"proof-{datetime.date.today().isoformat()}.json"

    def kept(*only: str, machine: str = "here", works: Callable[[], object] = lambda: None) -> dict[str, bool]:
        monkeypatch.setattr(prove, "machine_name", lambda: machine)
        monkeypatch.setattr(prove, "_SECTIONS", dict.fromkeys(("equality", "faults"), lambda *_: claims_of(works)))
        prove.main(["--only", *only, "--keep"])
        return {name: section["is_shown"] for name, section in json.loads(path.read_text())["sections"].items()}

    assert kept("faults") == {"faults": True}
    assert kept("equality", works=wrong) == {"equality": False, "faults": True}
    assert kept("equality") == {"equality": True, "faults": True}
    assert kept("faults", machine="elsewhere") == {"faults": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda outcome: outcome, ""),
        (lambda outcome: replace(outcome, losses=[loss * 2 for loss in outcome.losses]), "the losses differ"),
        (lambda outcome: replace(outcome, different=["exit.weight"]), "weights differ: exit.weight"),
        (lambda outcome: replace(outcome, num_cpu_adam_steps=1_000), "1000 CPU Adam steps, expected"),
        (lambda outcome: replace(outcome, peak_bytes=10**9), "the peak is 1000000000 bytes, guaranteed are"),
    ],
)
def test_equality_that_does_not_hold_is_a_failure(
    change: Callable[[Outcome], Outcome], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(case: Case, plan: Plan) -> Outcome:
        return change(trained(case, plan))

    monkeypatch.setattr(prove_equality, "trained", changed)
    (claim,) = prove_equality.prove(SMALL, no_progress)
    assert claim.is_shown == (message == "")
    assert claim.num_cases == 2
    assert all(message in failure for failure in claim.failures)


def test_every_optimizer_that_can_step_a_model_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not paged ones, which need a GPU, nor one for weights in bfloat16, of which this model has none."""
    claims = {claim.subject: claim for claim in prove_optimizers.prove(SMALL, no_progress)}
    assert {*claims} == {*Optimizer} - {Optimizer.PAGED_ADAMW_8BIT, Optimizer.ADAMW_BF16}
    assert all(claim.is_shown and claim.num_cases == 1 for claim in claims.values())

    def with_other_losses(case: Case, plan: Plan) -> Outcome:
        outcome = trained(case, plan)
        return replace(outcome, losses=[loss + 1 for loss in outcome.losses])

    monkeypatch.setattr(prove_optimizers, "trained", with_other_losses)
    assert not any(claim.is_shown for claim in prove_optimizers.prove(SMALL, no_progress))


def test_kills_that_lose_something_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that ends badly, as the killed trainings do when a check of theirs fails."""
    for program in ("_PROGRAM", "_PROGRAM_OF_RANKS", "_PROGRAM_OF_RUNS"):
        monkeypatch.setattr(prove_faults, program, "tests.runtime.no_such_program")
    claims = prove_faults.prove(SMALL, no_progress)
    assert len(claims) == 3
    assert not any(claim.is_shown for claim in claims)
    assert all("no_such_program" in claim.failures[0] for claim in claims)


RIGHT = Found([1.0], [1.0], [], 0.0, 10, 10, 1, 1, has_bound=True)
RIGHT_OF_GROUPS = Grouped([1.0], [1.0], [], [], 10, 10)


class Answers:
    """In the place of processes: every rank gives the same answers, but for the last one's to one question."""

    def __init__(self, question: str = "", wrong: Any = None) -> None:
        self._question, self._wrong = question, wrong
        self._num_ranks = 0
        self.asked: list[tuple[str, str, Plan]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def of(self, num_ranks: int) -> Self:
        self._num_ranks = num_ranks
        return self

    def run(self, function: Callable[..., Any], name: str, plan: Plan, *_: object, patience_s: float) -> list[Any]:
        asked = function.__name__
        assert plan.num_ranks == self._num_ranks
        self.asked.append((asked, name, plan))
        right = {
            "train": RIGHT,
            "train_grouped": RIGHT_OF_GROUPS,
            "peak_error": (0.0, 5, 5),
            "one_step": 0.5,
            "weights_hash": "a",
        }[asked]
        return [right] * (plan.num_ranks - 1) + [self._wrong if asked == self._question else right]


@some_quick(
    ("question", "wrong", "message"),
    [
        ("train", replace(RIGHT, losses=[2.0]), "the losses differ, first that of micro-batch 0, 2.0 instead of 1.0"),
        ("train", replace(RIGHT, different=["exit.weight"], worst=0.5), "5.0e-01 of the largest: exit.weight"),
        ("train", replace(RIGHT, peak_bytes=11), "rank 1: the peak is 11 bytes, guaranteed are 10"),
        ("train_grouped", replace(RIGHT_OF_GROUPS, losses=[2.0]), "rank 3: the losses differ"),
        ("train_grouped", replace(RIGHT_OF_GROUPS, different_in_state=["exit.weight"]), "differ: exit.weight"),
        ("peak_error", (0.01, 5, 5), r"rank 1: the peak is \+1.00% outside of its account"),
        ("peak_error", (0.0, 6, 5), "rank 1: the host has 6 bytes, the schedule's account is 5"),
        ("one_step", 1.5, "1.50 times the rounding of one step"),
        ("weights_hash", "b", "2 different ends|another end than that of plan"),
    ],
    quick=4,
)
def test_one_rank_that_errs_is_a_failure_of_its_claims_alone(
    question: str, wrong: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove_ranks, "Pool", lambda: Answers(question, wrong))
    monkeypatch.setattr(prove_ranks, "_DRAWN", 1)
    claims = prove_ranks.prove(replace(SMALL, plans=1), no_progress)
    missed = [claim for claim in claims if not claim.is_shown]
    # Of three modes each, but for groups, and for the ends that all modes have in common.
    of_question = {"train_grouped": 1, "weights_hash": 3 + 1}.get(question, 3)
    assert (len(missed), len(claims)) == (of_question, 3 * 3 + 1 + 1)
    assert all(re.search(message, failure) for claim in missed for failure in claim.failures)


def test_ranks_are_tried_in_every_mode_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers()
    monkeypatch.setattr(prove_ranks, "Pool", lambda: answers)
    monkeypatch.setattr(prove_ranks, "_DRAWN", 1)
    assert all(claim.is_shown for claim in prove_ranks.prove(replace(SMALL, plans=1), no_progress))
    asked = {(question, plan.parallel, plan.num_ranks) for question, _, plan in answers.asked}
    modes = {*ParallelMode} - {ParallelMode.SINGLE}
    assert asked == {("train_grouped", ParallelMode.SHARDED, 4)} | {
        (question, mode, number)
        for questions, numbers in ((("train", "peak_error"), (2,)), (("one_step", "weights_hash"), (3, 4, 5)))
        for question in questions
        for mode in modes
        for number in numbers
    }
