"""The folder of a run, which knows whose it is, how far it has come, and whether it is complete.

| name | what it holds |
| --- | --- |
| ``run.json`` | the settings, and the finished model's name once it is there |
| ``step-00000012-periodic`` | a checkpoint after step 12; so ``-best`` and ``-final`` |
| ``model-1a2b3c4d`` | the finished model, named after the run's fingerprint |

Files and folders get their names when they are whole, so that a kill between any two writes leaves what was there
before, or more.  Of the checkpoints the newest wins whatever it was saved for: after a longer budget was given, a run
that was finished once goes on from its later periodic ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Final

from ...shared.basics.documents import Document, unfinished_copies
from ...shared.basics.errors import FileError
from ..checkpoints.folder import find_folder, remove_folder
from ..checkpoints.manifest import CONFIGURATION, MANIFEST
from .run_settings import EarlierBudget, RunSettings

STATE: Final = "run.json"
"""Name of what a run's folder says of itself."""
_SHOWN: Final = 60
"""Characters of a value in a message."""


class CheckpointRole(StrEnum):
    """What a checkpoint was saved for."""

    PERIODIC = "periodic"
    """Its step was one of every so many."""
    BEST = "best"
    """Its validation had the lowest loss so far."""
    FINAL = "final"
    """The budget had been used up."""


_CHECKPOINT: Final = re.compile(rf"\.?step-(\d{{8,}})-({'|'.join(CheckpointRole)})(?:\.previous)?")
"""Its own name, or the name under which the one before lies for a moment (Note: Swapping folders)."""


class RunState(Document):
    """What a run's folder says of itself."""

    KIND: ClassVar[str] = "bypass_run"

    settings: RunSettings
    """As the run was last begun or continued."""
    fingerprint: str
    """Of ``settings`` after ``earlier``."""
    earlier: tuple[EarlierBudget, ...] = ()
    """Budgets that the run was continued from, the first one first (Note: Continued runs)."""
    inputs: str | None = None
    """Hash of all files and options that the finished model was asked for with, which tells that nothing has changed
    without reading the models; None: nobody has said."""
    model: str | None = None
    """Name of the finished model's folder; None: it is not finished."""


