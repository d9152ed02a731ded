"""``protwin run`` on two ranks: a plain loop over the data of both, told once, refused once."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from protwin.runtime.commands import random_model
from protwin.runtime.commands.run_ranks import ALONE, RunRank, has_to_start, rank_at_hand, start_ranks
from protwin.runtime.devices import process_settings
from protwin.shared import ParallelMode, Plan, PlanError, ProtwinError, RanksError, Record, Workload, WorkloadError
from tests.cli.test_fine_tuning import RUN, learned, save_plans, saved, sequences_by_hand, trained_plainly
from tests.runtime.ranks.processes import Ranks, environment
from tests.runtime.resuming import same_bits
from tests.runtime.small_language import chats, make_folder, write_rows

VARIABLES = {"COLUMNS": "120", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "PYTORCH_CUDA_ALLOC_CONF": ""}
TUNING = (*RUN, "--data=chats.jsonl", "--schedule=cosine", "--warmup-steps=2", "--steps=4")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, data, and a plan of two ranks with one micro-batch each."""
    folder = tmp_path_factory.mktemp("made")
    make_folder(folder / "base")
    write_rows(folder / "chats.jsonl", chats(12))
    write_rows(folder / "held.jsonl", chats(7))
    save_plans(folder)
    of_ranks = {"micro_batches": 1, "parallel": ParallelMode.REPLICATED, "num_ranks": 2}
    Plan.load(folder / "plan.json").model_copy(update=of_ranks).save(folder / "plan.json")
    return folder


@pytest.fixture
def job(made: Path, tmp_path: Path) -> Path:
    """A copy of them, to run in."""
    return Path(shutil.copytree(made, tmp_path / "job"))


def protwin_on(rank: int, folder: Path, *arguments: str) -> tuple[int, str, str]:
    """The command on every rank, as torchrun starts it; gives exit code, output and errors."""
    from protwin.shared.cli.main import main

    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    with (
        environment(**VARIABLES),
        patch.object(sys, "argv", ["protwin", *arguments]),
        redirect_stdout(streams[0]),
        redirect_stderr(streams[1]),
    ):
        os.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            main()
    torch.set_num_threads(1)
    output, errors = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
    return int(ended.value.code or 0), output, errors


def test_two_ranks_train_as_a_plain_loop_over_the_data_of_both(two_ranks: Ranks, job: Path) -> None:
    """Bit for bit: with two ranks the scales are powers of two."""
    evaluated = ("--evaluation=held.jsonl", "--evaluate-every=2", "--save=tuned")
    (code, told, errors), other = two_ranks.run(protwin_on, job, *TUNING, *evaluated)
    assert (code, errors) == (0, "")
    assert other == (0, "", ""), "the other rank speaks"
    plain, tuned = trained_plainly(job / "base", chats(12), steps=4), saved(job / "tuned")
    assert same_bits(dict(plain.state_dict()), dict(tuned.state_dict()))
    batches = sequences_by_hand(job / "base", chats(7), [list(range(7))])
    assert len(batches) % 4 in (1, 2), "no batch is left over for one rank alone"
    with torch.no_grad():
        losses = [plain.eval()(**batch).loss.item() * learned(batch) for batch in batches]
    expected = sum(losses) / sum(map(learned, batches))
    assert f"step 4: evaluation loss {expected:.4f}" in told


def test_two_ranks_go_on_from_their_checkpoint(two_ranks: Ranks, job: Path) -> None:
    """After a restart by torchrun too, which finds what the launch has saved; not what another one has."""
    saving = (*TUNING, "--checkpoint=saved", "--checkpoint-every=1", "--save=tuned")
    two_ranks.run(protwin_on, job, *saving[:-1], "--steps=2")
    for arguments, restarts, code in (
        (("--steps=3",), "0", 2),
        (("--resume", "--steps=3", "--seed=7"), "0", 2),
        (("--resume", "--steps=3"), "0", 0),
        (("--steps=4", "--save=tuned"), "1", 0),
    ):
        found = two_ranks.run(protwin_restarted, job, restarts, *saving[:-1], *arguments)
        assert [one[0] for one in found] == [code, code], found
    plain, tuned = trained_plainly(job / "base", chats(12), steps=4), saved(job / "tuned")
    assert same_bits(dict(plain.state_dict()), dict(tuned.state_dict()))


