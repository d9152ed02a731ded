"""Documents on disk: frozen models with a kind and a schema version, written atomically, refused with a reason."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .disk_space import why_unwritable
from .errors import FileError
from .shown import Shown

_LARGEST_BYTES: Final = 2**30
"""No file of ours comes near it; one of weights, named by mistake, must not fill the memory."""
_LONGEST_STEM: Final = 100
"""Characters of a file's name that the name of its unfinished copy keeps: names have at most 255."""
_UNFINISHED: Final = re.compile(r"\..+\.[0-9a-f]{16}\.part")


_COMPLAINTS: Final = {
    "extra_forbidden": "there is no such key",
    "missing": "it is missing",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "mapping_type"), "must be a table of keys"),
    **dict.fromkeys(("tuple_type", "list_type", "set_type", "frozen_set_type"), "must be a list"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    "finite_number": "must be a finite number",
    "string_type": "must be a text",
}
"""By pydantic's type of error, whose words are about Python and not about files."""

Name = Annotated[str, Field(max_length=255)]
"""What a machine, a part of it or a model is called, in tables and messages."""


class FrozenModel(Shown, BaseModel):
    """Data that never changes and knows all of its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields changed, which are not validated.

        Cached properties do not come along: pydantic would hand the copy an identity that belongs to the old fields.
        """
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(copied).model_fields.keys():
            del copied.__dict__[name]
        return copied


