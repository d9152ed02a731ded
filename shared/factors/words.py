"""What a plan does with weights in factors, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..basics.units import format_bytes
from ..schema.schedule import Schedule, TaskKind
from ..schema.workload import Workload

_PROJECTIONS: Final = (
    TaskKind.GRADIENT_PROJECTION,
    TaskKind.PARAMETER_PROJECTION,
    TaskKind.HOST_GRADIENT_PROJECTION,
    TaskKind.HOST_PARAMETER_PROJECTION,
)


def projection_sentences(schedule: Schedule, workload: Workload) -> list[str]:
    """What is frozen, where gradients are projected and why there, and how much that is; none without subspaces."""
    if not workload.subspaces:
        return []
    kinds = [(task.kind, task.chunk) for task in schedule.tasks]
    on_host = len({chunk for kind, chunk in kinds if kind is TaskKind.HOST_GRADIENT_PROJECTION})
    leaving = len({chunk for kind, chunk in kinds if kind is TaskKind.GRADIENT_PROJECTION} - {None})
    places = []
    if (TaskKind.GRADIENT_PROJECTION, None) in kinds:
        places.append("on the device where chunks stay there")
    if on_host:
        places.append(f"on the host, which steps them, for {on_host} chunk{_s(on_host)}")
    if leaving:
        places.append(
            f"on the device before they leave, while their frozen factors are there, for {leaving} chunk{_s(leaving)}"
        )
    computed = sum(task.phase.flops for task in schedule.tasks if task.phase is not None)
    flops = sum(task.flops for task in schedule.tasks if task.kind in _PROJECTIONS)
    more = f", {flops / computed:.1%} of those of forward and backward" if computed else ""
    return [
        f"Factors: {_bytes(workload, (s.frozen for s in workload.subspaces))} stay frozen beside "
        f"{_bytes(workload, (s.trained for s in workload.subspaces))} that are kept orthogonal to them.",
        f"Projections: of gradients {' and '.join(places)}; of parameters wherever they are stepped; {flops:.3g} "
        f"FLOPs a step{more}.",
    ]


def _bytes(workload: Workload, numbers: Iterable[int]) -> str:
    return format_bytes(sum(workload.parameters[number].size_bytes for number in numbers))


def _s(count: int) -> str:
    return "" if count == 1 else "s"
