"""What a proof consists of: claims, each with the cases that it was tried on and what went wrong in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.table import Table

_SHOWN_FAILURES: Final = 20


@dataclass(frozen=True)
class Settings:
    """How much is tried."""

    plans: int
    """Random plans of every model."""
    steps: int
    """Steps of every training that is compared."""
    kills: int
    growth_steps: int
    seed: int
    models: tuple[str, ...]
    """Parts of the names of the models that are tried; all of them if empty."""

    def has(self, name: str) -> bool:
        """Whether a model is to be tried."""
        return not self.models or any(part in name for part in self.models)


@dataclass
class Claim:
    """One thing that is to be shown, of one subject."""

    section: str
    subject: str
    claim: str
    num_cases: int = 0
    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def is_shown(self) -> bool:
        """Whether it was tried, and held each time."""
        return self.num_cases > 0 and not self.failures

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Try it once; an assertion or an error within the block is a failure of ``name``, and the others go on."""
        self.num_cases += 1
        try:
            yield
        except Exception as error:
            # Whatever goes wrong in one case is what the table is to show.
            reason = " ".join(str(error).split())[:300]
            self.failures.append(f"{name}: {type(error).__name__}: {reason}")

    def as_mapping(self) -> dict[str, Any]:
        """For the file that is kept."""
        return asdict(self) | {"is_shown": self.is_shown}


def show(claims: Sequence[Claim], title: str, console: Console) -> None:
    """Print the table, and below it what went wrong."""
    table = Table(title=title, title_justify="left")
    for heading in ("section", "subject", "claim"):
        table.add_column(heading)
    table.add_column("cases", justify="right")
    table.add_column("figures")
    table.add_column("failures", justify="right")
    previous = ""
    for claim in claims:
        if previous and claim.section != previous:
            table.add_section()
        figures = ", ".join(f"{name} {value}" for name, value in claim.figures.items())
        failures = str(len(claim.failures)) if claim.num_cases else "not tried"
        shown = claim.section if claim.section != previous else ""
        table.add_row(shown, claim.subject, claim.claim, str(claim.num_cases), figures, failures)
        previous = claim.section
    console.print(table)
    for claim in claims:
        for failure in claim.failures[:_SHOWN_FAILURES]:
            console.print(f"{claim.section}, {claim.subject}, {claim.claim}: {failure}")
        if len(claim.failures) > _SHOWN_FAILURES:
            console.print(f"... and {len(claim.failures) - _SHOWN_FAILURES} more")
