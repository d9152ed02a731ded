"""Why nothing fits, and the smallest changes that do: held against every plan of small spaces, simulated."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from protwin.shared.basics.errors import InfeasibleError
from protwin.shared.basics.units import parse_bytes
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.schema.hardware import DeviceKind, Hardware
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.training_options import LoraOptions, TrainingOptions
from protwin.shared.schema.workload import Workload
from protwin.shared.workloads.source import load_workload
from protwin.sim.memory.host import default_reserve_bytes, memory_with_room
from protwin.sim.searching import infeasible, least_memory
from protwin.sim.searching.infeasible import Changes, smallest_changes
from protwin.sim.searching.least_memory import least_device, least_host
from protwin.sim.searching.problem import SearchProblem, search_problem
from protwin.sim.searching.request import Effort, Step
from protwin.sim.searching.search import problems, search
from protwin.sim.space.space import SearchSpace
from protwin.sim.space.step_spec import StepSpec
from tests.proof_size import examples
from tests.sim.brute_force import Case, brute_force, cases
from tests.sim.fastest import fastest_request
from tests.sim.hand_made import machine, workload

SPACE = SearchSpace(chunk_bytes=256, n_offload_input=0)


def problem_of(found: Case, device_bytes: int, host_bytes: int) -> SearchProblem:
    return search_problem(
        fastest_request(
            workload=found.workload,
            hardware=found.hardware,
            calibration=found.calibration,
            device_budget_bytes=device_bytes,
            host_budget_bytes=host_bytes,
            space=found.space,
            step=found.asked_step,
        )
    )


def fits(found: Case, device_bytes: int, host_bytes: int) -> bool:
    return any(one.device_bytes <= device_bytes and one.host_bytes <= host_bytes for one in found.outcomes)


def is_found(found: Case, device_bytes: int, host_bytes: int) -> bool:
    try:
        search(
            fastest_request(
                workload=found.workload,
                hardware=found.hardware,
                calibration=found.calibration,
                device_budget_bytes=device_bytes,
                host_budget_bytes=host_bytes,
                space=found.space,
                step=found.asked_step,
                effort=Effort(max_replays=1),
            )
        )
    except InfeasibleError:
        return False
    return True


def check_changes(found: Case, changes: Changes, device_bytes: int, host_bytes: int) -> None:
    """Every change named makes a plan fit, none does with a byte less, and none is left out that would."""
    device, host = changes.both_bytes
    for is_enough in (fits, is_found):
        assert is_enough(found, device, host)
        assert host == 0 or not is_enough(found, device, host - 1)
        assert device == device_bytes or not is_enough(found, device - 1, 2**50)
        if changes.device_bytes is None:
            assert not is_enough(found, 2**50, host_bytes)
        else:
            assert is_enough(found, changes.device_bytes, host_bytes)
            assert not is_enough(found, changes.device_bytes - 1, host_bytes)
        if changes.host_bytes is None:
            assert not is_enough(found, device_bytes, 2**50)
        else:
            assert is_enough(found, device_bytes, changes.host_bytes)
            assert not is_enough(found, device_bytes, changes.host_bytes - 1)


@st.composite
def tight(draw: st.DrawFn) -> tuple[Case, int, int]:
    """A space, and budgets around what its plans need that hold none of them."""
    found = draw(cases())
    device_needs = sorted({one.device_bytes for one in found.outcomes})
    host_needs = sorted({one.host_bytes for one in found.outcomes})
    device_bytes = max(1, draw(st.sampled_from(device_needs)) + draw(st.integers(-9, 3)))
    host_bytes = max(0, draw(st.sampled_from(host_needs)) + draw(st.integers(-9, 3)))
    assume(min(one.iteration_s for one in found.outcomes) > 0)
    assume(not fits(found, device_bytes, host_bytes))
    return found, device_bytes, host_bytes


@given(tight())
@settings(max_examples=examples(60, 4))
def test_the_changes_named_are_the_smallest(drawn: tuple[Case, int, int]) -> None:
    found, device_bytes, host_bytes = drawn
    check_changes(found, smallest_changes(problem_of(found, device_bytes, host_bytes)), device_bytes, host_bytes)


@given(drawn=tight())
@settings(max_examples=examples(60, 6))
def test_the_message_names_them(drawn: tuple[Case, int, int]) -> None:
    found, device_bytes, host_bytes = drawn
    problem = problem_of(found, device_bytes, host_bytes)
    changes, message = smallest_changes(problem), str(infeasible.explain_infeasible(problem))
    named = [int(number) for number in re.findall(r"\((\d+) bytes\)", message)]
    wanted = [changes.device_bytes, changes.host_bytes]
    if changes.host_bytes is None and changes.both_bytes[0] != changes.device_bytes:
        wanted += changes.both_bytes
    assert sorted(named) == sorted(number for number in wanted if number is not None)
    for readable, exact in re.findall(r"budget(?: alone)? to (\S+ \w+) \((\d+) bytes\)", message):
        assert int(exact) <= parse_bytes(readable) <= 1.002 * int(exact) + 1
    assert "needs" in message
    assert "too little" in message or "more than the budget" in message


def test_peaks_are_worked_out_once_for_all_that_is_said() -> None:
    """The message, the smallest changes and the bounds of both budgets ask for the same plans again and again."""
    model, box = workload(num_blocks=4), machine()
    found = every_plan(model, box)
    problem = problem_of(found, min(one.device_bytes for one in found.outcomes) - 100, 300)
    asked: list[tuple[int, ...]] = []
    once = least_memory._found_cheapest

    def counting(of: SearchProblem, place: least_memory._Place) -> tuple[int, tuple[int, int, int]]:
        asked.append(place[2:])
        return once(of, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(least_memory, "_found_cheapest", counting)
        infeasible.explain_infeasible(problem)
        smallest_changes(problem)
    assert asked
    assert len(asked) == len(set(asked))


def test_activations_that_outweigh_everything_take_few_looks() -> None:
    """Of a sequence that no device holds, hundreds of residencies differ by less than one block's input."""
    tiles = (512,)
    model = load_workload("llama-3-8b", batch_size=1, sequence_length=4_000_000, mlp_tiles=tiles, loss_tiles=tiles)
    *_, widest = fastest_request(workload=model, hardware=load_hardware("rtx-3090")).tries
    problem = next(problems(widest))
    assert least_memory.least_device(problem) is not None
    assert sum(len(layout.prefixes) for layout in problem.layouts) > 200
    # Every layout is looked at where all that can leave does.
    assert len(problem.least_peaks) <= len(problem.layouts)