def protwin_restarted(rank: int, folder: Path, restarts: str, *arguments: str) -> tuple[int, str, str]:
    with environment(TORCHELASTIC_RESTART_COUNT=restarts):
        return protwin_on(rank, folder, *arguments)


def test_the_record_counts_the_data_of_all_ranks(two_ranks: Ranks, job: Path) -> None:
    told = ("--steps=6", "--json", "--timeline=timeline.json")
    (code, output, errors), other = two_ranks.run(protwin_on, job, *TUNING, *told)
    assert (code, errors) == (0, "")
    assert other == (0, "", "")
    record = Record.from_mapping(json.loads(output), origin="standard output")
    workload = Workload.load(job / "workload.json")
    assert (record.num_samples, record.num_tokens) == (2 * workload.num_samples, 2 * workload.num_tokens)
    assert record.plan.num_ranks == 2
    assert [one.rank for one in record.ranks] == [0, 1]
    events = json.loads((job / "timeline.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [f"measured, rank {rank}: {record.model_name}" for rank in (0, 1)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--save=base",), "error: base is not empty. "),
        (("--checkpoint=base",), "error: base holds something already. Pass --resume to go on from it, or "),
        (("--checkpoint=saved", "--resume"), "error: saved holds no checkpoint. Leave out --resume to begin at "),
        (("--ranks=3",), "error: --ranks is 3, but the plan is for 2 ranks (replicated). Pass --ranks 2, or "),
        (("--plan=eight.json",), "error: the plan is for 8 ranks, but 2 processes were started (WORLD_SIZE = 2). "),
        (("--plan=one.json",), "error: the plan is for one rank, but 2 processes were started together (WORLD_SIZE"),
        (("--device-budget=1KiB",), "error: the plan's device memory may reach "),
        (("--data=none.jsonl",), "error: none.jsonl"),
    ],
)
def test_a_mistake_is_told_once(two_ranks: Ranks, job: Path, arguments: tuple[str, ...], told: str) -> None:
    plan = Plan.load(job / "plan.json")
    plan.model_copy(update={"num_ranks": 8}).save(job / "eight.json")
    plan.model_copy(update={"num_ranks": 1, "parallel": ParallelMode.SINGLE}).save(job / "one.json")
    found = two_ranks.run(protwin_on, job, *TUNING, *arguments)
    assert [code for code, _, _ in found] == [2, 2]
    assert "".join(output for _, output, _ in found) == ""
    (line,) = "".join(errors for _, _, errors in found).splitlines()
    assert line.startswith(told)
    assert not (job / "saved").exists()


def protwin_with(rank: int, folder: Path, of_ranks: tuple[tuple[str, ...], ...]) -> tuple[int, str, str]:
    return protwin_on(rank, folder, *TUNING, *of_ranks[rank])


def test_ranks_with_different_plans_are_refused_once(two_ranks: Ranks, job: Path) -> None:
    plan = Plan.load(job / "plan.json")
    plan.model_copy(update={"n_buffer": plan.n_buffer + 1}).save(job / "other.json")
    found = two_ranks.run(protwin_with, job, ((), ("--plan=other.json",)))
    assert [code for code, _, _ in found] == [2, 2]
    (line,) = "".join(errors for _, _, errors in found).splitlines()
    assert line.startswith(f"error: ranks differ in the plan's n_buffer: {plan.n_buffer} on rank 0; ")


