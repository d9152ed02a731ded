"""Documents on disk: what is written reads back equal, what is not ours is refused with the reason."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from protwin.shared.basics.documents import Document, read_mapping, write_atomically
from protwin.shared.basics.errors import FileError
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import Workload
from tests.proof_size import examples
from tests.strategies.machines import calibrations, hardware
from tests.strategies.plans import plans
from tests.strategies.records import records
from tests.strategies.workloads import workloads

DOCUMENTS: dict[type[Document], SearchStrategy[Any]] = {
    Plan: workloads(max_blocks=3).flatmap(plans).map(lambda drawn: drawn[0]),
    Workload: workloads(max_blocks=3, measured=None),
    Hardware: hardware(),
    Calibration: calibrations(),
    Record: records(),
}
KINDS = pytest.mark.parametrize("kind", DOCUMENTS, ids=lambda kind: kind.__name__)
ONE_FOLDER = [HealthCheck.function_scoped_fixture]


def any_document() -> SearchStrategy[Document]:
    return st.one_of(*DOCUMENTS.values())


def a_plan() -> Plan:
    return Plan(workload_id="0123456789abcdef", chunk_bytes=4096, n_persist=1, n_buffer=2)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- round trips -----------------------------------------------------------------------------------------------------


@KINDS
@settings(max_examples=examples(40, 20), suppress_health_check=ONE_FOLDER)
@given(data=st.data())
def test_every_field_reads_back_equal(kind: type[Document], data: st.DataObject, tmp_path: Path) -> None:
    document = data.draw(DOCUMENTS[kind])
    path = tmp_path / "document.json"
    document.save(path)
    loaded = kind.load(path)
    assert loaded == document
    for name in kind.model_fields:
        assert getattr(loaded, name) == getattr(document, name), name
    assert loaded.to_json() == document.to_json()
    assert leftovers(tmp_path) == ["document.json"]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every scalar in a JSON document, with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copied = content.copy()
    copied[path[0]] = changed(content[path[0]], path[1:], value)
    return copied


@KINDS
@settings(max_examples=15)
@given(data=st.data())
def test_no_field_is_lost_on_the_way(kind: type[Document], data: st.DataObject) -> None:
    """A document with any one number or text changed reads back unequal, or is refused."""
    document = data.draw(DOCUMENTS[kind])
    content = json.loads(document.to_json())
    found = [(path, value) for path, value in leaves(content) if path[0] not in ("kind", "schema_version")]
    path, value = data.draw(st.sampled_from(found))
    if isinstance(value, bool):
        other: Any = not value
    elif isinstance(value, int | float):
        other = value + 1
    else:
        other = "another" if isinstance(value, str) else 0
    try:
        read = kind.from_mapping(changed(content, path, other), origin="text")
    except FileError:
        return
    assert read != document, path


@given(any_document())
def test_nothing_in_a_document_can_be_changed(document: Document) -> None:
    for name in type(document).model_fields:
        with pytest.raises(ValueError, match="frozen"):
            setattr(document, name, None)


def test_a_copy_has_the_identity_of_its_own_fields() -> None:
    plan = a_plan()
    first = plan.identity
    other = plan.model_copy(update={"n_buffer": 3})
    assert other.identity != first
    assert other.identity == plan.model_copy(update={"n_buffer": 3}).identity
    assert plan.model_copy().identity == first


# -- refusals --------------------------------------------------------------------------------------------------------


@KINDS
@settings(max_examples=20, suppress_health_check=ONE_FOLDER)
@given(data=st.data())
def test_a_truncated_file_is_refused(kind: type[Document], data: st.DataObject, tmp_path: Path) -> None:
    text = data.draw(DOCUMENTS[kind]).to_json()
    path = tmp_path / "document.json"
    # The last character is a newline after the closing brace.
    length = data.draw(st.integers(0, len(text) - 2))
    path.write_text(text[:length], encoding="utf-8")
    with pytest.raises(FileError, match="damaged" if length else "is empty"):
        kind.load(path)


@KINDS
@settings(max_examples=10)
@given(data=st.data())
def test_a_file_of_another_kind_is_refused_by_name(kind: type[Document], data: st.DataObject) -> None:
    other = data.draw(st.sampled_from([k for k in DOCUMENTS if k is not kind]))
    content = json.loads(data.draw(DOCUMENTS[other]).to_json())
    with pytest.raises(FileError, match=f"{spoken(other)} file, expected an? {spoken(kind)} file"):
        kind.from_mapping(content, origin="text")


@KINDS
@settings(max_examples=5)
@given(data=st.data())
def test_missing_and_unknown_fields_are_refused_by_name(kind: type[Document], data: st.DataObject) -> None:
    content = json.loads(data.draw(DOCUMENTS[kind]).to_json())
    with pytest.raises(FileError, match="surplus"):
        kind.from_mapping(content | {"surplus": 1}, origin="text")
    for name, field in kind.model_fields.items():
        if field.is_required():
            with pytest.raises(FileError, match=name):
                kind.from_mapping({key: value for key, value in content.items() if key != name}, origin="text")


@KINDS
@settings(max_examples=5)
@given(data=st.data())
def test_numbers_that_are_none_are_refused(kind: type[Document], data: st.DataObject) -> None:
    content = json.loads(data.draw(DOCUMENTS[kind]).to_json())
    numbers = [
        path
        for path, value in leaves(content)
        if isinstance(value, int | float) and not isinstance(value, bool) and path[0] != "schema_version"
    ]
    path = data.draw(st.sampled_from(numbers))
    for wrong in (float("nan"), float("inf"), float("-inf"), "many", [1]):
        with pytest.raises(FileError, match=str(path[0])):
            kind.from_mapping(changed(content, path, wrong), origin="text")


HEAD = {"kind": "plan", "schema_version": 2}
FIELDS = {"workload_id": "w", "chunk_bytes": 1, "n_persist": 0, "n_buffer": 0}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "damaged"),
        ("{", "damaged"),
        ("plan", "damaged"),
        ("[1, 2]", "holds a list"),
        ('"plan"', "holds a text"),
        ("null", "holds null"),
        ("3", "holds a number"),
        ("{}", "no protwin file"),
        ('{"kind": 3}', "no protwin file"),
        ('{"kind": "recipe"}', "a recipe file, expected a plan file"),
        ('{"kind": "plan"}', "no schema_version; this release reads 2. Write it again"),
        ('{"kind": "plan", "schema_version": 3}', "schema_version 3; this release reads 2. Update protwin"),
        # The first version counted chunks from the first block on, and kept what lies outside on the device.
        (json.dumps(FIELDS | {"kind": "plan", "schema_version": 1}), "schema_version 1; this release reads 2. Write"),
        ('{"kind": "plan", "schema_version": 0}', "Write it again"),
        ('{"kind": "plan", "schema_version": "2"}', "Write it again"),
        ('{"kind": "plan", "schema_version": true}', "Write it again"),
        ('{"kind": "plan", "schema_version": 2.0}', "Write it again"),
        (json.dumps(HEAD), "workload_id"),
        (json.dumps(HEAD | FIELDS | {"chunk_bytes": 0}), "chunk_bytes"),
        (json.dumps(HEAD | FIELDS | {"n_buffer": -1}), "n_buffer"),
        (json.dumps(HEAD | FIELDS | {"n_persist": 1.5}), "n_persist"),
        (json.dumps(HEAD | FIELDS | {"prefetch_depth": 0}), "prefetch_depth"),
        (json.dumps(HEAD | FIELDS | {"activation_modes": ["kept"]}), "activation_modes"),
        (json.dumps(HEAD | FIELDS | {"n_checkpoint": 1, "activation_modes": ["keep"]}), "n_checkpoint differs"),
        (json.dumps(HEAD | FIELDS | {"chunk_bytes": float("nan")}), "chunk_bytes"),
        ('{"kind": "plan", "schema_version": 2, "chunk_bytes": 1e999}', "chunk_bytes"),
        ('{"kind": "plan", "schema_version": 2, "chunk_bytes": ' + "9" * 5_000 + "}", "damaged"),
        ("[" * 100_000, "damaged"),
        (json.dumps(HEAD | FIELDS)[:-1] + ', "n_buffer": 3}', "'n_buffer' is stated more than once"),
    ],
    ids=range(29),
)
def test_damaged_and_foreign_files_are_refused_with_the_reason(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FileError) as caught:
        Plan.load(path)
    message = str(caught.value)
    assert str(path) in message
    assert reason in message
    assert "\n" not in message
    assert len(message) < 500 + len(str(path))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"):
        Plan.load(tmp_path / "nothing.json")
    with pytest.raises(FileError, match="cannot be read"):
        Plan.load(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match="cannot be read"):
        Plan.load(tmp_path / "binary.json")
    with pytest.raises(FileError, match="cannot be read"):
        Plan.load("a\0b.json")


def test_toml_is_read_and_its_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        'kind = "plan"\nschema_version = 2\nworkload_id = "0123456789abcdef"\n'
        "chunk_bytes = 4096\nn_persist = 1\nn_buffer = 2\n"
    )
    assert Plan.load(path) == a_plan()
    path.write_text("kind = plan")
    with pytest.raises(FileError, match="damaged"):
        read_mapping(path)


def test_json_is_not_written_under_the_name_of_toml(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"\.json"):
        a_plan().save(tmp_path / "plan.toml")
    assert leftovers(tmp_path) == []


# -- atomic writes ---------------------------------------------------------------------------------------------------


def in_place(path: str | Path, text: str) -> None:
    """The wrong way to write, for which these tests exist: an interruption leaves half a file."""
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
        os.replace(path, path)


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "interrupt"]
)
def test_an_interrupted_write_leaves_the_old_file(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(write: Callable[[Path, str], None]) -> type[BaseException]:
        path = tmp_path / "plan.json"
        path.write_text("old")

        def stop(*_: object, **__: object) -> None:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(os, step, stop)
            with pytest.raises(FileError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
                write(path, "new")
        return caught.type

    interrupted(write_atomically)
    assert (tmp_path / "plan.json").read_text() == "old"
    assert leftovers(tmp_path) == ["plan.json"]
    if step != "chmod" and isinstance(error, KeyboardInterrupt):
        interrupted(in_place)
        assert (tmp_path / "plan.json").read_text() == "new", "the wrong variant is caught"


def test_a_reader_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    seen: list[str] = []

    def looking(step: Callable[..., None]) -> Callable[..., None]:
        def look_and_go_on(*arguments: Any) -> None:
            seen.append(path.read_text())
            step(*arguments)

        return look_and_go_on

    monkeypatch.setattr(os, "fsync", looking(os.fsync))
    monkeypatch.setattr(os, "replace", looking(os.replace))
    write_atomically(path, "new")
    assert seen == ["old", "old"]
    assert path.read_text() == "new"


def test_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "out" / "demo" / "plan.json"
    a_plan().save(path)
    assert leftovers(path.parent) == ["plan.json"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_decides_who_reads_a_new_file(mask: int, mode: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    before = os.umask(mask)
    try:
        a_plan().save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o640)
    a_plan().save(path)
    assert (stat.S_IMODE(path.stat().st_mode), Plan.load(path)) == (0o640, a_plan())


def test_a_link_is_followed(tmp_path: Path) -> None:
    """Replacing the link would leave the file that it names as it was."""
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "plan.json", tmp_path / "plan.json"
    target.write_text("old")
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert leftovers(target.parent) == ["plan.json"]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """``--output /dev/stdout``, and by a user who may do everything, must not end the device."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(path, "new")
        assert os.read(reader, 100) == b"new"
    finally:
        os.close(reader)
    assert path.is_fifo()
    assert leftovers(tmp_path) == ["pipe"]
    by_renaming(path, "new")
    assert not path.is_fifo(), "the wrong variant is caught"


