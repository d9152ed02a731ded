"""What-if questions with names: the machine that each means, its budgets, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protwin.shared.basics.errors import CalibrationError, CatalogueError, HardwareError, WorkloadError
from protwin.shared.catalogue.machines import cluster_names, load_hardware, machine
from protwin.shared.catalogue.parts import device_part, host_part, link_part
from protwin.shared.schema.calibration import Calibration
from protwin.sim.questions.what_if import USUAL, what_if
from protwin.sim.questions.what_if_machines import _EXAMPLES, changed_machines, part_questions
from protwin.sim.questions.what_if_methods import FIELDS
from protwin.sim.searching.search import search
from protwin.sim.space.space import SearchSpace
from tests.cli.saved import decoder
from tests.sim.fastest import fastest_request

HERE = machine("rtx-3090")
GIB = 2**30


def test_a_part_takes_the_place_of_the_machines_own() -> None:
    device, host, link = (one.hardware for one in changed_machines(["rtx-4090", "epyc-96", "pcie5-x16"], HERE))
    named = {"device": device_part("rtx-4090"), "name": "rtx-4090", "overrides": ("device=rtx-4090",)}
    assert device == HERE.model_copy(update=named)
    assert host == HERE.model_copy(update={"host": host_part("epyc-96"), "overrides": ("host=epyc-96",)})
    pair = link_part("pcie5-x16")
    links = {"host_to_device": pair.host_to_device, "device_to_host": pair.device_to_host}
    changed = {"full_duplex": pair.full_duplex, "overrides": ("link=pcie5-x16",)}
    assert link == HERE.model_copy(update=links | changed)


def test_several_changes_make_one_question_in_any_order() -> None:
    one, other = changed_machines(
        ["  pcie5-x16   device.memory_bytes=48GiB", "device.memory_bytes=48GiB link=pcie5-x16"], HERE
    )
    assert one.change == "pcie5-x16 device.memory_bytes=48GiB", "blanks are no part of it"
    assert one.hardware.device.memory_bytes == 48 * GIB
    assert one.hardware.model_copy(update={"device": other.hardware.device}) == other.hardware


def test_a_machine_with_several_devices_is_a_machine() -> None:
    name = cluster_names()[0]
    (whole,) = changed_machines([name], HERE)
    assert whole.hardware == machine(name)
    (changed,) = changed_machines([f"{name} host.num_cores=8"], HERE)
    assert changed.hardware.host.num_cores == 8
    assert changed.hardware.node == machine(name).node


def test_the_usual_questions_and_repetitions_ask_for_no_machine() -> None:
    assert changed_machines([USUAL], HERE) == ()
    assert len(changed_machines(["epyc-96", USUAL, "epyc-96", " epyc-96 "], HERE)) == 1


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("pcie-5-x17", "Did you mean pcie5-x16"),
        ("RTX 4090", "no device"),
        ("rtx-4090 rtx-3090", "gives device twice"),
        ("link=pcie5-x16 pcie4-x16", "gives link twice"),
        (" ".join(cluster_names()[:2]), "gives machine twice"),
        ("device.memory_bytes=", "is no change"),
        ("=3", "is no change"),
        ("device.memory=3", "device.memory_bytes"),
        ("device.memory_bytes=0", "impossible"),
        ("", "names nothing"),
        # What may be said, beside figures of the machine, and what comes closest.
        ("nonsense=3", "nothing is called 'nonsense'. Name a device, .* ranks=16, optimizer=.*device.memory_bytes="),
        ("rank=2", "Did you mean ranks"),
        ("optimiser=sgd", "Did you mean optimizer"),
        ("batchsize=2", "Did you mean batch-size"),
        ("ranks", "has no value. Write it as ranks=16"),
        ("x", "Name a device, .* batch-size=4"),
    ],
)
def test_what_is_refused_says_why(question: str, words: str) -> None:
    with pytest.raises((CatalogueError, HardwareError), match=words):
        changed_machines([question], HERE)


def test_what_a_message_says_may_be_said() -> None:
    assert _EXAMPLES.keys() == {"ranks", *FIELDS}
    for example in (*_EXAMPLES.values(), "device.memory_bytes=40GiB"):
        assert changed_machines([example], load_hardware("a100-80gb-x8"))


def test_budgets_follow_the_changed_machine_unless_they_are_set() -> None:
    (larger,) = changed_machines(["device.memory_bytes=48GiB"], HERE)
    request = fastest_request(workload=decoder(), hardware=HERE)
    (asked,) = part_questions(request, [larger])
    assert asked.request.device_budget_bytes == larger.hardware.device.usable_bytes > HERE.device.usable_bytes
    (roomier,) = changed_machines(["host.memory_bytes=2TiB"], HERE)
    (asked,) = part_questions(request, [roomier])
    assert asked.request.host_budget_bytes is not None
    assert 1.9 * 2**40 < asked.request.host_budget_bytes < 2 * 2**40
    (asked,) = part_questions(replace(request, device_budget_bytes=GIB, host_budget_bytes=2 * GIB), [larger])
    assert (asked.request.device_budget_bytes, asked.request.host_budget_bytes) == (GIB, 2 * GIB)


def test_answers_are_those_of_searches_on_the_changed_machines() -> None:
    model, space = decoder(), SearchSpace(prefetch_depth=(1,), chunk_bytes=(2**26,))
    budget_bytes = 600 * 2**20
    asked = changed_machines(["pcie5-x16", "rtx-4090", "device.memory_bytes=4GiB"], HERE)
    request = fastest_request(workload=model, hardware=HERE, device_budget_bytes=budget_bytes, space=space)
    now_s = search(request).prediction.iteration_s
    answers = what_if(request, now_s, part_questions(request, asked))
    assert [answer.change for answer in answers] == [one.change for one in asked]
    for answer, one in zip(answers, asked, strict=True):
        expected_s = search(
            fastest_request(workload=model, hardware=one.hardware, device_budget_bytes=budget_bytes, space=space)
        ).prediction.iteration_s
        assert answer.iteration_s == expected_s
        assert answer.speedup == now_s / expected_s


def test_a_calibration_says_nothing_of_another_device() -> None:
    factors = Calibration(hardware_name=HERE.name, machine="here")
    assert changed_machines(["pcie5-x16"], HERE, factors)
    with pytest.raises(CalibrationError, match="Leave --calibration out"):
        changed_machines(["rtx-4090"], HERE, factors)


@pytest.mark.parametrize(
    ("question", "is_answered"),
    [
        ("rtx-4090", False),
        ("device.vector_flop_per_s=1e15", False),
        ("device.memory_bytes=48GiB", True),
        ("device.reserved_bytes=1GiB", True),
        ("epyc-96 pcie5-x16", True),
    ],
)
def test_measured_seconds_say_nothing_of_a_faster_device(question: str, is_answered: bool) -> None:
    request = fastest_request(workload=decoder().model_copy(update={"measured_on": HERE.name}), hardware=HERE)
    asked = changed_machines([question], HERE)
    if is_answered:
        assert part_questions(request, asked)
        return
    with pytest.raises(WorkloadError, match="cannot be compared"):
        part_questions(request, asked)
    # A wrong rule that looks at the machine's name alone misses the device that is faster by a figure.
    if "=" in question:
        assert asked[0].hardware.name == HERE.name
