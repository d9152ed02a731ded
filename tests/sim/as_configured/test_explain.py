"""Answers about a run are those of the simulator and of the search."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from protwin.shared.catalogue.machines import machine
from protwin.shared.foreign.asked_run import AskedRun, Checkpointing, Precision, Reading, Split, Tool
from protwin.shared.methods.runtime_profile import Runtime
from protwin.shared.phases.quantization import LATEST_RELEASE, PackedProducts, Quantization, QuantizedType
from protwin.shared.schema.training_options import LoraOptions, QuantizationOptions
from protwin.sim.as_configured import question
from protwin.sim.as_configured.explain import Asked, explain
from protwin.sim.as_configured.question import Said
from protwin.sim.as_configured.tables import fit_sentence
from protwin.sim.engine.simulator import simulate

from .runs import GOOD, never, planned, settled_of


def told_of(said: Said | None = None, *, on: str = "rtx-3090", **changes: Any) -> Any:
    run = AskedRun.model_validate({name: value for name, value in (GOOD | changes).items() if value is not None})
    asked = Asked(file="file.json", hardware_name=on, machine=machine(on))
    return explain(Reading(tool=Tool.TRAINING_ARGUMENTS, run=run), said or Said(), asked, never)


def test_attention_is_that_of_the_file_in_the_run_and_pytorchs_in_the_plan() -> None:
    on = "h100-80gb"
    usual, flash = (
        told_of(on=on, attention_kernel=kernel, batch_size=2, sequence_length=8192) for kernel in (None, "flash-2")
    )
    assert flash.configured.iteration_s > usual.configured.iteration_s
    assert flash.found.prediction.iteration_s == usual.found.prediction.iteration_s
    (own,) = [one for one in flash.found.baselines if one.name == "the run of the file"]
    assert own.iteration_s == flash.configured.iteration_s


def test_the_row_of_the_run_beside_plans_is_what_the_answer_says_of_it() -> None:
    """Where compiled blocks and another tool's copies keep other memory than the plan by itself would."""
    on = "h100-80gb-x8"
    asked = Asked(file="file.json", hardware_name=on, machine=machine(on))
    changes = {"split": Split.PARAMETERS, "compiled": "blocks", "batch_size": 8, "sequence_length": 8192}
    run = AskedRun.model_validate(GOOD | changes)
    told = explain(Reading(tool=Tool.TORCHTITAN, run=run), Said(), asked, never)
    assert told.found is not None
    (row,) = [one for one in told.found.baselines if one.name == "the run of the file"]
    own = told.configured
    assert own.host_memory is not None
    figures = (row.iteration_s, row.guaranteed_peak_device_bytes)
    assert figures == (own.iteration_s, own.guaranteed_peak_device_bytes)
    assert row.pinned_host_bytes + row.host_bytes == own.host_memory.planned_bytes
    (lack,) = row.lacking
    assert lack.size_bytes == own.guaranteed_peak_device_bytes - told.found.device_budget_bytes, "as of other rows"
    assert told.lacking[0].size_bytes < lack.size_bytes, "which leave a margin"


@pytest.mark.parametrize(
    ("model", "shape", "memory", "said"),
    [
        pytest.param(
            "qwen2.5-0.5b",
            (8, 900),
            ["device memory for the allocator's segments"],
            "leaves less of the device free than the 5.0 %",
            marks=pytest.mark.slow,
        ),
        # No plan leaves a margin, so that other rows need none either.
        pytest.param("gpt2", (30, 1024), [], "The run fits.", marks=pytest.mark.slow),
        pytest.param(
            "gpt2",
            (32, 1024),
            ["device memory for the allocator's segments"],
            "The run fits by what it allocates, but",
            marks=pytest.mark.slow,
        ),
        ("gpt2", (40, 1024), ["device memory"], "The run does not fit"),
    ],
)
def test_the_run_fits_no_better_than_the_same_plan_of_the_search(
    model: str, shape: tuple[int, int], memory: list[str], said: str
) -> None:
    """One plan in two rows: checkpointed plain training, by the file and by the search."""
    asked: dict[str, Any] = {"model": model, "batch_size": shape[0], "sequence_length": shape[1]}
    told = told_of(on="rtx-4090", checkpointing=Checkpointing.FULL, **asked)
    rows = {one.name: one for one in told.found.baselines}
    own, same = rows["the run of the file"], rows["plain, checkpointed"]
    assert own.lacking == same.lacking
    assert [lack.memory for lack in own.lacking] == memory
    assert own.expected_segments_bytes == same.expected_segments_bytes
    assert (told.found.best_baseline in (own, same)) == (not memory), "it is compared with as one that fits"
    assert said in fit_sentence(told)


