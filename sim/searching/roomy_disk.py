"""Whether a disk of any size would hold what the host of a machine cannot, and how much of it: found by trying.

The rates of a disk change nothing of which plans fit, so any will do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ...shared.basics.errors import InfeasibleError
from ...shared.basics.units import format_bytes, format_enough_bytes
from ...shared.catalogue.parts import disk_names, disk_part
from ...shared.schema.hardware import Disk
from .least_memory import Need, least_disk
from .problem import search_problem
from .request import SearchRequest

_ROOMY: Final = Disk(name="any", capacity_bytes=2**60, read_bytes_per_s=1e9, write_bytes_per_s=1e9)


def need_of_disk(request: SearchRequest) -> Need | None:
    """The plan of one rank that has the least on a disk, of those within both budgets, whatever room the disk has.

    Without the margin, which a search falls back on.  None if no disk is enough, or none may be used.
    """
    disk = request.hardware.disk
    roomy = _ROOMY if disk is None else disk.model_copy(update={"capacity_bytes": _ROOMY.capacity_bytes})
    asked = replace(request, hardware=request.hardware.model_copy(update={"disk": roomy}))
    if request.margin_frac and request.device_budget_bytes is None:
        asked = replace(asked, margin_frac=0.0)
    asked = asked.with_disk() if asked.may_use_disk else asked
    return None if asked.space.names_disk else least_disk(search_problem(asked))


def with_advice_on_disk(error: InfeasibleError, request: SearchRequest) -> InfeasibleError:
    """``error``, why no plan of ``request`` fits, with the disk that would help, if one would."""
    need = need_of_disk(request)
    if need is None:
        return error
    disk = request.hardware.disk
    enough = format_enough_bytes(need.disk_bytes)
    if disk is None:
        large = [one for one in map(disk_part, disk_names()) if one.capacity_bytes >= need.disk_bytes]
        least = min(large, key=lambda one: (one.capacity_bytes, one.name), default=None)
        how = "--set disk=NAME" if least is None else f"such as --set disk={least.name}"
        return InfeasibleError(
            f"{error} Or keep {enough} on a disk, which the machine lacks: a plan fits then ({how})."
        )
    return InfeasibleError(
        f"{error} Or keep {enough} on the disk {disk.name}, which has {format_bytes(disk.capacity_bytes)} for files: a "
        f"plan fits then (--set disk.capacity_bytes={need.disk_bytes})."
    )
