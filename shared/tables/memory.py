"""The memory beyond what the schedule allocates, in words: rows of tables and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..basics.units import format_bytes
from ..records.peak_parts import PeakPart, peak_parts
from ..schema.memory_accounts import DeviceReserved, HostMemory, PinnedRule
from ..schema.record import Record
from ..schema.schedule import Content, OuterSection, Schedule
from ..verify.guaranteed_peak import GuaranteedPeak

DEFAULT_SETTINGS: Final = "the allocator's default settings"
EXPANDABLE_SETTING: Final = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
_STAYS: Final[dict[Content | None, str]] = {
    None: "made by its operations on the way",
    Content.PARAMETERS: "of weights that it reads",
    Content.ACTIVATIONS: "of activations saved for it",
    Content.KEPT_RESULTS: "of results that it kept",
    Content.SWAPPED: "of activations saved for it",
    Content.OUTPUT: "of outputs that backward begins with",
    Content.LOSS: "of its loss",
    Content.INCOMING_GRADIENT: "of its output's gradient",
    Content.RESIDENT: "of module buffers, batch and what the loop holds",
}
_LEAVES: Final[dict[Content | None, str]] = {
    None: "made by a step or a projection on the way",
    Content.PARAMETERS: "of other weights",
    Content.GRADIENTS: "of gradients that are sent or stepped later",
    Content.ARRIVING_GRADIENTS: "of gradients that are added up later",
    Content.FLAT_GRADIENTS: "of gradients, laid flat",
    Content.REDUCED_GRADIENTS: "of shards of gradients",
    Content.BUCKET: "of buckets of gradients",
    Content.SECOND_BUCKET: "of buckets of gradients",
    Content.HELD_INPUT: "of inputs of recomputed blocks, and their gradients, that hooks hold",
    Content.CACHED_KEYS: "of keys and values that the loop caches",
    Content.OWNED_FROZEN: "of frozen matrices that owners project against",
    Content.OWNED_TRAINED: "of matrices that owners project",
    Content.PASSING_PARTS: "of matrices on their way to owners and back",
    Content.OPTIMIZER_STATE: "of optimizer state",
    Content.PAGED_STATE: "of paged optimizer state",
    Content.ACTIVATIONS: "of activations of other sections",
    Content.KEPT_RESULTS: "of results that other blocks kept",
    Content.SWAPPED: "of activations of other sections",
}
"""What of a peak cannot leave the device and what can, in words; the contents are those of ``PeakPart``."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One account, ready to be shown."""

    name: str
    size_bytes: int
    words: str


def beyond_the_schedule(record: Record) -> tuple[MemoryRow, ...]:
    """What the device's allocator reserves and what the host's process holds, where the record predicts them."""
    rows = []
    reserved, host = record.device_reserved, record.host_memory
    if reserved is not None:
        rows.append(MemoryRow("reserved by the allocator", reserved.expected_bytes, _reserved_words(reserved)))
        rows.append(
            MemoryRow(
                "device in all",
                reserved.expected_bytes + reserved.outside_bytes,
                f"with {format_bytes(reserved.outside_bytes)} of driver and context",
            )
        )
    if host is not None:
        rows.append(MemoryRow("host in all", host.total_bytes, _host_words(host)))
    return tuple(rows)


def stays_sentence(schedule: Schedule, peak: GuaranteedPeak) -> str:
    """What of the guaranteed peak cannot leave the device, by name and size, and what else is there."""
    parts = peak_parts(schedule, peak.task, peak.alive, peak.transient_bytes)
    stays = [part for part in parts if not part.can_leave]
    leaves = [part for part in parts if part.can_leave]
    running = schedule.tasks[peak.task]
    of_loss = ", with head and loss," if running.section is OuterSection.EPILOGUE else ""
    when = f"during {running.name}{of_loss}" if peak.transient_bytes else f"before {running.name}{of_loss}"
    sentence = f"Cannot leave the device {when}".rstrip(",")
    sentence += f": {_sum(stays)} ({_listed(stays, _STAYS)})."
    if leaves:
        sentence += f" Beside that: {_listed(leaves, _LEAVES)}."
    return sentence


