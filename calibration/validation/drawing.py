"""Plans by chance: what predictions are judged by, since nobody has chosen or fitted to them.

Every knob is drawn: chunk sizes, residencies, buffers, prefetch, a mode for every block, micro-batches, a limit of the
norm, chunks on a disk, what several ranks do together.  Within a budget a plan that does not fit is made smaller, knob
by knob, until it does: plans that fill a device are rare among all plans, and those are the ones that are searched for.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from ...shared.compile.compile import compile_schedule
from ...shared.layout.layout import Layout, largest_block_bytes, layout_of, why_not_on_device
from ...shared.methods.known import method_named
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import (
    ActivationMode,
    ParallelMode,
    Plan,
    ProjectionPlace,
    TrainingMethod,
    mode_counts,
    why_not_parallel,
)
from ...shared.schema.workload import Workload
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ..fitting.measurement_plans import RANK_MODES

_CHUNKS: Final = (0.0, 0.3, 0.5, 1.0, 1.0, 2.0)
"""Sizes of chunks, in those of the largest block; 0: a chunk for every parameter."""
_MIXTURES: Final[tuple[tuple[ActivationMode, ...], ...]] = (
    (ActivationMode.KEEP,),
    (ActivationMode.CHECKPOINT,),
    (ActivationMode.KEEP, ActivationMode.CHECKPOINT),
    (ActivationMode.KEEP, ActivationMode.SWAP),
    (ActivationMode.CHECKPOINT, ActivationMode.SWAP),
    (ActivationMode.KEEP, ActivationMode.CHECKPOINT, ActivationMode.SWAP),
    (ActivationMode.KEEP, ActivationMode.CHECKPOINT, ActivationMode.SWAP, ActivationMode.OFFLOAD_INPUT),
)
"""Modes that blocks choose from."""
_SELECTIVE_MIXTURES: Final[tuple[tuple[ActivationMode, ...], ...]] = (
    (ActivationMode.SELECTIVE,),
    (ActivationMode.KEEP, ActivationMode.SELECTIVE),
    tuple(ActivationMode),
)
"""More of them where MLPs run whole, and it is known which results blocks may keep."""
_LONG_MIXTURES: Final[tuple[tuple[ActivationMode, ...], ...]] = (
    (ActivationMode.OFFLOAD_INPUT,),
    (ActivationMode.CHECKPOINT, ActivationMode.OFFLOAD_INPUT),
    (ActivationMode.KEEP, ActivationMode.OFFLOAD_INPUT),
)
"""More of them for workloads that know tiles: those are for long sequences, where inputs of blocks are large."""
_LETTERS: Final = {mode: "R" if mode is ActivationMode.SELECTIVE else mode[0].upper() for mode in ActivationMode}
"""Of modes, in words for plans."""
_NORM: Final = 1.0
_ON_DEVICE: Final = 0.4
"""Of plans that project gradients, those that do so on the device."""
_TRIES: Final = 200
"""Draws in a row that give no new plan, until there are no more."""
_MISFITS: Final = 10
"""Draws in a row that cannot be made to fit, until it is taken that none can."""

Knobs = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Which plans may come."""

    seed: int = 0
    device_budget_bytes: int | None = None
    """What the guaranteed peak of each stays within; None for no limit."""
    optimizer: Optimizer = Optimizer.ADAMW
    has_disk: bool = False
    num_ranks: int = 1
    most_micro_batches: int = 3
    """Every other plan has one micro-batch, the others up to so many."""


def draw_plans(workload: Workload, draw: Draw, *, number: int, without: Iterable[Plan] = ()) -> tuple[Plan, ...]:
    """``number`` different plans for ``workload``, the same ones for the same draw; fewer if there are no more.

    ``without``: plans that do not come, such as those that a calibration is fitted to.  Empty if none is found within
    the budget.
    """
    return tuple(islice(_different(_Drawing(workload, draw), {plan.identity for plan in without}), number))


def _different(drawing: _Drawing, seen: set[str]) -> Iterator[Plan]:
    tries = misfits = 0
    while tries < _TRIES and misfits < _MISFITS:
        plan = drawing.plan()
        if plan is None:
            misfits += 1
            continue
        misfits = 0
        tries += 1
        if plan.identity not in seen:
            seen.add(plan.identity)
            tries = 0
            yield plan


def guaranteed_bytes(plan: Plan, workload: Workload) -> int:
    """What the device memory of ``plan`` cannot exceed."""
    return guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes


