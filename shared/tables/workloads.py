"""Workloads and the catalogue of models as tables."""

from __future__ import annotations

from ..basics.units import counted, format_bytes, format_count, format_seconds
from ..catalogue.models import ModelList
from ..schema.workload import LossHead, Phase, Workload
from .question import packing_words, weights_words
from .table import Parts, Table


def workload_tables(workload: Workload) -> Parts:
    """What the model is, and what each distinct block does."""
    return _facts(workload), _phases(workload)


def memory_words(workload: Workload) -> str | None:
    """Of blocks whose memory depends on values, how much more than the traced batch took is guaranteed for.

    None where no block's does.
    """
    profiles = [workload.profile_of(block) for block in range(workload.num_blocks)]
    of_values = [profile.seen for profile in profiles if profile.seen is not None]
    if not of_values:
        return None
    pairs = [
        (ours, seen) for profile in profiles for ours, seen in zip(profile.phases, profile.as_seen.phases, strict=True)
    ]
    more_bytes = max(ours.peak_bytes - seen.peak_bytes for ours, seen in pairs)
    words = (
        f"that of {len(of_values)} of {workload.num_blocks} blocks depends on values; a phase may take up to "
        f"{format_bytes(max(0, more_bytes))} more than it took on the traced batch, as "
    )
    num_tried = max(seen.num_tried for seen in of_values)
    if all(seen.is_forced for seen in of_values):
        return words + f"{num_tried} ways to route tokens to experts show"
    return words + f"{num_tried} batches show; other values may take more still"


def models_table(listed: ModelList) -> Parts:
    """The catalogue of models; papers are in its JSON."""
    rows = []
    for model in listed.models:
        parameters = format_count(model.num_parameters) if model.num_parameters is not None else ""
        source = model.source.removeprefix("config.json of ").split(" on the Hugging Face hub")[0]
        rows.append((model.name, parameters, str(model.dtype), model.architecture, source))
    columns = ("name", ">parameters", "published\nas", "architecture", "configuration")
    return (Table(columns=columns, rows=rows, always=4),)


def _facts(workload: Workload) -> Table:
    trainable = sum(p.num_elements for p in workload.parameters if p.trainable)
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in workload.batch_shapes.items())
    rows = [
        ("identity", workload.identity),
        ("parameters", f"{workload.num_parameters:,} ({trainable:,} trainable)"),
        ("weights", weights_words(workload.compute_dtype, workload.published_dtype, workload.dtype_origin)),
        ("blocks", f"{workload.num_blocks} of {counted(len(workload.profiles), 'kind')}"),
        ("batch", f"{shapes}: {workload.num_tokens:,} tokens"),
        ("traced with", f"{workload.traced_with} tensors"),
        ("timed on", workload.measured_on or "nothing: times come from a roofline"),
    ]
    if workload.packing is not None:
        rows.append(("packed", packing_words(workload.packing)))
    if workload.keeps_outputs:
        rows.append(("outputs", "held by the loop until the next micro-batch's are there"))
    if workload.loss_head is not LossHead.EAGER:
        rows.append(("loss", str(workload.loss_head)))
    if workload.quadratic is not None:
        rows.append(("squares", f"{workload.quadratic.where()}: tensors of attention"))
    if workload.kernels_taken:
        rows.append(("kernels", f"of {', '.join(workload.kernels_taken)}"))
    if workload.kernels_left_out:
        rows.append(("left out", f"kernels of {', '.join(workload.kernels_left_out)}: their reference was traced"))
    if (words := memory_words(workload)) is not None:
        rows.append(("memory", words))
    return Table(title=f"Workload {workload.model_name}", columns=("", ""), rows=rows)


def _phases(workload: Workload) -> Table:
    rows = [("prologue forward", *_cells(workload.prologue_forward))]
    counts = [sum(block.profile == i for block in workload.blocks) for i in range(len(workload.profiles))]
    for index, (profile, count) in enumerate(zip(workload.profiles, counts, strict=True)):
        kind = f"block kind {index} (x {count})"
        for name in ("forward", "backward", "checkpoint_forward", "recompute", "checkpoint_backward"):
            rows.append((f"{kind} {name.replace('_', ' ')}", *_cells(getattr(profile, name))))
    rows.append(("epilogue forward", *_cells(workload.epilogue_forward)))
    rows.append(("epilogue backward", *_cells(workload.epilogue_backward)))
    for tiling in workload.loss_tilings:
        tiles = f"in {tiling.loss_tiles:,} tiles"
        rows.append((f"epilogue forward {tiles}", *_cells(tiling.epilogue_forward)))
        rows.append((f"epilogue backward {tiles}", *_cells(tiling.epilogue_backward)))
    rows.append(("prologue backward", *_cells(workload.prologue_backward)))
    return Table(
        title="What each part does",
        columns=("part", ">operations", ">GFLOP", ">leaves behind", ">peak above start", ">seconds"),
        rows=rows,
    )


def _cells(phase: Phase) -> tuple[str, str, str, str, str]:
    return (
        str(sum(operation.count for operation in phase.operations)),
        f"{phase.flops / 1e9:.4g}",
        format_bytes(phase.net_bytes),
        format_bytes(phase.peak_bytes),
        format_seconds(phase.measured_s) if phase.measured_s is not None else "",
    )
