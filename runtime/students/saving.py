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
| ``modeling_mine.py`` | code of the teacher's own, if that is what it is made by: the files that ``auto_map`` names |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ...shared.basics.documents import read_mapping
from ...shared.basics.errors import FileError, WorkloadError
from ...shared.catalogue.own_code import AUTO_MAP, OwnCode, own_code, trusted_code
from ...shared.students.block_shape import BlockShape
from ...shared.students.families import family_of
from ...shared.students.shapes import student_shapes, uniform_sizes
from ...shared.students.student import Student
from ..checkpoints.files import sync, write_weights
from ..checkpoints.manifest import CONFIGURATION, WEIGHTS
from ..checkpoints.published import new_folder
from ..chunks.saved_weights import SavedWeights, names_of, persistent_buffers
from ..model.configurations import build_model, is_of_own_code, quiet, training_dtype
from ..model.pretrained import load_pretrained, no_progress_bar
from .building import build_student

STUDENT: Final = "student.json"
STUDENT_TYPE: Final = "protwin_student"
"""The ``model_type`` of students that transformers has no configuration for."""
_TEACHER: Final = "teacher_config"


def is_plain(student: Student, teacher_config: Any) -> bool:
    """Whether ``from_pretrained`` loads this teacher's student (Note: What from_pretrained can load)."""
    return _uniform(teacher_config, student_shapes(student, teacher_config.to_dict())) is not None


def save_student(
    folder: str | Path,
    model: Any,
    student: Student,
    teacher_config: Any,
    *,
    tokenizer: Any | None = None,
    code_folder: str | Path | None = None,
) -> None:
    """Write ``model``, which ``make_student`` made, into the new folder ``folder``, which is there when it is complete.

    ``teacher_config``: the teacher's configuration, of transformers.  ``code_folder``: the folder of a teacher that is
    made by code of its own.  The files that ``auto_map`` of its configuration names, and what these import of the
    folder, are copied; of other students no code is.  Raises FileError if the folder is not free or cannot be written,
    WorkloadError if ``model`` is not this teacher's student.
    """
    code = _code_of(model, code_folder)
    shapes = student_shapes(student, teacher_config.to_dict())
    _check_is_student(model, shapes, teacher_config)
    need_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with new_folder(Path(folder), need_bytes) as part, quiet(), no_progress_bar():
        if _uniform(teacher_config, shapes) is not None:
            model.save_pretrained(part)
            _write_plain(part / CONFIGURATION, code)
        else:
            # transformers would write experts and maps as blocks of one size are written.
            write_weights(part / WEIGHTS, _tied_once(model))
            _write_configuration(part / CONFIGURATION, model, teacher_config, code)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        _write_code(part, code)
        with (part / STUDENT).open("wb") as stream:
            stream.write(student.to_json().encode())
            sync(stream)


def load_student(folder: str | Path, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False) -> Any:
    """The student that ``save_student`` wrote, on the host, in evaluation mode, in ``dtype`` or as it was saved.

    Code that lies in the folder runs with ``trust_remote_code`` alone.  Raises FileError if files are missing, damaged,
    or not of one student, or if the student is made by code that is not trusted; WorkloadError if the configuration is
    of no model.
    """
    path = Path(folder)
    configuration = read_mapping(path / CONFIGURATION)
    if configuration.get("model_type") != STUDENT_TYPE:
        code = trusted_code(path, configuration, is_trusted=trust_remote_code)
        chosen = dtype or training_dtype(configuration, None)
        return load_pretrained(path, configuration, path.name, chosen, is_converting=True, code=code).eval()
    teacher = configuration.get(_TEACHER)
    if not isinstance(teacher, dict):
        raise FileError(f"{path / CONFIGURATION} has no {_TEACHER}. Save the student again.")
    student = Student.load(path / STUDENT)
    chosen = dtype or training_dtype(configuration, None)
    code = trusted_code(path, teacher, is_trusted=trust_remote_code)
    twin = build_model(teacher, path.name, chosen, code=code)
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


def _code_of(model: Any, folder: str | Path | None) -> OwnCode | None:
    """The code that a student is saved with.  Raises WorkloadError if it is made by some that is not given."""
    if folder is not None:
        return own_code(Path(folder), read_mapping(Path(folder) / CONFIGURATION))
    if is_of_own_code(model):
        raise WorkloadError(
            f"{type(model).__name__} is made by code of its own, without which nobody could load it. Pass the folder "
            f"of its teacher: save_student(..., code_folder=FOLDER)."
        )
    return None


def _write_configuration(path: Path, model: Any, teacher_config: Any, code: OwnCode | None) -> None:
    teacher = json.loads(teacher_config.to_json_string(use_diff=False))
    # Written into the teacher's too, whose head the student has.
    teacher["architectures"] = [type(model).__name__]
    dtype = str(next(iter(model.parameters())).dtype).removeprefix("torch.")
    _write_json(path, {"model_type": STUDENT_TYPE, "dtype": dtype, _TEACHER: _with_code(teacher, code)})


def _write_plain(path: Path, code: OwnCode | None) -> None:
    _write_json(path, _with_code(json.loads(path.read_text(encoding="utf-8")), code))


def _with_code(configuration: Mapping[str, Any], code: OwnCode | None) -> dict[str, Any]:
    """The configuration, which names the classes of ``code`` and no others."""
    plain = {name: value for name, value in configuration.items() if name != AUTO_MAP}
    return plain if code is None else {**plain, AUTO_MAP: dict(code.auto_map)}


def _write_code(folder: Path, code: OwnCode | None) -> None:
    """Write the files of ``code``; whatever other code transformers has saved beside the model goes."""
    for path in folder.rglob("*.py"):
        path.unlink()
    for name, content in ({} if code is None else code.files).items():
        with (folder / name).open("wb") as stream:
            stream.write(content)
            sync(stream)


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
