"""Students on disk: those that from_pretrained loads, and those that it must refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from protwin.runtime.students.saving import is_plain, load_student, save_student
from protwin.runtime.students.student_model import make_student
from protwin.shared.basics.errors import FileError, WorkloadError
from protwin.shared.students.student import Student
from tests.proof_size import some_quick

from .teachers import CONFIGURATIONS, batches, logits, make_teacher, student_of

NARROW = "[all]\nintermediate_size = 8\n[initialization]\nexperts = 'first'\n"
UNLIKE = "[block.0]\nffn = 'absent'\n[block.1]\nattention = 'linear'\n[block.2]\nintermediate_size = 8\n"


def saved(folder: Path, name: str, text: str, **changed: Any) -> tuple[Any, Student, Any]:
    """A teacher, the file of its student, and the student, which lies in ``folder``."""
    teacher, student = make_teacher(name, torch.float32, **changed), student_of(text)
    model = make_student(teacher, student)
    save_student(folder, model, student, teacher.config)
    return teacher, student, model


def same(one: Any, two: Any) -> bool:
    states = one.state_dict(), two.state_dict()
    assert states[0].keys() == states[1].keys()
    # Experts are multiplied in groups once they are loaded, which may round otherwise.
    close = torch.allclose(logits(one, batches()[0]), logits(two, batches()[0]), atol=1e-5)
    return close and all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())


@some_quick("name", CONFIGURATIONS, quick=3)
def test_transformers_loads_students_whose_blocks_are_alike(tmp_path: Path, name: str) -> None:
    heads = "" if name == "gpt2" else "num_key_value_heads = 1\n"
    teacher, student, model = saved(tmp_path / "s", name, NARROW.replace("[init", f"{heads}[init"))
    assert is_plain(student, teacher.config)
    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path / "s", output_loading_info=True)
    assert type(loaded) is type(teacher)
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(loaded, model)
    assert same(load_student(tmp_path / "s"), model)
    assert Student.load(tmp_path / "s" / "student.json") == student


@some_quick("name", CONFIGURATIONS, quick=3)
def test_other_students_are_loaded_here_and_refused_by_transformers(tmp_path: Path, name: str) -> None:
    text = UNLIKE + ("[initialization]\nlinear = 'random'" if name in ("mixtral", "jamba") else "")
    teacher, student, model = saved(tmp_path / "s", name, text)
    assert not is_plain(student, teacher.config)
    assert same(load_student(tmp_path / "s"), model)
    assert load_student(tmp_path / "s", dtype=torch.bfloat16).dtype is torch.bfloat16
    with pytest.raises(ValueError, match="protwin_student"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "s")


def test_tied_parameters_are_saved_once_and_tied_again(tmp_path: Path) -> None:
    _, _, model = saved(tmp_path / "s", "mistral", UNLIKE)
    loaded = load_student(tmp_path / "s")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert same(loaded, model)
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert (tmp_path / "s" / "model.safetensors").stat().st_size < size_bytes + 8192


@pytest.mark.parametrize("text", [NARROW, UNLIKE])
def test_no_configuration_names_code(tmp_path: Path, text: str) -> None:
    code = {"AutoModelForCausalLM": "modeling_mine.Mine"}
    saved(tmp_path / "s", "llama", text, auto_map=code)
    assert "auto_map" not in (tmp_path / "s" / "config.json").read_text()
    assert not list((tmp_path / "s").glob("*.py"))


def test_a_folder_that_is_not_free_and_another_model_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    teacher, student, model = saved(tmp_path / "s", "llama", UNLIKE)
    with pytest.raises(FileError, match="not empty"):
        save_student(tmp_path / "s", model, student, teacher.config)
    for text in (NARROW, ""):
        with pytest.raises(WorkloadError, match="is not what the student's file makes of this teacher"):
            save_student(tmp_path / "t", model, student_of(text), teacher.config)
    assert [one.name for one in tmp_path.iterdir()] == ["s"]


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "s", "llama", UNLIKE)
    other = student_of("[block.0]\nffn = 'absent'")
    (tmp_path / "s" / "student.json").write_text(other.to_json())
    with pytest.raises(FileError, match=r"of another student than its student\.json: they lack"):
        load_student(tmp_path / "s")
    (tmp_path / "s" / "student.json").unlink()
    with pytest.raises(FileError, match=r"student\.json does not exist"):
        load_student(tmp_path / "s")
    config = tmp_path / "s" / "config.json"
    config.write_text(json.dumps({"model_type": "protwin_student"}))
    with pytest.raises(FileError, match="has no teacher_config"):
        load_student(tmp_path / "s")
