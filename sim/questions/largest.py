"""The largest model of the catalogue that trains on a machine, by the host's memory.

[Note: Which model is the largest]
A model trains if some plan is within both memories for every timing; which one, least memory tells without a search
(``sim/searching/least_memory.py``).  Models are tried from the largest down.  Less host memory holds no model that more
does not, so that each size of it goes on where the next larger one ended: every model is tried once for a machine, and
none is passed over because a larger one needs less.  A search then finds the best plan of those that were found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from ...shared.answers.advice import LargestModel, LargestModels, TooLarge, TrainedModel
from ...shared.basics.errors import InfeasibleError, WorkloadError
from ...shared.basics.progress import OnProgress, no_progress
from ...shared.catalogue.models import model_configuration, model_names
from ...shared.records.question import sequence_length_of
from ...shared.schema.hardware import Device, Hardware
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.training_options import FULL_TRAINING, TrainingOptions
from ...shared.schema.workload import Workload
from ...shared.tables.labels import bottleneck
from ...shared.workloads.source import WorkloadRequest, untraced_workload
from ..memory.host import memory_with_room
from ..searching.confidence import DEFAULT_MARGIN_FRAC
from ..searching.infeasible import need_of_disk, smallest_changes
from ..searching.least_memory import least_host, some_plan_fits
from ..searching.problem import SearchProblem, search_problem
from ..searching.request import SearchRequest, Step
from ..searching.search import search_batches
from ..space.space import SearchSpace
from .in_tiles import Tiles

_UNLIMITED_BYTES: Final = 2**50
"""More than any model needs."""


@dataclass(frozen=True, kw_only=True)
class LargestRequest:
    """One step of training, of any model."""

    batch_size: int = 1
    """Samples."""
    sequence_length: int = 2048
    """Tokens per sample."""
    dtype: str | None = "bfloat16"
    """Element type of parameters; None for the published one."""
    optimizer: Optimizer = Optimizer.ADAMW
    margin_frac: float = DEFAULT_MARGIN_FRAC
    """As of ``SearchRequest``."""
    options: TrainingOptions = FULL_TRAINING
    """What of the model is trained, and how."""
    loss_tiles: Tiles = (1,)
    """Numbers of tiles that head and loss may run in."""

    @cached_property
    def models(self) -> tuple[tuple[int, str], ...]:
        """Parameters and names of the catalogue's models, the largest first."""
        found = ((model_configuration(name).num_parameters or 0, name) for name in model_names())
        return tuple(sorted(found, reverse=True))

    def workload(self, model: str, device: Device) -> Workload | None:
        """What the model does in one step; None if it has no sequences of this length, or only a trace knows."""
        try:
            asked = WorkloadRequest(
                model,
                batch_size=self.batch_size,
                sequence_length=self.sequence_length,
                dtype=self.dtype,
                options=self.options,
                device=device,
                loss_tiles=self.loss_tiles,
            )
            found = untraced_workload(asked)
        except WorkloadError:
            return None
        return found if found is not None and sequence_length_of(found) is not None else None

    def is_known_whole(self, model: str, device: Device) -> bool:
        """Whether its full training has such a step: what ``workload`` lacks then, a trace would know."""
        return replace(self, options=FULL_TRAINING, loss_tiles=(1,)).workload(model, device) is not None

    def search_request(self, workload: Workload, hardware: Hardware) -> SearchRequest:
        """The search for its best plan on the machine, with what its host cannot hold on its disk if it has one."""
        found = SearchRequest(
            workload=workload,
            hardware=hardware,
            margin_frac=self.margin_frac,
            space=SearchSpace(loss_tiles=self.loss_tiles),
            step=Step(optimizer=self.optimizer),
        )
        return found.with_disk() if found.may_use_disk else found

    def problem(self, workload: Workload, hardware: Hardware) -> SearchProblem:
        """All plans that a search falls back on: without the margin, and with what may lie elsewhere."""
        return search_problem([*self._tries(workload, hardware)][-1])

    def fits(self, workload: Workload, hardware: Hardware) -> bool:
        """Whether some plan trains the model on the machine."""
        return any(some_plan_fits(search_problem(asked)) for asked in self._tries(workload, hardware))

    def _tries(self, workload: Workload, hardware: Hardware) -> Iterator[SearchRequest]:
        return replace(self.search_request(workload, hardware), margin_frac=0.0).tries


def with_host_memory(hardware: Hardware, memory_bytes: int | None) -> Hardware:
    """The machine with so much host memory; None for more than any model needs."""
    memory_bytes = _UNLIMITED_BYTES if memory_bytes is None else memory_bytes
    return hardware.model_copy(update={"host": hardware.host.model_copy(update={"memory_bytes": memory_bytes})})


