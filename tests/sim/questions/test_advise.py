"""Advice about machines: ranked, resumed, and bound to the question."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protwin.shared.answers.advice import Advice, MachineAdvice
from protwin.shared.answers.plan_kind import PlanKind
from protwin.shared.answers.search_result import BatchSearchResult, Goal
from protwin.shared.basics.errors import FileError, HardwareError, InfeasibleError, PlanError, ProtwinError
from protwin.shared.basics.progress import no_progress
from protwin.shared.catalogue.machines import machine as known_machine
from protwin.shared.catalogue.machines import override_hardware
from protwin.shared.schema.hardware import Hardware
from protwin.shared.tables.advice import advice_tables
from protwin.shared.tables.terminal import as_text
from protwin.shared.workloads.source import load_workload
from protwin.sim.questions.advise import (
    AdviceRequest,
    Offer,
    advise,
    check_request,
    machines_with,
    search_machine,
    whole_machines,
)
from protwin.sim.questions.in_tiles import AskedTiles, sensible_tiles
from protwin.sim.searching.request import Effort, GlobalBatch, SearchRequest, Step
from protwin.sim.searching.search import search_batches
from protwin.sim.space.space import SearchSpace
from tests.cli.saved import decoder
from tests.sim.hand_made import machine, workload

REQUEST = AdviceRequest("model", 8, None, 4, None, "fingerprint")


def boxes(*names: str) -> list[Hardware]:
    prices = {"fast": 10.0, "slow": 1.0}
    return [
        machine(gather_s=1.0 + place).model_copy(update={"name": name, "price_usd_per_hour": prices.get(name)})
        for place, name in enumerate(names)
    ]


class Searches:
    """Stands for searches, and notes which machines were asked about."""

    def __init__(self, fails_at: str = "") -> None:
        self.asked: list[str] = []
        self.fails_at = fails_at

    def __call__(self, request: AdviceRequest, asked: Offer) -> MachineAdvice:
        hardware = asked.hardware
        self.asked.append(hardware.name)
        if hardware.name == self.fails_at:
            raise KeyboardInterrupt
        if hardware.name == "tiny":
            return MachineAdvice(hardware_name="tiny", price_usd_per_hour=None, reason="nothing fits")
        plan = {"workload_id": "w", "chunk_bytes": 1, "n_persist": 0, "n_buffer": 1}
        seconds = {"fast": 1.0, "slow": 3.0}.get(hardware.name, 2.0)
        return MachineAdvice.model_validate(
            {
                "hardware_name": hardware.name,
                "price_usd_per_hour": 1.0,
                "plan": plan,
                "micro_batch_size": 4,
                "iteration_s": seconds,
                "num_tokens": 32,
                "tokens_per_s": 32 / seconds,
                "usd_per_million_tokens": {"fast": 9.0, "slow": 1.0}.get(hardware.name),
                "guaranteed_peak_device_bytes": 1,
            }
        )


def ask(
    searches: Searches, names: tuple[str, ...], state: Path | None = None, request: AdviceRequest = REQUEST
) -> Advice:
    asked = [Offer(hardware) for hardware in boxes(*names)]
    return advise(request, asked, search_one=searches, num_processes=1, state=state, on_progress=no_progress)


def test_machines_are_ranked_by_time_and_by_cost() -> None:
    advice = ask(Searches(), ("slow", "tiny", "fast", "other"))
    assert [one.hardware_name for one in advice.machines] == ["fast", "other", "slow", "tiny"]
    assert [one.hardware_name for one in advice.by_cost] == ["slow", "fast"]
    text = as_text(advice_tables(advice))
    assert "Cheapest: slow" in text
    assert "tiny" in text


def killed(request: AdviceRequest, asked: Offer) -> MachineAdvice:
    """Stands for a search that the system ends, as it does where memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_a_process_that_is_killed_is_told() -> None:
    asked = [Offer(hardware) for hardware in boxes("a", "b")]
    with pytest.raises(ProtwinError, match=r"2 processes that search ended by itself.*--processes 1, and --state FILE"):
        advise(REQUEST, asked, search_one=killed, num_processes=2, on_progress=no_progress)


def test_an_interrupted_sweep_goes_on_where_it_ended(tmp_path: Path) -> None:
    state, names = tmp_path / "state.json", ("fast", "slow", "other")
    with pytest.raises(KeyboardInterrupt):
        ask(Searches(fails_at="other"), names, state)
    searches = Searches()
    resumed = ask(searches, names, state)
    assert searches.asked == ["other"]
    assert resumed == ask(Searches(), names)


