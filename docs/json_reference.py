"""Write docs/json.md: every kind of document and every field, read off the models and their docstrings.

Run it with ``make docs``; a test fails while the page is stale.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from protwin.shared.basics.documents import Document
from protwin.shared.catalogue.parts import LinkPair

_ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = _ROOT / "docs" / "json.md"
_FOLDERS: Final = ("shared", "sim", "runtime", "calibration")

_UNITS: Final = {
    "_bytes_per_s": "bytes per second",
    "_flop_per_s": "FLOP per second",
    "_usd_per_hour": "US dollars per hour",
    "usd_per_million_tokens": "US dollars per million tokens",
    "_per_s": "per second",
    "_bytes": "bytes",
    "_flops": "FLOP",
    "_frac": "fraction (1 is the whole)",
    "_s_per_byte": "seconds per byte",
    "_s": "seconds",
    "_hz": "hertz",
    "_id": "identity",
    "_hash": "hash",
}
"""By the end of a field's name; the longest end counts."""

_WHENCE: Final = {
    "plan": "`protwin search --output` writes it; `simulate` and `run` read it. People may write it too, as TOML.",
    "pipeline": "`protwin search --output` writes it of a distillation on several ranks; `simulate` reads it.",
    "pipeline_prediction": "`protwin simulate --json` prints it of a pipeline, `--output` writes it.",
    "split_search": "`protwin search --json` prints it of a distillation on several ranks.",
    "record": "`protwin simulate --json` and `protwin run --json` print it, `--output` writes it; `compare` reads two.",
    "search_result": "`protwin search --json` prints it.",
    "sweep": "`protwin sweep --json` prints it, `--output` writes it.",
    "explanation": "`protwin explain-config --json` prints it.",
    "advice": "`protwin advise --json` prints it, `--output` writes it.",
    "largest_models": "`protwin largest --json` prints it, `--output` writes it.",
    "advice_state": "`protwin advise --state` keeps it, to go on from.",
    "comparison": "`protwin compare --json` prints it, `--output` writes it.",
    "calibration": "`protwin calibrate --json` prints it, `--output` writes it; `search` and `simulate` read it.",
    "fidelity": "`protwin validate --json` prints it, `--output` writes it.",
    "workload": "`protwin trace --output` writes it; `search`, `simulate` and `run` read it.",
    "hardware": "`protwin hardware show --json` and `probe --json` print it, `--output` writes it, as JSON or TOML.",
    "model": "One model of the catalogue that comes with protwin.",
    "model_list": "The models of the catalogue that comes with protwin.",
    "workload_family": "The workloads of one model for every shape; they come with protwin, compressed.",
    "family_tilings": "What the workloads of one model do in any number of tiles; they come with protwin, compressed.",
    "student": "People write it, as TOML; bypass distillation reads it.",
    "bypass_history": "Lies in the folder of a bypass run: what `protwin bypass` has reported so far.",
    "bypass_run": "Lies in the folder of a bypass run, beside its checkpoints; `protwin bypass --json` prints it.",
    "checkpoint": "Lies in the folder of a checkpoint, beside its tensors.",
    "checkpoint_report": "`protwin checkpoint inspect --json` and `reshard --json` print it.",
    "consolidated_weights": "`protwin checkpoint consolidate --json` prints it.",
    "cached_workload": "Kept in the user's cache of traced workloads.",
}

_ALIKE: Final = {
    "model_name": "What the model is called.",
    "hardware_name": "What the machine is called, in the catalogue or in its file.",
    "predicted_hardware": "The machine that the prediction is for.",
    "measured_hardware": "The machine's description that the measurement names.",
    "software": "Versions, by name, of what it was made with.",
    "name": "What it is called.",
    "source": "Where the figures come from.",
    "kind": "What kind it is.",
    "dtype": "Element type.",
    "plan": "The plan.",
    "lane": "The lane.",
    "lanes": "What each lane did.",
    "tasks": "When each task ran.",
    "forward": "Of the forward.",
    "backward": "Of the backward.",
    "task": "The task's id in the schedule.",
    "count": "How many there are.",
    "trainable": "Whether it is trained.",
    "micro_batches": "Forwards and backwards per step.",
    "micro_batch_size": "Samples of one forward and backward.",
    "value": "Its value.",
    "shape": "Extents, outermost first.",
    "only_measured": "Names of tasks that the predicted record lacks.",
    "architecture": "The device's architecture, by the maker's name.",
    "adapters_per_node": "Network adapters of every node.",
    "seconds": "Seconds.",
}
"""Of fields that say by their names what they are, and have no docstring of their own."""