def test_the_answer_is_that_of_the_simulator_and_of_the_search() -> None:
    told = told_of(micro_batches=2)
    configured, workload, settled = planned(Tool.TRAINING_ARGUMENTS, on="rtx-3090", micro_batches=2)
    assert told.configured.iteration_s == simulate(configured.plan, workload, settled.machine).iteration_s
    assert told.lacking == ()
    (own,) = [one for one in told.found.baselines if one.name == "the run of the file"]
    assert own.iteration_s == pytest.approx(told.configured.iteration_s)
    assert told.speedup == told.configured.iteration_s / told.found.prediction.iteration_s
    assert told.speedup > 0.85, "within the uncertainty of a comparison"
    assert shlex.split(told.command)[:4] == ["protwin", "search", "--model=qwen2.5-0.5b", "--hardware=rtx-3090"]


@pytest.mark.slow
def test_a_search_lays_the_run_beside_its_plan_with_what_is_copied() -> None:
    told = told_of(on="a100-80gb-x8", split=Split.PARAMETERS, runtime=Runtime.FSDP2, reduce_dtype="float32")
    (row,) = [one for one in told.found.baselines if one.name == "the run of the file"]
    assert row.iteration_s == told.configured.iteration_s


@pytest.mark.slow
def test_a_plan_for_a_run_that_keeps_results_by_operation_may_keep_them_too() -> None:
    """The command that the answer names finds the same plan; where the run keeps none, no plan does."""
    knobs = {"sequence_length": 2048, "batch_size": 2}
    plans = []
    for kind in (Checkpointing.SELECTIVE, Checkpointing.FULL):
        run = AskedRun.model_validate(GOOD | knobs | {"checkpointing": kind})
        asked = Asked(file="a", hardware_name="a40", machine=machine("a40"), device_budget_bytes=12 * 2**30)
        told = explain(Reading(tool=Tool.TORCHTITAN, run=run), Said(), asked, never)
        assert ("--product-stride=all" in told.command) is (kind is Checkpointing.SELECTIVE)
        assert told.found is not None
        plans.append(told.found.plan)
    assert plans[0].n_selective == plans[0].n_checkpoint > 0
    assert plans[1].n_selective == 0


@pytest.mark.slow
def test_a_run_that_does_not_fit_lacks_what_the_account_says() -> None:
    told = told_of(model="llama-3-8b", sequence_length=2048)
    (lack,) = told.lacking
    over = told.configured.guaranteed_peak_device_bytes - machine("rtx-3090").device.usable_bytes
    assert (lack.memory, lack.size_bytes) == ("device memory", over)
    assert told.found is not None, "a plan with the host's memory fits"


@pytest.mark.slow  # every try of a search that ends in none
def test_where_no_plan_fits_the_run_is_predicted_all_the_same() -> None:
    run = AskedRun.model_validate(GOOD)
    asked = Asked(file="a", hardware_name="a40", machine=machine("a40"), device_budget_bytes=200 * 2**20)
    told = explain(Reading(tool=Tool.DEEPSPEED, run=run), Said(), asked, never)
    assert told.found is None
    assert told.infeasible is not None
    over = told.configured.guaranteed_peak_device_bytes - 200 * 2**20
    assert [lack.size_bytes for lack in told.lacking] == [over]
    assert told.command.endswith(f"--device-budget={200 * 2**20}B")
    assert told.speedup is None