def _sum(parts: Sequence[PeakPart]) -> str:
    return format_bytes(sum(part.size_bytes for part in parts))


def _listed(parts: Sequence[PeakPart], words: Mapping[Content | None, str]) -> str:
    sizes: dict[str, int] = {}
    for part in parts:
        sizes[words[part.content]] = sizes.get(words[part.content], 0) + part.size_bytes
    return ", ".join(f"{format_bytes(size)} {name}" for name, size in sizes.items())


def _reserved_words(reserved: DeviceReserved) -> str:
    words = f"{format_bytes(reserved.at_least_bytes)} to {format_bytes(reserved.at_most_bytes)}"
    if reserved.workspace_bytes:
        words += f", {format_bytes(reserved.workspace_bytes)} of it workspaces"
    return words


def _host_words(host: HostMemory) -> str:
    is_rounded = host.pinned_rule is PinnedRule.POWER_OF_TWO
    parts = [
        (host.pinned_bytes, "pinned in powers of two" if is_rounded else "pinned"),
        (host.state_bytes, "optimizer state"),
        (host.device_bytes, "in the device's place"),
        (host.step_bytes, "within steps"),
        (host.process_bytes, "Python and libraries"),
    ]
    listed = ", ".join(f"{format_bytes(size)} {name}" for size, name in parts if size)
    if host.loading_bytes > host.training_bytes:
        return f"while chunks are filled; then {listed}"
    return listed


def allocator_warning(record: Record) -> str | None:
    """What to do if cached segments of the allocator do not fit beside each other; None if they do."""
    reserved = record.device_reserved
    if reserved is None or reserved.num_retries == 0:
        return None
    held = f"{format_bytes(reserved.expected_bytes)} in segments but can have {format_bytes(reserved.limit_bytes)}"
    wants = f"the device's allocator is expected to want {held}"
    if reserved.fits:
        return f"{wants}: it will give cached segments back, and wait. {_advice(reserved)}"
    if reserved.needs_expandable:
        return f"{wants}: this plan runs out of memory with the allocator's own settings. {_advice(reserved)}"
    return f"{wants}: this plan may run out of memory, with expandable segments too. Lower --device-budget."


def _advice(reserved: DeviceReserved) -> str:
    if reserved.expandable_bytes is None or reserved.expandable_retries is None:
        return "Lower --device-budget."
    enough = f"{format_bytes(reserved.expandable_bytes)} are expected"
    if reserved.expandable_retries:
        enough = "free pages go back in time"
    return f"Set {EXPANDABLE_SETTING}, as protwin run does, with which {enough}, or lower --device-budget."


def host_warning(record: Record, memory_bytes: int) -> str | None:
    """What to do if the process does not fit into the host's ``memory_bytes``; None if it does."""
    host = record.host_memory
    if host is None or host.total_bytes <= memory_bytes:
        return None
    if host.process_bytes > memory_bytes:
        return (
            f"Python and libraries take {format_bytes(host.process_bytes)} of host memory with any plan, but the host "
            f"has {format_bytes(memory_bytes)}. Use --set host.memory_bytes=SIZE."
        )
    training_bytes = host.process_bytes + host.training_bytes
    if training_bytes <= memory_bytes:
        return (
            f"this plan needs {format_bytes(host.total_bytes)} of host memory while its chunks are filled, and "
            f"{format_bytes(training_bytes)} from then on, but the host has {format_bytes(memory_bytes)}. Give the "
            f"system swap space for the difference, or use --set host.memory_bytes=SIZE."
        )
    return (
        f"this plan needs {format_bytes(host.total_bytes)} of host memory in all, but the host has "
        f"{format_bytes(memory_bytes)}. Keep more chunks persistent (n_persist), or use --set host.memory_bytes=SIZE."
    )
