"""What more of something must never make worse."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from protwin.shared.compile.activation_levels import activation_levels
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import Layout
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import ActivationMode, Plan, place_activation_modes
from protwin.shared.schema.workload import Workload
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.simulator import simulate_timing
from protwin.sim.space.space import ModeRows
from tests.proof_size import examples
from tests.strategies.machines import hardware
from tests.strategies.plans import PlannedWorkload, planned_workloads
from tests.strategies.workloads import workloads


def mode_rows(num_blocks: int) -> ModeRows:
    """Every choice of modes."""
    pairs = [(s, c) for s in range(num_blocks + 1) for c in range(num_blocks + 1 - s)]
    return ModeRows(num_blocks, *(np.array(column) for column in zip(*pairs, strict=True)))


def period_s(plan: Plan, model: Workload, layout: Layout, box: Hardware) -> float:
    """Without contention, so that a task that ends sooner delays no other."""
    schedule = compile_schedule(plan, model, layout)
    durations_s = CostModel(box).durations_s(schedule)
    return simulate_timing(schedule, durations_s, ContentionModel.none(), max_iterations=40).iteration_s


def faster(box: Hardware, part: str, times: float) -> Hardware:
    """The machine with one part faster."""
    if part == "links":
        links = ("host_to_device", "device_to_host")
        return box.model_copy(
            update={
                name: getattr(box, name).model_copy(
                    update={"bandwidth_bytes_per_s": getattr(box, name).bandwidth_bytes_per_s * times, "table": ()}
                )
                for name in links
            }
        )
    if part == "host":
        host = box.host.model_copy(update={"adam_bytes_per_s": (box.host.adam_bytes_per_s or 1e9) * times})
        return box.model_copy(update={"host": host})
    device = box.device.model_copy(
        update={
            "vector_flop_per_s": box.device.vector_flop_per_s * times,
            "memory_bandwidth_bytes_per_s": box.device.memory_bandwidth_bytes_per_s * times,
            "peak_flop_per_s": {dtype: peak * times for dtype, peak in box.device.peak_flop_per_s.items()},
        }
    )
    return box.model_copy(update={"device": device})


@given(
    planned_workloads(max_blocks=3, measured=False),
    hardware(),
    st.sampled_from(("links", "host", "device")),
    st.floats(1, 8),
)
@settings(max_examples=examples(40, 6))
def test_a_faster_part_never_makes_a_fixed_plan_slower(
    found: PlannedWorkload, box: Hardware, part: str, times: float
) -> None:
    # Factor 1 gives the same part without its table, which is what the faster one is compared with.
    before_s = period_s(found.plan, found.workload, found.layout, faster(box, part, 1.0))
    after_s = period_s(found.plan, found.workload, found.layout, faster(box, part, times))
    assert after_s <= before_s * (1 + 1e-6)


@given(workloads(max_blocks=6))
@settings(max_examples=examples(60, 6))
def test_more_checkpointing_never_raises_the_activation_account(model: Workload) -> None:
    """Saved between the passes, of equal blocks.

    Their checkpointed forward leaves no more than their usual one, and holds nothing of others' that this one does not.
    """
    profile = model.profiles[0]
    assume(profile.checkpoint_forward.net_bytes <= profile.forward.net_bytes)
    assume(all({*shared.checkpointed_by} <= {*shared.kept_by} for shared in model.shared_inputs))
    # Those of some blocks alone may come back: the blocks that two choices checkpoint are not among those of three.
    assume(all(len(shared.kept_by) in (0, model.num_blocks) for shared in model.shared_inputs))
    equal = model.model_copy(
        update={"blocks": tuple(block.model_copy(update={"profile": 0}) for block in model.blocks)}
    )
    num_blocks = equal.num_blocks
    rows = ModeRows(num_blocks, np.zeros(num_blocks + 1, dtype=np.int64), np.arange(num_blocks + 1))
    nothing = np.zeros(rows.is_swap.shape, dtype=np.int64)
    at_turn = activation_levels(equal, rows.is_checkpoint, rows.is_swap, nothing, 1).alive_bytes[:, 0, num_blocks + 1]
    assert (np.diff(at_turn) <= 0).all()


@given(st.integers(1, 40))
@settings(max_examples=examples(20, 7))
def test_modes_are_placed_as_plans_place_them(num_blocks: int) -> None:
    rows = mode_rows(num_blocks)
    for row, (n_swap, n_checkpoint) in enumerate(zip(rows.n_swap.tolist(), rows.n_checkpoint.tolist(), strict=True)):
        modes = place_activation_modes(num_blocks, n_checkpoint=n_checkpoint, n_swap=n_swap)
        assert rows.is_checkpoint[row].tolist() == [mode is ActivationMode.CHECKPOINT for mode in modes]
        assert rows.is_swap[row].tolist() == [mode is ActivationMode.SWAP for mode in modes]
