"""The largest model that trains: held against a search of every model, also where a larger one needs less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protwin.shared.answers.advice import TrainedModel
from protwin.shared.basics.errors import InfeasibleError, WorkloadError
from protwin.shared.catalogue.machines import load_hardware, override_hardware
from protwin.shared.catalogue.models import model_configuration
from protwin.shared.phases.quantization import Quantization, QuantizedType
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.training_options import FULL_TRAINING, LoraOptions, QuantizationOptions, TrainingOptions
from protwin.shared.schema.workload import Workload
from protwin.shared.tables.advice import largest_tables
from protwin.shared.tables.terminal import as_text
from protwin.shared.workloads.source import load_workload
from protwin.sim.questions import largest
from protwin.sim.questions.largest import (
    LargestRequest,
    largest_models,
    least_host_memory_bytes,
    nearest_model,
    with_host_memory,
)
from protwin.sim.searching.least_memory import some_plan_fits
from protwin.sim.searching.request import Effort, SearchRequest
from protwin.sim.searching.search import search
from protwin.sim.space.space import SearchSpace

GIB = 2**30
REQUEST = LargestRequest(sequence_length=1024, margin_frac=0.0)


def box(device_bytes: int) -> Hardware:
    return override_hardware(load_hardware("rtx-3090"), {"device.memory_bytes": str(device_bytes)})


def trains(model: str, hardware: Hardware) -> bool:
    """Whether a search finds a plan; it ends with the first."""
    workload = REQUEST.workload(model, hardware.device)
    assert workload is not None
    try:
        search(replace(REQUEST.search_request(workload, hardware), margin_frac=None, effort=Effort(max_replays=1)))
    except InfeasibleError:
        return False
    return True


def untimed(request: LargestRequest, workload: Workload, hardware: Hardware) -> TrainedModel:
    """In the place of a search: which model trains is asked here, not how fast."""
    return TrainedModel(
        model=workload.model_name,
        num_parameters=workload.num_parameters,
        plan=Plan(workload_id=workload.identity, chunk_bytes=1, n_persist=0, n_buffer=1),
        iteration_s=1.0,
        tokens_per_s=1.0,
        bottleneck=None,
        guaranteed_peak_device_bytes=1,
        host_bytes=0,
        survives=True,
    )


@pytest.fixture(autouse=True)
def no_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "trained", untimed)


def ask(monkeypatch: pytest.MonkeyPatch, models: list[str], hardware: Hardware, hosts: list[int | None]) -> list[str]:
    """The answers for ascending sizes of the host's memory."""
    monkeypatch.setattr(largest, "model_names", lambda: tuple(models))
    answers = largest_models(LargestRequest(sequence_length=1024, margin_frac=0.0), [hardware], hosts).machines
    return ["none" if one.found is None else one.found.model for one in answers]


def test_every_answer_is_that_of_a_search_of_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    models = ["gpt2", "gpt2-large"]
    hosts: list[int | None] = [1 * GIB, 16 * GIB]
    hardware = box(3 * GIB)
    by_size = sorted(models, key=lambda name: model_configuration(name).num_parameters or 0, reverse=True)
    expected = [
        next((name for name in by_size if trains(name, with_host_memory(hardware, host))), "none") for host in hosts
    ]
    assert len(set(expected)) == 2, "the question is no question"
    assert ask(monkeypatch, models, hardware, hosts[::-1]) == expected


def test_a_larger_model_that_needs_less_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant, a bisection: of three models, the one in the middle has the largest vocabulary, and fails."""
    models, hardware = ["gpt2-medium", "qwen2.5-0.5b", "gpt2-large"], with_host_memory(box(2 * GIB), None)
    assert [trains(name, hardware) for name in models] == [True, False, True]
    assert ask(monkeypatch, models, hardware, [None]) == ["gpt2-large"]


def test_what_the_next_model_lacks_is_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With so much more host memory it trains, and with a percent less than that it does not."""
    monkeypatch.setattr(largest, "model_names", lambda: ("gpt2", "gpt2-large"))
    request, hardware = LargestRequest(sequence_length=1024, margin_frac=0.0), box(5 * GIB)
    found = largest_models(request, [hardware], [8 * GIB])
    (answer,) = found.machines
    assert answer.found is not None
    assert answer.following is not None
    assert (answer.found.model, answer.following.model) == ("gpt2", "gpt2-large")
    assert answer.following.short_device_bytes == 0
    workload = request.workload("gpt2-large", hardware.device)
    assert workload is not None
    enough = least_host_memory_bytes(request, workload, hardware)
    assert enough is not None
    assert trains("gpt2-large", with_host_memory(hardware, enough))
    assert not trains("gpt2-large", with_host_memory(hardware, int(0.99 * enough)))
    text = as_text(tuple(largest_tables(found)), width=150)
    assert "gpt2-large" in text
    assert "GiB host" in text


