"""Saves over an earlier checkpoint, killed before every operation on files; run as a program.

``python -m tests.runtime.killed_saving FOLDER`` prints, as JSON, for every variant and every place of the kill until
nothing loads: the operation, what is loaded (a step, or the message of the refusal), and what lies there after one more
save.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import protwin.runtime.checkpoints.checkpoints as checkpoints
from protwin.shared.basics.errors import FileError
from tests.runtime.file_operations import before_every_operation, loaded_step, save


@contextmanager
def in_place(folder: Any, *, manifest: str, known: Collection[str], need_bytes: int | None = None) -> Iterator[Path]:
    """A wrong variant: the files are replaced where they are."""
    Path(folder).mkdir(exist_ok=True)
    yield Path(folder)


@contextmanager
def removed_first(
    folder: Any, *, manifest: str, known: Collection[str], need_bytes: int | None = None
) -> Iterator[Path]:
    """A wrong variant: the earlier folder is removed before the new one takes its place."""
    path = Path(folder)
    part = path.with_name("part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    yield part
    if path.exists():
        for file in path.iterdir():
            os.unlink(file)
        os.rmdir(path)
    os.rename(part, path)


VARIANTS = {"right": checkpoints.replaced_folder, "in place": in_place, "removed first": removed_first}  # type: ignore[attr-defined]


def killed_before(number: int, folder: Path) -> str | None:
    """Save in a process of its own that dies before operation ``number``; gives its name, None if it did not die."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        remaining = number

        def die(name: str, args: tuple[Any, ...]) -> None:
            nonlocal remaining
            remaining -= 1
            if remaining:
                return
            if name == "fsync":
                # What was not synced may have reached the disk in part.
                size_bytes = os.fstat(args[0]).st_size
                if os.readlink(f"/proc/self/fd/{args[0]}").endswith((".pt", ".json", ".safetensors")):
                    os.truncate(f"/proc/self/fd/{args[0]}", size_bytes // 2)
            os.write(writable, name.encode())
            os._exit(9)

        with before_every_operation(die):
            save(2, folder)
        os._exit(0)
    os.close(writable)
    _, status = os.waitpid(child, 0)
    name = os.read(readable, 100).decode()
    os.close(readable)
    assert os.waitstatus_to_exitcode(status) == (9 if name else 0)
    return name or None


def kills(variant: str, parent: Path) -> list[dict[str, Any]]:
    """Kill before every operation there is."""
    found = []
    number = 0
    while True:
        number += 1
        checkpoints.replaced_folder = VARIANTS["right"]  # type: ignore[attr-defined]
        folder = parent / str(number) / "saved"
        folder.parent.mkdir(parents=True)
        save(1, folder)
        checkpoints.replaced_folder = VARIANTS[variant]  # type: ignore[attr-defined]
        operation = killed_before(number, folder)
        try:
            loaded: int | str = loaded_step(folder)
        except FileError as error:
            loaded = str(error)
        if variant == "right":
            save(3, folder)
            assert loaded_step(folder) == 3
        names = sorted(os.listdir(folder.parent))
        found.append({"operation": operation, "loaded": loaded, "names": names})
        if operation is None or isinstance(loaded, str):
            return found


def main() -> None:
    json.dump({variant: kills(variant, Path(sys.argv[1]) / variant) for variant in VARIANTS}, sys.stdout)


if __name__ == "__main__":
    main()
