"""Writes docs/families.md: which model families train by a plan, from the newest sweep.  Run it with ``make docs``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def newest() -> dict[str, Any]:
    """The sweep that was kept last."""
    (path,) = sorted((ROOT / "benchmarks" / "results").glob("families-*.json"))[-1:]
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def page(found: dict[str, Any]) -> str:
    """The page of one sweep."""
    rows = found["rows"]
    counts = Counter(row["verdict"] for row in rows)
    lines = [
        "# Model families",
        "",
        "Written by `docs/families_page.py` from the result of `make families`. Each family of transformers is built",
        "at a tiny size and trained for three steps, by a plain loop and by a plan that offloads every chunk and",
        "checkpoints every other block. **equal**: losses, weights and buffers are the plain loop's, bit for bit",
        "(float32, CPU). **refused**: a message says why, before anything is done.",
        "",
        f"{found['date']}, torch {found['torch']}, transformers {found['transformers']}: {counts['equal']} of",
        f"{len(rows)} families are equal, {counts['refused']} refused.",
        "",
        "Blocks are found by themselves. A model of another family, or of your own, is traced in the same way",
        "([own model](how-to/own-model.md)).",
    ]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        lines += [
            "",
            f"## {kind.capitalize()}",
            "",
            "| family | model | blocks | under a plan |",
            "| --- | --- | ---: | --- |",
        ]
        for row in rows:
            if row["kind"] == kind:
                said = row["verdict"] + (f": {_cell(row['reason'])}" if "reason" in row else "")
                lines.append(f"| {row['family']} | {row.get('model', '–')} | {row.get('blocks', '–')} | {said} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """The first sentence."""
    return text.split(". ")[0].rstrip(".").replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    (ROOT / "docs" / "families.md").write_text(page(newest()), encoding="utf-8")
