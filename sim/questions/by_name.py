"""Questions as Python code asks them: models and machines by name, by file or as objects, sizes as numbers or text."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, Unpack, cast, overload

from ...shared.basics.errors import HardwareError, PlanError, WorkloadError
from ...shared.basics.progress import OnProgress, no_progress
from ...shared.catalogue.machines import load_hardware
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Device, Hardware
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.schedule import Schedule
from ...shared.schema.search_result import Risk, SearchResult
from ...shared.schema.training_options import FULL_TRAINING, TrainingOptions
from ...shared.schema.workload import Workload
from ...shared.workloads.source import is_saved_workload, resolve_workload, usual_shape
from ..engine.simulator import simulate as simulate_plan
from ..searching.request import Effort, GlobalBatch, SearchRequest, Step
from ..searching.search import search_batches
from ..space.space import SearchSpace


class Shape(TypedDict, total=False):
    """What a model that is named is asked about; a ``Workload`` has all of it."""

    batch_size: int
    """Samples per micro-batch; 1 unless given."""
    sequence_length: int
    """Tokens per sample; 2,048 unless given, or the model's longest sequence if that is shorter."""
    dtype: str
    """Element type of parameters (``bf16``), instead of the one that the model was published in."""
    training: TrainingOptions
    """LoRA, frozen parts and autocast; full training unless given."""


class SearchOptions(Shape, total=False):
    """What ``search`` takes besides; all but the first are fields of ``SearchRequest``, and mean the same."""

    global_batch_size: int
    """Samples per step of all ranks, in the place of ``batch_size``: micro-batches of every size are searched."""
    calibration: Calibration | str | Path | None
    device_budget_bytes: int | str | None
    host_budget_bytes: int | str | None
    margin_frac: float | None
    space: SearchSpace
    step: Step
    effort: Effort
    risk: Risk
    baselines: tuple[tuple[str, Plan], ...] | None


@overload
def search(
    model: SearchRequest, *, on_progress: OnProgress | None = None, keep_interrupted: bool = False
) -> SearchResult: ...


@overload
def search(
    model: Workload | GlobalBatch | str | Path,
    hardware: Hardware | str | Path,
    *,
    on_progress: OnProgress | None = None,
    keep_interrupted: bool = False,
    **options: Unpack[SearchOptions],
) -> SearchResult: ...


def search(
    model: SearchRequest | Workload | GlobalBatch | str | Path,
    hardware: Hardware | str | Path | None = None,
    *,
    on_progress: OnProgress | None = None,
    keep_interrupted: bool = False,
    **options: Unpack[SearchOptions],
) -> SearchResult:
    """The plan to train ``model`` by on ``hardware``, without the machine: ``search("llama-3-8b", "rtx-3090")``.

    A plan fits if its guaranteed device peak and its pinned and other host memory are within the budgets; the
    certificate says what is proven about all others.

    Args:
        model: A name of the catalogue, a ``config.json``, a saved workload or a ``Workload``; or the whole question as
            one ``SearchRequest``.
        hardware: A name of the catalogue (``"8xH100"``), a file, or a ``Hardware``.
        on_progress: Told, now and then, how many plans of how many are decided.
        keep_interrupted: Ctrl-C ends the search with the best plan so far, if any, and the certificate says so.
        options: ``batch_size`` (1 unless given), ``sequence_length`` (2,048, or the model's longest if shorter),
            ``dtype`` and ``training`` of a named model, ``global_batch_size``, and the fields of ``SearchRequest``;
            sizes may be text (``device_budget_bytes="10GiB"``).

    Raises InfeasibleError if no plan fits, PlanError if there is no plan at all, and what ``load_workload`` and
    ``load_hardware`` raise.
    """
    if isinstance(model, SearchRequest):
        if hardware is not None or options:
            besides = ", ".join([*(["hardware"] if hardware is not None else []), *options])
            raise PlanError(f"a SearchRequest is the whole question, but {besides} is given besides. Put it into it.")
        request = model
    else:
        request = _request(model, _machine(hardware), options)
    return search_batches(request, on_progress=on_progress, keep_interrupted=keep_interrupted).result


