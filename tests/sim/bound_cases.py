"""Plans on machines, with the tables that the search's bounds read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.compile.compile import FULL_TRAINING, Policies, compile_schedule
from protwin.shared.layout.layout import Layout, build_layout
from protwin.shared.layout.residencies import GATHERED
from protwin.shared.layout.travelling_inputs import input_bytes
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Lane, Schedule
from protwin.shared.schema.workload import Workload
from protwin.sim.bounds.exact_peaks import family_peaks
from protwin.sim.bounds.least_work import LeastWork
from protwin.sim.bounds.peak_bounds import MemoryBounds
from protwin.sim.bounds.replay import Replayer, ReplayPlan
from protwin.sim.bounds.round_trips import RoundTrips
from protwin.sim.bounds.stretches import least_periods_s
from protwin.sim.bounds.throughput import Throughput
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.simulator import simulate_timing
from protwin.sim.engine.timing import Timing
from protwin.sim.space.chunk_table import ChunkTable, chunk_table
from protwin.sim.space.compute_table import ComputeTable, compute_table
from protwin.sim.space.disk_choices import DiskChoice
from protwin.sim.space.placements import Placements
from protwin.sim.space.plan_family import PlanFamily
from protwin.sim.space.space import ModeRows
from protwin.sim.space.step_spec import StepSpec
from tests.strategies.machines import calibrations, disks, hardware
from tests.strategies.plans import any_host_gradients, any_optimizer, plans
from tests.strategies.workloads import workloads


@dataclass(frozen=True)
class Case:
    """A plan on a machine, with the tables that its bounds read."""

    workload: Workload
    plan: Plan
    layout: Layout
    costs: CostModel
    contention: ContentionModel
    compute: ComputeTable
    chunks: ChunkTable
    policies: Policies = FULL_TRAINING

    @property
    def prefix(self) -> int:
        """The plan's residencies: its tables have no others."""
        return 0

    @property
    def schedule(self) -> Schedule:
        return compile_schedule(self.plan, self.workload, self.layout, policies=self.policies)

    def simulated(self) -> Timing:
        schedule = self.schedule
        return simulate_timing(schedule, self.costs.durations_s(schedule), self.contention, num_more_iterations=1)

    def simulated_s(self) -> float:
        return self.simulated().iteration_s

    @property
    def mode(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The plan's row of the compute table."""
        modes = self.compute.modes
        is_mode = (modes.n_swap == self.plan.n_swap) & (modes.n_checkpoint == self.plan.n_checkpoint)
        if modes.n_offload_input is not None:
            is_mode &= modes.n_offload_input == self.plan.n_offload_input
        return np.flatnonzero(is_mode)

    def family(self, n_buffer: int | None = None, depths: Sequence[int] | None = None) -> PlanFamily:
        """The plan's, or the one with other buffers and look-aheads."""
        return PlanFamily.of(
            self.chunks,
            self.compute,
            prefix=self.prefix,
            n_buffer=self.plan.n_buffer if n_buffer is None else n_buffer,
            trips=self.compute.modes.trips[int(self.mode[0])],
            depths=np.array([self.plan.prefetch_depth] if depths is None else depths),
            policies=self.policies,
        )

    def work_bound_s(self) -> float:
        """By the least work of every lane."""
        bounds = LeastWork(self.chunks, self.compute, Throughput.of(self.contention))
        return float(bounds.period_s(np.array([self.prefix]), self.mode)[0, 0])

    def round_trip_bound_s(self) -> float:
        """By what must be on the host and back in time, beside the work of every lane."""
        throughput = Throughput.of(self.contention)
        bounds = RoundTrips(self.chunks, self.compute, throughput, self.plan.prefetch_depth)
        return float(bounds.period_s(np.array([self.prefix]), self.mode)[0, 0])

    def time_bound_s(
        self, n_buffer: int | None = None, prefetch_depth: int | None = None, num_events: int | None = None
    ) -> float:
        """By what the lanes run, of this plan or of one with other buffers and another look-ahead."""
        family = self.family(n_buffer, None if prefetch_depth is None else [prefetch_depth])
        spread = {} if num_events is None else {"spread": (num_events,) * len(Lane)}
        return float(least_periods_s(family.programs(self.mode), Throughput.of(self.contention), **spread)[0, 0])

    @property
    def num_gathered(self) -> int:
        """Chunks that come to the device for stays."""
        return int(np.count_nonzero(self.chunks.is_any_of(self.prefix, *GATHERED)))

    def memory_bound_bytes(self) -> int:
        bounds = MemoryBounds(self.chunks, self.compute, self.workload.resident_bytes)
        knobs = (np.array([self.plan.n_buffer]), np.array([self.plan.prefetch_depth]))
        return int(bounds.peak_bytes(self.prefix, *knobs, self.mode)[0, 0, 0])

    def activation_bound_bytes(self) -> int:
        static = self.chunks.static_device_bytes(np.array([self.prefix]), self.workload.resident_bytes)
        bounds = MemoryBounds(self.chunks, self.compute, self.workload.resident_bytes)
        return int(static[0] + bounds.activation_bytes[self.mode[0]])

    def exact_peak_bytes(self) -> int:
        return int(family_peaks(self.family(), self.mode)[0, 0])

    def replayed_s(self) -> float:
        return float(Replayer(self.contention).periods_s([ReplayPlan(self.family(), 0, int(self.mode[0]))])[0])


def case(
    model: Workload,
    chosen: Plan,
    layout: Layout,
    costs: CostModel,
    contention: ContentionModel,
    policies: Policies = FULL_TRAINING,
) -> Case:
    knobs = (chosen.micro_batches, chosen.max_gradient_norm, chosen.parallel, chosen.num_ranks, chosen.optimizer)
    step = StepSpec(*knobs, chosen.host_gradients, chosen.shard_ranks, chosen.projects_gradients_on)
    costs = costs.stepping(chosen.optimizer)
    most = model.num_blocks + 1 if policies.sections.has_modes else 1
    choices = [(s, c, i) for s in range(most) for c in range(most - s) for i in range(c + 1)]
    n_swap, n_checkpoint, n_offload_input = (np.array(column) for column in zip(*choices, strict=True))
    inputs = np.array(input_bytes(model))
    moves = np.array([model.profile_of(block).swappable_bytes > 0 for block in range(model.num_blocks)])
    modes = ModeRows(model.num_blocks, n_swap, n_checkpoint, moves, n_offload_input, inputs)
    compute = compute_table(model, modes, costs, step, policies)
    on_disk = DiskChoice(chosen.n_disk_state, chosen.n_disk, chosen.n_staging)
    places = Placements.of(layout, [(chosen.n_persist, chosen.n_host_stepped, chosen.n_shard)], [on_disk])
    chunks = chunk_table(model, layout, costs, step, places, has_disk=Lane.DISK in contention.lanes)
    return Case(model, chosen, layout, costs, contention, compute, chunks, policies)


def hand_made(model: Workload, chosen: Plan, hardware: Hardware, contention: ContentionModel | None = None) -> Case:
    layout = build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=chosen.chunk_bytes)
    costs = CostModel(hardware, use_measured=True)
    return case(model, chosen, layout, costs, contention or ContentionModel.none())


