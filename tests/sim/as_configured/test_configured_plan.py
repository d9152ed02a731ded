"""The plan of a run does what the run does, and what a file leaves open is settled and told."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from protwin.shared.basics.errors import PlanError
from protwin.shared.catalogue.machines import machine
from protwin.shared.catalogue.models import model_configuration
from protwin.shared.foreign.asked_run import AskedRun, Checkpointing, Place, Precision, Reading, Split, Tool
from protwin.shared.foreign.deepspeed import read_deepspeed
from protwin.shared.foreign.training_arguments import read_training_arguments
from protwin.shared.methods.runtime_profile import Runtime, RuntimeProfile
from protwin.shared.phases.tiling import LossHead
from protwin.shared.schema.optimizer import HostGradients, Optimizer
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.training_options import LoraOptions
from protwin.shared.schema.workload import DType
from protwin.shared.workloads.source import load_workload
from protwin.sim.as_configured.configured_plan import configured_plan
from protwin.sim.as_configured.explain import Asked, command_line, explain
from protwin.sim.as_configured.explanation import Explanation
from protwin.sim.as_configured.question import Said, settle, workload_of
from protwin.sim.engine.simulator import simulate
from protwin.sim.searching.baselines import system_plan, systems
from protwin.sim.searching.problem import search_problem
from protwin.sim.searching.request import SearchRequest, Step

from .runs import GOOD, never, planned, settled_of


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


def test_hooks_hold_inputs_where_adapters_are_apart_and_checkpointing_is_reentrant() -> None:
    """As transformers has it; without any one of these nothing is held."""
    of_file = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"use_orig_params": False}}
    told = read_training_arguments(of_file)
    assert told.run is not None
    assert (told.run.runtime, told.run.frozen_apart) == (Runtime.FSDP, True)
    every: dict[str, Any] = {
        "split": Split.PARAMETERS,
        "runtime": Runtime.FSDP,
        "frozen_apart": True,
        "checkpointing": Checkpointing.FULL,
        "recomputes_whole": True,
        "lora": LoraOptions(rank=8),
    }
    assert planned(**every)[0].runtime.holds_inputs
    for change in ({"frozen_apart": False}, {"recomputes_whole": False}, {"runtime": Runtime.FSDP2}, {"lora": None}):
        assert not planned(**every | change)[0].runtime.holds_inputs


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


@pytest.mark.parametrize(
    ("split", "num_ranks", "place", "is_gathered"),
    [
        pytest.param(Split.PARAMETERS, 8, Place.DEVICE, True, id="zero 3"),
        pytest.param(Split.GRADIENTS, 8, Place.DEVICE, True, id="zero 2"),
        pytest.param(Split.PARAMETERS, 8, Place.HOST, False, id="from hosts"),
        pytest.param(Split.PARAMETERS, 1, Place.DEVICE, False, id="one rank"),
        pytest.param(Split.NOTHING, 8, Place.DEVICE, False, id="ddp"),
    ],
)
def test_narrow_gathers_count_where_devices_gather(
    split: Split, num_ranks: int, place: Place, *, is_gathered: bool
) -> None:
    on = "h100-80gb-x8"
    asked = Asked(file="file.json", hardware_name=on, machine=machine(on), searches=False)
    more = {"compiled": "blocks", "float8": "tensorwise", "float8_gather": "precomputed", "num_ranks": num_ranks}
    where = {"split": split, "runtime": Runtime.FSDP2, "parameters_on": place, "optimizer_on": place}
    run = AskedRun.model_validate(GOOD | more | where)
    found = explain(Reading(tool=Tool.TORCHTITAN, run=run), Said(), asked, never)
    assert ("gathered in float8" in " ".join(found.configured.emulated)) == is_gathered
    assert any("not in float8" in one for one in found.differences) == (place is Place.HOST)


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
    far: dict[str, Any] = {"on": "a100-80gb-x8", "split": Split.PARAMETERS, "num_ranks": 32}
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
    given: dict[str, Any] = {
        "batch_size": size,
        "micro_batches": number,
        "global_batch_size": of_all,
        "num_ranks": ranks,
    }
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


def test_weights_that_are_loaded_as_published_are_in_the_type_that_the_model_has() -> None:
    """Of the catalogue's models: published in bfloat16, in float32 and in float16."""
    for model, is_adapted, dtype, optimizer in (
        ("qwen2.5-0.5b", False, "bfloat16", Optimizer.ADAMW_BF16),
        ("qwen2.5-0.5b", True, "bfloat16", Optimizer.ADAMW),
        ("gpt2", False, "float32", Optimizer.ADAMW),
        ("llama-2-7b", True, "float16", Optimizer.ADAMW),
    ):
        lora = LoraOptions(rank=4) if is_adapted else None
        settled = settled_of(Said(model=model), precision="float32", is_as_published=True, lora=lora)
        assert (settled.dtype, settled.optimizer) == (dtype, optimizer), model
        assert any(f"as {model} is published" in one for one in settled.notes), model
    overruled = settled_of(Said(dtype="float32"), precision="float32", is_as_published=True)
    assert (overruled.dtype, overruled.optimizer) == ("float32", Optimizer.ADAMW)
    differs = settled_of(Said(model="llama-2-7b"), precision="float32", is_as_published=True).differences
    assert any("weights are loaded in float16" in one for one in differs)


# -- the answer ---------------------------------------------------------------------------------------------------


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
