"""Questions as Python code asks them: models and machines by name, by file or as objects, sizes as numbers or text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields as dataclass_fields
from pathlib import Path
from types import NoneType
from typing import TypedDict, Unpack, cast, overload

from ...shared.answers.search_result import Risk, SearchResult
from ...shared.basics.arguments import as_whole, check_kind, shown
from ...shared.basics.errors import HardwareError, PlanError, WorkloadError
from ...shared.basics.progress import OnProgress, no_progress
from ...shared.basics.suggestions import did_you_mean
from ...shared.catalogue.machines import load_hardware
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Device, Hardware
from ...shared.schema.optimizer import HostGradients, Optimizer
from ...shared.schema.plan import ParallelMode, Plan
from ...shared.schema.record import Record
from ...shared.schema.schedule import Schedule
from ...shared.schema.training_options import FULL_TRAINING, TrainingOptions
from ...shared.schema.workload import Workload
from ...shared.workloads.source import WorkloadRequest, is_saved_workload, resolve_workload, usual_shape
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
    """What ``search`` takes besides; all but the first are fields of ``SearchRequest`` and ``Step``, and mean the same.

    Text may stand for a member of an enumeration (``optimizer="lion"``), one number or member for a tuple of one.
    """

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
    micro_batches: int
    """This and all below are fields of ``Step``, in the place of ``step``."""
    max_gradient_norm: float | None
    num_ranks: int
    modes: tuple[ParallelMode, ...]
    optimizer: Optimizer
    host_gradients: HostGradients
    shard_ranks: tuple[int, ...] | None


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
            ``dtype`` and ``training`` of a named model, ``global_batch_size``, the fields of ``SearchRequest``, and
            those of ``Step`` (``micro_batches=2``); sizes may be text (``device_budget_bytes="10GiB"``).

    Raises InfeasibleError if no plan fits, PlanError if there is no plan at all or an option is of another type than it
    has, TypeError if there is no such option, and what ``load_workload`` and ``load_hardware`` raise.
    """
    _check_call(on_progress)
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
    device for a rank, WorkloadError if the workload says nothing of how long it takes on this machine, and TypeError if
    there is no such keyword.
    """
    _check_call(on_progress)
    check_kind("plan", plan, (Plan, str, Path), "a Plan, or the name of its file")
    check_kind("schedule", schedule, (Schedule, NoneType), "a Schedule, or None")
    _check_names("simulate", shape, tuple(Shape.__annotations__))
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
    _check_names("search", options, tuple(SearchOptions.__annotations__))
    of_step = {name: value for name, value in options.items() if name in _OF_STEP}
    if of_step and "step" in options:
        raise PlanError(f"step is the whole step, but {', '.join(of_step)} is given besides. Put it into the Step.")
    if "global_batch_size" in options and "micro_batches" in options:
        raise PlanError("global_batch_size and micro_batches exclude each other. Leave one of the two out.")
    fields = {name: value for name, value in options.items() if name not in _OF_WORKLOAD | _OF_STEP}
    if of_step:
        fields["step"] = Step(**of_step)  # type: ignore[arg-type]
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
_OF_STEP = {field.name for field in dataclass_fields(Step)}


def _check_call(on_progress: OnProgress | None) -> None:
    check_kind("on_progress", on_progress, (Callable, NoneType), "a function of two numbers")  # type: ignore[arg-type]


def _check_names(function: str, given: Mapping[str, object], known: tuple[str, ...]) -> None:
    """Raise TypeError if something is given that ``function`` does not know, with where it belongs."""
    for name in given:
        if name in known:
            continue
        if function == "search" and name in SearchSpace.model_fields:
            hint = f"It is a knob of plans: space=SearchSpace({name}=(...,))."
        elif function == "search" and name in {field.name for field in dataclass_fields(Effort)}:
            hint = f"It is a field of Effort: effort=Effort({name}=...)."
        else:
            hint = did_you_mean(name, known)
        raise TypeError(f"{function}() has no argument {name}. {hint}")


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

    num_samples = as_whole("global_batch_size", num_samples)

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
    training = shape.get("training", FULL_TRAINING)
    check_kind("training", training, TrainingOptions, 'TrainingOptions, as TrainingOptions(lora={"rank": 16})')
    check_kind("dtype", shape.get("dtype"), (str, NoneType), 'text such as "bf16"')
    asked = WorkloadRequest(
        str(model),
        batch_size=shape.get("batch_size", batch_size),
        sequence_length=shape.get("sequence_length", length),
        dtype=shape.get("dtype"),
        options=training,
        device=device,
    )
    return resolve_workload(asked)


def _check_no_shape(model: Workload | GlobalBatch, shape: Shape) -> None:
    if shape:
        raise WorkloadError(f"a {type(model).__name__} has its shape. Leave {', '.join(shape)} out, or name a model.")


def _machine(hardware: Hardware | str | Path | None) -> Hardware:
    if isinstance(hardware, Hardware):
        return hardware
    if hardware is None:
        raise HardwareError('no machine is named. Name one, as in search("llama-3-8b", "rtx-3090").')
    if not isinstance(hardware, str | Path):
        raise HardwareError(f'hardware is {shown(hardware)}; it must be a Hardware, or a name such as "rtx-3090".')
    return load_hardware(hardware)


def _calibration(calibration: Calibration | str | Path | None) -> Calibration | None:
    kinds = (Calibration, str, Path, NoneType)
    check_kind("calibration", calibration, kinds, "a Calibration, the name of its file, or None")
    return Calibration.load(calibration) if isinstance(calibration, str | Path) else calibration
