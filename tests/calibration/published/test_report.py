"""Published runs: how they are read, the models and machines that stand for them, and what is printed of them."""

from __future__ import annotations

import json
from io import StringIO

import pytest
import torch
from rich.console import Console

from protwin.calibration.published.machines import (
    HOP_LATENCY_S,
    all_reduce_s,
    four_rank_machine,
    hop_bytes_per_s,
    one_rank_machine,
    replicated_rank,
    sharded_rank,
    sharded_reduction_s,
    small_all_reduces_s,
)
from protwin.calibration.published.predictions import adam_predictions, idle_buffer_bytes, plan_on_device
from protwin.calibration.published.report import (
    is_within_aim,
    measured_order,
    predicted_order,
    predictions_of,
    published_document,
    published_tables,
)
from protwin.calibration.published.runs import (
    DATA_PARALLEL,
    ON_DEVICE,
    PUBLISHED_RUNS,
    REPLICATED,
    SHARDED,
    Measurement,
    Prediction,
    Quantity,
)
from protwin.calibration.published.sharded import fsdp_plan, sharded_predictions
from protwin.calibration.published.workloads import (
    WideAdapter,
    adapted_workload,
    dense_workload,
    llama,
    with_depth,
    with_divisions,
)
from protwin.shared.families.shipped import shipped_family
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.workload import DType, Workload
from protwin.sim.costs.copies import copy_time_s
from protwin.sim.costs.fabrics import CALL_OVERHEAD_S
from protwin.sim.engine.simulator import simulate
from protwin.sim.operations.efficiency import DISPATCHES_PER_LAUNCH
from tests.sim.hand_made import machine

TINY = llama(32, 4, 2, 64, vocab_size=64)


# -- the table -------------------------------------------------------------------------------------------------------


def test_every_run_of_the_list_is_there_and_says_what_is_unknown() -> None:
    assert [run.row for run in PUBLISHED_RUNS] == ["R1", "R2", "R3", "R4", "R5", "R6", "R7", "R8"]
    for run in PUBLISHED_RUNS:
        assert run.unknown
        assert bool(run.measurements) == (run.not_predicted is None)
        keys = [(m.case, m.quantity) for m in run.measurements]
        assert len(set(keys)) == len(keys)
        assert all(m.row == run.row for m in run.measurements)


def test_figures_that_were_also_published_rounded_agree() -> None:
    """The pages state GB with two decimals; the result files state bytes, which are 10^9 to the GB."""
    rounded = {
        ("R1", ON_DEVICE, Quantity.DEVICE_PEAK): 5.36,
        ("R1", DATA_PARALLEL, Quantity.DEVICE_PEAK): 5.38,
        ("R1", REPLICATED, Quantity.DEVICE_PEAK): 3.09,
        ("R1", REPLICATED, Quantity.PINNED): 3.82,
        ("R1", SHARDED, Quantity.DEVICE_PEAK): 3.09,
        ("R1", SHARDED, Quantity.PINNED): 0.96,
        ("R2", "113 of 130 chunks persistent", Quantity.DEVICE_PEAK): 13.16,
    }
    stated = {
        (m.row, m.case, m.quantity): m.readings
        for run in PUBLISHED_RUNS
        for m in run.measurements
        if m.quantity in (Quantity.DEVICE_PEAK, Quantity.PINNED)
    }
    assert stated.keys() == rounded.keys()
    for key, readings in stated.items():
        assert len(readings) == 1
        assert round(readings[0] / 1e9, 2) == rounded[key]


def test_samples_per_second_became_seconds() -> None:
    of_case = {m.case: m.readings[0] for m in PUBLISHED_RUNS[0].measurements if m.quantity is Quantity.ITERATION}
    published = {ON_DEVICE: 8.48, DATA_PARALLEL: 30.90, REPLICATED: 11.06, SHARDED: 5.93}
    for case, samples_per_s in published.items():
        assert round((2 if case == ON_DEVICE else 8) / of_case[case], 2) == samples_per_s
    assert measured_order() == [DATA_PARALLEL, REPLICATED, ON_DEVICE, SHARDED]


def test_tokens_per_second_became_seconds() -> None:
    (run,) = (run for run in PUBLISHED_RUNS if run.row == "R6")
    published = {"Llama-3-8B": 2904, "Llama-3-70B": 331, "Llama-3.1-8B": 5762}
    tokens = {"Llama-3-8B": 8192, "Llama-3-70B": 8192, "Llama-3.1-8B": 2 * 8192}
    for measurement in run.measurements:
        name = measurement.case.partition(",")[0].partition(" on ")[0]
        if name in published:
            assert tokens[name] / measurement.readings[0] == pytest.approx(published[name])


