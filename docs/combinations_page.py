"""Writes docs/combinations.md: which methods of training go together, as tests have it.  Run it with ``make docs``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.runtime.pairs import ALL_METHODS, BYPASS, ELSEWHERE, METHODS, RANKS, SHARED, verdict  # noqa: E402

_REASONS = {
    "compiled block": "A compiled part is refused by name, since nobody has seen what it saves "
    "([decision 0010](decisions/0010-compiled-blocks-are-refused.md)).",
    BYPASS: "A student's block runs backward right after its forward, so that nothing of it is swapped, recomputed or "
    "run in tiles, and its file says what of it is learnt.",
}


def page() -> str:
    """The page."""
    short = {name: str(number) for number, name in enumerate(ALL_METHODS, start=1)}
    lines = [
        "# What goes together",
        "",
        "Written by `docs/combinations_page.py` from the tests. Each **yes** among the first twelve is a training by",
        "both methods, in one plan, with the losses and weights of the plain loop bit for bit",
        "(`tests/runtime/training/test_pairs.py`). Nine of them train in one plan, too: all but float16, 8-bit Adam",
        "and compiled blocks.",
        "",
        "| | " + " | ".join(short.values()) + " |",
        "| --- |" + " --- |" * len(short),
    ]
    for one in ALL_METHODS:
        cells = ["–" if one == other else verdict(one, other) for other in ALL_METHODS]
        lines.append(f"| {short[one]} {one} | " + " | ".join(cells) + " |")
    lines += ["", "**not tried**: no test holds the pair. It may work, or be refused.", ""]
    lines += [f"- {name}: {reason}" for name, reason in _REASONS.items()]
    lines += ["", "Pairs that need several processes or a teacher are held by these tests:", ""]
    for path in dict.fromkeys(ELSEWHERE.values()):
        pairs = [f"{one} with {other}" for (one, other), held in ELSEWHERE.items() if held == path]
        lines.append(f"- `{path}`: {', '.join(pairs)}")
    return "\n".join(lines) + "\n"


assert {RANKS, SHARED, BYPASS, *METHODS} == set(ALL_METHODS)

if __name__ == "__main__":
    (ROOT / "docs" / "combinations.md").write_text(page(), encoding="utf-8")
