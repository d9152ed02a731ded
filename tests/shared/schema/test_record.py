"""What no record can say: a task twice, an end before its start."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from pydantic import ValidationError

from protwin.shared.basics.errors import FileError
from protwin.shared.schema.record import Record
from tests.strategies.records import records


def with_tasks(record: Record, tasks: list[dict[str, Any]]) -> dict[str, Any]:
    return record.model_dump(mode="json") | {"tasks": tasks}


@settings(max_examples=20)
@given(record=records())
def test_tasks_occur_once_and_end_after_their_start(record: Record) -> None:
    tasks = record.model_dump(mode="json")["tasks"]
    assert Record.model_validate(with_tasks(record, tasks)) == record
    if not tasks:
        return
    with pytest.raises(ValidationError, match="occurs twice in tasks"):
        Record.model_validate(with_tasks(record, [*tasks, tasks[-1]]))
    first = tasks[0]
    instant = first | {"end_s": first["start_s"]}
    assert Record.model_validate(with_tasks(record, [instant, *tasks[1:]])).tasks[0].end_s == first["start_s"]
    backwards = first | {"end_s": first["start_s"] - 1e-3}
    with pytest.raises(ValidationError, match="before its start"):
        Record.model_validate(with_tasks(record, [backwards, *tasks[1:]]))


@settings(max_examples=10)
@given(record=records().filter(lambda record: record.tasks))
def test_a_file_that_says_so_is_refused(record: Record) -> None:
    content = {"kind": "record", "schema_version": 1} | record.model_dump(mode="json")
    assert Record.from_mapping(dict(content), origin="record.json") == record
    content["tasks"] = [*content["tasks"], content["tasks"][0]]
    with pytest.raises(FileError, match=r"record\.json is damaged or inconsistent: task 0 .* occurs twice"):
        Record.from_mapping(content, origin="record.json")
