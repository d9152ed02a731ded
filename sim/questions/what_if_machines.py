"""What-if questions that name what would be different: parts, whole machines, single figures, or the method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ...shared.basics.errors import CalibrationError, CatalogueError, HardwareError, WorkloadError
from ...shared.basics.suggestions import did_you_mean, nearest_names
from ...shared.catalogue.machines import cluster_names, machine, override_hardware
from ...shared.catalogue.names import device_called, machine_called, written_alike
from ...shared.catalogue.overrides import field_names
from ...shared.catalogue.parts import device_names, disk_names, host_names, link_names, network_names, node_names
from ...shared.optimizers.check import check_host_gradients, check_optimizer
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Device, Hardware
from ...shared.schema.workload import Workload
from ..searching.request import SearchRequest
from ..space.step_spec import MOST_RANKS
from .what_if import USUAL, Question, ask, check_batch_of, machine_with_room
from .what_if_methods import AS_IT_IS, FIELDS, MethodChange, WorkloadWith, method_change, with_method

_PARTS: Final[dict[str, Callable[[], tuple[str, ...]]]] = {
    "device": device_names,
    "host": host_names,
    "link": link_names,
    "disk": disk_names,
    "node": node_names,
    "network": network_names,
}
_SWAPPED: Final = (*_PARTS, "host_to_device", "device_to_host")
"""Parts that a change may name, each with figures of its own."""
_EXAMPLES: Final = {
    "ranks": "ranks=16",
    "optimizer": "optimizer=adamw-8bit",
    "host-gradients": "host-gradients=float32",
    "lora": "lora=16",
    "max-gradient-norm": "max-gradient-norm=1.0",
    "sequence-length": "sequence-length=4096",
    "batch-size": "batch-size=4",
}
"""A change of each kind beside those of the machine."""
_SAYABLE: Final = (
    f"Name a device, host, link, disk, node, network or machine of the catalogue, or write a change: "
    f"{', '.join(_EXAMPLES.values())}, or a figure of a part as device.memory_bytes=40GiB."
)
_SPEEDLESS: Final = ("memory_bytes", "reserved_bytes", "source")
"""Fields of a device that no second depends on."""


@dataclass(frozen=True)
class ChangedMachine:
    """A machine as it might be, and what was asked for in the words of whoever asked."""

    change: str
    hardware: Hardware
    num_ranks: int | None = None
    """None: as many as there are."""
    method: MethodChange = AS_IT_IS
    """What is different besides the machine."""


def changed_machines(
    wanted: Iterable[str], hardware: Hardware, calibration: Calibration | None = None
) -> tuple[ChangedMachine, ...]:
    """The machine of each question, in order; ``USUAL`` asks for none.

    A question is the name of a device, host, link, disk, node or network, which takes the place of the machine's, or
    of a machine of the catalogue with several devices, or changes as ``override_hardware`` takes them
    (``device.memory_bytes=48GiB``), or another number of ranks (``ranks=16``), for which nodes are added where a
    network joins them, or another method (``optimizer=adamw-8bit``); or several of these, separated by blanks.  What
    names a device and a machine with one means the device.

    Raises CatalogueError if a name is unknown, HardwareError if a change is, or if two of a question contradict each
    other, and CalibrationError if ``calibration`` says nothing about the changed machine.
    """
    found = []
    for question in dict.fromkeys(" ".join(text.split()) for text in wanted):
        if question == USUAL:
            continue
        changed, num_ranks, method = _changed(question, hardware)
        if calibration is not None and changed.name != hardware.name:
            raise CalibrationError(
                f"--what-if {question} is another device than that of {hardware.name}, where the calibration was made. "
                f"Leave --calibration out to compare devices by their data sheets."
            )
        found.append(ChangedMachine(question, changed, num_ranks, method))
    return tuple(found)


def part_questions(
    request: SearchRequest, machines: Sequence[ChangedMachine], workload_with: WorkloadWith | None = None
) -> tuple[Question, ...]:
    """The questions about ``machines``: with the request's budgets where it has some, else with all of their memory.

    ``workload_with`` makes the workload that another method has; None: nothing makes the request's again.

    Raises WorkloadError if the seconds of the request's workload were measured, so that the change could not show,
    HardwareError if a machine has too few devices for the ranks, and PlanError if they cannot share a global batch.
    """
    asked = []
    workload = request.smallest_workload()
    for one in machines:
        _check_measured(workload, request.hardware, one)
        num_ranks = one.num_ranks or request.step.num_ranks
        if num_ranks > one.hardware.num_devices:
            raise HardwareError(
                f"--what-if {one.change} asks about {num_ranks:,} ranks, but {one.hardware.name} then has "
                f"{_devices(one.hardware)}. Ask about fewer with ranks={one.hardware.num_devices}, or name another "
                f"machine."
            )
        check_batch_of(request, num_ranks)
        then = with_method(request, one.method, workload_with)
        then.step.allowed_modes  # noqa: B018  # a mode that the optimizer forbids is told at once
        parameters = then.smallest_workload().parameters
        check_optimizer(then.step.optimizer, parameters)
        check_host_gradients(then.step.host_gradients, parameters)
        asked.append(ask(then, one.change, one.hardware, num_ranks=one.num_ranks))
    return tuple(asked)


def _devices(hardware: Hardware) -> str:
    return "one device" if hardware.num_devices == 1 else f"{hardware.num_devices:,} devices"


def _changed(question: str, hardware: Hardware) -> tuple[Hardware, int | None, MethodChange]:
    """The machine, the number of ranks if one is named, and what changes of the method."""
    changes: dict[str, str] = {}
    base = hardware
    for word in question.split():
        field, equals, value = word.partition("=")
        if not equals:
            field, value = _part_of(word), word
        elif not (field and value):
            raise HardwareError(f"--what-if {word} is no change. Write it as device.memory_bytes=40GiB.")
        if equals:
            _check_field(word, field)
        if field in changes or (field == "machine" and base is not hardware):
            raise HardwareError(f"--what-if {question} gives {field} twice. Ask two questions.")
        if field == "machine":
            base = machine(value)
        else:
            changes[field] = value
    if not question:
        raise HardwareError(f"--what-if names nothing. Name a part, write a change, or write {USUAL}.")
    method = method_change(question, {field: changes.pop(field) for field in FIELDS if field in changes})
    ranks = changes.pop("ranks", None)
    changed = override_hardware(base, changes) if changes else base
    if ranks is None:
        return changed, None, method
    num_ranks = _count(ranks)
    roomy = changed if "network.num_nodes" in changes else machine_with_room(changed, num_ranks)
    return roomy, num_ranks, method


def _check_field(word: str, field: str) -> None:
    """Raise HardwareError if nothing is called like ``field``, whose part's own messages know more of its figures."""
    named = ("ranks", *FIELDS, *_SWAPPED)
    if field in named or field.partition(".")[0] in _SWAPPED:
        return
    known = (*named, *field_names())
    if field in known:
        return
    near = nearest_names(field, known, least_similarity=0.6)
    raise HardwareError(
        f"--what-if {word}: nothing is called {field!r}.{f' {did_you_mean(field, near)}' if near else ''} {_SAYABLE}"
    )


