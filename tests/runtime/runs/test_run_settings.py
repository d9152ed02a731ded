"""Fingerprints of runs: each field that changes the result changes them, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protwin.runtime.distillation.learning_rate import CosineRate
from protwin.runtime.runs.run_settings import RunSettings
from protwin.runtime.runs.sweeps import sweep
from protwin.shared.basics.errors import FileError, WorkloadError
from protwin.shared.students.student import BlockOverrides, Initialization, Student

from .settings import LLAMA, MIXTRAL, settings, student

OTHER: dict[str, Any] = {
    "teacher_weights": "40",
    "teacher_configuration": MIXTRAL | {"rope_theta": 5e5},
    "teacher_code": "4c",
    "student": student(all={"num_key_value_heads": 1}),
    "dtype": "bfloat16",
    "autocast": "bfloat16",
    "data": "a8",
    "statistics_batches": 9,
    "sequence_length": 9,
    "micro_batch_size": 3,
    "micro_batches": 4,
    "num_tokens": 481,
    "seed": 1,
    "data_seed": 1,
    "optimizer": "sgd",
    "learning_rate": 2e-4,
    "least_rate_frac": 0.1,
    "warmup_frac": 0.1,
    "betas": (0.9, 0.99),
    "weight_decay": 0.0,
    "max_gradient_norm": None,
    "kept_weights": "final",
    "validate_every": 7,
    "validation_batches": 9,
    "name": "mine",
    "save_every": 5,
    "log_every": 1,
}
"""Another value of each field."""
WITHOUT_EFFECT = {"name", "save_every", "log_every"}


def test_every_field_has_been_thought_of() -> None:
    assert OTHER.keys() == RunSettings.model_fields.keys()


@given(st.sets(st.sampled_from(sorted(OTHER))))
def test_a_fingerprint_changes_with_the_fields_that_change_the_result_and_no_other(changed: set[str]) -> None:
    found = settings(**{field: OTHER[field] for field in changed})
    does_matter = changed - WITHOUT_EFFECT
    assert (found.fingerprint != settings().fingerprint) is bool(does_matter)
    assert (found.series != settings().series) is bool(does_matter - {"num_tokens"})
    assert found.differences(settings()).keys() >= (does_matter & {"seed", "data", "num_tokens"})


@given(st.sets(st.sampled_from(sorted(OTHER))), st.sets(st.sampled_from(sorted(OTHER))))
def test_equal_fingerprints_are_of_equal_runs(first: set[str], second: set[str]) -> None:
    one, two = (settings(**{field: OTHER[field] for field in changed}) for changed in (first, second))
    differing = (first ^ second) - WITHOUT_EFFECT
    if "kept_weights" in first & second:  # then no validation chooses weights
        differing -= {"validate_every", "validation_batches"}
    if "student" in first & second:  # it needs no statistics
        differing -= {"statistics_batches"}
    assert (one.fingerprint == two.fingerprint) is (not differing)


BUDGETS = (47, 480, 490, 528, 530, 960, 1440)
"""Tokens, of 48 a step: some have as many steps as others, and some as short a warm-up."""
Visits = list[tuple[int, int]]
"""Budgets that a run is given in turn, and how many more steps it is let train under each."""
visits = st.lists(st.tuples(st.sampled_from(BUDGETS), st.integers(0, 12)), min_size=1, max_size=5)


def continued(given: Visits) -> tuple[RunSettings, str, list[tuple[float, bool]]]:
    """The last settings, the run's fingerprint, and what it has seen: rates of steps, and where it was validated."""
    step, earlier, before, seen = 0, (), None, []
    for num_tokens, more in given:
        asked = settings(num_tokens=num_tokens, warmup_frac=0.2)
        steps = asked.budget.num_steps
        if step > steps:
            continue  # refused
        earlier = () if before is None else asked.continued(before, earlier, step)
        before = asked
        rate = CosineRate(asked.learning_rate, asked.budget.warmup_steps(0.2), steps, asked.least_rate_frac)
        for _ in range(min(more, steps - step)):
            step += 1
            seen.append((rate.at(step), step == steps))
    assert before is not None
    return before, before.fingerprint_after(earlier), seen


@given(visits, visits)
@example([(480, 10), (960, 12)], [(960, 12), (960, 10)])
def test_runs_of_equal_fingerprints_have_had_equal_rates_whatever_they_were_continued_from(
    one: Visits, two: Visits
) -> None:
    """Compared where both go on to the end of the last budget."""
    (last, own, seen), (other, others, also) = (continued([*given, (1440, 30)]) for given in (one, two))
    assert last == other
    if seen != also:
        assert own != others
        assert last.fingerprint == other.fingerprint, "the budget at the end tells nothing"
    if all(num_tokens == 1440 or not more for num_tokens, more in one):
        assert own == last.fingerprint


@given(visits, st.data())
def test_budgets_under_which_nothing_was_trained_and_pauses_change_nothing(given_: Visits, data: st.DataObject) -> None:
    _, own, seen = continued(given_)
    noisy: Visits = []
    step = 0
    for num_tokens, more in given_:
        steps = settings(num_tokens=num_tokens).budget.num_steps
        pause = data.draw(st.integers(0, more))
        noisy += [(data.draw(st.sampled_from(BUDGETS)), 0)] if steps >= step else []
        noisy += [(num_tokens, pause), (num_tokens, more - pause)]
        step += min(more, max(0, steps - step))
    assert continued(noisy)[1:] == (own, seen)


