"""The plan of a run does what the run does, and answers are those of the simulator and of the search."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest

from protwin.shared.basics.errors import PlanError
from protwin.shared.catalogue.machines import machine
from protwin.shared.catalogue.models import model_configuration
from protwin.shared.foreign.asked_run import AskedRun, Checkpointing, Place, Precision, Reading, Split, Tool
from protwin.shared.foreign.deepspeed import read_deepspeed
from protwin.shared.methods.runtime_profile import Runtime, RuntimeProfile
from protwin.shared.phases.quantization import LATEST_RELEASE, PackedProducts, Quantization, QuantizedType
from protwin.shared.phases.tiling import LossHead
from protwin.shared.schema.optimizer import HostGradients, Optimizer
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.training_options import LoraOptions, QuantizationOptions
from protwin.shared.schema.workload import DType, Workload
from protwin.shared.workloads.source import load_workload
from protwin.sim.as_configured import question
from protwin.sim.as_configured.configured_plan import ConfiguredPlan, configured_plan
from protwin.sim.as_configured.explain import Asked, command_line, explain
from protwin.sim.as_configured.explanation import Explanation
from protwin.sim.as_configured.question import Said, Settled, settle, workload_of
from protwin.sim.engine.simulator import simulate
from protwin.sim.searching.baselines import system_plan, systems
from protwin.sim.searching.problem import search_problem
from protwin.sim.searching.request import SearchRequest, Step

GOOD: dict[str, Any] = {
    "model": "qwen2.5-0.5b",
    "batch_size": 1,
    "sequence_length": 256,
    "optimizer": Optimizer.ADAMW,
    "precision": Precision.MIXED_BFLOAT16,
    "max_gradient_norm": 1.0,
}


def never(message: str) -> None:
    raise AssertionError(message)


def settled_of(said: Said | None = None, *, on: str = "a100-80gb-x8", **changes: Any) -> Settled:
    run = AskedRun.model_validate({name: value for name, value in (GOOD | changes).items() if value is not None})
    return settle(Reading(tool=Tool.DEEPSPEED, run=run), said or Said(), machine(on), file="file.json")


def planned(tool: Tool = Tool.DEEPSPEED, **changes: Any) -> tuple[ConfiguredPlan, Workload, Settled]:
    settled = settled_of(**changes)
    workload, settled = workload_of(settled, cache=None, warn=never)
    return configured_plan(settled, workload, tool), workload, settled


def on_one(**changes: Any) -> Plan:
    return planned(on="a100-80gb", **changes)[0].plan


def test_systems_with_a_baseline_are_planned_as_it_is() -> None:
    """The oracle is the plan that every search lays beside its own."""
    workload = load_workload("qwen2.5-0.5b", batch_size=1, sequence_length=256, dtype="bfloat16")
    hardware = machine("a100-80gb-x8")
    cases: list[tuple[str, dict[str, Any], Tool]] = [
        ("DDP", {"split": Split.NOTHING}, Tool.TRAINING_ARGUMENTS),
        ("DDP, checkpointed", {"checkpointing": Checkpointing.FULL}, Tool.TRAINING_ARGUMENTS),
        ("FSDP2", {"split": Split.PARAMETERS, "runtime": Runtime.FSDP2}, Tool.TORCHTITAN),
        (
            "FSDP2, offloaded",
            {
                "split": Split.PARAMETERS,
                "parameters_on": Place.HOST,
                "optimizer_on": Place.HOST,
                "runtime": Runtime.FSDP2,
            },
            Tool.TORCHTITAN,
        ),
        (
            "DeepSpeed ZeRO-3, offloaded",
            {
                "split": Split.PARAMETERS,
                "parameters_on": Place.HOST,
                "optimizer_on": Place.HOST,
                "live_parameters": 10**9,
                "prefetched_parameters": 5 * 10**7,
                "runtime": Runtime.DEEPSPEED_ZERO3,
            },
            Tool.TORCHTITAN,
        ),
    ]
    request = SearchRequest(workload=workload, hardware=hardware, step=Step(num_ranks=8, max_gradient_norm=1.0))
    problem = search_problem(request)
    like = Plan(
        workload_id=workload.identity,
        chunk_bytes=2**28,
        n_persist=1,
        n_buffer=0,
        num_ranks=8,
        parallel=ParallelMode.DDP,
        max_gradient_norm=1.0,
    )
    known = {system.name: system for system in systems(8)}
    for name, changes, tool in cases:
        system = known[name]
        is_checkpointed = changes.get("checkpointing") is Checkpointing.FULL
        found = planned(tool, **changes)[0]
        assert found.plan == system_plan(system, problem, like, is_checkpointed=is_checkpointed)
        assert found.runtime.runtime is system.runtime


def test_zero_2_gathers_once_per_step_and_holds_less_than_ddp() -> None:
    found = {split: planned(split=split, micro_batches=3) for split in Split}
    records = {
        split: simulate(configured.plan, workload, settled.machine)
        for split, (configured, workload, settled) in found.items()
    }
    peaks = [records[split].guaranteed_peak_device_bytes for split in Split]
    assert peaks[0] > peaks[1] == peaks[2] > peaks[3]
    two, three = (
        sum(task.kind is TaskKind.ALL_GATHER for task in records[split].tasks)
        for split in (Split.GRADIENTS, Split.PARAMETERS)
    )
    assert 0 < two < three
    assert any("ZeRO-1 keeps gradients whole" in one for one in found[Split.OPTIMIZER][0].differences)
    assert not any("ZeRO-1" in one for one in found[Split.GRADIENTS][0].differences)


def test_what_others_copy_around_collectives_counts_in_the_run() -> None:
    run = AskedRun.model_validate(
        GOOD | {"split": Split.PARAMETERS, "runtime": Runtime.FSDP2, "reduce_dtype": "float32"}
    )
    on = "a100-80gb-x8"
    asked = Asked(file="file.json", hardware_name=on, machine=machine(on), searches=False)
    told = explain(Reading(tool=Tool.TORCHTITAN, run=run), Said(), asked, never)
    found, workload, settled = planned(split=Split.PARAMETERS, runtime=Runtime.FSDP2, reduce_dtype="float32")
    profile = RuntimeProfile(Runtime.FSDP2, DType.FLOAT32)
    assert found.runtime == profile
    own, plain = (simulate(found.plan, workload, settled.machine, runtime=one) for one in (profile, RuntimeProfile()))
    assert told.configured.iteration_s == own.iteration_s > plain.iteration_s
    assert "copies that fsdp2 makes" in told.differences[0]
    assert told.found is None


@pytest.mark.parametrize(
    ("on", "more", "is_known"),
    [
        pytest.param("h100-80gb-x8", {"compiled": "blocks"}, True, id="compiled"),
        pytest.param("h100-80gb-x8", {"compiled": "blocks", "float8": "tensorwise"}, True, id="float8"),
        pytest.param("a100-80gb-x8", {"compiled": "blocks", "float8": "tensorwise"}, False, id="no units for float8"),
    ],
)
def test_what_is_compiled_and_narrow_counts_in_the_run(on: str, more: dict[str, str], *, is_known: bool) -> None:
    asked = Asked(file="file.json", hardware_name=on, machine=machine(on), searches=False)

    def told(**changes: str) -> Explanation:
        run = AskedRun.model_validate(GOOD | {"split": Split.PARAMETERS} | changes)
        return explain(Reading(tool=Tool.TORCHTITAN, run=run), Said(), asked, never)

    plain, found = told(), told(**more)
    words = [one for one in found.differences if "nothing is compiled or in float8" in one]
    if is_known:
        assert found.configured.iteration_s < plain.configured.iteration_s
        assert "compiled by torch.compile" in " ".join(found.configured.emulated)
        assert words == []
    else:
        assert found.configured.iteration_s == plain.configured.iteration_s
        assert "states no peak of float8" in words[0]


@pytest.mark.slow
def test_a_search_lays_the_run_beside_its_plan_with_what_is_copied() -> None:
    told = told_of(on="a100-80gb-x8", split=Split.PARAMETERS, runtime=Runtime.FSDP2, reduce_dtype="float32")
    (row,) = [one for one in told.found.baselines if one.name == "the run of the file"]
    assert row.iteration_s == told.configured.iteration_s


def test_one_rank_keeps_offloads_or_has_its_host_step() -> None:
    kept = on_one(split=Split.PARAMETERS)
    assert kept.parallel is ParallelMode.SINGLE
    assert kept.n_persist > 0
    stepped = on_one(split=Split.GRADIENTS, optimizer_on=Place.HOST)
    assert (stepped.n_persist, stepped.n_host_stepped, stepped.n_buffer) == (0, kept.n_persist, 0)
    offloaded = on_one(split=Split.PARAMETERS, optimizer_on=Place.HOST, parameters_on=Place.HOST)
    assert (offloaded.n_persist, offloaded.n_host_stepped) == (0, 0)
    assert 0 < offloaded.n_buffer < kept.n_persist
    assert offloaded.host_gradients is HostGradients.FLOAT32
    disk = on_one(split=Split.PARAMETERS, optimizer_on=Place.DISK, parameters_on=Place.HOST)
    assert (disk.n_disk_state, disk.n_disk, disk.n_staging) == (kept.n_persist, 0, 2)
    with pytest.raises(PlanError, match=r"\(NVMe\) in 8 ranks, but plans of one rank alone"):
        planned(split=Split.PARAMETERS, optimizer_on=Place.DISK)


def test_groups_of_shards_are_of_a_node_of_a_size_or_of_a_number() -> None:
    far = {"on": "a100-80gb-x8", "split": Split.PARAMETERS, "num_ranks": 32}
    assert planned(**far)[0].plan.shard_ranks is None
    assert planned(**far, shards_within_node=True)[0].plan.shard_ranks == 8
    assert planned(**far, shard_ranks=4)[0].plan.shard_ranks == 4
    assert planned(**far, replicas=2)[0].plan.shard_ranks == 16
    assert planned(**far)[2].machine.num_nodes == 4
    assert planned(split=Split.PARAMETERS, shard_ranks=4, replicas=4)[2].num_ranks == 16
    with pytest.raises(PlanError, match="3 replicas, which 32 ranks do not form evenly"):
        planned(**far, replicas=3)


def test_recomputation_is_whole_by_blocks_or_lies_between_two_ends() -> None:
    configured, workload, _ = planned(checkpointing=Checkpointing.FULL)
    num_blocks = workload.num_blocks
    assert configured.plan.n_checkpoint == num_blocks
    assert planned(checkpointing=Checkpointing.EVERY_NTH, checkpointed_every=3)[0].plan.n_checkpoint == num_blocks // 3
    configured, _, _ = planned(checkpointing=Checkpointing.BY_COMPILATION)
    assert configured.plan.n_checkpoint == num_blocks // 2
    assert [plan.n_checkpoint for _, plan in configured.other_plans] == [0, num_blocks]
    offloaded = planned(checkpointing=Checkpointing.FULL, offloads_inputs=True)[0].plan
    assert offloaded.n_offload_input == num_blocks - 1


def test_a_choice_by_operation_is_a_mode_of_every_block_where_it_is_known() -> None:
    configured, workload, settled = planned(checkpointing=Checkpointing.SELECTIVE, batch_size=4)
    plan, num_blocks = configured.plan, workload.num_blocks
    assert (plan.n_checkpoint, plan.n_selective, plan.product_stride) == (num_blocks, num_blocks, 2)
    assert configured.other_plans == ()
    peaks, times = zip(
        *(
            (record.guaranteed_peak_device_bytes, record.iteration_s)
            for kind in (Checkpointing.FULL, Checkpointing.SELECTIVE, Checkpointing.NONE)
            for record in [simulate(planned(checkpointing=kind, batch_size=4)[0].plan, workload, settled.machine)]
        ),
        strict=True,
    )
    asked = Asked(file="file.json", hardware_name="a100-80gb-x8", machine=settled.machine)
    assert "--product-stride=all" in command_line(settled, asked)
    assert peaks[0] < peaks[1] < peaks[2]
    assert times[0] > times[1] > times[2]
    unknown = tuple(profile.model_copy(update={"selective": ()}) for profile in workload.profiles)
    half = configured_plan(settled, workload.model_copy(update={"profiles": unknown}), Tool.TORCHTITAN)
    assert (half.plan.n_checkpoint, half.plan.n_selective, len(half.other_plans)) == (num_blocks // 2, 0, 2)


def test_a_chunked_head_makes_no_logits() -> None:
    plain, chunked = (planned(loss_head=head, batch_size=4) for head in (LossHead.EAGER, LossHead.CHUNKED))
    assert (plain[0].plan.loss_tiles, chunked[0].plan.loss_tiles) == (1, 8)
    peaks = [
        simulate(one.plan, workload, s.machine).guaranteed_peak_device_bytes for one, workload, s in (plain, chunked)
    ]
    assert peaks[1] < peaks[0]
    fused, workload, settled = planned(loss_head=LossHead.FUSED, batch_size=4)
    assert workload.loss_head is LossHead.FUSED
    assert simulate(fused.plan, workload, settled.machine).guaranteed_peak_device_bytes < peaks[0]


# -- what nobody says ---------------------------------------------------------------------------------------------


def test_everything_that_is_missing_is_told_at_once() -> None:
    reading = Reading(tool=Tool.DEEPSPEED, run=AskedRun(split=Split.PARAMETERS))
    with pytest.raises(PlanError) as caught:
        settle(reading, Said(), None, file="ds.json")
    told = str(caught.value)
    assert told.startswith("ds.json does not say which model")
    assert all(option in told for option in ("--model", "--hardware", "--batch-size", "--sequence-length"))
    with pytest.raises(
        PlanError, match=r"does not say how many tokens a sample has \(--sequence-length 2048\)\. Add it"
    ):
        settled_of(sequence_length=None)
    with pytest.raises(PlanError, match="trains acme/none, which is neither"):
        settled_of(model="acme/none")


@pytest.mark.parametrize("seed", range(20))
def test_sizes_of_a_step_agree(seed: int) -> None:
    rng = random.Random(seed)
    size, number, ranks = rng.randint(1, 9), rng.randint(1, 9), rng.choice([1, 2, 8])
    of_all = size * number * ranks
    given = {"batch_size": size, "micro_batches": number, "global_batch_size": of_all, "num_ranks": ranks}
    for left_out in ("micro_batches", "batch_size", "global_batch_size"):
        settled = settled_of(**{**given, left_out: None})
        assert (settled.batch_size, settled.micro_batches, settled.num_ranks) == (size, number, ranks)
    assert settled_of(**given).micro_batches == number
    with pytest.raises(PlanError, match="do not share evenly"):
        settled_of(**{**given, "global_batch_size": of_all + 1})


def test_options_overrule_the_file_and_it_is_told() -> None:
    settled = settled_of(Said(batch_size=7, num_ranks=2, dtype="float16"), micro_batches=2, num_ranks=4)
    assert (settled.batch_size, settled.num_ranks, settled.dtype) == (7, 2, "float16")
    assert "--batch-size 7 stands in the place of the file's 1." in settled.notes
    assert "--ranks 2 stands in the place of the file's 4." in settled.notes


def test_a_model_of_images_has_no_length() -> None:
    settled = settled_of(model="vit-huge", sequence_length=None)
    assert settled.sequence_length is None
    workload, _ = workload_of(settled, cache=None, warn=never)
    assert workload.num_samples == 1


def test_a_configuration_of_a_catalogue_model_needs_no_trace(tmp_path: Path) -> None:
    config = model_configuration("qwen2.5-0.5b").config
    (tmp_path / "config.json").write_text(json.dumps(config | {"_name_or_path": "mine", "torch_dtype": "float16"}))
    settled = settled_of(Said(model=str(tmp_path)))
    assert settled.model == "qwen2.5-0.5b"
    assert f"{tmp_path} describes the model that the catalogue calls qwen2.5-0.5b." in settled.notes
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert settled_of(Said(model=str(tmp_path))).model == str(tmp_path)


def test_element_types_are_those_of_the_file_or_of_the_device() -> None:
    for precision, dtype, optimizer in (
        (Precision.FLOAT32, "float32", Optimizer.ADAMW),
        (Precision.MIXED_FLOAT16, "float16", Optimizer.ADAMW),
        (Precision.PURE_BFLOAT16, "bfloat16", Optimizer.ADAMW_BF16),
    ):
        settled = settled_of(precision=precision)
        assert (settled.dtype, settled.optimizer) == (dtype, optimizer)
    assert any("autocast makes bfloat16 copies" in one for one in settled_of(precision="autocast bfloat16").differences)
    assert (settled_of(precision=None).dtype, settled_of(precision=None, on="t4").dtype) == ("bfloat16", "float16")


# -- the answer ---------------------------------------------------------------------------------------------------


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
    assert row.lacking == told.lacking


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


@pytest.mark.parametrize(
    ("stage", "offload", "num_ranks", "runtime"),
    [
        (1, {}, 8, Runtime.DEEPSPEED_ZERO1),
        (2, {}, 8, Runtime.DEEPSPEED_ZERO2),
        (3, {}, 8, Runtime.DEEPSPEED_ZERO3),
        (2, {"offload_optimizer": {"device": "cpu"}}, 8, Runtime.DEEPSPEED_ZERO2),
        (3, {"offload_optimizer": {"device": "cpu"}}, 8, Runtime.DEEPSPEED_OFFLOAD),
        (
            3,
            {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            8,
            Runtime.DEEPSPEED_ZERO3,
        ),
        (2, {}, 1, Runtime.DEEPSPEED_ZERO2),
        (2, {"offload_optimizer": {"device": "cpu"}}, 1, Runtime.DEEPSPEED_ZERO2),
        (3, {"offload_optimizer": {"device": "cpu"}}, 1, Runtime.DEEPSPEED_OFFLOAD),
        (2, {"offload_optimizer": {"device": "nvme"}}, 1, Runtime.OURS),
        (3, {}, 1, Runtime.DEEPSPEED_ZERO3),
    ],
)
def test_a_stage_of_deepspeed_has_its_own_runtime(
    stage: int, offload: dict[str, Any], num_ranks: int, runtime: Runtime
) -> None:
    """From the file on, and the plan is one that the runtime carries out."""
    content = {"zero_optimization": {"stage": stage, **offload}, "bf16": {"enabled": True}}
    run = read_deepspeed(content).run
    changes = {name: getattr(run, name) for name in run.model_fields_set}
    found, workload, settled = planned(
        Tool.DEEPSPEED, on="a100-80gb" if num_ranks == 1 else "a100-80gb-x8", micro_batches=2, **changes
    )
    assert found.runtime.runtime is runtime
    if runtime is not Runtime.OURS:
        assert simulate(found.plan, workload, settled.machine, runtime=found.runtime).iteration_s > 0
    assert not any("ZeRO-1 keeps" in one or "stays on its device" in one for one in found.differences)


@pytest.mark.parametrize(
    ("zero", "scalars"),
    [
        ({"reduce_bucket_size": 2e8, "overlap_comm": True}, 2 * 200_000_000),
        ({"reduce_bucket_size": "auto"}, 896**2),  # the hidden size of Qwen2.5 0.5B
        ({"contiguous_gradients": False}, 0),
        ({}, 500_000_000),
    ],
)
def test_buckets_of_the_file_are_in_the_run(zero: dict[str, Any], scalars: int) -> None:
    run = read_deepspeed({"zero_optimization": {"stage": 2, **zero}, "bf16": {"enabled": True}}).run
    changes = {name: getattr(run, name) for name in run.model_fields_set}
    found, workload, settled = planned(Tool.DEEPSPEED, on="a100-80gb-x8", **changes)
    buckets = found.runtime.buckets
    assert (0 if buckets is None else buckets.num_scalars * buckets.number) == scalars
    bare = RuntimeProfile(Runtime.DEEPSPEED_ZERO2, bucket_scalars=0)
    peaks = [
        simulate(found.plan, workload, settled.machine, runtime=runtime).guaranteed_peak_device_bytes
        for runtime in (bare, found.runtime)
    ]
    assert peaks[0] <= peaks[1] <= peaks[0] + 2 * scalars


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
    given = {"lora": LoraOptions(rank=8, targets=("q_proj",)), "quantized": INT8, "sequence_length": 1024}
    found = told_of(**given)
    assert found.found is not None
    plan = found.found.prediction
    assert found.configured.guaranteed_peak_device_bytes > plan.guaranteed_peak_device_bytes
    assert (bool(found.configured.emulated), bool(plan.emulated)) == (True, False)