def largest_models(
    request: LargestRequest,
    machines: Sequence[Hardware],
    host_memories: Sequence[int | None],
    *,
    on_progress: OnProgress = no_progress,
) -> LargestModels:
    """The largest model on every machine with each of these host memories; see [Note: Which model is the largest].

    Args:
        request: What a step is.
        machines: One device of each trains; those with a disk are asked about without it and with it.
        host_memories: Bytes, in the place of the machines' own; None for more than any model needs.
        on_progress: Told how many machines with a host's memory are answered.

    Raises what ``search`` raises, but for models that do not fit, and WorkloadError if nothing is known of any model in
    such a training.
    """
    left_out: dict[str, bool] = {}
    found: list[LargestModel] = []
    sizes = sorted(set(host_memories), key=lambda size: _UNLIMITED_BYTES if size is None else size)
    boxes = [box for hardware in machines for box in _without_and_with_disk(hardware)]
    for hardware in boxes:
        of_machine: list[LargestModel] = []
        # More than any model needs leaves nothing for a disk.
        bounded = sizes if hardware.disk is None else [size for size in sizes if size is not None]
        for one in _of_machine(request, hardware, bounded[::-1], left_out):
            of_machine.append(one)
            on_progress(len(found) + len(of_machine), len(boxes) * len(sizes))
        found += of_machine[::-1]
    if len(left_out) == len(request.models) and any(left_out.values()):
        raise WorkloadError(
            f"no model of the catalogue with sequences of {request.sequence_length:,} tokens is known in this training "
            f"without a trace, and none is traced here. Leave an option of it out, or ask protwin search about one "
            f"model."
        )
    return LargestModels(
        batch_size=request.batch_size,
        sequence_length=request.sequence_length,
        optimizer=request.optimizer,
        options=request.options,
        left_out=tuple(sorted(model for model, is_known_whole in left_out.items() if not is_known_whole)),
        untraced=tuple(sorted(model for model, is_known_whole in left_out.items() if is_known_whole)),
        machines=tuple(found),
    )


def _without_and_with_disk(hardware: Hardware) -> list[Hardware]:
    return [hardware.model_copy(update={"disk": None}), *([hardware] if hardware.disk is not None else [])]


def _of_machine(
    request: LargestRequest, hardware: Hardware, host_memories: Sequence[int | None], left_out: dict[str, bool]
) -> Iterator[LargestModel]:
    """One answer for each size of the host's memory; these descend."""
    models, tried = request.models, 0
    larger: Workload | None = None
    for memory_bytes in host_memories:
        box = with_host_memory(hardware, memory_bytes)
        found: TrainedModel | None = None
        while tried < len(models) and found is None:
            model = models[tried][1]
            workload = request.workload(model, box.device)
            if workload is None:
                left_out[model] = request.is_known_whole(model, box.device)
            elif request.fits(workload, box):
                found = trained(request, workload, box)
                break
            else:
                larger = workload
            tried += 1
        yield LargestModel(
            hardware_name=hardware.name,
            device_memory_bytes=hardware.device.memory_bytes,
            host_memory_bytes=memory_bytes,
            disk_name=None if hardware.disk is None else hardware.disk.name,
            found=found,
            following=None if larger is None else _too_large(request, larger, box),
        )


def _too_large(request: LargestRequest, workload: Workload, box: Hardware) -> TooLarge:
    """What ``workload`` lacks on the machine: where a larger disk is enough, that is named."""
    problem = request.problem(workload, box)
    need = None if box.disk is None else need_of_disk(request.search_request(workload, box))
    if box.disk is not None and need is not None:
        return TooLarge(
            model=workload.model_name,
            num_parameters=workload.num_parameters,
            short_device_bytes=0,
            short_host_bytes=0,
            short_disk_bytes=max(0, need.disk_bytes - box.disk.capacity_bytes),
        )
    device_bytes, host_bytes = smallest_changes(problem).both_bytes
    return TooLarge(
        model=problem.workload.model_name,
        num_parameters=problem.workload.num_parameters,
        short_device_bytes=max(0, device_bytes - problem.device_budget_bytes),
        short_host_bytes=max(0, host_bytes - problem.host_budget_bytes),
    )


def trained(request: LargestRequest, workload: Workload, hardware: Hardware) -> TrainedModel:
    """The best plan for a model on a machine.  Raises what ``search`` raises."""
    result = search_batches(request.search_request(workload, hardware)).result
    record = result.prediction
    host = record.host_memory
    return TrainedModel(
        model=workload.model_name,
        num_parameters=workload.num_parameters,
        plan=result.plan,
        iteration_s=record.iteration_s,
        iteration_interval_s=record.iteration_interval_s,
        tokens_per_s=record.tokens_per_s,
        bottleneck=bottleneck(record),
        guaranteed_peak_device_bytes=record.guaranteed_peak_device_bytes,
        host_bytes=0 if host is None else host.planned_bytes,
        survives=result.survives,
    )


def least_host_memory_bytes(request: LargestRequest, workload: Workload, hardware: Hardware) -> int | None:
    """The least memory of a host with which the model trains on the machine's device; None if it is too small."""
    problem = request.problem(workload, with_host_memory(hardware, None))
    need = least_host(problem, problem.device_budget_bytes)
    return None if need is None else memory_with_room(need.host_bytes, hardware.device.kind)


def nearest_model(request: LargestRequest, num_parameters: int, device: Device) -> Workload:
    """The model of the catalogue whose size is the nearest.  Raises InfeasibleError if none has such sequences."""
    for _, model in sorted(request.models, key=lambda one: (abs(one[0] - num_parameters), one)):
        workload = request.workload(model, device)
        if workload is not None:
            return workload
    raise InfeasibleError(
        f"no model of the catalogue has sequences of {request.sequence_length:,} tokens. Ask for less."
    )