def test_models_without_such_sequences_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "model_names", lambda: ("gpt2", "vit-huge", "tinyllama-1.1b"))
    found = largest_models(LargestRequest(sequence_length=1025), [box(2 * GIB)], [2 * GIB])
    assert found.machines[0].found is None
    assert found.left_out == ("gpt2", "vit-huge")


def test_adapters_beside_packed_weights_are_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against a search of what any command that names one model asks about; a host that full training exceeds."""
    models, hardware = ("qwen2.5-0.5b", "tinyllama-1.1b"), with_host_memory(box(2 * GIB), 9 * GIB)
    options = TrainingOptions(
        lora=LoraOptions(rank=8), quantized=QuantizationOptions(how=Quantization(type=QuantizedType.NF4, blocksize=64))
    )
    monkeypatch.setattr(largest, "model_names", lambda: models)
    asked = replace(REQUEST, options=options, sequence_length=512)
    of_adapters, of_all = (
        largest_models(request, [hardware], [9 * GIB]) for request in (asked, replace(asked, options=FULL_TRAINING))
    )
    workload = load_workload(
        "tinyllama-1.1b", batch_size=1, sequence_length=512, dtype="bfloat16", hardware=hardware, options=options
    )
    search(SearchRequest(workload=workload, hardware=hardware, margin_frac=None, effort=Effort(max_replays=1)))
    (found,), (whole,) = (answer.machines for answer in (of_adapters, of_all))
    assert found.found is not None
    assert (found.found.model, found.found.plan.workload_id) == ("tinyllama-1.1b", workload.identity)
    assert whole.found is None or whole.found.model != "tinyllama-1.1b"
    title = as_text(tuple(largest_tables(of_adapters)), width=150).splitlines()[0]
    assert "LoRA of rank 8 beside nf4" in title


def test_models_that_only_a_trace_knows_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as models without such sequences; and an answer about no model at all is none."""
    options = TrainingOptions(lora=LoraOptions(rank=8, targets=("q_proj", "v_proj")))
    asked = LargestRequest(sequence_length=1025, options=options)
    monkeypatch.setattr(largest, "model_names", lambda: ("tinyllama-1.1b", "gpt2-xl", "opt-1.3b"))
    found = largest_models(asked, [box(4 * GIB)], [16 * GIB])
    (answer,) = found.machines
    assert answer.found is not None
    assert (answer.found.model, found.untraced, found.left_out) == ("tinyllama-1.1b", ("opt-1.3b",), ("gpt2-xl",))
    assert "only a trace knows them in this training: opt-1.3b" in as_text(tuple(largest_tables(found)), width=200)
    with pytest.raises(WorkloadError, match="ask protwin search about one model"):
        largest_models(replace(asked, options=TrainingOptions(frozen=("*",))), [box(4 * GIB)], [16 * GIB])


def test_an_answer_without_any_such_sequences_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models that have none nobody could trace such a step; where only some have none, a trace would know more."""
    options = TrainingOptions(lora=LoraOptions(rank=8, targets=("q_proj", "v_proj")))
    asked = LargestRequest(sequence_length=1025, options=options)
    monkeypatch.setattr(largest, "model_names", lambda: ("gpt2", "vit-huge"))
    found = largest_models(asked, [box(4 * GIB)], [16 * GIB])
    assert [one.found for one in found.machines] == [None]
    assert (found.left_out, found.untraced) == (("gpt2", "vit-huge"), ())
    monkeypatch.setattr(largest, "model_names", lambda: ("gpt2", "opt-1.3b"))
    with pytest.raises(WorkloadError, match="ask protwin search about one model"):
        largest_models(replace(asked), [box(4 * GIB)], [16 * GIB])


@pytest.mark.parametrize("tiles", [(1,), (1, 8), (8,)])
def test_tiles_of_the_loss_and_inputs_on_the_host_count(
    tiles: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of 151,936 tokens fill a device that holds everything else; what a search tries in turn is tried here."""
    model, hardware = "qwen2.5-0.5b", box(2 * GIB)
    monkeypatch.setattr(largest, "model_names", lambda: (model,))
    workload = load_workload(
        model, batch_size=1, sequence_length=1024, dtype="bfloat16", hardware=hardware, loss_tiles=tiles
    )
    request = SearchRequest(
        workload=workload,
        hardware=with_host_memory(hardware, 64 * GIB),
        margin_frac=None,
        effort=Effort(max_replays=1),
        space=SearchSpace(loss_tiles=tiles),
    )
    try:
        plan = search(request).plan
    except InfeasibleError:
        plan = None
    assert (plan is None) == (tiles == (1,)), "the question is no question"
    assert plan is None or (plan.loss_tiles, plan.n_offload_input) == (8, workload.num_blocks)
    (answer,) = largest_models(replace(REQUEST, loss_tiles=tiles), [hardware], [64 * GIB]).machines
    assert (answer.found is None) == (plan is None)