def test_a_machine_that_changed_is_asked_about_again(tmp_path: Path) -> None:
    state, searches = tmp_path / "state.json", Searches()
    ask(searches, ("fast", "slow"), state)
    ask(searches, ("slow", "fast"), state)
    assert searches.asked == ["fast", "slow", "slow", "fast"], "the two have changed their links"


def test_answers_to_another_question_are_refused(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    ask(Searches(), ("fast",), state)
    with pytest.raises(FileError, match="another question"):
        ask(Searches(), ("fast",), state, AdviceRequest("model", 16, None, 4, None, "fingerprint"))
    state.write_text(state.read_text()[:-20])
    with pytest.raises(FileError, match="damaged"):
        ask(Searches(), ("fast",), state)


def test_a_machine_is_searched_over_the_sizes_of_the_micro_batch(tmp_path: Path) -> None:
    workload().save(tmp_path / "workload.json")
    box = machine().model_copy(update={"price_usd_per_hour": 2.0})
    found = search_machine(AdviceRequest(str(tmp_path / "workload.json"), None, None, 2, None, ""), Offer(box))
    assert found.plan is not None
    assert found.plan.micro_batches == 2
    assert found.is_certified
    assert found.price_usd_per_hour == 2.0
    assert found.usd_per_million_tokens == pytest.approx(2.0 / 3600 * 1e6 * found.iteration_s / 4)  # type: ignore[operator]
    refused = search_machine(AdviceRequest(str(tmp_path / "absent.json"), None, None, 2, None, ""), Offer(box))
    assert refused.plan is None
    assert refused.reason


# -- machines with several devices -----------------------------------------------------------------------------------


def test_a_search_that_proves_nothing_has_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is a plan all the same, and its row says so."""
    decoder().save(tmp_path / "workload.json")

    def unproven(request: SearchRequest) -> BatchSearchResult:
        found = search_batches(request)
        choices = tuple(one.model_copy(update={"shortest_possible_s": None}) for one in found.choices)
        return found.model_copy(update={"choices": choices})

    monkeypatch.setattr("protwin.sim.questions.advise.search_batches", unproven)
    box = known_machine("rtx-3090")
    request = AdviceRequest(str(tmp_path / "workload.json"), None, None, 2, None, "")
    found = search_machine(request, Offer(box))
    assert found.plan is not None
    assert found.gap_frac is None
    advice = Advice(model="ours", sequence_length=None, global_batch_size=2, machines=(found,))
    assert box.name in as_text(advice_tables(advice))


def test_a_whole_machine_is_asked_about_with_all_devices_that_can_share_the_batch() -> None:
    eight, two, one = known_machine("a100-80gb-x8"), known_machine("rtx-3090-x2-nvlink"), known_machine("a10")
    boxes = [one, two, eight]

    def asked(num_parts: int) -> set[tuple[str, int, int]]:
        return {(one.hardware.name, one.num_ranks, one.num_devices) for one in whole_machines(boxes, num_parts)}

    alone = {(box.name, 1, box.num_devices) for box in boxes}
    assert asked(16) == alone | {(eight.name, 8, 8), (two.name, 2, 2)}
    assert asked(6) == alone | {(eight.name, 6, 8), (two.name, 2, 2)}, "idle devices are paid for"
    assert asked(7) == alone | {(eight.name, 7, 8)}
    assert asked(1) == alone


def test_two_nodes_are_one_machine_at_twice_the_price() -> None:
    box = known_machine("a100-80gb-x8")
    assert box.network is not None
    network = box.network.model_copy(update={"num_nodes": 2})
    pair = box.model_copy(update={"network": network, "price_usd_per_hour": 10.0})
    (whole, _) = whole_machines([pair], 16)
    assert (whole.num_ranks, whole.num_devices) == (16, 16)
    assert whole.priced(MachineAdvice(hardware_name="", price_usd_per_hour=None)).price_usd_per_hour == 20.0


def test_numbers_of_devices_go_to_the_machines_that_have_them() -> None:
    boxes = [known_machine("a10"), known_machine("rtx-3090-x4"), known_machine("a100-80gb-x8")]
    asked = machines_with(boxes, [1, 4, 8])
    assert [(one.hardware.name, one.num_ranks) for one in asked] == [
        ("a10", 1),
        ("rtx-3090-x4", 1),
        ("a100-80gb-x8", 1),
        ("rtx-3090-x4", 4),
        ("a100-80gb-x8", 4),
        ("a100-80gb-x8", 8),
    ]
    with pytest.raises(HardwareError, match="a100-80gb-x8 has 8"):
        machines_with(boxes, [16])


def test_advice_about_a_machine_is_that_of_a_search_asked_directly(tmp_path: Path) -> None:
    model, box = decoder(), known_machine("a100-80gb-x8").model_copy(update={"price_usd_per_hour": 16.0})
    model.save(tmp_path / "workload.json")
    request = AdviceRequest(str(tmp_path / "workload.json"), None, None, 32, None, "")
    asked = whole_machines([box], 16)
    advice = advise(request, asked, search_one=search_machine, num_processes=1, on_progress=no_progress)
    found = {one.num_ranks: one for one in advice.machines}
    sizes = (model.num_samples,)
    directly = {
        8: search_batches(
            SearchRequest(
                workload=GlobalBatch(num_samples=32, workload_at=lambda size: model, micro_batch_sizes=sizes),
                hardware=box,
                step=Step(num_ranks=8),
            )
        ).result,
        1: search_batches(
            SearchRequest(
                workload=GlobalBatch(num_samples=32, workload_at=lambda size: model, micro_batch_sizes=sizes),
                hardware=box,
            )
        ).result,
    }
    assert set(found) == set(directly)
    for num_ranks, result in directly.items():
        one, seconds = found[num_ranks], result.prediction.iteration_s
        assert (one.plan, one.iteration_s) == (result.plan, seconds)
        assert one.num_tokens == result.prediction.num_tokens == 16 * model.num_tokens
        assert one.price_usd_per_hour == 16.0, "the machine is rented whole"
        assert one.usd_per_million_tokens == pytest.approx(16.0 / 3600 * 1e6 * seconds / one.num_tokens)
        # The simplest plan within the tolerance of the fastest, of which nothing is faster by more than the tolerance.
        assert one.gap_frac == result.gap_frac
        assert result.certificate.tolerance_frac == 0.005
        within = (1 - 0.005) / (1 + 0.005)
        if result.passed_over is not None:
            within *= 1 - result.uncertainty.between(result.plan_kind, result.passed_over.plan_kind)
        assert result.gap_frac <= 1 - within


@pytest.mark.slow
def test_advice_may_keep_results_of_operations() -> None:
    box = override_hardware(known_machine("rtx-3090"), {"device.memory_bytes": "4300MiB", "host.memory_bytes": "8GiB"})
    request = AdviceRequest("gpt2", 1024, None, 4, None, "", product_stride=(2,))
    assert request.identity != replace(request, product_stride=(0,)).identity
    one = search_machine(request, Offer(box))
    directly = search_batches(
        SearchRequest(
            workload=GlobalBatch(num_samples=4, workload_at=lambda size: request.workload_at(size, None, box.device)),
            hardware=box,
            space=SearchSpace(product_stride=(2,)),
            effort=Effort(max_replays=2000),
        )
    ).result
    assert one.plan is not None
    assert one.plan == directly.plan
    assert (one.plan.n_selective, one.plan.product_stride) == (one.plan.n_checkpoint, 2)


def test_tables_say_which_plans_keep_results_of_operations() -> None:
    def told(**knobs: int) -> str:
        one = answer("box", 1, 1, 1.0)
        assert one.plan is not None
        one = one.model_copy(update={"plan": one.plan.model_copy(update=knobs), "plan_kind": PlanKind.CHECKPOINTED})
        advice = Advice(model="gpt2", sequence_length=8, global_batch_size=4, machines=(one,))
        return " ".join(as_text(advice_tables(advice)).split())

    assert "selective" not in told(n_checkpoint=3)
    assert "checkpointed, selective" in told(n_checkpoint=3, n_selective=3)
    assert "every one of their matrix products" in told(n_checkpoint=3, n_selective=3)
    assert "the first of every 2 of their matrix" in told(n_checkpoint=3, n_selective=3, product_stride=2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"product_stride": (3,)}, "product_stride: 3, but it is known for 1 and 2"),
        ({"product_stride": (1,), "tiles": AskedTiles(mlp=(2,))}, "blocks in tiles keep no results"),
    ],
)
def test_what_no_block_keeps_is_refused_before_any_search(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        check_request(replace(AdviceRequest("qwen2.5-0.5b", 64, None, 4, None, ""), **changes), None)


def answer(name: str, num_ranks: int, num_devices: int, tokens_per_s: float | None) -> MachineAdvice:
    plan = {"workload_id": "w", "chunk_bytes": 1, "n_persist": 0, "n_buffer": 1}
    known = {"plan": plan, "iteration_s": 32 / (tokens_per_s or 1.0), "tokens_per_s": tokens_per_s}
    return MachineAdvice.model_validate(
        {
            "hardware_name": name,
            "num_ranks": num_ranks,
            "num_devices": num_devices,
            "price_usd_per_hour": None,
            "reason": "" if tokens_per_s else f"{name} is too small",
        }
        | (known if tokens_per_s else {})
    )


def test_one_device_alone_is_shown_where_its_tokens_cost_less() -> None:
    machines = (
        answer("scales well", 8, 8, 80.0),
        answer("scales well", 1, 8, 9.0),
        answer("scales not at all", 8, 8, 8.0),
        answer("scales not at all", 1, 8, 9.0),
        answer("idle", 6, 8, 60.0),
        answer("idle", 1, 8, 9.0),
        answer("too small alone", 8, 8, 8.0),
        answer("too small alone", 1, 8, None),
        answer("too small", 8, 8, None),
        answer("too small", 1, 8, None),
        answer("alone", 1, 1, 1.0),
    )
    advice = Advice(model="m", sequence_length=None, global_batch_size=8, machines=machines)
    assert [(one.hardware_name, one.num_ranks) for one in advice.deals] == [
        ("scales well", 8),
        ("scales not at all", 8),
        ("scales not at all", 1),
        ("idle", 6),
        ("too small alone", 8),
        ("alone", 1),
    ]
    assert [(one.hardware_name, one.num_ranks) for one in advice.without_plan] == [("too small", 8)]
    named = advice.model_copy(update={"ranks": (1, 8)})
    assert len(named.deals) == 8, "what was asked for by its number is shown"
    equal = advice.model_copy(update={"machines": (*machines, answer("equal", 1, 1, 9.0))})
    assert {one.hardware_name for one in equal.deals if one.num_ranks == 1} == {"alone", "equal"}


@pytest.mark.parametrize(("price", "is_whole_shown"), [(1.0, False), (8.0, False), (9.0, True), (None, True)])
def test_one_device_alone_is_left_out_beside_an_equal_machine_that_is_no_dearer(
    price: float | None, is_whole_shown: bool
) -> None:
    whole, single = answer("box", 8, 8, 8.0), answer("box", 1, 8, 9.0)
    alone = answer("board", 1, 1, 9.0).model_copy(update={"price_usd_per_hour": price})
    boxes = (one.model_copy(update={"price_usd_per_hour": 8.0}) for one in (whole, single))
    advice = Advice(model="m", sequence_length=None, global_batch_size=8, machines=(*boxes, alone))
    assert (("box", 1) in {(one.hardware_name, one.num_ranks) for one in advice.deals}) == is_whole_shown


def test_a_step_costs_the_rent_of_its_time() -> None:
    box = machine().model_copy(update={"price_usd_per_hour": 7.2})
    known = answer("box", 1, 1, 4.0)
    priced = Offer(box).priced(known.model_copy(update={"iteration_s": 2.5}))
    assert priced.usd_per_step == pytest.approx(7.2 * 2.5 / 3600)
    assert Offer(machine()).priced(known).usd_per_step is None


def test_equal_machines_are_searched_once_and_keep_their_names_and_prices() -> None:
    box = known_machine("a100-80gb-x8")
    other = box.model_copy(update={"name": "other", "price_usd_per_hour": 8.0})
    changed = box.model_copy(update={"host": box.host.model_copy(update={"num_cores": 8}), "name": "changed"})
    searches = Searches()
    request = AdviceRequest("gpt2", 8, None, 4, None, "fingerprint")
    asked = [Offer(box), Offer(other), Offer(changed)]
    advice = advise(request, asked, search_one=searches, num_processes=1, on_progress=no_progress)
    assert searches.asked == [box.name, "changed"]
    prices = {one.hardware_name: one.price_usd_per_hour for one in advice.machines}
    assert prices == {box.name: None, "other": 8.0, "changed": None}
    # A workload of one's own may hold seconds that were measured on a machine of that very name.
    ask(searches := Searches(), ("fast", "slow"))
    assert searches.asked == ["fast", "slow"]


def test_answers_of_an_older_release_are_refused(tmp_path: Path) -> None:
    """They name no ranks, and their request was that of other sources."""
    state = tmp_path / "state.json"
    ask(Searches(), ("fast",), state)
    saved = json.loads(state.read_text())
    saved["request"] = "0" * 32
    saved["answers"] = {
        key.partition("-")[0]: {
            field: value for field, value in one.items() if field not in ("num_ranks", "num_devices")
        }
        for key, one in saved["answers"].items()
    }
    state.write_text(json.dumps(saved))
    with pytest.raises(FileError, match="another question: another model, shape, global batch or release"):
        ask(Searches(), ("fast",), state)


# -- the longest sequences -------------------------------------------------------------------------------------------

MODEL, SAMPLES, BUDGET_BYTES = "smollm2-135m", 4, 2 * 2**30
LONGEST = AdviceRequest(
    MODEL, None, None, SAMPLES, None, "", device_budget_bytes=BUDGET_BYTES, goal=Goal.LONGEST_SEQUENCE
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_ranks"), [("rtx-3090", 1), ("rtx-3090-x2-nvlink", 2)])
def test_the_longest_sequence_trains_and_the_next_one_does_not(name: str, num_ranks: int) -> None:
    """Searches at single lengths are the oracle."""
    box = known_machine(name)
    found = search_machine(LONGEST, Offer(box, num_ranks))
    assert found.longest_sequence is not None, found.reason

    def result_at(length: int) -> BatchSearchResult:
        tiles = sensible_tiles(length)
        workload = load_workload(
            MODEL, batch_size=1, sequence_length=length, hardware=box, mlp_tiles=tiles, loss_tiles=tiles
        )
        step = Step(micro_batches=SAMPLES // num_ranks, num_ranks=num_ranks)
        return search_batches(
            SearchRequest(workload=workload, hardware=box, step=step, device_budget_bytes=BUDGET_BYTES)
        )

    longest = result_at(found.longest_sequence).result
    assert longest.survives
    assert (longest.plan, longest.prediction.iteration_s) == (found.plan, found.iteration_s)
    assert found.num_tokens == SAMPLES * found.longest_sequence
    assert f"{found.longest_sequence + 128:,}" in found.limit
    with suppress(InfeasibleError):
        assert result_at(found.longest_sequence + 128).result.survives is False


def test_longest_sequences_are_ranked_by_length_and_one_device_is_shown_where_it_is_longer() -> None:
    def of_length(name: str, num_ranks: int, tokens_per_s: float, length: int) -> MachineAdvice:
        found = answer(name, num_ranks, 8, tokens_per_s)
        return found.model_copy(update={"longest_sequence": length, "limit": f"at {length + 128:,}: no plan fits"})

    found = [
        of_length("short", 8, 80.0, 1024),
        of_length("long", 8, 40.0, 4096),
        of_length("long", 1, 4.0, 8192),
        of_length("short", 1, 8.0, 1024),
        answer("too small", 1, 8, None),
    ]
    advice = Advice(
        model="m",
        sequence_length=None,
        global_batch_size=8,
        goal=Goal.LONGEST_SEQUENCE,
        machines=tuple(sorted(found, key=MachineAdvice.rank)),
    )
    assert [(one.name, one.longest_sequence) for one in advice.deals] == [
        ("long", 8192),
        ("long, 8 ranks", 4096),
        ("short, 8 ranks", 1024),
    ]
    text = as_text(advice_tables(advice))
    assert "the longest sequences" in text
    assert "at 8,320: no plan fits" in text
    assert Advice.from_mapping(json.loads(advice.to_json()), origin="a test") == advice


def test_longest_sequences_need_a_model_that_has_some(tmp_path: Path) -> None:
    decoder().save(tmp_path / "workload.json")
    asked = {str(tmp_path / "workload.json"): "have one length", "vit-huge": "without tokens"}
    for model, words in asked.items():
        with pytest.raises(PlanError, match=words):
            check_request(AdviceRequest(model, None, None, 8, None, "", goal=Goal.LONGEST_SEQUENCE), None)
    assert check_request(LONGEST, None) == SAMPLES