@pytest.mark.slow
def test_the_command_starts_its_ranks(job: Path) -> None:
    script = Path(sys.executable).with_name("protwin")
    trained = subprocess.run(
        [script, *TUNING, "--ranks=2", "--save=tuned"],
        cwd=job,
        env=os.environ | VARIABLES,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (trained.returncode, trained.stderr) == (0, "")
    assert trained.stdout.splitlines()[-1] == "saved in tuned"
    assert trained.stdout.count("loss ") == 1
    plain, tuned = trained_plainly(job / "base", chats(12), steps=4), saved(job / "tuned")
    assert same_bits(dict(plain.state_dict()), dict(tuned.state_dict()))


@pytest.mark.slow
def test_what_a_started_rank_refuses_ends_the_command_with_its_message_and_code(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun adds nothing to it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert start_ranks(2, ["run", "--plan=none.json", "--model=gpt2"]) == 2
    output, errors = capfd.readouterr()
    assert output == ""
    (line,) = errors.splitlines()
    assert line.startswith("error: none.json")


LAUNCH = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_a_rank_knows_with_how_many_it_shares_the_machine() -> None:
    assert rank_at_hand({}) == ALONE
    assert rank_at_hand(LAUNCH) == RunRank(1, 4, 4, 1)
    assert rank_at_hand({**LAUNCH, "LOCAL_WORLD_SIZE": "2"}) == RunRank(1, 4, 2, 1)
    with pytest.raises(RanksError, match="MASTER_PORT is not set"):
        rank_at_hand({**LAUNCH, "MASTER_PORT": ""})


def test_ranks_are_started_where_a_plan_has_several_and_nobody_has_started_them() -> None:
    one = Plan(workload_id="any", chunk_bytes=1, n_persist=1, n_buffer=0)
    four = one.model_copy(update={"num_ranks": 4, "parallel": ParallelMode.DDP})
    assert has_to_start(four, 4, {})
    assert not has_to_start(one, None, {})
    assert not has_to_start(one, 1, {})
    assert not has_to_start(four, None, LAUNCH)
    assert not has_to_start(four, 4, LAUNCH)
    for plan, asked, variables, told in (
        (four, None, {}, r"for 4 ranks, but 1 process was started \(no --ranks is given\)"),
        (four, 1, {}, "--ranks is 1, but the plan is for 4 ranks .* search a plan without --ranks"),
        (one, 4, {}, "--ranks is 4, but the plan is for one rank. Leave it out"),
        (one, 4, LAUNCH, "--ranks is 4, but the plan is for one rank"),
    ):
        with pytest.raises(ProtwinError, match=told):
            has_to_start(plan, asked, variables)
    with pytest.raises(PlanError, match=r"for one rank, but 4 processes were started together \(WORLD_SIZE = 4\)"):
        has_to_start(one, None, LAUNCH)


@pytest.mark.parametrize(("num_processes", "num_threads"), [(1, 7), (2, 3), (3, 1), (8, 1), (16, 1)])
def test_ranks_share_the_cores_of_a_machine(
    monkeypatch: pytest.MonkeyPatch, num_processes: int, num_threads: int
) -> None:
    """Eight of them, one per process for its lanes."""
    monkeypatch.setattr(process_settings, "num_cores", lambda: 8)
    before = torch.get_num_threads()
    try:
        assert process_settings.leave_a_core_for_lanes(num_processes) == num_threads == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def test_ranks_share_the_memory_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 weight with its gradient on the way, and two moments: 16 bytes."""
    model = torch.nn.Linear(1000, 1, bias=False)
    monkeypatch.setattr(random_model, "host_memory_bytes", lambda: 2 * 16_100)
    random_model.check_host_memory(model, "linear", "Buy more.", num_processes=2)
    with pytest.raises(WorkloadError, match=r"linear with its optimizer state in each of 3 processes needs .*Buy"):
        random_model.check_host_memory(model, "linear", "Buy more.", num_processes=3)
