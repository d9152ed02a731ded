"""A checkpoint that is damaged, foreign or newer is refused before anything is touched."""

from __future__ import annotations

import io
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from protwin.runtime import Training
from protwin.runtime.checkpoints.checkpoints import read_checkpoint
from protwin.runtime.checkpoints.manifest import MANIFEST, Manifest, SavedFile
from protwin.runtime.checkpoints.pieces import _IndexUnpickler
from protwin.shared.basics.errors import FileError
from tests.runtime.models import SEED, cases
from tests.runtime.resuming import kept, mixed, same_bits, saved_after, sgd, start, train


def everything(model: nn.Module, training: Training) -> dict[str, Any]:
    """All that a resumption could change, by bytes."""
    content = training._state.collect(training.num_steps, None, None)
    states = {name: entry["state"] for name, entry in content.optimizer["parameters"].items()}
    return {
        "weights": {name: tensor.clone() for name, tensor in content.weights.items()},
        "states": {n: {k: torch.as_tensor(v).clone() for k, v in s.items()} for n, s in states.items()},
        "rates": [dict(group["options"]) for group in content.optimizer["groups"]],
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()),
        "steps": training.num_steps,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the model "llama" after two steps."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    case = cases()["llama"]
    saved_after(case, mixed(case.workload), 2, folder)
    return folder


def copy_of(folder: Path, place: Path) -> Path:
    place.mkdir()
    for file in folder.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


def flip(place: str, at: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = bytearray((folder / place).read_bytes())
        content[int(at * (len(content) - 1))] ^= 1
        (folder / place).write_bytes(content)

    return damage


def truncate(place: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / place).write_bytes((folder / place).read_bytes()[:-1])

    return damage


def resealed(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        manifest = Manifest.load(folder / MANIFEST)
        (folder / MANIFEST).write_text(manifest.model_copy(update=changes).sealed().to_json())

    return damage


def newer(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    assert '"schema_version": 1' in text
    (folder / MANIFEST).write_text(text.replace('"schema_version": 1', '"schema_version": 2'))


FILES = ["model.safetensors", "optimizer.pt", "training.pt", "config.json", MANIFEST]
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{f"flipped in {name} at {at}": (flip(name, at), "damaged") for name in FILES for at in (0.0, 0.37, 1.0)},
    **{f"truncated {name}": (truncate(name), "damaged") for name in FILES},
    **{f"missing {name}": (lambda f, n=name: (f / n).unlink(), "missing") for name in FILES},
    "nothing in it": (lambda f: [file.unlink() for file in f.iterdir()], "is empty"),
    "one more file": (lambda f: (f / "notes.txt").write_text("mine"), "holds notes.txt"),
    "newer": (newer, "Update protwin"),
    "foreign": (resealed(model_hash="0" * 16), "another model"),
    "file outside": (resealed(files={"../secret": SavedFile(size_bytes=1, sha256="0" * 64)}), "damaged"),
}


@pytest.fixture(scope="module")
def touched() -> Any:
    """A training that has stepped, and what it was like."""
    case = cases()["llama"]
    model = case.build()
    with start(case, model, mixed(case.workload)) as training:
        torch.manual_seed(SEED)
        train(case, model, training, 0, 1)
        training.synchronize()
        yield training, model, everything(model, training)


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoints_are_refused_before_anything_is_touched(
    name: str, saved: Path, touched: Any, tmp_path: Path
) -> None:
    training, model, before = touched
    folder = copy_of(saved, tmp_path / "copy")
    damage, message = DAMAGES[name]
    damage(folder)
    with pytest.raises(FileError, match=message):
        training.resume(folder)
    assert same_bits(everything(model, training), before)


def test_foreign_checkpoints_are_refused_before_anything_is_touched(touched: Any, saved: Path, tmp_path: Path) -> None:
    training, model, _ = touched
    case = cases()["llama"]
    saved_after(cases()["llama, tied"], kept(cases()["llama, tied"].workload), 1, tmp_path / "other model")
    saved_after(case, kept(case.workload), 1, tmp_path / "other optimizer", optimizer=sgd)
    other_model = case.build()
    groups = [{"params": [p]} for p in other_model.parameters()]
    with start(case, other_model, kept(case.workload), parameter_groups=groups) as other:
        other.save(tmp_path / "other groups")
        scheduler = torch.optim.lr_scheduler.ConstantLR(other.optimizer)
    with start(case, case.build(), kept(case.workload)) as other:
        other.save(tmp_path / "with a scheduler", scheduler=scheduler)
    (tmp_path / "file").write_text("")
    before = everything(model, training)
    for folder, message in [
        ("other model", "another model"),
        ("other optimizer", "optimizer torch.optim.sgd.SGD"),
        ("other groups", "other parameter groups"),
        ("with a scheduler", "ConstantLR"),
        ("nowhere", "does not exist"),
        ("file", "is a file"),
    ]:
        with pytest.raises(FileError, match=message):
            training.resume(tmp_path / folder)
    with pytest.raises(FileError, match="without a scheduler"):
        training.resume(saved, scheduler=scheduler)
    assert same_bits(everything(model, training), before)


class Surprise:
    """Nothing that may be unpickled."""


def test_what_could_not_be_read_back_is_not_saved(touched: Any, tmp_path: Path) -> None:
    training, model, _ = touched
    before = everything(model, training)
    training.save(tmp_path / "saved", data_position=7)
    for position in (Surprise(), lambda: None, {"shard": Surprise}):
        with pytest.raises(FileError, match="data_position cannot be saved"):
            training.save(tmp_path / "saved", data_position=position)
    assert read_checkpoint(tmp_path / "saved").training["data_position"] == 7
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert same_bits(everything(model, training), before)


class Named:
    """Pickled as ``getattr(owner, name)``, as Python 3.11.2 pickles members of enumerations."""

    def __init__(self, owner: object, name: str) -> None:
        self._asked = owner, name

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        return getattr, self._asked


def test_an_index_names_members_of_its_enumeration_and_no_other_attributes() -> None:
    """Whatever could be reached by attributes would run while an index is read."""
    known = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert read_index(pickle.dumps(Named(_MEM_FORMAT_ENCODING, known.name))) is known
    for owner, name in ((_MEM_FORMAT_ENCODING, "mro"), (torch.Size, "numel"), (Metadata, "__init__"), (os, "system")):
        with pytest.raises((pickle.UnpicklingError, TypeError)):
            read_index(pickle.dumps(Named(owner, name)))


def read_index(content: bytes) -> Any:
    return _IndexUnpickler(io.BytesIO(content)).load()
