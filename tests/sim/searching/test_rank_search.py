"""The search over several ranks: bounds below the simulator, the best plan of brute force, and a true certificate."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.answers.search_result import SearchResult
from protwin.shared.basics.errors import InfeasibleError, PlanError
from protwin.shared.basics.units import format_bytes
from protwin.shared.catalogue.machines import machine as known_machine
from protwin.shared.catalogue.machines import override_hardware
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.families.shipped import shipped_family
from protwin.shared.layout.layout import build_layout
from protwin.shared.layout.residencies import ChunkResidency, residencies
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Lane, Memory, lanes_of
from protwin.shared.schema.workload import DType, Workload
from protwin.shared.tables.search import mode_table
from protwin.shared.tables.terminal import as_text
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.bounds.peak_bounds import MemoryBounds
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.simulator import simulate, simulate_timing
from protwin.sim.searching.least_memory import least_device
from protwin.sim.searching.request import Effort, SearchRequest, Step
from protwin.sim.searching.search import problems, search
from protwin.sim.space.space import SearchSpace
from protwin.sim.space.step_spec import SEVERAL
from tests.cli.saved import decoder
from tests.proof_size import examples, share
from tests.sim.bound_cases import Case
from tests.sim.brute_force import kept_counts
from tests.sim.fastest import fastest_request
from tests.sim.host_account import host_bytes
from tests.sim.ranked_cases import RANKS, nodes, ranked_cases
from tests.strategies.workloads import workloads

# -- bounds ----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(30, 5))
@given(ranked_cases())
def test_no_bound_of_memory_exceeds_the_peak_and_the_last_one_equals_it(found: Case) -> None:
    peak_bytes = guaranteed_device_peak(found.schedule).size_bytes
    bounds = MemoryBounds(found.chunks, found.compute, found.workload.resident_bytes)
    knobs = (np.array([found.plan.n_buffer]), np.array([found.plan.prefetch_depth]))
    assert bounds.peak_bytes(found.prefix, *knobs, found.mode)[0, 0, 0] <= peak_bytes
    assert found.exact_peak_bytes() == peak_bytes


@settings(max_examples=examples(30, 5))
@given(ranked_cases())
def test_tables_hold_what_the_schedule_holds(found: Case) -> None:
    schedule, prefix = found.schedule, np.array([found.prefix])
    swapped_bytes = found.compute.trip_bytes(found.compute.modes.trips[int(found.mode[0])])
    assert found.chunks.pinned_host_bytes(prefix)[0] + swapped_bytes == schedule.static_bytes(Memory.PINNED_HOST)
    assert found.chunks.host_bytes(prefix)[0] == schedule.static_bytes(Memory.HOST)
    durations_s = found.costs.durations_s(schedule)
    busy_s = {lane: sum(durations_s[task] for task in program) for lane, program in schedule.lanes.items()}
    family = found.family()
    assert family.compute_s(found.mode)[0].sum() == pytest.approx(busy_s[Lane.COMPUTE])
    for number, lane in enumerate(lanes_of(found.plan.num_ranks)):
        assert lane is Lane.COMPUTE or family.seconds(number, 0).sum() == pytest.approx(busy_s[lane])


# -- brute force -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Small:
    """A small space of every mode, and all of its plans: ((mode, shard group), seconds, device and host bytes)."""

    workload: Workload
    hardware: Hardware
    space: SearchSpace
    outcomes: tuple[tuple[tuple[ParallelMode, int | None], float, int, int], ...]
    step: Step

    def search(self, device_budget_bytes: int) -> SearchResult:
        return search(
            fastest_request(
                workload=self.workload,
                hardware=self.hardware,
                device_budget_bytes=device_budget_bytes,
                host_budget_bytes=max(host for _, _, _, host in self.outcomes),
                space=self.space,
                step=self.step,
                effort=Effort(tolerance_frac=0.0),
            )
        )


def shard_counts(space: SearchSpace, mode: ParallelMode, num_chunks: int, n_persist: int) -> list[int]:
    """What [Note: Mixtures in the space] of ``sim/space/placements.py`` allows."""
    left = num_chunks - n_persist
    if mode is not ParallelMode.SHARDED:
        return [0]
    if space.n_shard is not None:
        return [n_shard for n_shard in space.n_shard if n_shard <= left]
    assert space.n_persist
    return list(range(left + 1)) if n_persist == min(space.n_persist) else [0, left]


@st.composite
def small_spaces(draw: DrawFn) -> Small:
    model = draw(workloads(max_blocks=3))
    box = draw(nodes()).model_copy(update={"name": model.measured_on})
    space = SearchSpace(
        chunk_bytes=tuple(draw(st.sets(st.sampled_from((512, 2048, 100_000)), min_size=1, max_size=2))),
        n_persist=tuple({0, draw(st.integers(0, 4)), 1000 if draw(st.booleans()) else 0}),
        n_host_stepped=draw(st.sampled_from(((0,), (0, 1, 2), None))),
        n_buffer=tuple({1000, draw(st.integers(0, 4))}),
        prefetch_depth=tuple(draw(st.sets(st.integers(1, 3), min_size=1, max_size=2))),
        n_checkpoint=tuple({0, draw(st.integers(0, model.num_blocks))}),
    )
    most = max(
        len(build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=size).chunks)
        for size in space.chunk_bytes or ()
    )
    counts = st.sets(st.integers(0, 6), min_size=1, max_size=3)
    space = space.model_copy(
        update={
            "n_persist": tuple(sorted({min(value, most) for value in space.n_persist or ()})),
            "n_shard": draw(st.none() | counts.map(lambda some: tuple(some | {0}))),
        }
    )
    step = Step(
        micro_batches=draw(st.sampled_from((1, 1, 2))),
        max_gradient_norm=draw(st.sampled_from((None, 1.0))),
        num_ranks=RANKS,
        shard_ranks=draw(st.sampled_from((None, (2,), (2, RANKS), ()))),
    )
    groups = {None: (None,), (2,): (2,)}.get(step.shard_ranks, (None, 2))
    outcomes = []
    costs = CostModel.of(model, box, num_ranks=RANKS)
    contention = ContentionModel.of(box, num_ranks=RANKS)
    assert space.chunk_bytes
    assert space.n_persist
    assert space.n_buffer
    assert space.n_checkpoint
    for size in space.chunk_bytes:
        layout = build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=size)
        kept = kept_counts(space, len(layout.chunks))
        knobs = product(SEVERAL, kept, space.n_buffer, space.prefetch_depth, space.n_checkpoint)
        for mode, (n_persist, n_host_stepped), n_buffer, depth, n_checkpoint in knobs:
            if n_persist > len(layout.chunks) or n_buffer < layout.min_buffers(n_persist + n_host_stepped):
                continue
            is_whole = len(layout.persistent(n_persist)) == len(layout.chunks)
            if is_whole != (mode is ParallelMode.DDP) or (n_host_stepped and mode is not ParallelMode.REPLICATED):
                continue
            shards = shard_counts(space, mode, len(layout.chunks), n_persist)
            for n_shard, group in product(shards, groups if mode is ParallelMode.SHARDED else (None,)):
                chosen = Plan(
                    workload_id=model.identity,
                    chunk_bytes=size,
                    n_persist=len(layout.chunks) if is_whole else n_persist,
                    n_host_stepped=n_host_stepped,
                    n_shard=n_shard,
                    n_buffer=n_buffer,
                    prefetch_depth=depth,
                    n_checkpoint=n_checkpoint,
                    parallel=mode,
                    num_ranks=RANKS,
                    shard_ranks=group,
                    micro_batches=step.micro_batches,
                    max_gradient_norm=step.max_gradient_norm,
                )
                # Frozen chunks that the host would step stay on the device: with them alone nothing leaves it.
                is_kept = set(residencies(chosen, layout)) <= {ChunkResidency.PERSISTENT}
                if is_kept and mode is not ParallelMode.DDP:
                    continue
                schedule = compile_schedule(chosen, model, layout)
                timing = simulate_timing(schedule, costs.durations_s(schedule), contention)
                needed = host_bytes(chosen, model, layout, schedule)
                outcomes.append(
                    ((mode, group), timing.iteration_s, guaranteed_device_peak(schedule).size_bytes, needed)
                )
    assume(outcomes)
    return Small(model, box, space, tuple(outcomes), step)


@settings(max_examples=examples(30, 5))
@given(small_spaces(), st.floats(0, 1))
def test_the_search_finds_what_brute_force_finds(found: Small, share: float) -> None:
    peaks = sorted({device for _, _, device, _ in found.outcomes})
    budget_bytes = peaks[round(share * (len(peaks) - 1))]
    best_s = min(seconds for _, seconds, device, _ in found.outcomes if device <= budget_bytes)
    assume(best_s > 0)
    result = found.search(budget_bytes)
    assert result.prediction.iteration_s == best_s
    assert result.certificate.is_certified
    assert result.prediction.guaranteed_peak_device_bytes <= budget_bytes
    for choice in result.modes:
        own = (choice.parallel, choice.shard_ranks)
        times_s = [s for mode, s, device, _ in found.outcomes if mode == own and device <= budget_bytes]
        if choice.shortest_possible_s is not None and times_s:
            assert choice.shortest_possible_s <= min(times_s)
        if choice.best_iteration_s is not None:
            assert choice.best_iteration_s >= min(times_s)


# -- a machine -------------------------------------------------------------------------------------------------------


def test_the_answer_says_what_became_of_every_mode() -> None:
    model, box = decoder(), known_machine("a100-80gb-x8")
    roomy = search(fastest_request(workload=model, hardware=box, step=Step(num_ranks=8)))
    assert tuple(choice.parallel for choice in roomy.modes) == SEVERAL
    best_s = {choice.parallel: choice.best_iteration_s for choice in roomy.modes}
    known_s = [seconds for seconds in best_s.values() if seconds is not None]
    assert roomy.prediction.iteration_s <= min(known_s) * 1.005
    assert roomy.plan.parallel in best_s
    tight = search(fastest_request(workload=model, hardware=box, device_budget_bytes=2**30, step=Step(num_ranks=8)))
    assert tight.plan.parallel is ParallelMode.SHARDED
    ddp = tight.modes[0]
    assert (ddp.parallel, ddp.best_iteration_s, ddp.shortest_possible_s) == (ParallelMode.DDP, None, None)
    assert re.search(r"GiB of device memory, \S+ MiB more than the budget of 1 GiB", ddp.reason)
    for result in (roomy, tight):
        again = simulate(result.plan, model, box)
        assert again.iteration_s == pytest.approx(result.prediction.iteration_s)
        assert again.num_tokens == 8 * model.num_tokens
        assert result.prediction.guaranteed_peak_device_bytes <= result.device_budget_bytes


def test_a_search_that_ends_early_says_so() -> None:
    model, box = decoder(), known_machine("a100-80gb-x8")
    step = Step(num_ranks=8, modes=(ParallelMode.SHARDED,))
    request = fastest_request(workload=model, hardware=box, device_budget_bytes=2**30, step=step)
    quick, thorough = (search(replace(request, effort=Effort(max_replays=most))) for most in (3, None))
    assert thorough.certificate.is_certified
    assert quick.certificate.num_undecided > 0
    assert not quick.certificate.is_certified
    assert thorough.prediction.iteration_s <= quick.prediction.iteration_s * 1.005


def test_one_mode_alone_has_the_plans_that_offload_nothing_too() -> None:
    model, box = decoder(), known_machine("a100-80gb-x8")
    result = search(
        fastest_request(workload=model, hardware=box, step=Step(num_ranks=8, modes=(ParallelMode.REPLICATED,)))
    )
    assert result.plan.parallel is ParallelMode.REPLICATED
    assert result.prediction.num_gathers == 0


def test_what_fits_nowhere_is_told() -> None:
    model, box = decoder(), known_machine("a100-80gb-x8")
    with pytest.raises(
        InfeasibleError,
        match=r"no plan fits on 8 ranks in modes ddp, replicated or sharded, for device memory is too small: in mode "
        r"replicated, which lacks the least, each rank of ",
    ):
        search(fastest_request(workload=model, hardware=box, device_budget_bytes=2**20, step=Step(num_ranks=8)))
    with pytest.raises(PlanError, match="no plan of this mode"):
        search(
            fastest_request(
                workload=model,
                hardware=box,
                space=SearchSpace(n_persist=(0,), chunk_bytes=2**25),
                step=Step(num_ranks=8, modes=(ParallelMode.DDP,)),
            )
        )


def test_modes_that_do_not_fit_say_in_a_clause_what_they_lack() -> None:
    """No plan is expected to fit in segments: one mode has the recommended plan, one says so, and DDP what is short."""
    family = shipped_family("gpt2", DType.BFLOAT16)
    assert family is not None
    asked = SearchRequest(
        workload=family.at(batch_size=4, sequence_length=1024),
        hardware=known_machine("a100-80gb-x8"),
        margin_frac=0.0,
        space=SearchSpace(chunk_bytes=2**26, n_swap=0, loss_tiles=1),
        step=Step(num_ranks=2),
        effort=Effort(max_replays=100),
        baselines=None,
    )
    found = {problem.step.parallel: problem for problem in problems(asked)}
    needs = {mode: need.device_bytes for mode, problem in found.items() if (need := least_device(problem)) is not None}
    budget_bytes = needs[ParallelMode.SHARDED]
    assert needs[ParallelMode.REPLICATED] == budget_bytes < needs[ParallelMode.DDP]
    memory_bytes = asked.hardware.device.memory_bytes - asked.budgets_bytes()[0] + budget_bytes
    tight = override_hardware(asked.hardware, {"device.memory_bytes": str(memory_bytes)})
    result = search(replace(asked, hardware=tight))
    assert not result.survives
    modes = {mode.parallel: mode for mode in result.modes}
    chosen = modes.pop(result.plan.parallel)
    assert (chosen.reason, chosen.best_iteration_s) == ("", result.prediction.iteration_s)
    need, more = (format_bytes(needs[ParallelMode.DDP] - has_bytes) for has_bytes in (0, budget_bytes))
    assert modes.pop(ParallelMode.DDP).reason == (
        f"needs at least {need} of device memory, {more} more than the budget of {format_bytes(budget_bytes)}"
    )
    (other,) = modes.values()
    assert other.reason == "its plans fit by what they allocate, but not by the segments that they are expected to take"
    table = as_text((mode_table(result),), width=100)
    assert "chosen" in table
    assert "Raise" not in table


def test_ctrl_c_gives_the_best_plan_so_far_and_says_that_it_is_not_certified() -> None:
    model, box = decoder(), known_machine("a100-80gb-x8")
    calls = 0

    def stop(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt

    result = search(
        fastest_request(workload=model, hardware=box, step=Step(num_ranks=8)), keep_interrupted=True, on_progress=stop
    )
    assert result.certificate.is_interrupted
    assert not result.certificate.is_certified
    assert result.certificate.num_undecided > 0
    calls = 0
    with pytest.raises(KeyboardInterrupt):
        search(fastest_request(workload=model, hardware=box, step=Step(num_ranks=8)), on_progress=stop)


# -- what would fit --------------------------------------------------------------------------------------------------


def fits(box: Hardware, **budgets: int) -> str:
    """Empty if a plan of four ranks fits, else why none does."""
    try:
        search(
            fastest_request(
                workload=decoder(), hardware=box, **budgets, step=Step(num_ranks=RANKS), effort=Effort(max_replays=1)
            )
        )
    except InfeasibleError as error:
        return str(error)
    return ""


def bytes_after(words: str, message: str) -> int:
    found = re.search(rf"{words} [\d.]+ \w+ \((\d+) bytes\)", message)
    assert found is not None, message
    return int(found[1])


@pytest.mark.slow
def test_the_smallest_change_of_each_memory_fits_and_a_byte_less_does_not() -> None:
    box = known_machine("a100-80gb-x8")
    enough = bytes_after("device budget to", fits(box, device_budget_bytes=2**20))
    assert not fits(box, device_budget_bytes=enough)
    assert fits(box, device_budget_bytes=enough - 1)
    message = fits(box, device_budget_bytes=enough, host_budget_bytes=2**10)
    enough_of_host = bytes_after("host budget to", message)
    assert not fits(box, device_budget_bytes=enough, host_budget_bytes=enough_of_host)
    assert fits(box, device_budget_bytes=enough, host_budget_bytes=enough_of_host - 1)


def test_the_memory_of_the_host_is_that_of_all_ranks_that_share_it() -> None:
    box = known_machine("a100-80gb-x8")

    def with_host(memory_bytes: int) -> Hardware:
        return box.model_copy(update={"host": box.host.model_copy(update={"memory_bytes": memory_bytes})})

    device_bytes = bytes_after("device budget to", fits(box, device_budget_bytes=2**20))
    message = fits(with_host(2**20), device_budget_bytes=device_bytes)
    assert "for 4 ranks" in message
    enough_bytes = bytes_after("a host with", message)
    assert not fits(with_host(enough_bytes), device_budget_bytes=device_bytes)
    # A little less is not enough, and so what one rank needs, the wrong variant, is not enough for four.
    for short_bytes in share((enough_bytes - 2**20, enough_bytes // RANKS), 2):
        assert fits(with_host(short_bytes), device_budget_bytes=device_bytes)