@pytest.mark.slow
def test_adapters_are_told_of_without_a_trace() -> None:
    told = told_of(lora=LoraOptions(rank=16), model="llama-3.2-1b", sequence_length=1024)
    assert told.configured.question.lora_rank == 16
    assert "--lora-rank=16" in told.command


INT8 = QuantizationOptions(how=Quantization(type=QuantizedType.INT8), products=PackedProducts(release=LATEST_RELEASE))


def test_inputs_that_eight_bits_keep_are_left_out_without_torch_and_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lora = LoraOptions(rank=8)
    assert settled_of(lora=lora, quantized=INT8).options.quantized == INT8
    monkeypatch.setattr(question, "_has_torch", lambda: False)
    without = settled_of(lora=lora, quantized=INT8)
    assert without.options.quantized == INT8.model_copy(update={"products": None})
    assert any("maps of 8 bits keep" in one for one in without.differences)
    nf4 = QuantizationOptions(how=Quantization(type=QuantizedType.NF4, blocksize=64))
    assert not any("8 bits" in difference for difference in settled_of(lora=lora, quantized=nf4).differences)


@pytest.mark.slow
def test_inputs_that_eight_bits_keep_are_in_the_run_and_not_in_the_plan_beside_it() -> None:
    given: dict[str, Any] = {
        "lora": LoraOptions(rank=8, targets=("q_proj",)),
        "quantized": INT8,
        "sequence_length": 1024,
    }
    found = told_of(**given)
    assert found.found is not None
    plan = found.found.prediction
    assert found.configured.guaranteed_peak_device_bytes > plan.guaranteed_peak_device_bytes
    assert (bool(found.configured.emulated), bool(plan.emulated)) == (True, False)


@pytest.mark.parametrize(
    ("optimizer", "split", "ranks"),
    [("adamw-8bit", None, 1), ("lion", None, 1), ("adamw-8bit", Split.NOTHING, 4), ("sgd", Split.GRADIENTS, 4)],
)
def test_masters_that_a_run_has_not_are_no_reason_why_it_does_not_fit(
    optimizer: str, split: Split | None, ranks: int
) -> None:
    """Float32 of 494 million parameters; the wrong variant takes them for the run's."""
    on = "a100-80gb-x8"
    changes = {"precision": Precision.PURE_BFLOAT16, "optimizer": optimizer, "split": split, "num_ranks": ranks}
    run = AskedRun.model_validate({name: value for name, value in (GOOD | changes).items() if value is not None})
    reading, masters = (
        Reading(tool=Tool.AXOLOTL, run=run),
        4 * 494_032_768 // (1 if split is not Split.GRADIENTS else 4),
    )

    def told(budget_bytes: int | None) -> Any:
        asked = Asked(
            file="a.yml", hardware_name=on, machine=machine(on), device_budget_bytes=budget_bytes, searches=False
        )
        return explain(reading, Said(), asked, never)

    usual = told(None)
    peak = usual.configured.guaranteed_peak_device_bytes
    assert (usual.masters_bytes, usual.peak_bytes) == (masters, peak - masters)
    assert any("float32 masters here, " in one for one in usual.differences)
    assert told(peak - masters).lacking == ()
    assert "without the float32 masters of the prediction" in fit_sentence(told(peak - masters))
    (lack,) = told(peak - masters - 1).lacking
    assert lack.size_bytes == 1
    mixed = explain(
        Reading(tool=Tool.AXOLOTL, run=run.model_copy(update={"precision": Precision.MIXED_BFLOAT16})),
        Said(),
        Asked(file="a.yml", hardware_name=on, machine=machine(on), searches=False),
        never,
    )
    assert mixed.masters_bytes == 0