# -- the machines ----------------------------------------------------------------------------------------------------


def test_ranges_ascend_from_favourable_to_unfavourable() -> None:
    for machines in (four_rank_machine(), one_rank_machine()):
        favourable, likely, unfavourable = machines.all
        assert favourable.device.vector_flop_per_s >= likely.device.vector_flop_per_s
        assert likely.device.vector_flop_per_s > unfavourable.device.vector_flop_per_s
        assert favourable.device.launch_overhead_s <= likely.device.launch_overhead_s
        assert likely.device.launch_overhead_s < unfavourable.device.launch_overhead_s
    hosts = [hardware.host.memory_bandwidth_bytes_per_s for hardware in four_rank_machine().all]
    assert hosts == sorted(hosts, reverse=True)


def test_ranks_share_the_hosts_memory() -> None:
    likely = four_rank_machine().likely  # 12.1 and 12.9 GB/s of link, 64 GB/s of memory
    alone, four, eight = (replicated_rank(likely, n).host_to_device.bandwidth_bytes_per_s for n in (1, 4, 8))
    assert (alone, four, eight) == (12.1e9, 12.1e9, 8e9)
    assert hop_bytes_per_s(likely, 4) == 8e9  # 64 GB/s, written and read by four
    assert hop_bytes_per_s(four_rank_machine().favourable, 4) == 12.1e9


def test_a_sharded_gather_and_an_all_reduce_by_hand() -> None:
    likely = four_rank_machine().likely
    size_bytes = 10**9
    gather = sharded_rank(likely, 4).host_to_device
    own_s, others_s = 0.25 / 12.1, 0.75 / 8
    latency_s = likely.host_to_device.latency_s + 3 * HOP_LATENCY_S
    assert copy_time_s(size_bytes, gather) == pytest.approx(own_s + others_s + latency_s)
    assert all_reduce_s(size_bytes, likely, 4) == pytest.approx(6 * HOP_LATENCY_S + 2 * 0.75 / 8)
    # No all-gather or all-reduce moves less than its lower bound over the link itself.
    link = 12.1e9
    assert copy_time_s(size_bytes, gather) > 0.75 * size_bytes / link
    assert all_reduce_s(size_bytes, likely, 4) > 2 * 0.75 * size_bytes / link


def test_reductions_by_hand() -> None:
    likely = four_rank_machine().likely
    size_bytes = 4 * 10**8
    scattering_s = 3 * HOP_LATENCY_S + 0.75 * size_bytes / 8e9  # 64 GB/s of memory, written and read by four
    share_s = likely.device_to_host.latency_s + size_bytes / 4 / 12.9e9
    assert sharded_reduction_s(size_bytes, likely, 4) == pytest.approx(CALL_OVERHEAD_S + scattering_s + share_s)
    each = [CALL_OVERHEAD_S + all_reduce_s(size, likely, 4) for size in (1000, 20_000)]
    assert small_all_reduces_s((1000, 20_000), likely, 4) == pytest.approx(sum(each))
    # One by one takes longer than all at once.
    assert small_all_reduces_s([10_000] * 100, likely, 4) > 50 * all_reduce_s(10_000, likely, 4)


def test_older_servers_dispatch_slower_than_desktops() -> None:
    favourable, likely, unfavourable = (m.device.launch_overhead_s for m in four_rank_machine().all)
    assert 1.5 < likely / favourable < 2.5
    assert unfavourable > likely


# -- the models ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted() -> Workload:
    return adapted_workload(TINY, "tiny", batch_size=2, sequence_length=8, rank=4)


def test_adapters_alone_are_trained(adapted: Workload) -> None:
    trained = [parameter for parameter in adapted.parameters if parameter.trainable]
    assert len(trained) == 4 * 4 * 2
    assert sum(parameter.num_elements for parameter in trained) == 4 * 4 * 2 * 32 * 4
    assert {str(parameter.dtype) for parameter in trained} == {"float32"}
    assert {str(parameter.dtype) for parameter in adapted.parameters if not parameter.trainable} == {"float16"}
    record = simulate(plan_on_device(adapted), adapted, four_rank_machine().likely)
    assert record.num_gathers == record.num_cpu_adam_steps == 0