class Document(FrozenModel):
    """A model that lives in a file of its own: ``{"kind": ..., "schema_version": ..., <fields>}``."""

    KIND: ClassVar[str]
    SCHEMA_VERSION: ClassVar[int] = 1
    FORMS: ClassVar[str] = ""
    """How people write its figures, told beside a text that is no such figure."""

    def to_json(self) -> str:
        """The document as JSON text; equal documents give equal bytes."""
        head = {"kind": self.KIND, "schema_version": self.SCHEMA_VERSION}
        body = self.model_dump(mode="json")
        return json.dumps(head | body, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the document to ``path`` atomically, as JSON.

        Raises FileError if the folder cannot be written, or if the name promises TOML or HTML.
        """
        check_json_name(as_path(path))
        write_atomically(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a document; JSON, or TOML when the name ends in ``.toml``.

        Raises FileError if it is missing, damaged, of another kind or of a version this release does not read.
        """
        return cls.from_mapping(read_mapping(path), origin=str(path))

    @classmethod
    def from_mapping(cls, content: dict[str, Any], *, origin: str) -> Self:
        """The document that ``content`` describes; ``origin`` names it in messages.  Raises FileError."""
        fields = dict(content)
        kind = fields.pop("kind", None)
        version = fields.pop("schema_version", None)
        by_hand = origin.endswith(".toml")
        if kind != cls.KIND:
            found = f"{_named(kind)} file" if isinstance(kind, str) else "no protwin file"
            head = f' Begin it with kind = "{cls.KIND}" and schema_version = {cls.SCHEMA_VERSION}.'
            raise FileError(
                f"{origin} is {found}, expected {_named(cls.KIND)} file (its 'kind' must be {cls.KIND!r})."
                f"{head if by_hand and kind is None else ''}"
            )
        if type(version) is not int or version != cls.SCHEMA_VERSION:
            newer = isinstance(version, int) and version > cls.SCHEMA_VERSION
            advice = "Update protwin to read it." if newer else "Write it again with this release."
            if by_hand and version is None:
                advice = f"Write schema_version = {cls.SCHEMA_VERSION} below its kind."
            stated = "no schema_version" if version is None else f"schema_version {version!r}"
            raise FileError(f"{origin} has {stated}; this release reads {cls.SCHEMA_VERSION}. {advice}")
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            forms = f" {cls.FORMS}" if cls.FORMS and _is_misread(error) else ""
            raise FileError(f"{origin} is damaged or inconsistent: {describe(error, cls)}{forms}") from error


def _is_misread(error: ValidationError) -> bool:
    """Whether a text stands where a number, or a quantity in another form, is expected."""
    kinds = {"float_parsing", "int_parsing", "value_error"}
    return any(isinstance(item.get("input"), str) and item["type"] in kinds for item in error.errors())


def _named(kind: str) -> str:
    """``"an advice state"`` for ``advice_state``."""
    words = kind.replace("_", " ")
    return f"a{'n' if words[:1] in 'aeiou' else ''} {words}"


def describe(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """The first three complaints of a validation, each with its field, on one line.

    An unknown field gets the one of ``model``, which was validated, that it resembles, and comes first: what is missing
    follows from it.
    """
    complaints = []
    every = sorted(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")
    for item in every[:3]:
        where = "".join(f"{part}." for part in item["loc"]).removesuffix(".")
        stated = item["msg"].removeprefix("Value error, ").removesuffix(".")
        message = _COMPLAINTS.get(item["type"], re.sub(r"^Input should be ", "must be ", stated))
        value = item.get("input")
        shown = "" if item["type"] == "missing" or isinstance(value, dict | list) else f" (found {value!r:.60})"
        meant = _meant_field(model, item["loc"]) if model is not None and item["type"] == "extra_forbidden" else ""
        asked = f".{meant.removesuffix('.')}" if meant else ""
        complaints.append((f"{where}: " if where else "") + message + shown + asked)
    more = error.error_count() - len(complaints)
    told = "; ".join(complaints)
    return told + (f"; and {more} more." if more > 0 else "" if told.endswith("?") else ".")


def _meant_field(model: type[BaseModel], place: Sequence[int | str]) -> str:
    """``" Did you mean memory_bytes?"`` of an unknown field at ``place`` within ``model``, or its keys if none is near.

    ``place`` is pydantic's ``loc``: names of fields, keys and indices, the unknown field last.
    """
    from .suggestions import did_you_mean

    *above, unknown = place
    kinds: list[Any] = [model]
    for part in above:
        if isinstance(part, str):
            # A name is a field of a model, or else a key, whose value the models within the annotation describe.
            fields = [kind.model_fields[part].annotation for kind in kinds if part in kind.model_fields]
            kinds = [found for annotation in fields for found in _models_in(annotation)] if fields else kinds
    names = dict.fromkeys(name for kind in kinds for name in kind.model_fields)
    return f" {did_you_mean(str(unknown), names)}" if names else ""


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def check_json_name(path: Path) -> None:
    """Raise FileError if the name promises something else than JSON that this package writes too."""
    if path.suffix in (".toml", ".html", ".htm"):
        raise FileError(f"{path} would hold JSON, which its name denies. Choose a name that ends in .json.")


def as_path(path: object) -> Path:
    """Where a file is.  Raises FileError if a caller gives something else than a path."""
    if not isinstance(path, str | Path):
        from .arguments import shown

        raise FileError(f"path is {shown(path)}; it must be the path of a file.")
    return Path(path)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The table in a JSON or TOML file.  Raises FileError if it is missing or damaged."""
    path = as_path(path)
    text = read_text(path)
    try:
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text, object_pairs_hook=stated_once)
    except (ValueError, RecursionError) as error:
        what = "is empty" if not text.strip() else f"is damaged: {why_unreadable(error)}"
        raise FileError(f"{path} {what}.") from error
    if not isinstance(content, dict):
        raise FileError(f"{path} holds {_in_json(content)}, expected a table of fields.")
    return content


def why_unreadable(error: ValueError | RecursionError) -> str:
    """What a reader of JSON, TOML or YAML complains of, in words of files where its own are of Python."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if "integer string conversion" in str(error):
        return f"a number has more than {sys.get_int_max_str_digits():,} digits"
    return str(error)


def _in_json(content: object) -> str:
    """What a file holds in the place of a table."""
    named = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return named.get(type(content), "null")


def stated_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of JSON.  Raises ValueError if a key is there twice: of two values one would be lost without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{twice!r:.60} is stated more than once")
    return found


def read_text(path: Path) -> str:
    """The text of a file, without the mark that some editors put before it.  Raises FileError."""
    try:
        found = path.stat()
        # A character device such as /dev/zero may never end; a pipe, which a shell may give, does.
        if stat.S_ISCHR(found.st_mode) or found.st_size > _LARGEST_BYTES:
            raise FileError(f"{path} cannot be read: it is a device or has more than 1 GiB. Name another file.")
        content = path.read_bytes()
    except FileNotFoundError:
        raise FileError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read: {_reason(error)}.") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} cannot be read: it holds no UTF-8 text (byte {error.start}).") from error


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write ``content``, text as UTF-8, so that a reader sees the old file or the whole new one.

    A symbolic link is followed.  A file that is there keeps its mode; a new one gets what the umask leaves.  What is
    no file on a disk (``/dev/stdout``, a pipe) cannot be replaced and is written to.  Raises FileError.
    """
    path, need_bytes = as_path(path), None
    try:
        written = content.encode() if isinstance(content, str) else content
        need_bytes = len(written)
        if _is_stream(path):
            with path.open("wb") as stream:
                stream.write(written)
        else:
            _replace(Path(os.path.realpath(path)), written)
    except (OSError, ValueError) as error:
        raise FileError(why_unwritable(path, error, need_bytes=need_bytes)) from error


def _is_stream(path: Path) -> bool:
    """Whether there is something at ``path`` that is neither a file nor a folder.  Raises OSError."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def unfinished_copies(folder: Path) -> list[Path]:
    """What killed calls of ``write_atomically`` have left in ``folder``.  Raises OSError if it cannot be read."""
    return [path for path in folder.iterdir() if _UNFINISHED.fullmatch(path.name)] if folder.exists() else []


def _replace(path: Path, content: bytes) -> None:
    """Write a copy beside ``path`` and let it take its place; leaves nothing if it raises OSError."""
    made = [folder for folder in path.parents if not folder.exists()]
    unfinished = path.with_name(f".{path.name[:_LONGEST_STEM]}.{os.urandom(8).hex()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if path.exists():
            os.chmod(unfinished, stat.S_IMODE(path.stat().st_mode))
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()
        raise


def _reason(error: Exception) -> str:
    """What is wrong, without the error's number and without the names of files that the user never named."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
