"""Teachers that are made by code of their own: it runs where the user says so, and the student keeps what it needs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from protwin.runtime import load_student
from protwin.runtime.bypass.teacher import TeacherFolder
from protwin.runtime.distillation.configurations import distillation_of_configuration
from protwin.runtime.model.configurations import build_model
from protwin.runtime.students.saving import save_student
from protwin.runtime.students.student_model import make_student
from protwin.shared.basics.errors import FileError, WorkloadError
from protwin.shared.students.student import Student
from tests.runtime.bypass.small_runs import LENGTH, SAMPLES, SHAPE, carry_out, plan_of, run_of, settings_of
from tests.runtime.own_code import CODE, OTHERS, save_own_teacher

PLAIN = Student.model_validate({"initialization": {"ffn": "truncate"}, "all": {"intermediate_size": 24}})
UNLIKE = Student.model_validate({"initialization": {"ffn": "truncate"}, "block": {"1": {"ffn": "absent"}}})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers puts code before it runs it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


@pytest.fixture
def teacher(tmp_path: Path, trace: Path) -> Path:
    save_own_teacher(tmp_path / "teacher", trace, SHAPE)
    return tmp_path / "teacher"


def distilled(folder: Path, teacher: Path, student: Student) -> Path:
    opened = TeacherFolder.opened(teacher, trust_remote_code=True)
    assert opened.code is not None
    workload = distillation_of_configuration(
        opened.stored,
        student=student,
        name=opened.name,
        batch_size=SAMPLES,
        sequence_length=LENGTH,
        code=opened.code,
    )
    settings = settings_of(
        opened, student=student, num_tokens=3 * SAMPLES * LENGTH, teacher_code=opened.code.fingerprint
    )
    plan = plan_of(workload, settings)
    return carry_out(run_of(folder, opened, settings, workload=workload, plan=lambda: plan))


def test_without_a_word_of_the_user_nothing_runs_and_nothing_is_written(teacher: Path, trace: Path) -> None:
    for change in ({}, {"model_type": "llama"}):
        configuration = teacher / "config.json"
        configuration.write_text(json.dumps(json.loads(configuration.read_text()) | change))
        before = sorted(teacher.iterdir())
        with pytest.raises(FileError, match=r"configuration_mine\.py, modeling_mine\.py, gains\.py\. It did not run"):
            TeacherFolder.opened(teacher)
        assert not trace.exists()
        assert sorted(teacher.iterdir()) == before
    # The trace is one that the code does leave.
    TeacherFolder.opened(teacher, trust_remote_code=True)
    assert "model" in trace.read_text()
    assert "setup" not in trace.read_text()


@pytest.mark.parametrize("student", [PLAIN, UNLIKE], ids=["plain", "unlike"])
def test_a_student_of_trusted_code_has_the_files_that_are_named_and_no_others(
    tmp_path: Path, teacher: Path, trace: Path, student: Student
) -> None:
    model = distilled(tmp_path / "run", teacher, student)
    assert {path.name for path in model.rglob("*.py")} == set(CODE)
    assert {name: (model / name).read_bytes() for name in CODE} == {
        name: (teacher / name).read_bytes() for name in CODE
    }
    assert not any((model / name).exists() for name in OTHERS)
    (checkpoint,) = (tmp_path / "run").glob("step-*")
    assert not (checkpoint / "config.json").exists(), "beside no code it would be of another model"
    trace.unlink()
    with pytest.raises(FileError, match="trust_remote_code=True"):
        load_student(model)
    assert not trace.exists()
    loaded = load_student(model, trust_remote_code=True)
    assert type(loaded).__name__ == "MineModel"
    # The activations are those of the code: a Llama with the same weights gives something else.
    tokens = torch.arange(LENGTH)[None]
    kind: Any = type(loaded.model.layers[0].mlp.act_fn)
    assert kind.__name__ == "Gained"
    if student is PLAIN:
        again = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=True, local_files_only=True)
        plain = LlamaForCausalLM.from_pretrained(model)
        with torch.no_grad():
            assert torch.equal(again(tokens).logits, loaded(tokens).logits)
            assert not torch.allclose(plain(tokens).logits, loaded(tokens).logits)


def test_code_is_part_of_what_a_run_follows_from(tmp_path: Path, teacher: Path) -> None:
    def asked() -> Any:
        opened = TeacherFolder.opened(teacher, trust_remote_code=True)
        assert opened.code is not None
        return settings_of(opened, student=PLAIN, teacher_code=opened.code.fingerprint)

    before = asked()
    (teacher / "setup.py").write_text("other = 1\n")
    assert asked().fingerprint == before.fingerprint
    path = teacher / "gains.py"
    path.write_text(path.read_text().replace("self.gain *", "2 * self.gain *"))
    assert asked().fingerprint != before.fingerprint


def test_code_that_fails_or_makes_no_model_is_one_message(teacher: Path) -> None:
    path = teacher / "gains.py"
    path.write_text("raise ValueError('the wrong version')\n")
    with pytest.raises(WorkloadError, match="code of its own fails in teacher: the wrong version"):
        TeacherFolder.opened(teacher, trust_remote_code=True)
    (teacher / "modeling_mine.py").write_text("class MineModel:\n    pass\n")
    with pytest.raises(WorkloadError, match="is no PreTrainedModel of transformers"):
        TeacherFolder.opened(teacher, trust_remote_code=True)


def test_other_commands_build_no_model_of_unknown_code(teacher: Path, trace: Path) -> None:
    configuration = json.loads((teacher / "config.json").read_text())
    with pytest.raises(WorkloadError, match="of which nothing ran"):
        build_model(configuration, "teacher", torch.float32)
    # transformers' own models are what they are without the code.
    assert type(build_model(configuration | {"model_type": "llama", "architectures": None}, "a", torch.float32)) is (
        LlamaForCausalLM
    )
    assert not trace.exists()


def test_a_student_of_own_code_is_not_saved_without_it(tmp_path: Path, teacher: Path) -> None:
    model = TeacherFolder.opened(teacher, trust_remote_code=True).load("float32")
    student = make_student(model, PLAIN)
    with pytest.raises(WorkloadError, match="code_folder=FOLDER"):
        save_student(tmp_path / "student", student, PLAIN, model.config)
    assert not (tmp_path / "student").exists()
    save_student(tmp_path / "student", student, PLAIN, model.config, code_folder=teacher)
    assert {path.name for path in (tmp_path / "student").glob("*.py")} == set(CODE)