def simulate(
    plan: Plan | str | Path,
    model: Workload | str | Path,
    hardware: Hardware | str | Path,
    calibration: Calibration | str | Path | None = None,
    *,
    schedule: Schedule | None = None,
    on_progress: OnProgress = no_progress,
    **shape: Unpack[Shape],
) -> Record:
    """What one steady-state iteration of ``model`` under ``plan`` does on ``hardware``.

    Ranks of a plan that has several are equal: each has its share of the machine, and one of them is simulated.

    Args:
        plan: What every rank does, or its file.
        model: One rank's micro-batch: a ``Workload``, a saved one, a ``config.json`` or a name of the catalogue.
        hardware: The machine of all ranks: a name of the catalogue, a file, or a ``Hardware``.
        calibration: Factors measured on that machine, or their file; None for its data sheet.
        schedule: Spares compiling ``plan`` again; it is verified to carry the plan out.
        on_progress: Told of every simulated iteration; the memory that follows takes about as long.
        shape: ``batch_size``, ``sequence_length``, ``dtype`` and ``training`` of a named model, as of ``search``.

    Raises PlanError if the plan does not fit the workload, ScheduleError if ``schedule`` is unsafe, CalibrationError if
    the calibration belongs to another machine, HardwareError if the machine lacks a figure that the workload needs or a
    device for a rank, and WorkloadError if the workload says nothing of how long it takes on this machine.
    """
    machine = _machine(hardware)
    return simulate_plan(
        plan if isinstance(plan, Plan) else Plan.load(plan),
        _workload(model, machine.device, shape),
        machine,
        _calibration(calibration),
        schedule=schedule,
        on_progress=on_progress,
    )


def _request(model: Workload | GlobalBatch | str | Path, machine: Hardware, options: SearchOptions) -> SearchRequest:
    fields = {name: value for name, value in options.items() if name not in _OF_WORKLOAD}
    shape = _shape(options)
    device = machine.device
    workload: Workload | GlobalBatch
    if "global_batch_size" in options:
        workload = _global_batch(model, options["global_batch_size"], shape, device)
    elif isinstance(model, GlobalBatch):
        _check_no_shape(model, shape)
        workload = model
    else:
        workload = _workload(model, device, shape)
    calibration = _calibration(options.get("calibration"))
    return SearchRequest(
        **{"baselines": ()} | fields | {"workload": workload, "hardware": machine, "calibration": calibration}  # type: ignore[arg-type]
    )


_OF_WORKLOAD = {*Shape.__annotations__, "global_batch_size"}


def _shape(options: SearchOptions) -> Shape:
    return cast(Shape, {name: value for name, value in options.items() if name in Shape.__annotations__})


def _global_batch(
    model: Workload | GlobalBatch | str | Path, num_samples: int, shape: Shape, device: Device
) -> GlobalBatch:
    """A global batch of a model that has a workload at any size."""
    if not isinstance(model, str | Path) or is_saved_workload(str(model)):
        raise PlanError("global_batch_size has every size of the micro-batch searched, which needs a model by name.")
    if "batch_size" in shape:
        raise PlanError("global_batch_size and batch_size exclude each other. Leave one of the two out.")

    def workload_at(size: int) -> Workload:
        return _workload(model, device, {**shape, "batch_size": size})

    return GlobalBatch(num_samples=num_samples, workload_at=workload_at)


def _workload(model: Workload | str | Path, device: Device, shape: Shape) -> Workload:
    if isinstance(model, Workload):
        _check_no_shape(model, shape)
        return model
    if not isinstance(model, str | Path):
        raise WorkloadError(
            f"a {type(model).__name__} is no model by name and no Workload. Trace a module first: "
            f"protwin.runtime.trace(model, batch)."
        )
    batch_size, length = (None, None) if is_saved_workload(str(model)) else usual_shape(str(model))
    return resolve_workload(
        str(model),
        batch_size=shape.get("batch_size", batch_size),
        sequence_length=shape.get("sequence_length", length),
        dtype=shape.get("dtype"),
        cache=None,
        warn=lambda _: None,  # it says why tracing takes long
        options=shape.get("training", FULL_TRAINING),
        device=device,
    )


def _check_no_shape(model: Workload | GlobalBatch, shape: Shape) -> None:
    if shape:
        raise WorkloadError(f"a {type(model).__name__} has its shape. Leave {', '.join(shape)} out, or name a model.")


def _machine(hardware: Hardware | str | Path | None) -> Hardware:
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str | Path):
        raise HardwareError('no machine is named. Name one, as in search("llama-3-8b", "rtx-3090").')
    return load_hardware(hardware)


def _calibration(calibration: Calibration | str | Path | None) -> Calibration | None:
    return Calibration.load(calibration) if isinstance(calibration, str | Path) else calibration
