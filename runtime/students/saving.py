"""Students on disk, in the Hugging Face form as far as that goes.

[Note: What from_pretrained can load]
A configuration of transformers has one size for all blocks.  A student whose blocks are all alike, with nothing absent
or linear, is a plain model of its family: ``from_pretrained`` loads its folder.  For any other student transformers
would need code that comes with the folder, which nobody should run unread.  Worse, a plain configuration beside such
weights would be taken without an error where parts are absent: they would be random.  So the folder of such a student
has a ``model_type`` that transformers does not know and refuses by name; ``load_student`` here makes it again.

| file | what it holds |
| --- | --- |
| ``config.json`` | a plain student's configuration; otherwise the teacher's, under ``teacher_config`` |
| ``student.json`` | the student's file; for a plain student it says where it comes from, and nothing needs it |
| ``model.safetensors`` | the weights, in several files with an index if transformers splits them |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ...shared.basics.documents import read_mapping
from ...shared.basics.errors import FileError, WorkloadError
from ...shared.students.block_shape import BlockShape
from ...shared.students.families import family_of
from ...shared.students.shapes import student_shapes, uniform_sizes
from ...shared.students.student import Student
from ..checkpoints.files import sync, write_weights
from ..checkpoints.manifest import CONFIGURATION, WEIGHTS
from ..checkpoints.published import new_folder
from ..chunks.saved_weights import SavedWeights, names_of, persistent_buffers
from ..model.configurations import build_model, quiet, training_dtype
from ..model.pretrained import load_pretrained, no_progress_bar
from .building import build_student

STUDENT: Final = "student.json"
STUDENT_TYPE: Final = "protwin_student"
"""The ``model_type`` of students that transformers has no configuration for."""
_TEACHER: Final = "teacher_config"
_CODE: Final = "auto_map"
"""What a configuration calls files of code; none is copied, so none is named."""


def is_plain(student: Student, teacher_config: Any) -> bool:
    """Whether ``from_pretrained`` loads this teacher's student (Note: What from_pretrained can load)."""
    return _uniform(teacher_config, student_shapes(student, teacher_config.to_dict())) is not None


def save_student(
    folder: str | Path, model: Any, student: Student, teacher_config: Any, *, tokenizer: Any | None = None
) -> None:
    """Write ``model``, which ``make_student`` made, into the new folder ``folder``, which is there when it is complete.

    ``teacher_config``: the teacher's configuration, of transformers.  Raises FileError if the folder is not free or
    cannot be written, WorkloadError if ``model`` is not this teacher's student.
    """
    shapes = student_shapes(student, teacher_config.to_dict())
    _check_is_student(model, shapes, teacher_config)
    need_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with new_folder(Path(folder), need_bytes) as part, quiet(), no_progress_bar():
        if _uniform(teacher_config, shapes) is not None:
            model.save_pretrained(part)
            _leave_out_code(part / CONFIGURATION)
        else:
            # transformers would write experts and maps as blocks of one size are written.
            write_weights(part / WEIGHTS, _tied_once(model))
            _write_configuration(part / CONFIGURATION, model, teacher_config)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        with (part / STUDENT).open("wb") as stream:
            stream.write(student.to_json().encode())
            sync(stream)


def load_student(folder: str | Path, *, dtype: torch.dtype | None = None) -> Any:
    """The student that ``save_student`` wrote, on the host, in evaluation mode, in ``dtype`` or as it was saved.

    No code that lies in the folder is run.  Raises FileError if files are missing, damaged, or not of one student,
    WorkloadError if the configuration is of no model.
    """
    path = Path(folder)
    configuration = read_mapping(path / CONFIGURATION)
    if configuration.get("model_type") != STUDENT_TYPE:
        chosen = dtype or training_dtype(configuration, None)
        return load_pretrained(path, configuration, path.name, chosen, is_converting=True).eval()
    teacher = configuration.get(_TEACHER)
    if not isinstance(teacher, dict):
        raise FileError(f"{path / CONFIGURATION} has no {_TEACHER}. Save the student again.")
    student = Student.load(path / STUDENT)
    chosen = dtype or training_dtype(configuration, None)
    twin = build_model(teacher, path.name, chosen)
    model = build_student(type(twin), twin.config, student_shapes(student, twin.config.to_dict(), name=path.name))
    _read_weights(model, SavedWeights(path), chosen)
    return model.eval()


def _uniform(teacher_config: Any, shapes: Sequence[BlockShape]) -> Mapping[str, int] | None:
    return uniform_sizes(family_of(teacher_config.to_dict(), type(teacher_config).__name__), shapes)


def _check_is_student(model: Any, shapes: Sequence[BlockShape], teacher_config: Any) -> None:
    """Raise WorkloadError unless the parameters of ``model`` have the names and shapes of that student's."""
    expected = {name: one.shape for name, one in build_student(type(model), teacher_config, shapes).named_parameters()}
    found = {name: one.shape for name, one in model.named_parameters()}
    differing = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if differing:
        name = differing[0]
        told = [list(one[name]) if name in one else "missing" for one in (found, expected)]
        raise WorkloadError(
            f"the model is not what the student's file makes of this teacher: {name} is {told[0]}, expected {told[1]}. "
            f"Pass the file and the teacher's configuration that it was made with."
        )


def _tied_once(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, tied ones under their first name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, int]] = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.numel())
        if place not in seen or not tensor.numel():
            seen.add(place)
            found[name] = tensor.detach().cpu().contiguous()
    return found


def _write_configuration(path: Path, model: Any, teacher_config: Any) -> None:
    teacher = json.loads(teacher_config.to_json_string(use_diff=False))
    # Written into the teacher's too, whose head the student has.
    teacher["architectures"] = [type(model).__name__]
    dtype = str(next(iter(model.parameters())).dtype).removeprefix("torch.")
    _write_json(path, {"model_type": STUDENT_TYPE, "dtype": dtype, _TEACHER: _without_code(teacher)})


def _leave_out_code(path: Path) -> None:
    _write_json(path, _without_code(json.loads(path.read_text(encoding="utf-8"))))


def _without_code(configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in configuration.items() if name != _CODE}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("wb") as stream:
        stream.write((json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
        sync(stream)


def _read_weights(model: Any, saved: SavedWeights, dtype: torch.dtype) -> None:
    """Fill parameters and buffers of ``model`` from files.  Raises FileError unless they hold exactly these."""
    if reasons := saved.misfits(model, fills_all=True):
        raise FileError(
            f"the weights in {saved.folder} are of another student than its {STUDENT}: {'; '.join(reasons):.400}. Name "
            f"a folder that was written at once."
        )
    for parameter, names in names_of(model.named_parameters(remove_duplicate=False)):
        value = torch.empty(parameter.shape, dtype=dtype)
        saved.read(saved.find(names)[0], value, slice(0, value.numel()), value.view(-1))
        made = torch.nn.Parameter(value)
        for name in names:
            path, _, own = name.rpartition(".")
            model.get_submodule(path)._parameters[own] = made
    for buffer, names in names_of(persistent_buffers(model)):
        for held in saved.find(names)[:1]:
            saved.read(held, buffer, slice(0, buffer.numel()), buffer.view(-1))
