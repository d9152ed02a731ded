"""Writes docs/constants.md: every constant of the cost model, its value and its source.  Run it with ``make docs``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BESIDE = (ROOT / "sim" / "engine" / "error_sources.py", ROOT / "shared" / "schema" / "hardware.py")
FILES = (*sorted(file for room in ("operations", "costs") for file in (ROOT / "sim" / room).glob("*.py")), *BESIDE)
SOURCE = re.compile(
    r"arXiv|doi|github|NVIDIA|NCCL|CUTLASS|PTX|bench-|benchmarks/|[Mm]easured|published|torch|Little|definition"
    r"|estimate|\d %|counted|Note:"
)
"""What tells where a figure comes from."""
_LONGEST = 100


@dataclass(frozen=True)
class Constant:
    """One figure, or a table of figures."""

    path: str
    name: str
    value: str
    words: str
    """Its docstring, and the comments within it."""
    is_counted: bool
    """Whether it is made of whole numbers: a count or a size, and no rate."""

    @property
    def has_source(self) -> bool:
        """Whether its words tell where it comes from."""
        return SOURCE.search(self.words) is not None


def constants() -> Iterator[Constant]:
    """Every constant of ``FILES`` that has a number in it, in their order."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        lines, body = text.splitlines(), ast.parse(text).body
        for node, following in zip(body, [*body[1:], None], strict=True):
            if not isinstance(node, ast.AnnAssign) or node.value is None or "Final" not in ast.unparse(node.annotation):
                continue
            numbers = [
                leaf.value
                for leaf in ast.walk(node.value)
                if isinstance(leaf, ast.Constant) and isinstance(leaf.value, int | float)
            ]
            if not numbers:
                continue
            docstring = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                docstring = str(following.value.value)
            of_value = lines[node.lineno - 1 : node.end_lineno]
            comments = [line.split("# ", 1)[1] for line in of_value if line.lstrip().startswith("# ")]
            assert isinstance(node.target, ast.Name)
            yield Constant(
                path=str(path.relative_to(ROOT)),
                name=node.target.id,
                value=ast.unparse(node.value),
                words=" ".join(" ".join([docstring, *comments]).split()),
                is_counted=all(isinstance(number, int) for number in numbers),
            )


def page() -> str:
    """The page."""
    lines = [
        "# Constants",
        "",
        "Written by `docs/constants_page.py` from the code. These are all numbers that predictions without",
        "measurements are made of, besides the data sheets of the [catalogue](machines.md) and NCCL's tables. No",
        "constant of a time is fitted to a published training run.",
        "[Predictions](predictions.md#where-the-constants-come-from) explains how they work together, and",
        "[intervals](intervals.md) what the errors in `error_sources.py` are for.",
    ]
    path = ""
    for one in constants():
        if one.path != path:
            path = one.path
            lines += ["", f"## {path}", "", "| constant | value | what it is, and its source |", "| --- | --- | --- |"]
        value = one.value if len(one.value) <= _LONGEST else "a table"
        lines.append(f"| `{one.name}` | `{value}` | {_cell(one.words)} |")
    return "\n".join(lines) + "\n"


def _cell(words: str) -> str:
    return words.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    (ROOT / "docs" / "constants.md").write_text(page(), encoding="utf-8")