class _Drawing:
    """One plan after the other."""

    def __init__(self, workload: Workload, draw: Draw) -> None:
        self._workload = workload
        self._draw = draw
        self._chance = random.Random(draw.seed)
        self._largest_bytes = largest_block_bytes(workload)
        self._has_modes = method_named(workload.method).policies.sections.has_modes
        self._trains = any(parameter.trainable for parameter in workload.parameters)

    def plan(self) -> Plan | None:
        """A plan that fits; None if this draw cannot be made to."""
        knobs = self._knobs()
        for smaller in ({}, *_smaller(knobs)):
            knobs |= smaller
            plan = self._made(knobs)
            budget_bytes = self._draw.device_budget_bytes
            if budget_bytes is None or guaranteed_bytes(plan, self._workload) <= budget_bytes:
                return plan
        return None

    def _knobs(self) -> Knobs:
        """Shares and numbers of everything that a plan says, independent of the layout."""
        chance, workload = self._chance, self._workload
        known = {
            "mlp_tiles": [tiling.mlp_tiles for tiling in workload.tilings],
            "loss_tiles": [tiling.loss_tiles for tiling in workload.loss_tilings],
        }
        tiled = {knob: chance.choice((1, *numbers)) for knob, numbers in known.items() if numbers}
        mixtures = _MIXTURES + _LONG_MIXTURES if tiled else _MIXTURES
        if tiled.get("mlp_tiles", 1) == 1 and all(profile.selective for profile in workload.profiles):
            mixtures += _SELECTIVE_MIXTURES
        mixture = chance.choice(mixtures) if self._has_modes else ()
        knobs: Knobs = {
            "chunk": chance.choice(_CHUNKS),
            "kept": chance.choice((0.0, 1.0, chance.random(), chance.random())),
            "host_stepped": chance.choice((0.0, 0.0, chance.random())),
            "sharded": chance.choice((0.0, 1.0, chance.random())),
            "disk_state": chance.choice((0.0, chance.random())),
            "disk": chance.random(),
            "n_staging": chance.randint(1, 3),
            "more_buffers": chance.randint(0, 4),
            "prefetch_depth": chance.randint(1, 3),
            "modes": tuple(chance.choice(mixture) for _ in range(workload.num_blocks)) if mixture else None,
            "micro_batches": chance.choice((1, chance.randint(1, self._draw.most_micro_batches))),
            "limits_norm": self._trains and chance.random() < 0.25,
        }
        knobs |= {"tiles": tiled, "most_tiles": {knob: max(numbers) for knob, numbers in known.items() if numbers}}
        knobs["on_device"] = bool(workload.subspaces) and chance.random() < _ON_DEVICE
        return knobs | {"parallel": self._mode(), "optimizer": self._draw.optimizer}

    def _mode(self) -> ParallelMode:
        if self._draw.num_ranks == 1:
            return ParallelMode.SINGLE
        able = [mode for mode in RANK_MODES if why_not_parallel(self._draw.optimizer, mode) is None]
        return self._chance.choice(able)

    def _made(self, knobs: Knobs) -> Plan:
        workload, parallel = self._workload, knobs["parallel"]
        layout = layout_of(workload, max(1, round(self._largest_bytes * knobs["chunk"])))
        num_chunks = len(layout.chunks)
        num_kept = num_chunks if parallel is ParallelMode.DDP else round(knobs["kept"] * num_chunks)
        n_host_stepped = round(knobs["host_stepped"] * num_kept) if _may_step_kept(parallel) else 0
        offloaded = num_chunks - num_kept
        n_shard = round(knobs["sharded"] * offloaded)
        n_disk_state = round(knobs["disk_state"] * offloaded) if self._draw.has_disk else 0
        is_of_parts = workload.method is TrainingMethod.BYPASS and parallel is ParallelMode.SHARDED
        return Plan(
            workload_id=workload.identity,
            method=workload.method,
            chunk_bytes=layout.chunk_bytes,
            n_persist=num_kept - n_host_stepped,
            n_host_stepped=n_host_stepped,
            n_shard=layout.enough_sharded(num_kept, n_shard) if parallel is ParallelMode.SHARDED else 0,
            n_disk_state=n_disk_state,
            n_disk=round(knobs["disk"] * n_disk_state),
            n_staging=knobs["n_staging"] if n_disk_state else 0,
            n_buffer=_buffers(layout, num_kept, knobs["more_buffers"]),
            prefetch_depth=knobs["prefetch_depth"],
            micro_batches=knobs["micro_batches"],
            max_gradient_norm=_NORM if knobs["limits_norm"] and not is_of_parts else None,
            optimizer=knobs["optimizer"],
            parallel=parallel,
            num_ranks=self._draw.num_ranks,
            projects_gradients_on=_place(knobs, layout),
            **_of_modes(knobs["modes"]),
            **knobs["tiles"],
        )


