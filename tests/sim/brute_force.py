"""Small spaces of plans with every plan in them simulated: the oracle of the search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.answers.search_result import SearchResult
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.methods.full_training import FULL_TRAINING
from protwin.shared.methods.method import Method
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.simulator import simulate_timing
from protwin.sim.searching.request import Effort, Step
from protwin.sim.searching.search import search
from protwin.sim.space.space import SearchSpace
from protwin.sim.space.step_spec import StepSpec
from tests.sim.fastest import fastest_request
from tests.sim.host_account import host_bytes
from tests.strategies.machines import calibrations, disks, hardware
from tests.strategies.plans import any_host_gradients, any_optimizer
from tests.strategies.tilings import with_tilings
from tests.strategies.workloads import workloads

_MODELS, _SMALL_MODELS = workloads(max_blocks=3), workloads(max_blocks=2)


@dataclass(frozen=True)
class Outcome:
    """What the simulator says of one plan."""

    plan: Plan
    iteration_s: float
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Case:
    """A small space, and every plan of it simulated."""

    workload: Workload
    hardware: Hardware
    calibration: Calibration | None
    space: SearchSpace
    step: StepSpec
    outcomes: tuple[Outcome, ...]
    method: Method = FULL_TRAINING

    def search(self, device_budget_bytes: int, tolerance_frac: float = 0.0) -> SearchResult:
        return search(
            fastest_request(
                workload=self.workload,
                hardware=self.hardware,
                calibration=self.calibration,
                device_budget_bytes=max(1, device_budget_bytes),
                host_budget_bytes=max(outcome.host_bytes for outcome in self.outcomes),
                space=self.space,
                step=self.asked_step,
                effort=Effort(tolerance_frac=tolerance_frac),
                method=self.method,
            )
        )

    @property
    def asked_step(self) -> Step:
        """The step as a request asks for it."""
        step = self.step
        return Step(
            micro_batches=step.micro_batches,
            max_gradient_norm=step.max_gradient_norm,
            optimizer=step.optimizer,
            host_gradients=step.host_gradients,
        )

    def feasible(self, device_budget_bytes: int) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.device_bytes <= device_budget_bytes]


def kept_counts(space: SearchSpace, num_chunks: int) -> list[tuple[int, int]]:
    """``n_persist`` and ``n_host_stepped`` by [Note: Mixtures in the space] of ``sim/space/placements.py``."""
    assert space.n_persist
    found = []
    for n_persist in space.n_persist:
        left = num_chunks - n_persist
        every = range(left + 1) if n_persist == min(space.n_persist) else {0, left}
        named = every if space.n_host_stepped is None else space.n_host_stepped
        found += [(n_persist, number) for number in named if 0 <= number <= left]
    return found


def disk_counts(space: SearchSpace) -> list[tuple[int, int, int]]:
    """``n_disk_state``, ``n_disk`` and ``n_staging`` that agree."""
    named = list(product(space.n_disk_state or (0,), space.n_disk, space.n_staging))
    return [one for one in named if 0 < one[0] >= one[1]] + ([(0, 0, 0)] if 0 in (space.n_disk_state or (0,)) else [])


def brute_force(
    model: Workload,
    box: Hardware,
    calibration: Calibration | None,
    space: SearchSpace,
    step: StepSpec,
    method: Method = FULL_TRAINING,
) -> tuple[Outcome, ...]:
    """Every combination of knobs that the compiler takes, several of which are the same plan, simulated."""
    costs = CostModel(box, calibration, use_measured=model.measured_on == box.name)
    outcomes = []
    mlp = (1, *(tiling.mlp_tiles for tiling in model.tilings))
    loss = (1, *(tiling.loss_tiles for tiling in model.loss_tilings))
    tiles: list[dict[str, Any]] = [
        {"mlp_tiles": of_mlp, "loss_tiles": of_loss}
        for of_mlp, of_loss in product(mlp, loss)
        if of_mlp in (space.mlp_tiles or mlp) and of_loss in (space.loss_tiles or loss)
    ]
    counts = product(space.n_checkpoint or (), space.n_swap or (), space.n_offload_input or (0,))
    every_modes = list(product(counts, space.product_stride or (0, 1)))
    others: tuple[Iterable[Any], ...] = (tiles, space.n_buffer or (), space.prefetch_depth, every_modes)
    for chunk_bytes in space.chunk_bytes or ():
        layout = layout_of(model, chunk_bytes)
        kept = kept_counts(space, len(layout.chunks))
        for (n_persist, n_host_stepped), on_disk, in_tiles, n_buffer, depth, modes in product(
            kept, disk_counts(space), *others
        ):
            (n_checkpoint, n_swap, n_offload_input), product_stride = modes
            is_kept = product_stride and n_checkpoint
            keeps = {"n_selective": n_checkpoint, "product_stride": product_stride} if is_kept else {}
            if product_stride and (n_offload_input or in_tiles["mlp_tiles"] > 1):
                continue
            if n_buffer >= layout.min_buffers(n_persist + n_host_stepped):
                if n_checkpoint + n_swap > model.num_blocks or n_offload_input > n_checkpoint:
                    continue
                if on_disk[0] > len(layout.chunks) - n_persist - n_host_stepped:
                    continue
                plan = Plan(
                    workload_id=model.identity,
                    method=model.method,
                    chunk_bytes=chunk_bytes,
                    n_persist=n_persist,
                    n_host_stepped=n_host_stepped,
                    n_disk_state=on_disk[0],
                    n_disk=on_disk[1],
                    n_staging=on_disk[2],
                    n_buffer=n_buffer,
                    prefetch_depth=depth,
                    n_checkpoint=n_checkpoint,
                    n_swap=n_swap,
                    n_offload_input=n_offload_input,
                    **in_tiles,
                    **keeps,
                    micro_batches=step.micro_batches,
                    max_gradient_norm=step.max_gradient_norm,
                    optimizer=step.optimizer,
                    host_gradients=step.host_gradients,
                    projects_gradients_on=step.projects_gradients_on,
                )
                schedule = compile_schedule(plan, model, layout, policies=method.policies)
                contention = ContentionModel.for_plan(plan, box, calibration)
                timing = simulate_timing(schedule, costs.durations_s(schedule), contention)
                outcomes.append(
                    Outcome(
                        plan,
                        timing.iteration_s,
                        guaranteed_device_peak(schedule).size_bytes,
                        host_bytes(plan, model, layout, schedule),
                    )
                )
    return tuple(outcomes)


@st.composite
def cases(draw: DrawFn, method: Method = FULL_TRAINING, models: st.SearchStrategy[Workload] = _MODELS) -> Case:
    """Few blocks and one or two values of every knob, on any machine; time passes in every one of them."""
    model, has_modes = draw(models), method.policies.sections.has_modes
    box, calibration = draw(hardware()), draw(st.none() | calibrations())
    if draw(st.booleans()):
        box = box.model_copy(update={"name": model.measured_on})
        calibration = calibration and calibration.model_copy(update={"hardware_name": model.measured_on})

    def some(values: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(st.sets(values, min_size=1, max_size=2)))

    space = SearchSpace(
        chunk_bytes=some(st.sampled_from((512, 2048, 4096, 100_000))),
        n_persist=tuple({0, draw(st.integers(0, 8))}),
        n_host_stepped=draw(st.sampled_from(((0,), (0, 1), (0, 2, 5), None))),
        n_buffer=tuple({1000, draw(st.integers(0, 6))}),
        prefetch_depth=some(st.integers(1, 3)),
        n_checkpoint=tuple({0, draw(st.integers(0, model.num_blocks))}) if has_modes else (0,),
        n_swap=draw(st.sampled_from(((0,), (0,), (0, 1), (0, model.num_blocks)))) if has_modes else (0,),
    )
    step = StepSpec(
        draw(st.sampled_from((1, 1, 2, 3))),
        draw(st.sampled_from((None, None, 1.0))),
        optimizer=draw(any_optimizer(model)),
        host_gradients=draw(any_host_gradients(model)),
    )
    outcomes = brute_force(model, box, calibration, space, step, method)
    return Case(model, box, calibration, space, step, outcomes, method)


@st.composite
def cases_with_disk(
    draw: DrawFn, method: Method = FULL_TRAINING, models: st.SearchStrategy[Workload] = _SMALL_MODELS
) -> Case:
    """Few blocks, chunks on a disk and not, and few values of the other knobs."""
    model = draw(models)
    box = draw(hardware()).model_copy(update={"disk": draw(disks()), "name": model.measured_on})
    space = SearchSpace(
        chunk_bytes=(draw(st.sampled_from((512, 2048))),),
        n_persist=tuple({0, draw(st.integers(0, 2))}),
        n_disk_state=draw(st.sampled_from(((0, 1), (0, 2), (1, 3)))),
        n_disk=draw(st.sampled_from(((0,), (0, 1), (1,)))),
        n_staging=draw(st.sampled_from(((1,), (2,), (1, 3)))),
        n_buffer=tuple({1000, draw(st.integers(0, 4))}),
        prefetch_depth=(draw(st.integers(1, 2)),),
        n_checkpoint=(draw(st.integers(0, 1)),),
    )
    step = StepSpec(draw(st.sampled_from((1, 1, 2))), draw(st.sampled_from((None, None, 1.0))))
    assume(disk_counts(space))
    outcomes = brute_force(model, box, None, space, step, method)
    assume(outcomes)
    return Case(model, box, None, space, step, outcomes, method)


@st.composite
def cases_with_long_knobs(draw: DrawFn, models: st.SearchStrategy[Workload] = _MODELS) -> Case:
    """Few blocks, tiles of MLPs and of the loss, inputs on the host, and few values of the other knobs."""
    model = draw(with_tilings(draw(models)))
    box = draw(hardware()).model_copy(update={"name": model.measured_on})
    every = st.sampled_from((None, None, (1, 2), (2, 5)))
    space = SearchSpace(
        chunk_bytes=(draw(st.sampled_from((512, 2048))),),
        n_persist=tuple({0, draw(st.integers(0, 4))}),
        n_buffer=(1000,),
        prefetch_depth=(draw(st.integers(1, 2)),),
        n_checkpoint=tuple({0, draw(st.integers(0, model.num_blocks))}),
        n_swap=draw(st.sampled_from(((0,), (0,), (0, 1)))),
        n_offload_input=draw(st.sampled_from(((0,), (0, 1), (0, 2), (0, 1, 2)))),
        mlp_tiles=draw(every),
        loss_tiles=draw(every),
        product_stride=draw(st.sampled_from(((0,), (1,), (0, 1), None))),
    )
    step = StepSpec(draw(st.sampled_from((1, 1, 2))), draw(st.sampled_from((None, None, 1.0))))
    outcomes = brute_force(model, box, None, space, step)
    assume(outcomes)
    return Case(model, box, None, space, step, outcomes)
