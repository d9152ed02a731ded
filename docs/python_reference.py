"""Write docs/python/*.md: one page per face, with every name that it gives; mkdocstrings shows their docstrings.

Run it with ``make docs``; a test fails while a page is stale.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parent / "python"
FACES: Final = ("protwin", "shared", "sim", "runtime", "calibration")


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for face in FACES:
        (FOLDER / f"{face}.md").write_text(page(face), encoding="utf-8")


def page(face: str) -> str:
    """The page of one face as text: functions, then classes, then errors, each by name."""
    name = face if face == "protwin" else f"protwin.{face}"
    module = import_module(name)
    summary = (module.__doc__ or "").split("\n\n")[0]
    kinds: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": []}
    for one in module.__all__:
        found = getattr(module, one)
        if isinstance(found, type):
            kinds["Errors" if issubclass(found, BaseException) else "Classes"].append(one)
        else:
            assert inspect.isroutine(found), f"{name}.{one} is neither a class nor a function"
            kinds["Functions"].append(one)
    parts = [
        f"# {name}\n",
        "<!-- Written by docs/python_reference.py from the face's names. Change those, then run `make docs`. -->\n",
        f"{' '.join(summary.split())} Import these names from `{name}`; the modules behind it may move.",
    ]
    for heading, names in kinds.items():
        if names:
            parts.append(f"\n## {heading}")
            parts += [f"\n::: {name}.{one}" for one in names]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
