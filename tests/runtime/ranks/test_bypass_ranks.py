"""Bypass runs on several ranks end with what one rank ends with: model, losses, validations."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from protwin.calibration.commands.bypass import _chosen
from protwin.runtime.bypass import ranks as ranks_module
from protwin.runtime.bypass.loop import HISTORY
from protwin.runtime.runs.run_folder import RunFolder
from protwin.shared.basics.errors import ProtwinError
from protwin.shared.pipelines.pipeline import Pipeline
from protwin.shared.students.student import Student
from tests.cli.test_bypass import OPTIONS, STUDENT, made
from tests.proof_size import some_quick
from tests.runtime.distillation.cases import quiet
from tests.runtime.ranks.bypassing import bypass, plan_by, run_on, save_teacher
from tests.runtime.ranks.processes import Pool, Ranks
from tests.runtime.ranks.test_run import protwin_on

__all__ = ["made"]

WAYS = (("stages", 2), ("replicas", 2), ("pipelines", 4))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bypass") / "teacher"
    save_teacher(folder)
    return folder


@pytest.fixture(scope="module")
def alone(teacher: Path) -> tuple[Path, list[str]]:
    """The run of one rank, and what it tells."""
    path = teacher.parent / "alone"
    with quiet():
        return path, bypass(0, path, teacher, "one rank")


def differs(path: Path, other: Path) -> list[str]:
    """What two runs have not the same, to the bit."""
    models = [next(folder.glob("model-*")) / "model.safetensors" for folder in (path, other)]
    one, two = map(load_file, models)
    wrong = [name for name, value in one.items() if not torch.equal(value, two[name])]
    wrong += [HISTORY] if (path / HISTORY).read_bytes() != (other / HISTORY).read_bytes() else []
    names = [sorted(place.name for place in folder.iterdir()) for folder in (path, other)]
    return wrong + ([] if names[0] == names[1] else [f"{names}"])


@some_quick(("how", "num_ranks"), WAYS, quick=WAYS[:1])
def test_ranks_end_with_what_one_rank_ends_with(
    how: str, num_ranks: int, alone: tuple[Path, list[str]], teacher: Path, pool: Pool, tmp_path: Path
) -> None:
    path, told = alone
    said = pool.of(num_ranks).run(bypass, tmp_path / "run", teacher, how)
    assert differs(tmp_path / "run", path) == []
    assert said[0][:-1] == told[:-1]
    assert said[1:] == [[]] * (num_ranks - 1)
    again = pool.of(num_ranks).run(bypass, tmp_path / "run", teacher, how)
    assert again[0] == [f"{tmp_path / 'run'} is complete: the student is in {model_of(tmp_path / 'run')}"]


def model_of(path: Path) -> Path:
    return next(path.glob("model-*"))


@pytest.mark.slow
def test_a_run_goes_on_after_a_kill_under_any_number_of_ranks(
    alone: tuple[Path, list[str]], teacher: Path, pool: Pool, tmp_path: Path
) -> None:
    """Killed on rank 1 after four steps of a pipeline, on rank 0 after one more by replicas; ended by one rank."""
    path = tmp_path / "run"
    for killed, how, steps in (((1, 4), "stages", 4), ((0, 1), "replicas", 4)):
        outcomes = pool.of(2).outcomes(bypass, path, teacher, how, killed)
        assert type(outcomes[killed[0]].error) is EOFError
        pool.of(2).kill()
        newest = RunFolder(path, run_on(path, teacher, "one rank").settings).newest
        assert newest is not None
        assert newest.step <= steps
    with quiet():
        bypass(0, path, teacher, "one rank")
    assert differs(path, alone[0]) == []


def test_a_wrong_variant_shows(alone: tuple[Path, list[str]], teacher: Path, two_ranks: Ranks, tmp_path: Path) -> None:
    """Rank 0 saves its own blocks alone."""
    two_ranks.run(bypass_wrong, tmp_path / "run", teacher)
    assert any(name.startswith("model.layers.1.") for name in differs(tmp_path / "run", alone[0]))


def bypass_wrong(rank: int, path: Path, teacher: Path) -> None:
    with mock.patch.object(ranks_module.BypassRanks, "fill", lambda *_: None):  # noqa: PT008
        bypass(rank, path, teacher, "stages")


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def job(made: Path, tmp_path: Path) -> Path:
    """What the command reads, with a pipeline."""
    from protwin.runtime.bypass.teacher import TeacherFolder
    from protwin.runtime.distillation.configurations import distillation_of_configuration
    from protwin.shared.schema.hardware import DeviceKind
    from protwin.shared.schema.plan import Plan

    folder = Path(shutil.copytree(made, tmp_path / "job"))
    assert STUDENT
    opened = TeacherFolder.opened(folder / "teacher")
    with quiet():
        workload = distillation_of_configuration(
            opened.stored,
            student=Student.load(folder / "student.toml"),
            name=opened.name,
            batch_size=2,
            sequence_length=8,
            device_kind=DeviceKind.CPU,
        )
    pipeline = plan_by("stages", workload, Plan.load(folder / "plan.json"))
    assert isinstance(pipeline, Pipeline)
    pipeline.save(folder / "plan.json")
    return folder


def test_the_command_runs_on_the_ranks_of_a_pipeline(job: Path, two_ranks: Ranks) -> None:
    (code, told, errors), other = two_ranks.run(protwin_on, job, "bypass", *OPTIONS)
    assert (code, errors) == (0, "")
    assert "saved in run" in told
    assert other == (0, "", "")
    assert model_of(job / "run").is_dir()


@pytest.mark.parametrize(
    ("further", "message"),
    [
        (("--ranks=3",), "--ranks is 3, but the plan is for 2 ranks (a pipeline of 2 stages)"),
        (("--micro-batches=3",), "the run has --micro-batches 3, and the plan 1"),
    ],
)
def test_what_contradicts_is_refused_once(further: tuple[str, ...], message: str, job: Path, two_ranks: Ranks) -> None:
    found = two_ranks.run(protwin_on, job, "bypass", *OPTIONS, *further)
    assert [code for code, _, _ in found] == [2, 2]
    told = "".join(errors for _, _, errors in found)
    assert " ".join(told.split()).count(message) == 1, told
    assert not (job / "run").exists()


Told = Callable[..., object]


def test_ranks_need_a_plan() -> None:
    """A search on the way is one for one rank."""
    assert _chosen(None, 1) is None
    with pytest.raises(ProtwinError, match=r"--ranks is 2, and a plan is to be searched.* Search a pipeline first"):
        _chosen(None, 2)
