"""A workload as tables for people."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table

from ..basics.units import format_bytes, format_seconds
from ..catalogue.models import ModelList
from ..schema.workload import Phase, Workload
from .style import FittingTable, add_row, plain_table, spaced, titled


def workload_tables(workload: Workload) -> RenderableType:
    """What the model is, and what each distinct block does."""
    facts = titled(f"Workload {workload.model_name}", _facts(workload))
    return spaced((facts, titled("What each part does", _phases(workload))))


def models_table(listed: ModelList) -> RenderableType:
    """The catalogue of models; papers are in its JSON."""
    rows = []
    for model in listed.models:
        parameters = f"{model.num_parameters:,}" if model.num_parameters is not None else ""
        source = model.source.removeprefix("config.json of ").split(" on the Hugging Face hub")[0]
        rows.append((model.name, parameters, str(model.dtype), model.architecture, source))
    columns = ("name", ">parameters", "published as", "architecture", "configuration")
    return FittingTable(columns, rows, always=3, expendable=("architecture",))


def _facts(workload: Workload) -> Table:
    table = plain_table("", "")
    table.show_header = False
    trainable = sum(p.num_elements for p in workload.parameters if p.trainable)
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in workload.batch_shapes.items())
    for name, value in (
        ("identity", workload.identity),
        ("parameters", f"{workload.num_parameters:,} ({trainable:,} trainable), {workload.compute_dtype}"),
        ("blocks", f"{workload.num_blocks} of {len(workload.profiles)} kinds"),
        ("batch", f"{shapes}: {workload.num_tokens:,} tokens"),
        ("traced with", f"{workload.traced_with} tensors"),
        ("timed on", workload.measured_on or "nothing: times come from a roofline"),
    ):
        add_row(table, name, value)
    return table


def _phases(workload: Workload) -> Table:
    table = plain_table("part", ">operations", ">GFLOP", ">leaves behind", ">peak above start", ">seconds")
    add_row(table, "prologue forward", *_cells(workload.prologue_forward))
    counts = [sum(block.profile == i for block in workload.blocks) for i in range(len(workload.profiles))]
    for index, (profile, count) in enumerate(zip(workload.profiles, counts, strict=True)):
        kind = f"block kind {index} (x {count})"
        for name in ("forward", "backward", "checkpoint_forward", "recompute", "checkpoint_backward"):
            add_row(table, f"{kind} {name.replace('_', ' ')}", *_cells(getattr(profile, name)))
    add_row(table, "epilogue forward", *_cells(workload.epilogue_forward))
    add_row(table, "epilogue backward", *_cells(workload.epilogue_backward))
    add_row(table, "prologue backward", *_cells(workload.prologue_backward))
    return table


def _cells(phase: Phase) -> tuple[str, str, str, str, str]:
    return (
        str(sum(operation.count for operation in phase.operations)),
        f"{phase.flops / 1e9:.4g}",
        format_bytes(phase.net_bytes),
        format_bytes(phase.peak_bytes),
        format_seconds(phase.measured_s) if phase.measured_s is not None else "",
    )
