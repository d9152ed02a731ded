"""In a pipeline both whole models give on every rank what plain copies give; and each rank reads its own blocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protwin.runtime.distillation.validation import language_model_loss
from protwin.shared.schema.plan import ParallelMode
from tests.proof_size import IS_PROOF, examples, some_quick
from tests.runtime.distillation.cases import quiet
from tests.runtime.distillation.families import families
from tests.runtime.distillation.test_evaluation import other_batches, plain_models
from tests.runtime.ranks.processes import Pool, Ranks
from tests.runtime.ranks.stage_evaluating import Evaluated, evaluate, evaluate_otherwise, output_of, without_values
from tests.runtime.ranks.staging import expected, pipeline_of, workload_of
from tests.runtime.saved_models import save

STEPS = 1


def case_of(name: str, num_pairs: tuple[int, ...], seed: int, **given: Any) -> Evaluated:
    return Evaluated(
        name=name,
        pipeline=pipeline_of(workload_of(name), num_pairs, seed),
        workload=workload_of(name),
        reference=expected(name, 1, STEPS),
        batches=other_batches(families()[name]),
        **given,
    )


def check(case: Evaluated, found: list[Any]) -> None:
    """Every rank has what plain copies give after as many steps."""
    assert [wrong for _, _, wrong, _ in found] == [[]] * len(found), case.pipeline
    for step in range(STEPS + 1):
        plain = plain_models(case.name, step)
        with quiet(), torch.no_grad():
            outputs = [output_of(model, batch) for batch in case.batches for model in plain]
            losses = [] if "points" in case.batches[0] else [language_model_loss(m, case.batches) for m in plain]
        for at_times, of_times, _, _ in found:
            assert all(np.array_equal(one, other) for one, other in zip(at_times[step], outputs, strict=True)), step
            assert not losses or [of_times[step].teacher, of_times[step].student] == losses


SPLITS = (("llama", (1, 2)), ("gpt2", (1, 1, 1)), ("dicts", (2, 1)), ("jamba", (2, 1)), ("mixtral", (1, 2)))


@pytest.mark.parametrize(("name", "num_pairs"), SPLITS if IS_PROOF else SPLITS[:2])
def test_both_models_are_what_plain_copies_are(name: str, num_pairs: tuple[int, ...], pool: Pool) -> None:
    for seed in range(examples(6, 1)):
        case = case_of(name, num_pairs, seed)
        check(case, pool.of(len(num_pairs)).run(evaluate, case))


@some_quick("variant", ["nothing is written", "the last is not written"], quick=1)
def test_wrong_variants_show(variant: str, three_ranks: Ranks) -> None:
    case = case_of("llama", (1, 1, 1), 0)
    with pytest.raises(AssertionError):
        check(case, three_ranks.run(evaluate, case, variant))


@some_quick(
    ("how", "first", "second"),
    [
        ("another model", "RanksError: training was ended by rank 1", "ScheduleError: rank 0 evaluates the teacher"),
        ("another batch", "RanksError: training was ended by rank 1", "ScheduleError: rank 0 evaluates the teacher"),
        ("hidden states", "ScheduleError: LlamaForCausalLM was asked for hidden_states", "ScheduleError: LlamaForC"),
        ("an error", "ValueError: trouble", "RanksError: training was ended by rank 0: ValueError: trouble"),
    ],
    quick=2,
)
def test_ranks_that_evaluate_otherwise_are_told(how: str, first: str, second: str, two_ranks: Ranks) -> None:
    said = two_ranks.run(evaluate_otherwise, case_of("llama", (1, 2), 0), how)
    for word, one in zip((first, second), said, strict=True):
        assert re.match(word, one), said


# -- weights from folders --------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    found = tmp_path / "teacher", tmp_path / "student"
    for model, folder in zip((families()["llama"].teacher(), families()["llama"].student()), found, strict=True):
        folder.mkdir()
        save(model, folder)
    return found


def test_each_rank_reads_its_own_blocks(folders: tuple[Path, Path], two_ranks: Ranks) -> None:
    """Both models are on the meta device everywhere; the bits are those of models that were loaded."""
    case = case_of("llama", (1, 2), 3, folders=folders)
    found = two_ranks.run(evaluate, case)
    check(case, found)
    of_blocks = [{int(name.split(".")[3]) for name in read if ".layers." in name} for _, _, _, read in found]
    assert of_blocks == [{0}, {1, 2}]
    of_models = [{name.split(".")[0] for name in read} for _, _, _, read in found]
    assert of_models == [{"teacher", "student"}] * 2


@pytest.mark.slow
def test_replicas_read_too(folders: tuple[Path, Path], four_ranks: Ranks) -> None:
    case = case_of("llama", (1, 2), 3, folders=folders)
    pipeline = pipeline_of(case.workload, (1, 2), 3, parallel=ParallelMode.SHARDED, num_replicas=2)
    assert four_ranks.run(without_values, _with(case, pipeline), _weights(folders), None) == [None] * 4


def _with(case: Evaluated, pipeline: Any) -> Evaluated:
    return Evaluated(
        name=case.name, pipeline=pipeline, workload=case.workload, reference=case.reference, batches=case.batches
    )


def _weights(folders: tuple[Path, Path]) -> dict[str, Any]:
    return {"teacher_weights": folders[0], "student_weights": folders[1]}


@pytest.mark.parametrize(
    ("given", "different", "message"),
    [
        ({"student_weights": "student"}, None, "PlanError: parameter .* of the teacher is on the meta device and has"),
        ({"teacher_weights": "student", "student_weights": "student"}, None, "FileError: the weights in .* another mo"),
        (
            {"teacher_weights": "teacher", "student_weights": "student", "other": "changed"},
            1,
            "PlanError: ranks differ in weights: ",
        ),
    ],
)
def test_what_is_missing_is_refused_alike(
    given: dict[str, str], different: int | None, message: str, folders: tuple[Path, Path], two_ranks: Ranks
) -> None:
    changed = folders[0].parent / "changed"
    changed.mkdir()
    teacher = families()["llama"].teacher()
    with torch.no_grad():
        teacher.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    save(teacher, changed)
    files = {name: folders[0].parent / folder for name, folder in given.items()}
    first, second = two_ranks.errors(without_values, case_of("llama", (1, 2), 0), files, different)
    assert first == second
    assert re.match(message, first), first
