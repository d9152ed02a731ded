"""Several runs that differ from one: every entry from the base, never from the entry before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ...shared.basics.documents import describe
from ...shared.basics.errors import FileError
from .run_settings import RunSettings


def sweep(base: RunSettings, entries: Sequence[Mapping[str, Any]]) -> tuple[RunSettings, ...]:
    """One run for every entry: ``base`` with the fields that the entry states.

    Tables are merged field by field (``{"student": {"all": {"intermediate_size": 512}}}`` leaves what else the base's
    student says); everything else takes the place of the base's.  Runs are named after their students.  Raises
    FileError if there are no entries, if an entry is impossible, or if two are one run, WorkloadError if an entry's
    student does not go with the teacher.
    """
    if not entries:
        raise FileError("a sweep has no entries. State at least one.")
    made = tuple(_entry(base, entry, f"entry {number} of the sweep") for number, entry in enumerate(entries, 1))
    numbers: dict[str, int] = {}
    for number, run in enumerate(made, 1):
        before = numbers.setdefault(run.fingerprint, number)
        if before != number:
            raise FileError(f"entries {before} and {number} of the sweep are one run. Leave one of them out.")
    return made


def _entry(base: RunSettings, entry: Mapping[str, Any], origin: str) -> RunSettings:
    content = base.model_dump(mode="json", exclude_unset=True) | {"name": ""}
    try:
        return RunSettings.model_validate(_merged(content, entry))
    except ValidationError as error:
        raise FileError(f"{origin} is impossible: {describe(error, RunSettings)}") from error


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in changes.items():
        before = merged.get(name)
        both_tables = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(before, value) if both_tables else value  # type: ignore[arg-type]
    return merged
