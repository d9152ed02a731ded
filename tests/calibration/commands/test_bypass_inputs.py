"""What a bypass run is asked for with: any file or option that may change the result changes its hash."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from protwin.calibration.commands.bypass_inputs import BypassInputs
from protwin.shared.basics.errors import FileError
from protwin.shared.catalogue.machines import machine
from protwin.shared.schema.plan import Plan, TrainingMethod
from tests.runtime.runs.settings import LLAMA

PLAN = Plan(
    workload_id="1234", method=TrainingMethod.BYPASS, chunk_bytes=4096, n_persist=1, n_buffer=8, prefetch_depth=2
)


@pytest.fixture
def inputs(tmp_path: Path) -> BypassInputs:
    for folder in ("teacher", "tokens"):
        (tmp_path / folder).mkdir()
    save_weights(tmp_path)
    files = {"teacher/config.json": repr(LLAMA).replace("'", '"'), "tokens/tokenizer.json": "{}", "a": "a", "b": "b"}
    files |= {"held": "c", "student.toml": 'kind = "student"\nschema_version = 1\n', "tokens/merges.txt": "a b\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return BypassInputs(
        teacher=tmp_path / "teacher",
        trust_remote_code=False,
        student=tmp_path / "student.toml",
        training=(tmp_path / "a", tmp_path / "b"),
        validation=(tmp_path / "held",),
        tokenizer=tmp_path / "tokens",
        is_bytes=False,
        fields={"seed": 0, "num_tokens": 96},
        dtype=None,
        plan=PLAN,
        hardware=None,
    )


def save_weights(folder: Path, *, name: str = "w", shape: tuple[int, ...] = (4, 8), value: float = 1.0) -> None:
    save_file({name: np.full(shape, value, np.float32)}, folder / "teacher" / "model.safetensors")


def append(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + " \n")


CHANGED: dict[str, Callable[[Path], Any]] = {
    "configuration": append("teacher/config.json"),
    "values of weights": lambda folder: save_weights(folder, value=2.0),
    "name of a weight": lambda folder: save_weights(folder, name="v"),
    "shape of a weight": lambda folder: save_weights(folder, shape=(8, 4)),
    "another file of weights": lambda folder: shutil.copy(
        folder / "teacher" / "model.safetensors", folder / "teacher" / "more.safetensors"
    ),
    "tokenizer": append("tokens/tokenizer.json"),
    "merges": append("tokens/merges.txt"),
    "data": append("b"),
    "held out": append("held"),
    "student": lambda folder: (folder / "student.toml").write_text(
        (folder / "student.toml").read_text() + 'keys_to_learn = ["subblock_ffn"]\n'
    ),
    "a name": lambda folder: (folder / "tokens" / "merges.txt").rename(folder / "tokens" / "other.txt"),
}
OTHER: dict[str, Any] = {
    "trust_remote_code": True,
    "training": ("b", "a"),
    "validation": (),
    "tokenizer": None,
    "is_bytes": True,
    "fields": {"seed": 1, "num_tokens": 96},
    "dtype": "bfloat16",
    "plan": PLAN.model_copy(update={"workload_id": "1235"}),
    "hardware": machine("rtx-3090"),
}


@pytest.mark.parametrize("name", [*CHANGED, *OTHER])
def test_each_file_and_each_option_counts(tmp_path: Path, inputs: BypassInputs, name: str) -> None:
    before = inputs.fingerprint
    value = OTHER.get(name)
    if name in CHANGED:
        CHANGED[name](tmp_path)
    elif isinstance(value, tuple):
        value = tuple(tmp_path / one for one in value)
    other: dict[str, Any] = {name: value} if name in OTHER else {}
    changed = replace(inputs, **other)
    assert before is not None
    assert changed.fingerprint not in (before, None)


def test_every_option_has_been_thought_of() -> None:
    assert OTHER.keys() | {"teacher", "student"} == BypassInputs.__dataclass_fields__.keys()


def test_where_files_lie_when_they_were_written_and_another_plan_do_not_count(
    tmp_path: Path, inputs: BypassInputs
) -> None:
    before = inputs.fingerprint
    for path in tmp_path.rglob("*"):
        os.utime(path, (1, 1))
    moved = tmp_path / "elsewhere"
    shutil.copytree(tmp_path, moved, ignore=shutil.ignore_patterns("elsewhere"))
    again = replace(
        inputs,
        teacher=moved / "teacher",
        student=moved / "student.toml",
        training=(moved / "a", moved / "b"),
        validation=(moved / "held",),
        tokenizer=moved / "tokens",
        plan=PLAN.model_copy(update={"n_buffer": 9}),
    )
    assert again.fingerprint == before


def test_what_cannot_be_read_is_left_to_those_who_say_why(tmp_path: Path, inputs: BypassInputs) -> None:
    (tmp_path / "b").unlink()
    assert inputs.fingerprint is None
    shutil.rmtree(tmp_path / "teacher")
    with pytest.raises(FileError, match="does not exist"):
        inputs.code()