def test_the_check_notices_changes_that_are_not_the_smallest() -> None:
    """The wrong variants: what was said before, and figures that are off by one or of the wrong plan."""
    model, box = workload(num_blocks=4), machine()
    found = every_plan(model, box)
    device_bytes, host_bytes = min(one.device_bytes for one in found.outcomes) - 100, 300
    right = smallest_changes(problem_of(found, device_bytes, host_bytes))
    check_changes(found, right, device_bytes, host_bytes)
    assert right.device_bytes is not None
    device, host = right.both_bytes
    for wrong in (
        replace(right, both_bytes=(right.device_bytes, host)),
        replace(right, both_bytes=(device, host - 1)),
        replace(right, both_bytes=(device, host + 1)),
        replace(right, both_bytes=(device + 1, host)),
        replace(right, device_bytes=right.device_bytes - 1),
        replace(right, device_bytes=right.device_bytes + 1),
        replace(right, device_bytes=None),
        replace(right, host_bytes=host),
    ):
        with pytest.raises(AssertionError):
            check_changes(found, wrong, device_bytes, host_bytes)


def every_plan(model: Workload, box: Hardware) -> Case:
    space = SearchSpace(
        chunk_bytes=(256,),
        n_persist=(0, 1, 2, 4),
        n_buffer=(1, 4),
        prefetch_depth=(1,),
        n_checkpoint=(0, model.num_blocks),
        n_swap=(0,),
    )
    return Case(model, box, None, space, StepSpec(), brute_force(model, box, None, space, StepSpec()))