def _place(knobs: Knobs, layout: Layout) -> ProjectionPlace:
    """On the device where that was drawn, and gradients leave whole, with what they are projected against."""
    is_whole = knobs["parallel"] is not ParallelMode.SHARDED
    can = knobs["on_device"] and is_whole and why_not_on_device(layout) is None
    return ProjectionPlace.DEVICE if can else ProjectionPlace.HOST


def _may_step_kept(parallel: ParallelMode) -> bool:
    """Whether the host may step what the device keeps."""
    return parallel in (ParallelMode.SINGLE, ParallelMode.REPLICATED)


def _buffers(layout: Layout, num_kept: int, more: int) -> int:
    fewest, offloaded = layout.min_buffers(num_kept), len(layout.chunks) - num_kept
    return min(fewest + more, max(fewest, offloaded)) if fewest else 0


def _of_modes(modes: tuple[ActivationMode, ...] | None) -> Knobs:
    if modes is None:
        return {}
    return {**mode_counts(modes), "activation_modes": modes}


def _smaller(knobs: Knobs) -> Iterator[Knobs]:
    """Changes that make a plan need less of the device, one after the other; the last leaves the least of it."""
    for share in (0.7, 0.4, 0.2, 0.0):
        yield {"kept": min(knobs["kept"], share)}
    yield {"more_buffers": 0}
    yield {"prefetch_depth": 1}
    if knobs["modes"] is not None:
        for every in (3, 2, 1):
            yield {"modes": _without_kept(knobs["modes"], every)}
    yield {"sharded": 0.0}
    for chunk in (0.3, 0.0):
        yield {"chunk": min(knobs["chunk"], chunk)}
    if knobs["modes"] is not None:
        yield {"modes": (ActivationMode.CHECKPOINT,) * len(knobs["modes"])}
    yield {"tiles": knobs["most_tiles"]}
    yield {"micro_batches": 1}


def _without_kept(modes: tuple[ActivationMode, ...], every: int) -> tuple[ActivationMode, ...]:
    """Every so many-th block that keeps what it saves is checkpointed instead."""
    return tuple(
        ActivationMode.CHECKPOINT if mode is ActivationMode.KEEP and place % every == 0 else mode
        for place, mode in enumerate(modes)
    )


def plan_words(plan: Plan, workload: Workload) -> str:
    """What tells a plan from others, in short: ``5/9 kept, 2 disk, 2K 1C 3S, ×2``.

    Chunks that are kept on the device, of all; blocks that keep what they save, are checkpointed, swap, or
    are recomputed from an input that travels (O) or from results that stay (R); tiles of MLPs and of the loss.
    """
    num_chunks = len(layout_of(workload, plan.chunk_bytes).chunks)
    parts = [] if plan.parallel is ParallelMode.SINGLE else [str(plan.parallel)]
    parts.append(f"{plan.num_kept}/{num_chunks} kept")
    for count, words in ((plan.n_host_stepped, "host-stepped"), (plan.n_shard, "shard"), (plan.n_disk_state, "disk")):
        parts += [f"{count} {words}"] if count else []
    modes = plan.modes(workload.num_blocks) if method_named(plan.method).policies.sections.has_modes else ()
    counts = [f"{modes.count(mode)}{_LETTERS[mode]}" for mode in ActivationMode if mode in modes]
    parts += [" ".join(counts)] if counts else []
    for tiles, words in ((plan.mlp_tiles, "MLPs"), (plan.loss_tiles, "loss")):
        parts += [f"{words} in {tiles}"] if tiles > 1 else []
    parts += [f"×{plan.micro_batches}"] if plan.micro_batches > 1 else []
    parts += ["norm"] if plan.max_gradient_norm is not None else []
    parts += ["projected on the device"] if plan.projects_gradients_on is ProjectionPlace.DEVICE else []
    return ", ".join(parts)
