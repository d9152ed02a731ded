"""Published training runs: their data, their predictions in the sources' units, and comparisons of plans."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.calibration.published.comparisons import (
    COVERED_FRAC,
    Activations,
    Comparison,
    Difference,
    Place,
    PlanForm,
    Spread,
    Timed,
    comparisons,
    form_of_run,
    modes_of_r1,
    timed_plans,
)
from protwin.calibration.published.measured_runs import (
    MEASURED_RUNS,
    RUNS_OF_OTHER_FORMS,
    SOURCES,
    Measured,
    MeasuredRun,
    configuration_of,
)
from protwin.calibration.published.outcome import Outcome, calibrated_comparisons
from protwin.calibration.published.run_predictions import (
    figures_of,
    hardware_of,
    plan_of,
    predict_run,
    profile_of,
    workload_of,
)
from protwin.calibration.published.run_tables import of_intervals, own_figure, run_tables
from protwin.calibration.published.runs import DATA_PARALLEL, REPLICATED, Prediction, Quantity
from protwin.shared.basics.interval import Interval
from protwin.shared.basics.units import format_number, format_seconds
from protwin.shared.catalogue.models import known_model, load_model_configuration
from protwin.shared.methods.runtime_profile import Runtime, RuntimeProfile
from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import DType
from protwin.shared.tables.labels import format_share
from protwin.shared.tables.record import iteration_table
from protwin.shared.tables.table import Table
from protwin.shared.tables.terminal import as_text
from protwin.sim.engine.simulator import simulate
from protwin.sim.searching.confidence import CALIBRATED, DATA_SHEETS

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
KEPT = Outcome.load(max(RESULTS.glob("published-*.json")))
FIDELITY = max(RESULTS.glob("fidelity-*.json"))
BY_ID = {run.id: run for run in MEASURED_RUNS}


# -- the data --------------------------------------------------------------------------------------------------------


def test_every_run_names_its_source_its_model_and_its_machine() -> None:
    assert len(BY_ID) == len(MEASURED_RUNS)
    assert {run.source for run in (*MEASURED_RUNS, *RUNS_OF_OTHER_FORMS)} == set(SOURCES)
    assert all(source.url.startswith("https://") and source.about for source in SOURCES.values())
    for run in MEASURED_RUNS:
        assert configuration_of(run.model) is not None or known_model(run.model) is not None
        assert hardware_of(run).num_devices >= run.num_ranks


def test_twenty_runs_of_many_classes_are_shown() -> None:
    shown = [run for run in MEASURED_RUNS if run.is_shown]
    assert len(shown) == 25
    assert len({run.run_class for run in shown}) >= 10
    assert len({run.measured.speed[0] for run in shown if run.measured.speed is not None}) == 3
    assert any(run.host_stepped for run in shown)
    assert any(run.lora_rank is not None for run in shown)


def test_plans_have_what_sources_and_runs_say_of_norms_and_shard_groups() -> None:
    hsdp = BY_ID["fms-7b-a100-128"]
    of_source = plan_of(hsdp, workload_of(hsdp))
    assert (of_source.max_gradient_norm, of_source.shard_ranks) == (1.0, 8)
    unknown = hsdp.model_copy(update={"source": "nobody's", "shard_ranks": None})
    of_nobody = plan_of(unknown, workload_of(unknown))
    assert (of_nobody.max_gradient_norm, of_nobody.shard_ranks) == (None, None)
    held, deleted = (workload_of(BY_ID[name]) for name in ("thunder-7b-fsdp2-eager", "titan-h100-8"))
    assert (held.keeps_outputs, deleted.keeps_outputs) == (True, False), "as the scripts' loops"
    composer = BY_ID["mosaic-a100_80gb-125m-s512-g8-mb128x2"]
    assert profile_of(composer).num_loss_metrics == 2
    assert profile_of(composer.model_copy(update={"loss_metrics": 0})).num_loss_metrics == 0


def test_buckets_and_gradients_that_stay_are_those_of_scripts() -> None:
    buckets = profile_of(BY_ID["qwen-7B-qlora-512"]).buckets
    assert buckets is not None
    assert (buckets.num_scalars, buckets.number) == (200_000_000, 2)
    small = profile_of(BY_ID["qwen-1.8B-full-1024"]).buckets
    assert small is not None
    assert small.num_scalars == 2048**2  # what transformers writes for "auto"
    assert profile_of(BY_ID["hf-bert-large-vanilla"]).keeps_gradients
    assert not profile_of(BY_ID["qwen-7B-lora-512"]).keeps_gradients


def test_what_a_run_says_of_its_runtime_is_carried_out() -> None:
    """Every field that both have, with a value that is not its usual one."""
    run = BY_ID["titan-h100-8"]
    both = [one for one in dataclasses.fields(RuntimeProfile) if one.name in MeasuredRun.model_fields]
    assert len(both) >= 8
    for one in both:
        usual = MeasuredRun.model_fields[one.name].default
        other: object = not usual if isinstance(usual, bool) else 3
        if one.name in ("runtime", "reduce_dtype"):
            other = {"runtime": Runtime.COMPOSER, "reduce_dtype": DType.FLOAT64}[one.name]
        changed = profile_of(run.model_copy(update={one.name: other}))
        assert getattr(changed, one.name) == other != getattr(profile_of(run), one.name), one.name


def made_up(measured: Measured) -> MeasuredRun:
    return MeasuredRun.model_validate(
        {
            "id": "made-up",
            "class": "made up",
            "source": "none",
            "model": "gpt2",
            "batch_size": 3,
            "micro_batches": 2,
            "sequence_length": 100,
            "machine": "a100-80gb-x8",
            "num_ranks": 4,
            "parallel": "ddp",
            "measured": measured,
        }
    )


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [
        # 24 samples and 2,400 tokens a step, 600 of them on each device
        (Measured(tokens_per_s_per_device=300), 2.0),
        (Measured(samples_per_s=6), 4.0),
        (Measured(iteration_s=5), 5.0),
        (Measured(allocated_bytes="1GiB"), None),  # type: ignore[arg-type]
    ],
)
def test_units_become_seconds(measured: Measured, seconds: float | None) -> None:
    assert made_up(measured).iteration_s == seconds


def test_a_run_without_any_figure_is_refused() -> None:
    with pytest.raises(ValueError, match="made-up has neither a speed nor a memory"):
        made_up(Measured())


# -- predictions -----------------------------------------------------------------------------------------------------

SHIPPED = [
    run for run in MEASURED_RUNS if known_model(run.model) is not None and run.lora_rank is None and not run.autocast
]
"""Runs that need no trace."""


COUNTED = [run for run in SHIPPED if run.measured.mfu_percent is not None]


@cache
def record_of(name: str) -> Record:
    run = BY_ID[name]
    workload = workload_of(run)
    return simulate(plan_of(run, workload), workload, hardware_of(run))


@pytest.mark.parametrize("run", COUNTED, ids=lambda run: run.id)
def test_utilisation_is_counted_as_the_sources_do_but_for_tables_that_are_looked_up(run: MeasuredRun) -> None:
    """6 FLOPs for each parameter and token, 12 for each layer, token of the sequence and unit of width."""
    config = load_model_configuration(run.model).config
    workload = workload_of(run)
    attention = 12 * workload.num_blocks * config["hidden_size"] * run.sequence_length
    peak = hardware_of(run).device.peak_flop_per_s[DType.BFLOAT16]

    def utilisation(num_parameters: int, tokens_per_s: float) -> float:
        return float((6 * num_parameters + attention) * tokens_per_s / peak)

    measured, predicted = run.measured, figures_of(run, record_of(run.id))
    assert measured.tokens_per_s_per_device is not None
    assert measured.mfu_percent is not None
    as_published = utilisation(workload.num_parameters, measured.tokens_per_s_per_device)
    assert 100 * as_published == pytest.approx(measured.mfu_percent, rel=0.003)
    products = workload.num_parameters - config["vocab_size"] * config["hidden_size"]
    assert predicted.mfu_frac == pytest.approx(utilisation(products, predicted.tokens_per_s_per_device), rel=1e-3)


@pytest.mark.parametrize("name", ["titan-h100-8", "gist-llama7b-z3-ac-optoff-b2"])
def test_tables_have_the_figures_that_a_record_shows(name: str) -> None:
    """Those of the table that ``protwin simulate`` prints."""
    record, predicted = record_of(name), figures_of(BY_ID[name], record_of(name))
    cells = {row[0]: row[1] for row in iteration_table(record).rows}
    assert cells["tokens per second and device"] == format_number(predicted.tokens_per_s_per_device)
    assert cells["samples per second"] == format_number(predicted.samples_per_s)
    assert cells["iteration"] == format_seconds(predicted.iteration_s)
    assert predicted.mfu_frac is not None
    assert cells["MFU (model FLOPs)"] == format_share(predicted.mfu_frac)


@pytest.mark.parametrize("name", ["titan-h100-8", "gist-llama7b-z3-ac-optoff-b2"])
def test_figures_of_one_prediction_agree(name: str) -> None:
    run = BY_ID[name]
    predicted = figures_of(run, record_of(name))
    assert predicted.samples_per_s * predicted.iteration_s == pytest.approx(run.num_samples)
    assert predicted.tokens_per_s_per_device * predicted.iteration_s * run.num_ranks == pytest.approx(run.num_tokens)
    assert run.measured.speed is not None
    unit, _ = run.measured.speed
    is_own = {"tokens/s and device": predicted.tokens_per_s_per_device, "samples/s": predicted.samples_per_s}
    assert own_figure(predicted, unit) == is_own[unit]


def test_offloaded_runs_have_nothing_on_devices_and_sharded_ones_nothing_on_hosts() -> None:
    for name in ("gist-llama7b-z3-ac-b2", "gist-llama7b-z3-ac-optoff-b2"):
        run = BY_ID[name]
        workload = workload_of(run)
        plan = plan_of(run, workload)
        assert (plan.n_persist, plan.n_shard > 0) == (0, not run.host_stepped)
        assert (plan.n_checkpoint, plan.micro_batches, plan.num_ranks) == (workload.num_blocks, 4, 8)


def test_nodes_are_as_many_as_the_ranks_need() -> None:
    assert hardware_of(BY_ID["fms-34b-h100-96"]).num_devices == 96
    assert hardware_of(BY_ID["fms-34b-h100-96"]).network.adapters_per_node == 2  # type: ignore[union-attr]
    limited = hardware_of(BY_ID["titan-h100-8"])
    assert (limited.device.memory_bytes, limited.num_devices) == (96 * 10**9, 8)


# -- comparisons -----------------------------------------------------------------------------------------------------

KEPT_THERE = PlanForm(Place.RESIDENT, Activations.KEPT)
CHECKPOINTED = PlanForm(Place.RESIDENT, Activations.CHECKPOINTED)
OFFLOADED = PlanForm(Place.OFFLOADED, Activations.CHECKPOINTED)
seconds = st.floats(1e-3, 1e3)


def timed(form: PlanForm, predicted_s: float, measured_s: float, *, name: str = "", subject: str = "one") -> Timed:
    return Timed(name, subject, form, predicted_s, measured_s)


@given(seconds, seconds, seconds, seconds, st.floats(0.1, 10), st.floats(0.1, 10))
def test_what_two_runs_have_in_common_cancels(
    a: float, b: float, c: float, d: float, common: float, other: float
) -> None:
    plain = Comparison(timed(KEPT_THERE, a, b), timed(CHECKPOINTED, c, d))
    scaled = Comparison(timed(KEPT_THERE, common * a, other * b), timed(CHECKPOINTED, common * c, other * d))
    assert scaled.error_frac == pytest.approx(plain.error_frac, abs=1e-9)
    swapped = Comparison(timed(KEPT_THERE, c, d), timed(CHECKPOINTED, a, b))
    assert swapped.error_frac == pytest.approx(-plain.error_frac, abs=1e-9)
    assert -1 < plain.error_frac < 1


def test_errors_by_hand() -> None:
    """Predicted as fast as the first and measured twice as slow: the gain was wrong by half of the longer time."""
    too_fast = Comparison(timed(KEPT_THERE, 1.0, 1.0), timed(OFFLOADED, 1.0, 2.0))
    assert too_fast.error_frac == pytest.approx(-0.5)
    assert too_fast.difference is Difference.PLACE
    too_slow = Comparison(timed(KEPT_THERE, 1.0, 2.0), timed(CHECKPOINTED, 1.25, 2.0))
    assert too_slow.error_frac == pytest.approx(0.2)
    assert too_slow.difference is Difference.ACTIVATIONS
    spread = Spread.of([too_fast, too_slow])
    assert (spread.num, spread.low, spread.high) == (2, pytest.approx(-0.5), pytest.approx(0.2))  # type: ignore[comparison-overlap]
    assert (spread.mean, spread.covering) == (pytest.approx(0.35), pytest.approx(0.5))  # type: ignore[comparison-overlap]


@given(st.lists(st.tuples(seconds, seconds, seconds, seconds), min_size=1, max_size=30))
def test_the_covering_error_is_the_least_that_covers(rows: list[tuple[float, float, float, float]]) -> None:
    compared = [Comparison(timed(KEPT_THERE, a, b), timed(CHECKPOINTED, c, d)) for a, b, c, d in rows]
    covering = Spread.of(compared).covering
    sizes = [abs(one.error_frac) for one in compared]
    assert sum(size <= covering for size in sizes) >= COVERED_FRAC * len(compared)
    assert covering in sizes
    assert sum(size < covering for size in sizes) < COVERED_FRAC * len(compared)


def test_the_simpler_plan_comes_first_and_subjects_stay_apart() -> None:
    found = comparisons(
        [
            timed(OFFLOADED, 1, 1, name="c"),
            timed(KEPT_THERE, 1, 1, name="a"),
            timed(CHECKPOINTED, 1, 1, name="b"),
            timed(KEPT_THERE, 1, 1, name="z", subject="other"),
        ]
    )
    assert [(one.first.name, one.second.name) for one in found] == [("a", "b"), ("a", "c"), ("b", "c")]


def test_published_pairs_differ_in_their_plan_alone() -> None:
    at_one_shape, on_one_machine = KEPT.pairs()
    assert len(at_one_shape) >= 15
    for pair in at_one_shape:
        if pair.first.subject == "R1":
            continue
        first, second = BY_ID[pair.first.name], BY_ID[pair.second.name]
        for field in ("source", "model", "batch_size", "micro_batches", "sequence_length", "machine", "num_ranks"):
            assert getattr(first, field) == getattr(second, field)
        assert form_of_run(first) != form_of_run(second)
    names = {(pair.first.name, pair.second.name) for pair in at_one_shape}
    assert names.isdisjoint((pair.first.name, pair.second.name) for pair in on_one_machine)


def test_modes_of_r1_take_the_plan_that_their_memory_points_to() -> None:
    def prediction(case: str, seconds: float, variant: str = "") -> Prediction:
        return Prediction.of("R1", case, Quantity.ITERATION, [seconds] * 3, how="made up", variant=variant)

    given_out = [
        prediction(REPLICATED, 3.0, "by its memory"),
        prediction(REPLICATED, 1.0),
        prediction(DATA_PARALLEL, 2.0),
    ]
    ddp, replicated = sorted(
        modes_of_r1(given_out, {REPLICATED: 4.0, DATA_PARALLEL: 2.0}), key=lambda one: one.measured_s
    )
    assert (ddp.form.place, ddp.predicted_s) == (Place.RESIDENT, 2.0)
    assert (replicated.form.place, replicated.predicted_s) == (Place.OFFLOADED, 3.0)


def test_a_measured_plan_has_the_form_that_its_name_tells() -> None:
    """Such as "6: 88/88 kept, 4 host-stepped, 4K 2C 1S, norm"."""
    forms = {plan.name: plan.form for plan in timed_plans(json.loads(FIDELITY.read_text())) if ": " in plan.name}
    assert {form.activations for form in forms.values()} == set(Activations)
    assert {form.place for form in forms.values()} == {Place.RESIDENT, Place.OFFLOADED}
    for name, form in forms.items():
        kept, num_chunks = re.findall(r"(\d+)/(\d+) kept", name)[0]
        assert (form.place is Place.RESIDENT) == (kept == num_chunks and "host-stepped" not in name)
        swaps, checkpoints = (re.search(rf"\b\d+{letter}\b", name) is not None for letter in "SC")
        assert (form.activations is Activations.SWAPPED) == swaps
        assert (form.activations is Activations.KEPT) == (not swaps and not checkpoints)


# -- what the search trusts ------------------------------------------------------------------------------------------


def test_uncertainties_cover_what_was_measured() -> None:
    at_one_shape, on_one_machine = KEPT.pairs()
    calibrated = calibrated_comparisons(FIDELITY)

    def differing(pairs: list[Comparison], difference: Difference) -> list[Comparison]:
        return [pair for pair in pairs if pair.difference is difference]

    activations = differing(at_one_shape, Difference.ACTIVATIONS)
    assert Spread.of(activations).covering <= DATA_SHEETS.device_frac
    # Micro-batches of one sequence are slower than predicted, by a cause that no plan shares.
    several = [
        pair
        for pair in differing(on_one_machine, Difference.ACTIVATIONS)
        if min(BY_ID[pair.first.name].batch_size, BY_ID[pair.second.name].batch_size) > 1
    ]
    assert Spread.of(several).covering <= DATA_SHEETS.device_frac
    places = differing(at_one_shape, Difference.PLACE)
    assert len(places) >= 4
    missed = [pair for pair in places if abs(pair.error_frac) > DATA_SHEETS.host_frac]
    assert all("gist-llama7b" in pair.first.name for pair in missed), "DeepSpeed overlaps its step with nothing"
    assert len(missed) <= 2
    for num_on_host, frac in (((0, 2), CALIBRATED.device_frac), ((1,), CALIBRATED.host_frac)):
        compared = [
            pair for pair in calibrated if pair.first.form.uses_host + pair.second.form.uses_host in num_on_host
        ]
        assert len(compared) >= 20
        assert frac - 0.02 < Spread.of(compared).covering <= frac


# -- what is kept and printed ----------------------------------------------------------------------------------------


def test_the_kept_outcome_has_every_run() -> None:
    assert list(KEPT.predicted) == list(BY_ID)


@pytest.mark.parametrize("name", ["titan-a100-llama-2-13b-ckpt0.5", "gist-llama7b-z3-ac-optoff-b2"])
def test_the_kept_outcome_is_what_would_be_predicted(name: str) -> None:
    """Else keep a new one: make published ARGS="--keep benchmarks/results"."""
    now, then = predict_run(BY_ID[name]), KEPT.predicted[name]
    assert now.iteration_s == pytest.approx(then.iteration_s, rel=0.02)
    assert now.needed_bytes == pytest.approx(then.needed_bytes, rel=0.02)


def test_what_is_kept_reads_back_equal(tmp_path: Path) -> None:
    assert Outcome.load(KEPT.keep(tmp_path)) == KEPT


def test_tables_tell_what_was_measured_beside_what_is_predicted() -> None:
    text = as_text(run_tables(KEPT, calibrated_comparisons(FIDELITY)), width=220)
    for words in ("tokens/s and device", "samples/s", "s per step", "MFU, %", "Margins of memory", "Published pairs"):
        assert words in text
    fms = BY_ID["fms-7b-a100-128"]
    likely = KEPT.predicted[fms.id].tokens_per_s_per_device
    assert fms.measured.tokens_per_s_per_device == 3760
    (line,) = (line for line in text.splitlines() if "128 x a100-80gb" in line)
    assert "3,760" in line
    assert f"{likely:,.0f}" in line
    assert f"{likely / 3760 - 1:+.1%}" in line


def test_runs_of_other_forms_are_told_and_not_predicted() -> None:
    """What was measured, in GiB and seconds as published, and why nothing stands beside it."""
    text = as_text(run_tables(KEPT, []), width=220)
    block = text.split("not predicted")[1].split("Comparisons")[0]
    (line,) = (line for line in block.splitlines() if line.startswith("prime-rl-3234-16384-offloaded"))
    assert all(word in line for word in ("5.73", "21.5", "expert parallelism over 8 devices"))
    others = {run.id for run in RUNS_OF_OTHER_FORMS}
    assert others
    assert not others & (set(BY_ID) | set(KEPT.predicted))


def test_every_class_is_summed_up_once() -> None:
    text = as_text(run_tables(KEPT, []), width=220)
    block = text.split("Times of all published runs, by class")[1].split("Memory of all published runs")[0]
    classes = {run.run_class for run in MEASURED_RUNS if run.iteration_s is not None}
    for name in classes:
        assert sum(line.strip().startswith(name + "  ") for line in block.splitlines()) == 1


def test_runs_inside_their_intervals_are_counted_by_class() -> None:
    """Intervals that end a little above and a little below the measured time, in turn."""
    predicted, inside = {}, 0
    for number, run in enumerate(MEASURED_RUNS):
        measured_s = run.iteration_s or 1.0
        high = measured_s * (1.01 if number % 2 else 0.99)
        inside += run.iteration_s is not None and number % 2
        update = {"iteration_s": measured_s, "iteration_interval_s": Interval(low=0.5 * measured_s, high=high)}
        predicted[run.id] = KEPT.predicted[run.id].model_copy(update=update)
    (table,) = of_intervals(predicted)
    assert isinstance(table, Table)
    timed = [run for run in MEASURED_RUNS if run.iteration_s is not None]
    assert table.rows[-1] == ("all", str(len(timed)), str(inside), f"{inside / len(timed):.0%}", "25%")
    assert sum(int(row[1]) for row in table.rows[:-1]) == len(timed)
    untold = {name: run.model_copy(update={"iteration_interval_s": None}) for name, run in KEPT.predicted.items()}
    assert of_intervals(untold) == ()


def test_nine_in_ten_measured_times_are_inside_their_intervals_or_nearly() -> None:
    """Between 80 and 95 % of all, so that they are neither too narrow nor of no use."""
    (table,) = of_intervals(KEPT.predicted)
    assert isinstance(table, Table)
    _, number, inside, _, width = table.rows[-1]
    assert 0.8 <= int(inside) / int(number) <= 0.95
    assert float(width.removesuffix("%")) <= 40