STUDENTS = {
    "keys_to_learn": ("subblock_ffn",),
    "loss": "cosine",
    "initialization": Initialization(ffn="truncate"),
    "all": BlockOverrides(intermediate_size=23),
    "block": {"2": BlockOverrides(ffn="absent")},
}


def test_every_field_of_a_student_counts() -> None:
    assert STUDENTS.keys() == Student.model_fields.keys()
    base = settings()
    for field, value in STUDENTS.items():
        other = Student.model_validate(base.student.model_dump() | {field: value})
        assert settings(student=other).fingerprint != base.fingerprint, field
    kinds = {"intermediate_size": 24, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 1}
    for field in BlockOverrides.model_fields:
        own = student(block={"0": {field: kinds.get(field, "absent")}})
        assert settings(student=own).fingerprint != settings(student=student()).fingerprint, field


@pytest.mark.parametrize(
    ("own", "mode", "other", "used_with"),
    [
        ("ffn", "prune", "truncate", {"intermediate_size": 24}),
        ("key_value_heads", "first", "average", {"num_key_value_heads": 2}),
        ("experts", "first", "router", {"num_local_experts": 3}),
        ("linear", "random", "from_teacher", {"attention": "linear"}),
    ],
)
def test_an_initialization_counts_where_something_is_initialised_by_it(
    own: str, mode: str, other: str, used_with: dict[str, Any]
) -> None:
    for overrides, matters in ((used_with, True), ({}, False), ({"attention": "absent"}, False)):
        one, two = (
            settings(student=student(initialization={own: chosen}, all=overrides)).fingerprint
            for chosen in (mode, other)
        )
        assert (one != two) is matters, overrides


def test_two_ways_to_write_one_student_are_one_run() -> None:
    every = student(all={"num_key_value_heads": 2})
    each = student(block={"0-1": {"num_key_value_heads": 2}, "2": {"num_key_value_heads": 2}, "3": every.all})
    stated = student(all={"num_key_value_heads": 2, "intermediate_size": 48, "ffn": "full"})
    assert len({settings(student=one).fingerprint for one in (every, each, stated)}) == 1
    came_from = LLAMA | {"_name_or_path": "here", "transformers_version": "4.50", "torch_dtype": "float16"}
    plain = {"student": every, "teacher_configuration": LLAMA}
    assert settings(**plain | {"teacher_configuration": came_from}).fingerprint == settings(**plain).fingerprint


def test_a_folder_is_called_after_what_differs() -> None:
    labels = {
        settings(student=student(all=fields)).label.rpartition("-")[0]
        for fields in (
            {},
            {"intermediate_size": 24},
            {"ffn": "absent"},
            {"num_key_value_heads": 2, "intermediate_size": 9},
        )
    }
    assert labels == {"full", "ffn-24", "ffn-absent", "ffn-9-heads-2"}
    assert settings(student=student(block={"1": {"ffn": "absent"}})).label.startswith("custom-")
    assert settings(name="mine").label == "mine"
    assert settings().label == settings(num_tokens=999).label != settings(seed=3).label


# -- sweeps ----------------------------------------------------------------------------------------------------------


def test_every_entry_of_a_sweep_is_from_the_base() -> None:
    base = settings(name="base", seed=5)
    runs = sweep(
        base,
        [
            {"student": {"all": {"intermediate_size": 12}}},
            {"student": {"keys_to_learn": "subblock_ffn"}},
            {"learning_rate": 1e-3, "name": "fast"},
            {},
        ],
    )
    assert [run.student.all.intermediate_size for run in runs] == [12, 24, 24, 24]
    assert [run.student.all.num_key_value_heads for run in runs] == [2] * 4, "tables are merged"
    assert [run.student.keys_to_learn for run in runs] == [base.student.keys_to_learn, ("subblock_ffn",)] + [
        base.student.keys_to_learn
    ] * 2
    assert [run.learning_rate for run in runs] == [1e-4, 1e-4, 1e-3, 1e-4]
    assert {run.seed for run in runs} == {5}
    assert runs[2].name == "fast"
    assert runs[3].fingerprint == base.fingerprint
    assert len({run.label for run in runs}) == 4


def test_impossible_sweeps_are_refused() -> None:
    for entries, words in (
        ([], "has no entries"),
        ([{"seed": 1}, {}, {"seed": 1, "log_every": 3}], "entries 1 and 3 of the sweep are one run"),
        (
            [{}, {"lerning_rate": 1e-3}],
            r"entry 2 .* impossible: lerning_rate: .*Did you mean learning_rate",
        ),
        ([{"student": {"all": {"ffn": "gone"}}}], r"entry 1 .*student\.all\.ffn"),
    ):
        with pytest.raises(FileError, match=words):
            sweep(settings(), entries)
    with pytest.raises(WorkloadError, match=r"block 0 .*49, but its teacher only 48"):
        sweep(settings(), [{"student": {"all": {"intermediate_size": 49}}}])