# -- the three reasons -----------------------------------------------------------------------------------------------


def message_of(device_bytes: int | None, host_bytes: int | None, box: Hardware | None = None, **space: Any) -> str:
    with pytest.raises(InfeasibleError) as raised:
        search(
            fastest_request(
                workload=workload(num_blocks=4),
                hardware=box or machine(),
                device_budget_bytes=device_bytes,
                host_budget_bytes=host_bytes,
                space=SearchSpace(chunk_bytes=256, **space),
            )
        )
    return str(raised.value)


def smallest_peak(host_bytes: int = 10**9) -> int:
    need = least_device(
        search_problem(
            fastest_request(
                workload=workload(num_blocks=4), hardware=machine(), space=SPACE, host_budget_bytes=host_bytes
            )
        )
    )
    assert need is not None
    return need.device_bytes


def test_where_no_host_memory_would_help_the_device_alone_is_named() -> None:
    message = message_of(smallest_peak() - 1, 10**9)
    assert message.startswith("no plan fits, for device memory is too small: ")
    assert "Cannot leave the device" in message
    assert f"Raise the device budget to {smallest_peak() / 1024:.3f} KiB ({smallest_peak()} bytes);" in message
    assert "host budget" not in message


def test_where_the_smallest_plan_exceeds_the_device_and_the_host_both_are_named() -> None:
    message = message_of(smallest_peak() - 1, 100)
    assert message.startswith("no plan fits, for host and device memory are too small: ")
    assert (
        f"Raise the device budget to {smallest_peak() / 1024:.3f} KiB ({smallest_peak()} bytes) and the host" in message
    )
    assert "or the device budget alone to" in message


def test_where_the_host_alone_rules_out_every_plan_it_is_named() -> None:
    message = message_of(10**9, 100, n_persist=0)
    assert message.startswith("no plan fits, for host memory is too small: ")
    assert "Cannot leave the device" not in message
    assert "device budget" not in message


def test_where_the_host_rules_out_every_plan_and_the_device_does_too_both_are_named() -> None:
    message = message_of(100, 100, n_persist=0)
    assert re.search(r"Raise the device budget to .* bytes\) and the host budget to", message)
    assert "alone" not in message


# -- hosts -----------------------------------------------------------------------------------------------------------


@given(room_bytes=st.integers(0, 2**50), kind=st.sampled_from(list(DeviceKind)))
def test_a_host_with_room_is_the_smallest(room_bytes: int, kind: DeviceKind) -> None:
    least = memory_with_room(room_bytes, kind)
    assert least - default_reserve_bytes(least, kind) >= room_bytes
    assert least == 0 or least - 1 - default_reserve_bytes(least - 1, kind) < room_bytes


