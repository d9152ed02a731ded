"""Sections that a file holds itself, or names the files of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..basics.documents import read_text, stated_once
from ..basics.errors import FileError
from .keys import Walk, shown


def section(walk: Walk, key: str, folder: Path | None) -> Mapping[str, Any]:
    """The section at ``key``, of the file itself or of one that it names, in ``folder``; empty where there is none.

    Raises FileError if the file that is named cannot be read.
    """
    given = walk.value(key)
    if given is None:
        return {}
    if isinstance(given, Mapping):
        walk.opened.add(key)
        return given
    if not isinstance(given, str):
        walk.refuse(key, "a section, or the path of its JSON file")
        return {}
    path = next((one for one in ((folder or Path()) / given, Path(given)) if one.is_file()), None)
    if path is None:
        place = (folder or Path()) / given
        raise FileError(
            f"{key} is {shown(given)}, and there is no file {place}. Put it there, or its content in place."
        )
    try:
        found = json.loads(read_text(path), object_pairs_hook=stated_once)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}, which {key} names, is no JSON: {error}.") from error
    if not isinstance(found, Mapping):
        raise FileError(f"{path}, which {key} names, holds a {type(found).__name__}, where a section belongs.")
    walk.means(key, "read of that file")
    return found