_HEAD: Final = """# Files

<!-- Written by docs/json_reference.py from the models and their docstrings. Change those, then run `make docs`. -->

Every command that prints tables prints one JSON document instead with `--json`, on standard output alone; progress,
warnings and errors go to standard error. The exit code is 0 on success, 2 for a mistake of the user (one message on
standard error, no document), 130 after Ctrl-C, 1 where nobody reads standard output any more.

- **Documents** are objects that begin with `kind` and `schema_version`. A release reads the versions that it names
  below and refuses others with the reason. A field that is renamed, removed or given another meaning raises the
  version; a field that is added with a default does not, so programs should ignore what they do not know.
- A document within another, as the plan of a record, has its fields alone, without `kind` and `schema_version`.
- **Quantities** carry their unit at the end of their name: `_s` seconds, `_bytes` bytes, `_flops` floating-point
  operations, `_bytes_per_s`, `_flop_per_s`, `_frac` a fraction of 1. `num_` is a count. Numbers are finite.
- **Enumerations** are written by name. `null` stands for a value that is not known or does not apply; the meaning says
  which.
- Every field is written. One that is `null`, empty or 0 by default may be missing from a file that is read.
- Equal input gives equal bytes. Files are replaced at once: a reader sees the old file or the whole new one.

`protwin hardware list --json` prints no document but a list of objects with the names of each machine's parts: `name`,
`num_devices`, `device`, `host`, `link`, `node`, `network` (`null` where there is none). `protwin hardware parts --json`
prints an object with the lists `hosts`, `links`, `disks`, `nodes` and `networks`, of [Host](#host),
[LinkPair](#linkpair), [Disk](#disk), [Node](#node) and [Network](#network). `protwin explain-config
--json` prints of a file with a section `protwin` an object with the keys in `section`, and the lists of texts
`commands`, `obstacles` and `notes`; with `--hardware` also the document [explanation](#explanation). `--timeline`
writes the Trace Event Format of Chrome, for Perfetto: microseconds, one process per record, one thread per lane; a
task's arguments are its `task`, `kind`, `chunk` or `section` and `duration_s`, and where the schedule is at hand also
`moved_bytes`, `allocated_bytes`, `freed_bytes`, `waits_for` and `waits_for_previous_iteration`.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def documents() -> list[type[Document]]:
    """Every kind of document, by kind; their modules are found by looking through the sources."""
    found = []
    for folder in _FOLDERS:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            for name in re.findall(
                r"^class (\w+)\((?:\w+, )*Document\):(?:\n(?!class ).*)*?\n    KIND: ClassVar\[str\] = ",
                path.read_text(),
                re.M,
            ):
                module = ".".join(("protwin", *path.relative_to(_ROOT).with_suffix("").parts))
                found.append(getattr(import_module(module), name))
    return sorted(found, key=lambda document: document.KIND)


@cache
def _kind_of_class() -> dict[str, str]:
    return {document.__name__: document.KIND for document in documents()}


def page() -> str:
    """The page as text."""
    kinds = documents()
    parts = [_HEAD, "## Kinds of documents\n", "| kind | version | |\n| --- | --- | --- |"]
    for document in kinds:
        whence = _WHENCE.get(document.KIND, _first_sentence(document))
        parts.append(f"| [`{document.KIND}`](#{_anchor(document.KIND)}) | {document.SCHEMA_VERSION} | {whence} |")
    models: dict[str, type[BaseModel]] = {}
    enums: dict[str, type[StrEnum]] = {}
    for document in kinds:
        parts.append(f"\n## {document.KIND}\n\n{_text(document)}\n")
        parts.append(_table(document))
        _collect(document, models, enums)
    models[LinkPair.__name__] = LinkPair
    parts.append("\n## Parts\n\nObjects that stand within documents.")
    for name in sorted(models):
        parts.append(f"\n### {name}\n\n{_text(models[name])}\n")
        parts.append(_table(models[name]))
    parts.append("\n## Enumerations")
    for name in sorted(enums):
        parts.append(f"\n### {name}\n\n{_text(enums[name])}\n")
        meanings = _attribute_docstrings(enums[name])
        parts.append("| value | meaning |\n| --- | --- |")
        parts += [f"| `{member.value}` | {_cell(meanings.get(member.name, ''))} |" for member in enums[name]]
    return "\n".join(parts) + "\n"


def fields_of(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    """Per field of a model: name, type, unit and meaning."""
    schema = model.model_json_schema(mode="validation", ref_template="{model}")
    meanings: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            meanings |= _attribute_docstrings(base)
    for name, described in schema.get("properties", {}).items():
        words = meanings.get(name) or _ALIKE.get(name) or _of_its_type(model.model_fields[name].annotation)
        yield name, _type(described), _unit(name), words


def _of_its_type(annotation: Any) -> str:
    """What the type of a field says of itself, where it is one of ours."""
    ours = [found for found in _classes(annotation) if found.__module__.startswith("protwin.")]
    return _first_sentence(ours[0]) if ours else ""


def _table(model: type[BaseModel]) -> str:
    rows = ["| field | type | unit | meaning |", "| --- | --- | --- | --- |"]
    rows += [f"| `{name}` | {kind} | {unit} | {_cell(words)} |" for name, kind, unit, words in fields_of(model)]
    return "\n".join(rows)


def _type(described: dict[str, Any]) -> str:
    """A JSON type in words; what is defined on the page is a link."""
    if "$ref" in described:
        name = _kind_of_class().get(described["$ref"], described["$ref"])
        return f"[{name}](#{_anchor(name)})"
    if "anyOf" in described:
        return " or ".join(dict.fromkeys(_type(one) for one in described["anyOf"]))
    if "allOf" in described:
        return _type(described["allOf"][0])
    if "const" in described:
        return f"`{described['const']}`"
    if "enum" in described:
        return " or ".join(f"`{value}`" for value in described["enum"])
    kind = described.get("type")
    if kind == "array":
        if "prefixItems" in described:
            return "[" + ", ".join(_type(one) for one in described["prefixItems"]) + "]"
        return f"list of {_type(described.get('items', {}))}"
    if kind == "object":
        values = described.get("additionalProperties")
        return f"object of {_type(values)}" if isinstance(values, dict) else "object"
    words = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
    return words.get(str(kind), "any") + _bounds(described)


def _bounds(described: dict[str, Any]) -> str:
    if "exclusiveMinimum" in described:
        return f" > {described['exclusiveMinimum']:g}"
    return f" ≥ {described['minimum']:g}" if "minimum" in described else ""


def _unit(name: str) -> str:
    ends = [end for end in _UNITS if name.endswith(end)]
    if ends:
        return _UNITS[max(ends, key=len)]
    return "count" if name.startswith("num_") else ""


def _collect(model: type[BaseModel], models: dict[str, type[BaseModel]], enums: dict[str, type[StrEnum]]) -> None:
    """Add every model and enumeration that the fields of ``model`` name, at any depth."""
    for field in model.model_fields.values():
        for found in _classes(field.annotation):
            if issubclass(found, Document):
                continue  # it has a section of its own
            if issubclass(found, BaseModel) and found.__name__ not in models:
                models[found.__name__] = found
                _collect(found, models, enums)
            elif issubclass(found, StrEnum):
                enums[found.__name__] = found


def _classes(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and not hasattr(annotation, "__origin__"):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _classes(argument)


def _attribute_docstrings(owner: type) -> dict[str, str]:
    """The strings that follow the attributes of a class, by attribute."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        target = statement.target if isinstance(statement, ast.AnnAssign) else None
        if isinstance(statement, ast.Assign):
            target = statement.targets[0]
        if not isinstance(target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            found[target.id] = str(following.value.value)
    return found


def _text(owner: type) -> str:
    return _cell(inspect.getdoc(owner) or "", separator="\n")


def _first_sentence(owner: type) -> str:
    return _text(owner).split("\n", 1)[0]


def _cell(words: str, *, separator: str = " ") -> str:
    """Words for a cell of a table: on one line, with single backquotes, and without what Markdown takes for markup."""
    words = re.sub(r"``([^`]*)``", r"`\1`", words)
    paragraphs = [" ".join(part.split()) for part in words.split("\n\n")]
    parts = re.split(r"(`[^`]*`)", (separator * 2 if separator == "\n" else " ").join(paragraphs))
    return "".join(part if part.startswith("`") else re.sub(r"([|<*\[\]])", r"\\\1", part) for part in parts)


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


if __name__ == "__main__":
    main()