@given(kind=st.sampled_from(list(DeviceKind)), share=st.floats(0.05, 0.95), data=st.data())
@settings(max_examples=examples(100, 7))
def test_a_host_of_the_memory_named_is_enough(kind: DeviceKind, share: float, data: DataObject) -> None:
    """Where no budget of the host was given; a CPU's device budget is part of the same memory."""
    model = workload(num_blocks=4)
    memory_bytes = max(1, int(share * (8000 if kind is DeviceKind.CPU else 4000)))
    box = with_memory(machine(kind=kind), memory_bytes)
    device_bytes = data.draw(st.none() | st.integers(1, 6000))

    def attempt(memory_bytes: int, device_bytes: int | None) -> Plan | None:
        try:
            found = search(
                fastest_request(
                    workload=model,
                    hardware=with_memory(box, memory_bytes),
                    device_budget_bytes=device_bytes,
                    space=SPACE,
                    effort=Effort(max_replays=1),
                )
            )
        except InfeasibleError:
            return None
        return found.plan

    assume(attempt(memory_bytes, device_bytes) is None)
    problem = search_problem(
        fastest_request(workload=model, hardware=box, space=SPACE, device_budget_bytes=device_bytes)
    )
    changes, message = smallest_changes(problem), str(infeasible.explain_infeasible(problem))
    if changes.device_bytes is not None:
        assert attempt(memory_bytes, changes.device_bytes) is not None
        assert attempt(memory_bytes, changes.device_bytes - 1) is None
    for device, memory in re.findall(
        r"(?:device budget to [^(]*\((\d+) bytes\) and )?the host budget to [^(]*\(\d+ bytes\), "
        r"which a host with [^(]*\((\d+) bytes\)",
        message,
    ):
        budget = int(device) if device else device_bytes
        assert attempt(int(memory), budget) is not None
        assert attempt(int(memory) - 1, budget) is None


def with_memory(box: Hardware, memory_bytes: int) -> Hardware:
    host = box.host.model_copy(update={"memory_bytes": memory_bytes})
    device = box.device
    if device.kind is DeviceKind.CPU:
        device = device.model_copy(update={"memory_bytes": memory_bytes})
    return box.model_copy(update={"host": host, "device": device})


def test_the_least_host_memory_is_that_of_the_smallest_peak() -> None:
    problem = search_problem(fastest_request(workload=workload(num_blocks=4), hardware=machine(), space=SPACE))
    free = least_host(problem)
    assert free is not None
    assert free.host_bytes == 0, "everything persistent"
    assert least_host(problem, 1) is None


# -- shared sequences ------------------------------------------------------------------------------------------------


def refusal(model: str, num_ranks: int, sequence_length: int, **shape: Any) -> str:
    """Why nothing fits where activations decide."""
    found = load_workload(model, batch_size=1, sequence_length=sequence_length, dtype="bfloat16", **shape)
    request = fastest_request(
        workload=found,
        hardware=load_hardware("rtx-4090-x8"),
        device_budget_bytes=4 * 2**30,
        space=SearchSpace(chunk_bytes=2**28, n_offload_input=0),
        step=Step(num_ranks=num_ranks, modes=(ParallelMode.REPLICATED,)),
    )
    return str(infeasible.explain_infeasible(search_problem(request)))


LORA: Final = TrainingOptions(lora=LoraOptions(rank=4))


@pytest.mark.parametrize(
    ("model", "num_ranks", "sequence_length", "shape", "is_told"),
    [
        ("qwen2.5-0.5b", 2, 32_768, {"options": LORA}, True),
        ("tinyllama-1.1b", 8, 32_768, {"options": LORA}, True),
        ("tinyllama-1.1b", 1, 32_768, {"options": LORA}, False),  # nobody to share with
        ("tinyllama-1.1b", 8, 32_767, {"options": LORA}, False),  # tokens that no ranks divide
        ("llama-3-8b", 8, 32_768, {"sequence_ranks": (2,)}, False),  # it knows some, and they are searched
        ("tinyllama-1.1b", 8, 32_768, {"packed_lengths": "uniform:8192:8192"}, False),  # rows are not shared
        ("t5-small", 8, 8_192, {}, False),  # an encoder has no sequence to share
    ],
)
def test_ranks_that_might_share_sequences_are_told_that_they_might(
    model: str, num_ranks: int, sequence_length: int, shape: dict[str, Any], *, is_told: bool
) -> None:
    message = refusal(model, num_ranks, sequence_length, **shape)
    assert "a shorter sequence" in message
    assert ("sequences that ranks share" in message) is is_told, message
    if is_told:
        assert f"(--sequence-ranks {num_ranks}; in Python" in message
