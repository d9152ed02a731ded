"""Code files that come with a model, and whether they may run.

[Note: Code of a model's own]
``auto_map`` of a ``config.json`` names classes (``modeling_mine.Mine``) of files that lie beside it.  transformers runs
these files when it loads the model, and they can do whatever the user can.  So none runs, or is copied, unless the user
says so.  A name that leads out of the folder (``repository--module.Class``, fetched from the hub, or a path) is refused
in any case.  transformers finds what such a file imports of its folder by two patterns, and not by its syntax
(``dynamic_module_utils.get_relative_imports``).  Ours are the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..basics.errors import FileError

AUTO_MAP: Final = "auto_map"
"""What configurations call the classes of a model's own code."""
_CLASS: Final = re.compile(r"([A-Za-z_]\w*)\.[A-Za-z_]\w*", re.ASCII)
_MODULE: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_RELATIVE_IMPORTS: Final = (
    re.compile(r"^\s*import\s+\.(\S+)\s*$", re.MULTILINE),
    re.compile(r"^\s*from\s+\.(\S+)\s+import", re.MULTILINE),
)


@dataclass(frozen=True, slots=True)
class OwnCode:
    """The code files of one model."""

    folder: Path
    auto_map: Mapping[str, Any]
    """As the configuration has it: ``module.Class`` by the class of transformers that loads it."""
    files: Mapping[str, bytes]
    """What the files hold, by name: those of the classes, and those that they import of the folder."""

    @property
    def fingerprint(self) -> str:
        """Of the classes and the files."""
        digest = hashlib.sha256(json.dumps(self.auto_map, sort_keys=True).encode())
        for name, content in sorted(self.files.items()):
            digest.update(f"{name} {len(content)} ".encode() + content)
        return digest.hexdigest()[:16]

    def class_for(self, auto_class: str) -> str | None:
        """The ``module.Class`` that ``auto_class`` loads; None if that is transformers' own."""
        found = self.auto_map.get(auto_class)
        return found if isinstance(found, str) else None


def own_code(folder: Path, configuration: Mapping[str, Any]) -> OwnCode | None:
    """The code that the configuration of the model in ``folder`` names; None if it names none.  Nothing of it runs.

    Raises FileError if a name is none of a class in a file of ``folder``, or if such a file cannot be read.
    """
    named = configuration.get(AUTO_MAP)
    if not named:
        return None
    origin = folder / "config.json"
    if not isinstance(named, Mapping):
        raise FileError(f"{AUTO_MAP} of {origin} is a {type(named).__name__}, expected a table of classes.")
    files: dict[str, bytes] = {}
    for stated in _stated(named):
        found = _CLASS.fullmatch(stated) if isinstance(stated, str) else None
        if found is None:
            raise FileError(
                f"{AUTO_MAP} of {origin} names {stated!r:.80}, which is no class of a file in that folder. Only such "
                f"code can be trusted: get the files, and name them as module.Class."
            )
        _read(folder, found[1], str(origin), files)
    return OwnCode(folder, dict(named), files)


def trusted_code(folder: Path, configuration: Mapping[str, Any], *, is_trusted: bool) -> OwnCode | None:
    """The code that the model in ``folder`` is made by, which may run; None if transformers' own code makes it.

    Raises FileError as ``own_code`` does, and if there is code that nobody has said may run.
    """
    code = own_code(folder, configuration)
    if code is not None and not is_trusted:
        raise FileError(
            f"the model in {folder} comes with code of its own: {', '.join(code.files)}. It did not run. Read it, and "
            f"let it run with --trust-remote-code (in Python trust_remote_code=True); or, if transformers has that "
            f"model itself, remove {AUTO_MAP} from {folder / 'config.json'}."
        )
    return code


def _stated(named: Mapping[str, Any]) -> Iterator[Any]:
    """All classes; of tokenizers there may be two, or None in the place of one."""
    for value in named.values():
        yield from (one for one in value if one is not None) if isinstance(value, list | tuple) else (value,)


def _read(folder: Path, module: str, origin: str, files: dict[str, bytes]) -> None:
    """Add the file of ``module``, and all that it imports of the folder, to ``files``."""
    name = f"{module}.py"
    if name in files:
        return
    try:
        content = (folder / name).read_bytes()
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise FileError(f"{origin} names {name}, which cannot be read: {reason}. Get the folder again.") from error
    files[name] = content
    for imported in sorted({found for pattern in _RELATIVE_IMPORTS for found in pattern.findall(text)}):
        if not _MODULE.fullmatch(imported):
            raise FileError(
                f"{folder / name} imports .{imported}, which is no file in its own folder. transformers loads no other."
            )
        _read(folder, imported, str(folder / name), files)
