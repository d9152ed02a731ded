"""Commands that ask about several devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.shared.answers.search_result import SearchResult
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.schedule import Lane
from tests.cli.conftest import Protwin

SIMULATE = ("simulate", "--plan", "plan.json", "--model", "workload.json")


def simulated(protwin: Protwin, *arguments: str) -> Record:
    result = protwin(*SIMULATE, "--json", *arguments)
    assert result.returncode == 0, result.stderr
    return Record.from_mapping(json.loads(result.stdout), origin="standard output")


def test_a_mode_takes_all_devices_of_the_machine(protwin_here: Protwin, folder: Path) -> None:
    record = simulated(protwin_here, "--hardware", "a100-80gb-x8", "--parallel", "sharded")
    assert (record.plan.parallel, record.plan.num_ranks) == (ParallelMode.SHARDED, 8)
    alone = simulated(protwin_here, "--hardware", "a100-80gb-x8")
    assert record.num_tokens == 8 * alone.num_tokens
    assert record.lane(Lane.COLLECTIVE).num_tasks > 0
    assert [use.lane for use in alone.lanes] == [Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.CPU_OPTIM]


def test_devices_that_are_not_asked_about_are_named(protwin_here: Protwin, folder: Path) -> None:
    said = protwin_here(*SIMULATE, "--hardware", "a100-80gb-x8").stderr
    assert "a100-80gb-x8 has 8 devices and one is used" in said
    said = protwin_here(*SIMULATE, "--hardware", "a100-80gb-x8", "--parallel", "sharded", "--ranks", "4").stderr
    assert "8 devices and 4 are used" in said
    assert "devices" not in protwin_here(*SIMULATE, "--hardware", "a100-80gb-x8", "--parallel", "sharded").stderr


def test_tables_timeline_and_report_show_the_ranks(protwin_here: Protwin, folder: Path) -> None:
    asked = ("--hardware", "a100-80gb-x8", "--parallel", "sharded", "--set", "price_usd_per_hour=16")
    shown = protwin_here(*SIMULATE, *asked, "--timeline", "timeline.json", "--report", "report.html")
    assert shown.returncode == 0, shown.stderr
    for words in ("8 ranks", "tokens per second and device", "between ranks", "sharded", "US dollars a million tokens"):
        assert words in shown.stdout
    threads = [
        e["args"]["name"]
        for e in json.loads((folder / "timeline.json").read_text())["traceEvents"]
        if e["name"] == "thread_name"
    ]
    assert "collective" in threads
    page = (folder / "report.html").read_text()
    assert "between ranks" in page
    assert "all-gather" in page


def test_the_price_is_that_of_whole_machines(protwin_here: Protwin, folder: Path) -> None:
    asked = ("--hardware", "a100-80gb-x8", "--price", "a100-80gb-x8=16")
    assert simulated(protwin_here, *asked).price_usd_per_hour == 16
    assert simulated(protwin_here, *asked, "--parallel", "sharded").price_usd_per_hour == 16
    assert simulated(protwin_here, "--hardware", "a100-80gb-x8").price_usd_per_hour is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "8"), "8 ranks are asked for, but parallel is single"),
        (
            ("--ranks", "1", "--parallel", "ddp"),
            "2 ranks at least, and one is asked for. Write --ranks 2 or more",
        ),
        (("--parallel", "sharded", "--ranks", "9"), "9 ranks do not fit on a100-80gb-x8, which has 8 devices"),
        (
            ("--parallel", "sharded", "--ranks", "2", "--hardware", "rtx-4090"),
            "Use one rank, or a machine with more: rtx-4090-x8.",
        ),
        (("--parallel", "ddp"), "Set n_persist to"),
        (("--parallel", "fsdp"), "not one of"),
        (("--ranks", "0"), "--ranks"),
    ],
)
def test_what_does_not_go_together_is_refused(
    protwin_here: Protwin, folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    result = protwin_here(*SIMULATE, "--hardware", "a100-80gb-x8", *arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_a_plan_of_several_ranks_is_not_run_by_one(protwin_here: Protwin, folder: Path) -> None:
    plan = Plan.load(folder / "plan.json")
    plan.model_copy(update={"parallel": ParallelMode.SHARDED, "num_ranks": 2}).save(folder / "plan.json")
    result = protwin_here("run", "--plan", "plan.json", "--workload", "workload.json", "--model", "gpt2")
    assert result.returncode == 2
    assert "the plan is for 2 ranks, but 1 process was started" in result.stderr
    assert "--ranks 2" in result.stderr


# -- search ----------------------------------------------------------------------------------------------------------

SEARCH = ("search", "--model", "workload.json", "--hardware", "a100-80gb-x8")


def test_a_search_compares_the_modes_and_says_which(protwin_here: Protwin, folder: Path) -> None:
    found = protwin_here(*SEARCH, "--ranks", "8", "--device-budget", "1GiB", "--output", "found.json")
    assert found.returncode == 0, found.stderr
    for words in ("What 8 ranks do together", "ddp", "does not fit", "replicated", "◀ chosen", "8 ranks"):
        assert words in found.stdout
    plan = Plan.load(folder / "found.json")
    assert (plan.parallel, plan.num_ranks) == (ParallelMode.SHARDED, 8)
    simulated = protwin_here("simulate", "--plan", "found.json", *SEARCH[1:], "--json")
    record = Record.from_mapping(json.loads(simulated.stdout), origin="standard output")
    assert "No plan of the" in found.stdout
    assert record.plan == plan
    assert record.guaranteed_peak_device_bytes <= 2**30


def test_a_global_batch_is_shared_by_the_ranks(protwin_here: Protwin, folder: Path) -> None:
    found = protwin_here(*SEARCH, "--ranks", "4", "--global-batch", "16", "--what-if", "ranks=8", "--json")
    assert found.returncode == 0, found.stderr
    result = SearchResult.from_mapping(json.loads(found.stdout), origin="standard output")
    plan, sizes = result.plan, result.batch
    assert sizes is not None
    assert (sizes.global_batch_size, sizes.micro_batch_size, plan.micro_batches, plan.num_ranks) == (16, 2, 2, 4)
    assert [choice.micro_batch_size for choice in sizes.choices] == [2]
    (answer,) = result.what_if
    alone = protwin_here(*SEARCH, "--ranks", "8", "--global-batch", "16", "--json")
    expected = SearchResult.from_mapping(json.loads(alone.stdout), origin="standard output").prediction
    assert answer.iteration_s == expected.iteration_s
    assert answer.speedup == pytest.approx(result.prediction.iteration_s / expected.iteration_s)


def test_without_a_global_batch_more_ranks_train_on_more(protwin_here: Protwin, folder: Path) -> None:
    found = protwin_here(*SEARCH, "--ranks", "2", "--what-if", "ranks=8", "--json")
    assert found.returncode == 0, found.stderr
    result = SearchResult.from_mapping(json.loads(found.stdout), origin="standard output")
    (answer,) = result.what_if
    assert answer.iteration_s is not None
    assert answer.speedup == pytest.approx(4 * result.prediction.iteration_s / answer.iteration_s)


def test_a_mode_may_be_named(protwin_here: Protwin, folder: Path) -> None:
    found = protwin_here(*SEARCH, "--parallel", "replicated", "--json")
    assert found.returncode == 0, found.stderr
    result = SearchResult.from_mapping(json.loads(found.stdout), origin="standard output")
    assert (result.plan.parallel, result.plan.num_ranks) == (ParallelMode.REPLICATED, 8)
    assert [mode.parallel for mode in result.modes] == [ParallelMode.REPLICATED]


def test_shard_groups_may_be_named_and_the_answer_shows_each(protwin_here: Protwin, folder: Path) -> None:
    """Every number that makes equal groups on two nodes, the largest first."""
    nodes = ("--set", "network.num_nodes=2", "--ranks", "16", "--parallel", "sharded")
    found = protwin_here(*SEARCH, *nodes, "--shard-ranks", "all", "--json")
    assert found.returncode == 0, found.stderr
    result = SearchResult.from_mapping(json.loads(found.stdout), origin="standard output")
    assert [mode.shard_ranks for mode in result.modes] == [None, 8, 4, 2]
    assert sum(mode.has(result.plan) for mode in result.modes) == 1
    named = protwin_here(*SEARCH, *nodes, "--shard-ranks", "8")
    assert named.returncode == 0, named.stderr
    assert "sharded in groups of 8" in " ".join(named.stdout.split())
    assert "shard_ranks" in named.stdout


def test_a_simulated_plan_takes_groups(protwin_here: Protwin, folder: Path) -> None:
    nodes = ("--hardware", "a100-80gb-x8", "--set", "network.num_nodes=2", "--parallel", "sharded")
    record = simulated(protwin_here, *nodes, "--shard-ranks", "8")
    assert (record.plan.num_ranks, record.plan.shard_ranks) == (16, 8)
    assert simulated(protwin_here, *nodes, "--shard-ranks", "16").plan.shard_ranks is None
    refused = protwin_here(*SIMULATE, *nodes, "--shard-ranks", "6")
    assert (refused.returncode, "shard_ranks: 6 does not divide num_ranks 16" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--ranks", "1", "--parallel", "ddp"),
            "2 ranks at least, and one is asked for. Write --ranks 2 or more",
        ),
        (("--ranks", "8", "--parallel", "single"), "8 ranks are asked for, but parallel is single"),
        (("--ranks", "9"), "9 ranks do not fit"),
        (("--ranks", "8", "--global-batch", "20"), "Choose a global batch of 16 or 24, or 5 or 10 ranks"),
        (("--ranks", "8", "--global-batch", "8"), "which do not divide each rank's 1 of the global batch of 8"),
        (("--ranks", "8", "--what-if", "ranks=0"), "is no number of ranks"),
        (("--ranks", "8", "--what-if", "rtx-3090-x4"), "rtx-3090-x4 then has 4 devices"),
        (("--ranks", "8", "--shard-ranks", "3"), "shard_ranks: 3 does not divide num_ranks 8 into equal groups"),
        (("--ranks", "8", "--shard-ranks", "some"), "'some' is neither a number"),
        (("--ranks", "8", "--parallel", "ddp", "--shard-ranks", "4"), "shard_ranks: 4 with parallel ddp"),
        (("--ranks", "0"), "--ranks"),
        (("--ranks", str(2**40)), "--ranks"),
        (
            ("--ranks", "8", "--device-budget", "1MiB"),
            "on 8 ranks in modes ddp, replicated or sharded",
        ),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(
    protwin_here: Protwin, folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    result = protwin_here(*SEARCH, *arguments)
    assert result.returncode == 2
    assert words in result.stderr


def test_a_search_for_one_rank_names_the_devices_that_it_leaves_alone(protwin_here: Protwin, folder: Path) -> None:
    found = protwin_here(*SEARCH)
    assert found.returncode == 0
    assert "a100-80gb-x8 has 8 devices and one is used" in found.stderr


def test_chunks_are_sharded_over_the_devices_on_request(protwin_here: Protwin, folder: Path) -> None:
    asked = ("--hardware", "a100-80gb-x8", "--parallel", "sharded")
    offloaded, sharded = (simulated(protwin_here, *asked, *more) for more in ((), ("--n-shard", "1")))
    assert (offloaded.plan.n_shard, sharded.plan.n_shard) == (0, 1)
    assert sharded.lane(Lane.H2D).num_tasks < offloaded.lane(Lane.H2D).num_tasks
    assert sharded.num_cpu_adam_steps < offloaded.num_cpu_adam_steps


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--parallel", "ddp", "--n-shard", "1"), "n_shard is 1 but parallel is ddp"),
        (("--n-shard", "1"), "n_shard is 1 but parallel is single"),
        (("--parallel", "sharded", "--n-shard", "1000"), "Lower n_shard to"),
        (("--parallel", "sharded", "--n-shard", "-1"), "--n-shard"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_shards_that_cannot_be(protwin_here: Protwin, folder: Path, arguments: tuple[str, ...], said: str) -> None:
    refused = protwin_here(*SIMULATE, "--hardware", "a100-80gb-x8", *arguments)
    assert refused.returncode == 2
    assert said in " ".join(refused.stderr.replace("│", " ").split())
    assert "Traceback" not in refused.stderr


def test_a_search_lets_the_host_step_what_the_device_keeps_on_request(protwin_here: Protwin, folder: Path) -> None:
    asked = ("search", "--model", "workload.json", "--hardware", "a100-80gb-x8", "--json", "--n-host-stepped", "2")
    found = protwin_here(*asked, "--n-persist", "1")
    assert found.returncode == 0, found.stderr
    result = SearchResult.from_mapping(json.loads(found.stdout), origin="standard output")
    assert (result.plan.n_persist, result.plan.n_host_stepped) == (1, 2)
    refused = protwin_here(*asked, "--ranks", "8", "--parallel", "sharded")
    assert refused.returncode == 2
    assert "only hosts of one rank" in " ".join(refused.stderr.replace("│", " ").split())


def test_a_search_over_ranks_shards_over_the_devices_what_may_be(protwin_here: Protwin, folder: Path) -> None:
    asked = ("search", "--model", "workload.json", "--hardware", "a100-80gb-x8", "--ranks", "8", "--json")
    budget = ("--parallel", "sharded", "--device-budget", "700MiB")
    found = {}
    for n_shard in (None, "0"):
        result = protwin_here(*asked, *budget, *(() if n_shard is None else ("--n-shard", n_shard)))
        assert result.returncode == 0, result.stderr
        found[n_shard] = SearchResult.from_mapping(json.loads(result.stdout), origin="standard output")
    assert found[None].plan.n_shard > 0 == found["0"].plan.n_shard
    assert found[None].prediction.iteration_s < found["0"].prediction.iteration_s
    refused = protwin_here("search", "--model", "workload.json", "--hardware", "a100-80gb-x8", "--n-shard", "2")
    assert refused.returncode == 2
    assert "only ranks in mode sharded" in " ".join(refused.stderr.replace("│", " ").split())