def test_the_best_plan_runs_the_loss_in_tiles_that_are_asked_for() -> None:
    """Where everything fits whole too, which is faster."""
    hardware = load_hardware("rtx-3090")
    for tiles, expected in (((8,), 8), ((1, 8), 1)):
        request = replace(REQUEST, sequence_length=128, loss_tiles=tiles)
        workload = request.workload("gpt2", hardware.device)
        assert workload is not None
        asked = replace(request.search_request(workload, hardware), effort=Effort(max_replays=1))
        assert search(asked).plan.loss_tiles == expected


def test_a_model_whose_tiles_only_a_trace_knows_has_such_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "model_names", lambda: ("t5-base", "gpt2"))
    found = largest_models(replace(REQUEST, loss_tiles=(1, 8)), [box(2 * GIB)], [2 * GIB])
    assert (found.untraced, found.left_out) == (("t5-base",), ())


def test_the_nearest_model_is_nearest() -> None:
    device = load_hardware("rtx-3090").device
    for billions, name in ((123, "mistral-large-2407"), (75, "qwen2.5-72b"), (34, "codellama-34b")):
        assert nearest_model(REQUEST, billions * 10**9, device).model_name == name


def test_a_disk_adds_rows_with_what_the_host_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "trained", untimed)
    monkeypatch.setattr(largest, "model_names", lambda: ("gpt2", "gpt2-xl"))
    machine = override_hardware(box(8 * GIB), {"disk": "nvme-pcie4-2tb"})
    answer = largest_models(replace(REQUEST), [machine], [12 * GIB, None])  # a request keeps the models it found
    found = {(one.disk_name, one.host_memory_bytes): one.found and one.found.model for one in answer.machines}
    # State, parameters and gradients of gpt2-xl take 16 bytes for each of 1.56 billion parameters: 23 GiB.
    assert found == {(None, 12 * GIB): "gpt2", (None, None): "gpt2-xl", ("nvme-pcie4-2tb", 12 * GIB): "gpt2-xl"}
    assert "nvme-pcie4-2tb" in as_text(largest_tables(answer), width=200)


@pytest.mark.slow
def test_a_disk_that_is_too_small_is_what_the_next_model_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "model_names", lambda: ("gpt2", "gpt2-xl"))
    few = {"disk": "nvme-pcie4-2tb", "disk.capacity_bytes": "1GiB"}
    answer = largest_models(replace(REQUEST), [override_hardware(box(8 * GIB), few)], [12 * GIB])
    without, with_disk = (one.following for one in answer.machines)
    assert without is not None
    assert with_disk is not None
    assert without.short_host_bytes > 0 == without.short_disk_bytes
    assert with_disk.short_disk_bytes > 0 == with_disk.short_host_bytes == with_disk.short_device_bytes
    assert "GiB disk" in as_text(largest_tables(answer), width=200)
    # So much more room on the disk, and the model trains; a MiB less, and it does not.
    for more, is_enough in ((0, True), (-(2**20), False)):
        few["disk.capacity_bytes"] = str(GIB + with_disk.short_disk_bytes + more)
        machine = with_host_memory(override_hardware(box(8 * GIB), few), 12 * GIB)
        workload = REQUEST.workload("gpt2-xl", machine.device)
        assert workload is not None
        assert some_plan_fits(REQUEST.problem(workload, machine)) is is_enough