def _count(words: str) -> int:
    if not (words.isascii() and words.isdigit() and len(words) < 10 and 1 <= int(words) <= MOST_RANKS):
        raise HardwareError(f"--what-if ranks={words} is no number of ranks. Write one from 1 to {MOST_RANKS:,}.")
    return int(words)


def _part_of(name: str) -> str:
    """Which part of a machine ``name`` names, or "machine".  Raises CatalogueError if it names none."""
    for part, names in _PARTS.items():
        if written_alike(name, names()) or (part == "device" and device_called(name)):
            return part
    if machine_called(name) is not None:
        return "machine"
    if name in ("ranks", *FIELDS):
        raise HardwareError(f"--what-if {name} has no value. Write it as {_EXAMPLES[name]}.")
    known = [name for names in _PARTS.values() for name in names()] + list(cluster_names())
    raise CatalogueError(
        f"--what-if {name}: the catalogue has no device, host, link, disk, node, network or machine of that name. "
        f"{did_you_mean(name, known)} {_SAYABLE}"
    )


def _check_measured(workload: Workload, hardware: Hardware, one: ChangedMachine) -> None:
    if workload.measured_on != hardware.name:
        return
    if one.hardware.name == hardware.name and _speeds(one.hardware.device) == _speeds(hardware.device):
        return
    raise WorkloadError(
        f"the seconds of {workload.model_name} were measured on {hardware.name}, so that --what-if {one.change}, "
        f"another device, cannot be compared with them. Trace the model without measuring it, or ask about other parts."
    )


def _speeds(device: Device) -> Device:
    return device.model_copy(update={field: Device.model_fields[field].default for field in _SPEEDLESS})