def by_renaming(path: Path, text: str) -> None:
    """The wrong way to write to a device."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(text)
    unfinished.replace(path)


def test_messages_name_no_file_but_the_users(tmp_path: Path) -> None:
    for path in (tmp_path / ("x" * 300), Path("/proc/plan.json")):
        with pytest.raises(FileError) as caught:
            write_atomically(path, "text")
        assert ".part" not in str(caught.value)
        assert "Errno" not in str(caught.value)


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written"):
        write_atomically(tmp_path / "plan.json", "\udcff")
    assert leftovers(tmp_path) == []


def test_the_mark_of_an_editor_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xef\xbb\xbf" + a_plan().to_json().encode())
    assert Plan.load(path) == a_plan()


def test_what_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    """A device that never ends, and a file of weights that was named by mistake."""
    with (tmp_path / "weights").open("wb") as stream:
        stream.truncate(2**33)
    for path in ("/dev/zero", tmp_path / "weights"):
        with pytest.raises(FileError, match="is a device or has more than 1 GiB"):
            read_mapping(path)


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """As ``--plan <(command)`` gives one."""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(a_plan().to_json(),))
    writer.start()
    assert Plan.load(tmp_path / "pipe") == a_plan()
    writer.join()


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "plan.json", tmp_path / "folder", tmp_path / ("x" * 300)):
        with pytest.raises(FileError, match="cannot be written"):
            a_plan().save(path)
    assert leftovers(tmp_path) == ["file", "folder"]


def spoken(kind: type[Document]) -> str:
    return kind.KIND.replace("_", " ")


def test_kinds_are_named_as_people_speak(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"kind": "advice_state", "schema_version": 1}')
    with pytest.raises(FileError, match="is an advice state file, expected a plan file"):
        Plan.load(tmp_path / "state.json")
    (tmp_path / "plan.json").write_text('{"kind": "plan"}')
    with pytest.raises(FileError, match="has no schema_version; this release reads 2"):
        Plan.load(tmp_path / "plan.json")


def test_a_file_that_people_write_is_told_how_it_begins(tmp_path: Path) -> None:
    """It was told to be written again with this release, which writes none."""
    written = tmp_path / "plan.toml"
    for text, said in (
        ("chunk_bytes = 1\n", r'Begin it with kind = "plan" and schema_version = 2\.'),
        ('kind = "plan"\n', r"Write schema_version = 2 below its kind\."),
    ):
        written.write_text(text)
        with pytest.raises(FileError, match=said):
            Plan.load(written)
    written.write_text('kind = "plan"\nschema_version = 1\n')
    with pytest.raises(FileError, match="Write it again with this release"):
        Plan.load(written)