@dataclass(frozen=True, slots=True, order=True)
class RunCheckpoint:
    """A checkpoint that is whole."""

    step: int
    """Completed steps."""
    role: CheckpointRole
    path: Path

    def num_batches(self, settings: RunSettings) -> int:
        """Micro-batches that were trained on before it: those to skip when the run goes on."""
        return self.step * settings.micro_batches


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, for one process at a time."""

    path: Path
    settings: RunSettings
    earlier: tuple[EarlierBudget, ...] = ()
    """Budgets that it is continued from."""
    inputs: str | None = None
    """Hash of what it is asked for with (``RunState.inputs``)."""

    @property
    def fingerprint(self) -> str:
        """Of the settings after the budgets before them."""
        return self.settings.fingerprint_after(self.earlier)

    @classmethod
    def begin(cls, path: str | Path, settings: RunSettings, *, inputs: str | None = None) -> RunFolder:
        """The folder at ``path`` for a run with ``settings``: a new one, or the one of this run, to go on with.

        A run may go on with another budget.  Raises FileError, and nothing is written, if ``path`` holds another run,
        anything else, or more steps than the budget has; also if it cannot be written.
        """
        folder = cls.checked(path, settings, inputs=inputs)
        folder._remove_unfinished()
        found = read_state(path)
        if found is None or (found.fingerprint, found.earlier) != (folder.fingerprint, folder.earlier):
            folder._write(None)
        return folder

    @classmethod
    def checked(cls, path: str | Path, settings: RunSettings, *, inputs: str | None = None) -> RunFolder:
        """The folder at ``path``, of which nothing is written.  Raises what ``begin`` does."""
        found, folder = read_state(path), cls(Path(path), settings, inputs=inputs)
        if found is None:
            folder._check_is_free()
            return folder
        if found.settings.series != settings.series:
            raise FileError(f"{path} holds another run: {_told(settings, found.settings)}. Name another folder.")
        if found.settings.num_tokens == settings.num_tokens and found.model is not None:
            return replace(folder, earlier=found.earlier)
        newest, steps = folder.newest, settings.budget.num_steps
        num_completed = 0 if newest is None else newest.step
        if num_completed > steps:
            raise FileError(
                f"{path} has completed {num_completed:,} steps, and num_tokens = {settings.num_tokens:,} are "
                f"{steps:,}. Give more tokens, or name another folder."
            )
        return replace(folder, earlier=settings.continued(found.settings, found.earlier, num_completed))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def checkpoint_path(self, step: int, role: CheckpointRole) -> Path:
        """Where the checkpoint after ``step`` completed steps belongs (``Training.save``)."""
        return self.path / f"step-{step:08d}-{role}"

    @property
    def checkpoints(self) -> tuple[RunCheckpoint, ...]:
        """All that are whole, by step.  Raises FileError if the folder cannot be read."""
        found = set()
        for name in self._names():
            told = _CHECKPOINT.fullmatch(name)
            if told is not None:
                step, role = int(told[1]), CheckpointRole(told[2])
                place = find_folder(self.checkpoint_path(step, role))
                if place is not None and (place / MANIFEST).is_file():
                    found.add(RunCheckpoint(step, role, self.checkpoint_path(step, role)))
        return tuple(sorted(found))

    @property
    def newest(self) -> RunCheckpoint | None:
        """The one to go on from: the one after the most steps, whatever its role."""
        return max(self.checkpoints, default=None)

    @property
    def best(self) -> RunCheckpoint | None:
        """The newest of those that were the best when they were saved."""
        return max((one for one in self.checkpoints if one.role is CheckpointRole.BEST), default=None)

    def remove_superseded(self) -> None:
        """Remove all checkpoints but the newest and the best.  Raises FileError if one cannot be removed."""
        kept = (self.newest, self.best)
        for one in self.checkpoints:
            if one not in kept:
                remove_folder(one.path, manifest=MANIFEST)

    # -- the finished model -------------------------------------------------------------------------------------------

    @property
    def model_path(self) -> Path:
        """Where the finished model belongs; with another budget it is another one."""
        return self.path / f"model-{self.fingerprint[:8]}"

    def finish(self) -> None:
        """Note that the model is there.  Raises FileError if it is not, or if that cannot be written."""
        if not _is_model(self.model_path):
            raise FileError(f"{self.model_path} holds no model, so that the run is not complete. Save the model first.")
        self._write(self.model_path.name)

    @property
    def is_complete(self) -> bool:
        """Whether a run with these settings has finished here, and its model is still there."""
        found = read_state(self.path)
        if found is None or found.model is None or found.fingerprint != self.fingerprint:
            return False
        return _is_model(self.path / found.model)

    # -- the state ----------------------------------------------------------------------------------------------------

    def _write(self, model: str | None) -> None:
        state = RunState(
            settings=self.settings,
            fingerprint=self.fingerprint,
            earlier=self.earlier,
            inputs=None if model is None else self.inputs,
            model=model,
        )
        state.save(self.path / STATE)

    def _names(self) -> list[str]:
        try:
            return sorted(one.name for one in self.path.iterdir()) if self.path.exists() else []
        except OSError as error:
            raise FileError(f"{self.path} cannot be read: {error.strerror}. Name a folder for the run.") from error

    def _check_is_free(self) -> None:
        unfinished = {one.name for one in self._unfinished()}
        if names := [name for name in self._names() if name not in unfinished]:
            raise FileError(f"{self.path} holds {names[0]} and no run. Name a new folder, or an empty one.")

    def _unfinished(self) -> list[Path]:
        """What a run that was killed in the middle of writing a file has left."""
        try:
            return unfinished_copies(self.path)
        except OSError as error:
            raise FileError(f"{self.path} cannot be read: {error.strerror}. Name a folder for the run.") from error

    def _remove_unfinished(self) -> None:
        for one in self._unfinished():
            try:
                one.unlink(missing_ok=True)
            except OSError as error:
                raise FileError(f"{one} cannot be removed: {error.strerror}. Remove it, then go on.") from error


def read_state(path: str | Path) -> RunState | None:
    """What the folder of a run says of itself; None if there is none.  Raises FileError if it is damaged."""
    place = Path(path) / STATE
    if not place.exists():
        return None
    found = RunState.load(place)
    if found.fingerprint != found.settings.fingerprint_after(found.earlier):
        raise FileError(f"{place} is damaged or was changed: its fingerprint is of other settings. Name a new folder.")
    return found


def finished_model(path: str | Path, inputs: str) -> Path | None:
    """The finished model of the run in ``path`` if it was asked for with these ``inputs``; None if it was not.

    None says nothing: the same run may have been asked for otherwise.  Raises FileError if its state is damaged.
    """
    found = read_state(path)
    if found is None or found.model is None or found.inputs != inputs:
        return None
    model = Path(path) / found.model
    return model if _is_model(model) else None


def told_complete(path: Path, model: Path) -> str:
    """What is said of a run that is not run again."""
    return f"{path} is complete: the student is in {model}"


def _is_model(path: Path) -> bool:
    return (path / CONFIGURATION).is_file()


def _told(asked: RunSettings, there: RunSettings) -> str:
    """What differs, in words."""
    differing = {name: pair for name, pair in asked.differences(there).items() if name not in RunSettings.BUDGET}
    told = [
        f"its {name} is {theirs!s:.{_SHOWN}} and not {own!s:.{_SHOWN}}"
        if name not in ("student", "teacher_configuration")
        else f"it has another {name.replace('_', ' ')}"
        for name, (own, theirs) in differing.items()
    ]
    return "; ".join(told[:3])