@st.composite
def cases(draw: DrawFn) -> Case:
    """Plans of the space that is searched, with and without contention, measured and modelled."""
    model = draw(workloads(measured=None))
    has_disk = draw(st.booleans())
    sorts: dict[str, Any] = {"optimizers": any_optimizer(model), "host_gradients": any_host_gradients(model)}
    chosen, layout = draw(plans(model, **sorts, has_disk=has_disk))
    # Blocks that keep results are a workload of their own to the search's tables (``tests/sim/brute_force.py``).
    chosen = chosen.model_copy(update={"activation_modes": None, "n_selective": 0})
    if draw(st.booleans()):
        chosen = chosen.model_copy(update={"n_swap": 0, "micro_batches": 1, "max_gradient_norm": None})
    return draw(on_a_machine(model, chosen, layout, has_disk=has_disk))


@st.composite
def on_a_machine(
    draw: DrawFn,
    model: Workload,
    chosen: Plan,
    layout: Layout,
    policies: Policies = FULL_TRAINING,
    *,
    has_disk: bool,
) -> Case:
    """The plan on any machine, with a disk or without."""
    box, calibration = draw(hardware()), draw(st.none() | calibrations())
    if has_disk:
        box = box.model_copy(update={"disk": draw(disks())})
    costs = CostModel(box, calibration, use_measured=draw(st.booleans()))
    among = (ContentionModel.of(box, calibration, has_disk=has_disk), ContentionModel.none(has_disk=has_disk))
    contention = draw(st.sampled_from(among))
    return case(model, chosen, layout, costs, contention, policies)