def test_idle_buffers_by_hand() -> None:
    """A block of 1.6 MiB in float16, in chunks of 128 MiB: one chunk, and so two buffers."""
    workload = adapted_workload(llama(256, 4, 2, 512, vocab_size=64), "small", batch_size=1, sequence_length=8)
    assert idle_buffer_bytes(workload) == (2 * 128 * 2**20, 2 * 64 * 2**20, 2 * 256 * 2**20)
    # The published model: two chunks of 128 MiB for each block, four of 64 MiB, one of 256 MiB.
    published = adapted_workload(llama(2560, 3, 20, 6912), "wide", batch_size=1, sequence_length=8)
    assert idle_buffer_bytes(published) == (4 * 128 * 2**20, 8 * 64 * 2**20, 2 * 256 * 2**20)


def test_data_parallel_divides_each_gradient_once(adapted: Workload) -> None:
    divided = with_divisions(adapted)
    trained = sum(p.trainable for p in adapted.parameters)
    added = 0
    for block in range(adapted.num_blocks):
        before, after = (w.profile_of(block).checkpoint_backward for w in (adapted, divided))
        extra = after.operations[len(before.operations) :]
        assert after.operations[: len(before.operations)] == before.operations
        assert {operation.name for operation in extra} == {"div_"}
        added += sum(operation.count for operation in extra)
    assert added == trained
    likely = four_rank_machine().likely
    records = [simulate(plan_on_device(w), w, likely) for w in (adapted, divided)]
    assert records[0].peak_device_bytes == records[1].peak_device_bytes
    # The tiny model's kernels are over before the next is dispatched.
    dispatch_s = trained * DISPATCHES_PER_LAUNCH * likely.device.launch_overhead_s
    assert records[1].iteration_s - records[0].iteration_s == pytest.approx(dispatch_s)


def test_an_adapted_map_is_the_sum_of_both() -> None:
    torch.manual_seed(0)
    base = torch.nn.Linear(5, 3)
    adapted = WideAdapter(base, 2, scale=0.5)
    x = torch.randn(4, 5)
    expected = x @ base.weight.T + base.bias + 0.5 * (x @ adapted.down.weight.T @ adapted.up.weight.T)
    torch.testing.assert_close(adapted(x), expected)
    adapted(x).sum().backward()
    assert base.weight.grad is None
    assert adapted.down.weight.grad is not None


@pytest.mark.slow
def test_a_model_made_deeper_is_the_deeper_model() -> None:
    """Against the trace of the model that really has that many blocks."""
    shallow = dense_workload(llama(32, 5, 2, 64, vocab_size=64), "tiny", batch_size=1, sequence_length=8)
    deep = dense_workload(llama(32, 9, 2, 64, vocab_size=64), "tiny", batch_size=1, sequence_length=8)
    made = with_depth(shallow, 9)
    assert made.parameters == deep.parameters
    assert [block.name for block in made.blocks] == [block.name for block in deep.blocks]
    plans = [plan_on_device(workload) for workload in (made, deep)]
    records = [simulate(plan, w, machine()) for plan, w in zip(plans, (made, deep), strict=True)]
    assert records[0].peak_device_bytes == records[1].peak_device_bytes
    assert records[0].iteration_s == pytest.approx(records[1].iteration_s)


def test_adam_by_hand() -> None:
    by_case = {prediction.case: prediction for prediction in adam_predictions()}
    large = by_case["Llama-2-7B, 128 threads"]
    assert large.likely == pytest.approx(6_738_415_616 * 28 / (0.7 * 171.5e9))
    for prediction in by_case.values():
        assert prediction.low < prediction.likely < prediction.high


# -- what is printed -------------------------------------------------------------------------------------------------


# -- sharded over devices --------------------------------------------------------------------------------------------


def test_a_unit_of_fsdp_is_a_block() -> None:
    family = shipped_family("llama-2-13b", DType.BFLOAT16)
    assert family is not None
    workload = family.at(batch_size=1, sequence_length=128)
    chosen = fsdp_plan(workload, 64, 0.5)
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=chosen.chunk_bytes)
    of_blocks = [chunk.forward for chunk in layout.chunks if 0 < chunk.forward[0] <= workload.num_blocks]
    assert of_blocks == [(1 + block,) for block in range(workload.num_blocks)]
    assert layout.sharded(0, chosen.n_shard) == {chunk.id for chunk in layout.chunks}
    assert (chosen.n_buffer, chosen.n_checkpoint) == (2, 20)


