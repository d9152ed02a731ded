"""The commands that need no torch, through the real console script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protwin.shared import load_workload
from protwin.shared.answers.search_result import SearchResult
from protwin.shared.catalogue.machines import machine, machine_names
from protwin.shared.cli.root import COMMANDS
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.verify import verify_schedule
from tests.cli.conftest import Protwin
from tests.cli.saved import decoder
from tests.proof_size import some_quick

GIB = 2**30


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """A saved workload."""
    path = tmp_path / "workload.json"
    decoder().save(path)
    return path


@pytest.fixture
def without_torch(tmp_path: Path, environment: dict[str, str]) -> dict[str, str]:
    """Variables of a process in which importing torch or transformers ends it."""
    folder = tmp_path / "blocked"
    folder.mkdir()
    for module in ("torch", "transformers"):
        (folder / f"{module}.py").write_text(f"raise SystemExit('{module} was imported')\n")
    return {"PYTHONPATH": str(folder)}


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    """A configuration that is traced within a second."""
    path = tmp_path / "model" / "config.json"
    path.parent.mkdir()
    fields = {"model_type": "gpt2", "n_layer": 3, "n_head": 2, "n_embd": 64, "vocab_size": 128, "n_positions": 64}
    path.write_text(json.dumps(fields))
    return path


def searched(protwin: Protwin, *arguments: str | Path, **variables: str) -> SearchResult:
    """What ``protwin search --json`` prints."""
    result = protwin("search", "--json", *arguments, **variables)
    assert result.returncode == 0, result.stderr
    return SearchResult.from_mapping(json.loads(result.stdout), origin="standard output")


# -- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        *((name,) for name in COMMANDS if name not in ("hardware", "checkpoint")),
        *(("hardware", name) for name in ("list", "show", "probe")),
        *(("checkpoint", name) for name in ("inspect", "consolidate", "reshard")),
    ],
    ids=" ".join,
)
def test_every_help_shows_an_example(protwin_here: Protwin, command: tuple[str, ...]) -> None:
    result = protwin_here(*command, "--help")
    assert result.returncode == 0, result.stderr
    assert f"  protwin {' '.join(command)}" in result.stdout.partition("Example")[2]


def test_the_help_of_simulation_imports_no_torch(protwin: Protwin, without_torch: dict[str, str]) -> None:
    for command in ("hardware", "search", "simulate"):
        result = protwin(command, "--help", **without_torch)
        assert result.returncode == 0, result.stderr
    assert "was imported" in protwin("hardware", "probe", **without_torch).stderr, "the block works"


# -- hardware --------------------------------------------------------------------------------------------------------


def test_list_names_every_machine(protwin_here: Protwin) -> None:
    result = protwin_here("hardware", "list")
    assert result.returncode == 0
    assert all(f"\n{name} " in result.stdout for name in machine_names())


@pytest.mark.parametrize("name", ["rtx-3090", machine_names()[-1]])
def test_show_writes_what_reads_back_equal(protwin_here: Protwin, tmp_path: Path, name: str) -> None:
    for suffix in ("toml", "json"):
        path = tmp_path / f"machine.{suffix}"
        assert protwin_here("hardware", "show", name, "--output", path).returncode == 0
        assert Hardware.load(path) == machine(name)
    from_file = protwin_here("hardware", "show", tmp_path / "machine.toml")
    assert from_file.stdout == protwin_here("hardware", "show", name).stdout


def test_show_prints_json(protwin_here: Protwin) -> None:
    result = protwin_here("hardware", "show", "rtx-3090", "--json")
    assert Hardware.from_mapping(json.loads(result.stdout), origin="standard output") == machine("rtx-3090")


def test_set_changes_one_part(protwin_here: Protwin) -> None:
    result = protwin_here("hardware", "show", "rtx-3090", "--set", "device.memory_bytes=48GiB", "--json")
    assert result.returncode == 0, result.stderr
    changed = Hardware.from_mapping(json.loads(result.stdout), origin="standard output")
    assert changed.device.memory_bytes == 48 * GIB
    assert changed.host == machine("rtx-3090").host


# -- search ----------------------------------------------------------------------------------------------------------


def test_search_needs_no_torch(protwin: Protwin, workload: Path, without_torch: dict[str, str]) -> None:
    searched(protwin, "--model", workload, "--hardware", "rtx-3090", **without_torch)


@pytest.mark.slow
def test_the_same_question_gets_the_same_bytes(protwin: Protwin, workload: Path) -> None:
    ask = ("search", "--model", workload, "--hardware", "rtx-3090", "--device-budget", "700MiB")
    first, second = protwin(*ask), protwin(*ask, PYTHONHASHSEED="12345")
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert protwin(*ask, "--json").stdout == protwin(*ask, "--json", PYTHONHASHSEED="54321").stdout


def test_tables_answer_every_question(protwin_here: Protwin, workload: Path) -> None:
    result = protwin_here("search", "--model", workload, "--hardware", "rtx-3090", "--device-budget", "700MiB")
    knobs = ("chunk_bytes", "n_persist", "n_buffer", "prefetch_depth", "n_checkpoint")
    phases = ("forward", "backward", "optimizer", "iteration", "tokens per second")
    memory = ("device memory", "pinned host memory", "Alive at the device memory peak")
    lanes = ("compute", "host to device", "device to host", "CPU Adam", "bottleneck")
    for words in (*knobs, *phases, *memory, *lanes, "in the space", "Device budget 700 MiB"):
        assert words in result.stdout, words


def test_the_plan_that_is_written_is_safe_and_fits(protwin_here: Protwin, workload: Path, tmp_path: Path) -> None:
    budget_bytes = 700 * 2**20
    plan_path = tmp_path / "plan.json"
    result = searched(
        protwin_here, "--model", workload, "--hardware", "rtx-3090", "--device-budget", "700MiB", "--output", plan_path
    )
    plan = Plan.load(plan_path)
    assert plan == result.plan
    saved = Workload.load(workload)
    schedule = compile_schedule(plan, saved)
    layout = build_layout(saved.parameters, num_blocks=saved.num_blocks, chunk_bytes=plan.chunk_bytes)
    verify_schedule(schedule, plan, saved, layout)
    assert guaranteed_device_peak(schedule).size_bytes <= budget_bytes
    assert result.device_budget_bytes == budget_bytes


def test_a_smaller_budget_is_never_faster(protwin_here: Protwin, workload: Path) -> None:
    ask = ("--model", workload, "--hardware", "rtx-3090", "--device-budget")
    times_s = [searched(protwin_here, *ask, budget).prediction.iteration_s for budget in ("600MiB", "900MiB", "20GiB")]
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[0] > times_s[-1]


def test_a_smaller_device_is_a_smaller_budget(protwin_here: Protwin, workload: Path) -> None:
    usable_bytes = 700 * 2**20
    reserved_bytes = machine("rtx-3090").device.reserved_bytes
    changed = searched(
        protwin_here,
        *("--model", workload, "--hardware", "rtx-3090"),
        *("--set", f"device.memory_bytes={usable_bytes + reserved_bytes}"),
    )
    asked = searched(protwin_here, "--model", workload, "--hardware", "rtx-3090", "--device-budget", str(usable_bytes))
    assert changed.device_budget_bytes == usable_bytes
    assert changed.plan == asked.plan


@some_quick(
    ("option", "value", "field", "expected"),
    [
        ("--prefetch-depth", "2", "prefetch_depth", 2),
        ("--n-checkpoint", "8", "n_checkpoint", 8),
        ("--n-persist", "3", "n_persist", 3),
        ("--n-buffer", "4", "n_buffer", 4),
        ("--chunk-bytes", "16MiB", "chunk_bytes", 16 * 2**20),
    ],
    quick=2,
)
def test_a_knob_can_be_held(
    protwin_here: Protwin, workload: Path, option: str, value: str, field: str, expected: Any
) -> None:
    ask = ("--model", workload, "--hardware", "rtx-3090", "--device-budget", "700MiB")
    held = searched(protwin_here, *ask, option, value)
    assert getattr(held.plan, field) == expected
    assert held.certificate.num_candidates < searched(protwin_here, *ask).certificate.num_candidates


# -- simulate --------------------------------------------------------------------------------------------------------


def test_simulate_says_what_search_said(protwin_here: Protwin, workload: Path, tmp_path: Path) -> None:
    ask = ("--model", workload, "--hardware", "rtx-3090")
    paths = {name: tmp_path / f"{name}.json" for name in ("plan", "predicted", "timeline")}
    found = searched(protwin_here, *ask, "--device-budget", "700MiB", "--output", paths["plan"])
    result = protwin_here(
        "simulate", "--plan", paths["plan"], *ask, "--output", paths["predicted"], "--timeline", paths["timeline"]
    )
    assert result.returncode == 0, result.stderr
    # A search has budgets and a margin, and a simulation of its plan has neither.
    within = {"device_budget_bytes": None, "host_budget_bytes": None, "margin_frac": None}
    # The chance to run out of memory is one of a budget: here of 700 MiB, there of all that the device has.
    simulated, searched_for = Record.load(paths["predicted"]), found.prediction.asking(**within)
    assert simulated.chance_oom == 0
    assert searched_for.chance_oom is not None
    assert simulated == searched_for.model_copy(update={"chance_oom": 0})
    events = json.loads(paths["timeline"].read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {timing.name for timing in found.prediction.tasks}


@pytest.mark.parametrize("is_tight", [False, True])
def test_the_chance_to_run_out_of_memory_is_that_of_a_search(
    protwin_here: Protwin, workload: Path, tmp_path: Path, *, is_tight: bool
) -> None:
    """It is that of the budget, where one is named; the margin is no limit, for nobody runs out of memory in it."""
    path = tmp_path / "plan.json"
    ask = ["--model", workload, "--hardware", "rtx-3090", "--set", "device.memory_bytes=1.9GiB"]
    found = searched(protwin_here, *ask, "--margin", "20", "--output", path)
    if is_tight:
        ask += ["--device-budget", f"{found.prediction.guaranteed_peak_device_bytes}B"]
        found = searched(protwin_here, *ask, "--output", path)
    result = protwin_here("simulate", "--plan", path, *ask, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["chance_oom"] == found.prediction.chance_oom
    assert bool(found.prediction.chance_oom) == is_tight


def test_simulate_warns_of_a_plan_that_may_not_fit(protwin_here: Protwin, workload: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved = Workload.load(workload)
    Plan(workload_id=saved.identity, chunk_bytes=2**30, n_persist=100, n_buffer=1).save(path)
    ask = ("simulate", "--plan", path, "--model", workload, "--hardware", "rtx-3090", "--device-budget", "100MiB")
    too_many = protwin_here(*ask)
    assert too_many.returncode == 2
    Plan(workload_id=saved.identity, chunk_bytes=2**30, n_persist=2, n_buffer=1).save(path)
    fits_not = protwin_here(*ask, "--json")
    assert fits_not.returncode == 0, fits_not.stderr
    assert fits_not.stderr.startswith("warning: this plan may need ")
    Record.from_mapping(json.loads(fits_not.stdout), origin="standard output")


# -- models by configuration -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_configuration_is_traced_once(
    protwin: Protwin,
    protwin_here: Protwin,
    small_model: Path,
    without_torch: dict[str, str],
    environment: dict[str, str],
) -> None:
    """Nothing but the cache is shared with the processes that answer without torch."""
    ask = ("search", "--model", small_model, "--hardware", "rtx-3090", "--batch-size", "2", "--sequence-length", "32")
    first = protwin_here(*ask)
    assert first.returncode == 0, first.stderr
    (entry,) = (Path(environment["XDG_CACHE_HOME"]) / "protwin" / "workloads").iterdir()
    second = protwin(*ask, **without_torch)
    assert second.returncode == 0, second.stderr
    assert second.stdout == first.stdout
    assert "was imported" in protwin(*ask, "--no-cache", **without_torch).stderr
    entry.write_text(entry.read_text()[:-100])
    assert "was imported" in protwin(*ask, **without_torch).stderr, "a damaged entry is a miss"
    again = protwin_here(*ask)
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert protwin(*ask, **without_torch).returncode == 0


def test_what_if_takes_names_changes_or_nothing(protwin_here: Protwin, workload: Path) -> None:
    common = ("--model", workload, "--hardware", "rtx-3090", "--n-buffer", "4")
    named = searched(protwin_here, "--what-if", "pcie5-x16", *common, "--what-if=rtx-4090 host=epyc-96")
    assert [one.change for one in named.what_if] == ["pcie5-x16", "rtx-4090 host=epyc-96"]
    bare = searched(protwin_here, "--what-if", *common, "--what-if", "device.memory_bytes=48GiB", "--what-if")
    assert {"links twice as fast", "device.memory_bytes=48GiB"} < {one.change for one in bare.what_if}
    refused = protwin_here("search", *common, "--what-if", "pcie-5-x17")
    assert refused.returncode == 2
    assert "Did you mean pcie5-x16" in refused.stderr


def test_held_inputs_of_none_are_warned_of(protwin_here: Protwin, tmp_path: Path) -> None:
    """Hooks hold inputs of recomputed blocks with frozen parameters, behind the first."""
    whole = decoder()
    frozen = tuple(
        parameter.model_copy(update={"trainable": parameter.name.endswith("0")}) for parameter in whole.parameters
    )
    asked = ("--hardware", "h100-80gb-x8", "--ranks", "8", "--parallel", "sharded", "--as", "fsdp", "--reentrant")
    for part in (whole, whole.model_copy(update={"parameters": frozen})):
        for n_checkpoint in (0, 2, len(whole.blocks)):
            part.save(tmp_path / "part.json")
            plan = Plan(
                workload_id=part.identity, chunk_bytes=2**26, n_persist=0, n_buffer=4, n_checkpoint=n_checkpoint
            )
            plan.save(tmp_path / "plan.json")
            files = ("--plan", tmp_path / "plan.json", "--model", tmp_path / "part.json")
            found = [protwin_here("simulate", *files, *asked, "--json", *more) for more in ((), ("--holds-inputs",))]
            assert [one.returncode for one in found] == [0, 0], found[1].stderr
            peaks = [json.loads(one.stdout)["guaranteed_peak_device_bytes"] for one in found]
            is_held = part is not whole and n_checkpoint > 1
            assert peaks[1] >= peaks[0] if is_held else peaks[1] == peaks[0]
            assert ("--holds-inputs changes nothing" in found[1].stderr) != is_held


def test_cached_keys_of_none_are_warned_of(protwin_here: Protwin, tmp_path: Path) -> None:
    """Keys and values are alive beside recomputed blocks with a kernel of attention, and beside no others."""
    model = load_workload("qwen2.5-0.5b", batch_size=1, sequence_length=64)
    none = decoder()
    for workload, n_checkpoint, is_cached in ((model, 2, True), (model, 0, False), (none, 2, False)):
        workload.save(tmp_path / "workload.json")
        plan = Plan(
            workload_id=workload.identity, chunk_bytes=2**30, n_persist=1, n_buffer=2, n_checkpoint=n_checkpoint
        )
        plan.save(tmp_path / "plan.json")
        asked = ("--plan", tmp_path / "plan.json", "--model", tmp_path / "workload.json", "--hardware", "rtx-3090")
        found = protwin_here("simulate", *asked, "--caches-keys", "--json")
        assert found.returncode == 0, found.stderr
        assert ("--caches-keys changes nothing" in found.stderr) is not is_cached


def test_fsdp_casts_weights_wherever_they_are_used(protwin_here: Protwin, small_model: Path, tmp_path: Path) -> None:
    """Its weights are views, of which autocast keeps no casts: ``--as fsdp`` says so by itself."""
    size = ("--model", small_model, "--batch-size", "2", "--sequence-length", "32")
    casts = ("--autocast", "bfloat16", "--dtype", "float32")
    traced = protwin_here("trace", *size, *casts, "--output", tmp_path / "workload.json")
    assert traced.returncode == 0, traced.stderr
    identity = load_workload(tmp_path / "workload.json").identity
    plan = Plan(workload_id=identity, chunk_bytes=2**20, n_persist=0, n_buffer=4, n_checkpoint=2)
    plan.save(tmp_path / "plan.json")
    asked = ("simulate", "--plan", tmp_path / "plan.json", *size, *casts, "--hardware", "a100-80gb-x8", "--json")
    ranks = ("--parallel", "sharded", "--ranks", "2", "--as", "fsdp")
    of_file = ("simulate", "--plan", tmp_path / "plan.json", "--model", tmp_path / "workload.json", *asked[-3:])
    says_so, by_itself, kept = (
        protwin_here(*command, *ranks) for command in ((*asked, "--no-autocast-cache"), asked, of_file)
    )
    assert (by_itself.returncode, kept.returncode) == (0, 0), by_itself.stderr
    assert says_so.stdout == by_itself.stdout != kept.stdout
    refused = protwin_here("trace", *size, "--no-autocast-cache")
    assert refused.returncode == 2
    assert "--autocast is not: nothing is cast" in refused.stderr
