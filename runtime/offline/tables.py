"""What a checkpoint is, as tables."""

from __future__ import annotations

from ...shared.basics.units import format_bytes, format_count
from ...shared.tables.labels import NO_VALUE
from ...shared.tables.table import Parts, Table
from .inspecting import CheckpointReport


def checkpoint_tables(report: CheckpointReport) -> Parts:
    """What it is of, and its files."""
    facts = [("model", report.model_name), ("step", f"{report.step:,}"), ("ranks", f"{report.num_ranks:,}")]
    if report.left_out is not None:
        facts.append(("not in it", f"the {report.left_out.part}'s weights (identity {report.left_out.identity})"))
    if report.optimizer is not None:
        facts.append(("optimizer", report.optimizer))
    if report.num_parameters is not None and report.weight_bytes is not None:
        facts.append(("weights", f"{format_count(report.num_parameters)}, {format_bytes(report.weight_bytes)}"))
    if report.state_bytes is not None:
        facts.append(("optimizer state", format_bytes(report.state_bytes)))
    facts.append(("software", ", ".join(f"{name} {version}" for name, version in report.software.items())))
    files = [
        (file.name, NO_VALUE if file.size_bytes is None else format_bytes(file.size_bytes), file.damage or "whole")
        for file in report.files
    ]
    return (
        Table(title="Checkpoint", columns=("", ""), rows=facts),
        Table(title="Files", columns=("file", ">size", "state"), rows=files),
    )