def test_runs_whose_configuration_is_known_are_predicted_within_the_aim() -> None:
    """Those on A100, which say which blocks they checkpoint.  Nothing was fitted to them."""
    measurements = {m.case: m for run in PUBLISHED_RUNS if run.row == "R6" for m in run.measurements}
    predictions = {prediction.case: prediction for prediction in sharded_predictions()}
    assert predictions.keys() == measurements.keys()
    for case, prediction in predictions.items():
        if "H100" not in case:
            assert is_within_aim(measurements[case], prediction)
        assert prediction.low < prediction.likely < prediction.high


def made_up() -> list[Prediction]:
    """Every time predicted 10 % too long, every memory 4 % too small in the first reading."""
    return [
        Prediction.of(
            m.row, m.case, m.quantity, [factor * m.readings[0] for factor in (0.9 * f, f, 1.1 * f)], how="made up"
        )
        for run in PUBLISHED_RUNS
        for m in run.measurements
        for f in [0.96 if m.quantity in (Quantity.DEVICE_PEAK, Quantity.PINNED) else 1.1]
    ]


def printed(predictions: list[Prediction]) -> str:
    stream = StringIO()
    Console(file=stream, width=150, highlight=False).print(published_tables(predictions))
    return stream.getvalue()


def test_signed_errors_and_aims() -> None:
    predictions = made_up()
    for run in PUBLISHED_RUNS:
        for measurement in run.measurements:
            (prediction,) = predictions_of(measurement, predictions)
            is_time = measurement.quantity in (Quantity.ITERATION, Quantity.ADAM, Quantity.LARGEST, Quantity.LONGEST)
            assert prediction.error_frac(measurement.readings[0]) == pytest.approx(0.1 if is_time else -0.04)
            assert is_within_aim(measurement, prediction) == (measurement.quantity in AIMED)
    text = printed(predictions)
    assert "+10.0%" in text
    assert "-4.0%" in text
    assert "time within 15 %: 13 of 13 figures" in text
    assert "memory within 5 %: 5 of 5 figures" in text
    assert "(the same)" in text
    assert "Not predicted: two things" in text


AIMED = (Quantity.ITERATION, Quantity.DEVICE_PEAK, Quantity.PINNED)


def test_a_miss_is_called_one() -> None:
    predictions = [
        p.model_copy(update={"low": 2 * p.low, "likely": 2 * p.likely, "high": 2 * p.high}) for p in made_up()
    ]
    text = printed(predictions)
    assert "time within 15 %: 0 of 13 figures; for some reading of what is unknown: 0" in text
    assert "memory within 5 %: 0 of 5 figures" in text


def test_what_was_put_in_counts_for_nothing() -> None:
    predictions = [p.model_copy(update={"is_given": True}) for p in made_up()]
    assert "memory within 5 %: 0 of 0 figures" in printed(predictions)


def test_the_order_of_cases_is_by_samples_per_second() -> None:
    predictions = made_up()
    assert predicted_order(predictions) == measured_order()
    slow = [
        p.model_copy(update={"likely": 100.0}) if (p.row, p.case) == ("R1", DATA_PARALLEL) else p for p in predictions
    ]
    assert predicted_order(slow)[-1] == DATA_PARALLEL
    assert "(another order)" in printed(slow)


def test_the_document_holds_every_figure() -> None:
    document = json.loads(json.dumps(published_document(made_up())))
    figures = [figure for run in document["runs"] for figure in run["figures"]]
    assert len(figures) == sum(len(run.measurements) for run in PUBLISHED_RUNS)
    for figure in figures:
        (prediction,) = figure["predictions"]
        assert len(prediction["error_frac"]) == len(figure["readings"])
    assert document["order_of_R1"]["predicted"] == document["order_of_R1"]["measured"]


def test_a_range_holds_a_measurement_that_it_reaches() -> None:
    prediction = Prediction.of("R9", "x", Quantity.ITERATION, (1.0, 2.0, 3.0), how="by hand")
    assert prediction.reaches((2.5, 9.0))
    assert not prediction.reaches((3.5, 9.0))
    assert prediction.reaches((3.5, 9.0), within_frac=0.15)
    assert not prediction.reaches((3.6, 9.0), within_frac=0.15)
    assert prediction.reaches((0.9,), within_frac=0.15)
    assert not prediction.reaches((0.8,), within_frac=0.15)
    wide = Measurement(row="R9", case="x", quantity=Quantity.ITERATION, readings=(2.2,))
    assert is_within_aim(wide, prediction)
    assert not is_within_aim(wide.model_copy(update={"readings": (2.5,)}), prediction)
