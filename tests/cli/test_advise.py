"""``protwin advise``: Ctrl-C and death with processes at work, going on afterwards, its report, and bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from protwin.shared.answers.advice import Advice, AdviceState
from protwin.shared.catalogue.list_prices import list_price
from protwin.shared.catalogue.machines import hardware_to_toml, machine
from tests.cli.conftest import Protwin
from tests.cli.saved import decoder
from tests.interrupting import wait_until_asleep
from tests.proof_size import some_quick
from tests.shared.report_pages import check_self_contained, parse
from tests.sim.slow_search import FOLDER, QUICK, SLOW_S

DEADLINE_S = 300.0
MACHINES = ("rtx-3090", QUICK, "rtx-5090")
COMMAND = """
import protwin.sim.commands.advise as commands
from protwin.shared.cli.main import main
from tests.sim.slow_search import search_one

commands.search_machine = search_one
if {begin!r}:
    import protwin.sim.questions.processes
    import tests.sim.slow_search

    protwin.sim.questions.processes.end_with_parent = getattr(tests.sim.slow_search, {begin!r})
main()
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(work: Path, environment: dict[str, str], tmp_path: Path) -> Start:
    """Starts the command with made-up searches, in a process group of its own, as a terminal would."""
    decoder().save(work / "workload.json")
    (tmp_path / "searches").mkdir()

    def run(*arguments: str, slow_s: float = 600.0, begin: str = "") -> subprocess.Popen[str]:
        asked = ("--model=workload.json", "--global-batch=8", *(f"--hardware={name}" for name in MACHINES))
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND.format(begin=begin), "advise", *asked, *arguments],
            cwd=work,
            env=environment
            | {FOLDER: str(tmp_path / "searches"), SLOW_S: str(slow_s), "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return run


def searches(tmp_path: Path) -> dict[str, int]:
    """The process that searched each machine so far."""
    named = (path.name.rpartition(".") for path in (tmp_path / "searches").iterdir())
    return {name: int(process) for name, _, process in named}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def press_ctrl_c(process: subprocess.Popen[str]) -> None:
    """As a terminal does it: every process of the group gets it, once the command waits for its searches."""
    wait_until_asleep(process.pid)
    os.killpg(process.pid, signal.SIGINT)


def is_alive(process: int) -> bool:
    """Whether the process runs; one that has ended and that nobody has asked about does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_at_work(tmp_path: Path, state: Path) -> bool:
    """Whether the quick machine is answered and the others are being searched."""
    return len(searches(tmp_path)) == len(MACHINES) and state.exists() and bool(AdviceState.load(state).answers)


@pytest.mark.slow
def test_ctrl_c_while_processes_begin_is_one_word(start: Start, work: Path, tmp_path: Path) -> None:
    """As soon as one is at work the others are still importing, most likely."""
    process = start("--processes=3")
    wait_for(lambda: bool(searches(tmp_path)))
    press_ctrl_c(process)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert errors == "interrupted\n"
    wait_for(lambda: not any(map(is_alive, searches(tmp_path).values())))


@some_quick("as_json", [False, True], quick=1)
def test_ctrl_c_shows_the_ranking_so_far_and_leaves_no_process(
    start: Start, work: Path, tmp_path: Path, as_json: bool
) -> None:
    state = work / "state.json"
    output = ("--output=advice.json", "--report=advice.html")
    process = start("--state=state.json", "--processes=3", *output, *(("--json",) if as_json else ()))
    wait_for(lambda: all_at_work(tmp_path, state))
    workers = searches(tmp_path).values()
    assert all(map(is_alive, workers))
    press_ctrl_c(process)
    shown, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    files = "advice.json and advice.html"
    assert errors == f"interrupted: the ranking so far, which is not complete, is in {files}\n"
    wait_for(lambda: not any(map(is_alive, workers)))
    assert Advice.load(work / "advice.json").unanswered == ("rtx-3090", "rtx-5090")
    page = (work / "advice.html").read_text(encoding="utf-8")
    assert "it is not complete: 1 of 3 machines. Not searched: rtx-3090, rtx-5090." in " ".join(page.split())
    if as_json:
        found = Advice.from_mapping(json.loads(shown), origin="standard output")
        assert [one.hardware_name for one in found.machines] == [QUICK]
        assert found.unanswered == ("rtx-3090", "rtx-5090")
    else:
        words = " ".join(shown.split())
        assert "it is not complete: 1 of 3 machines. Not searched: rtx-3090, rtx-5090." in words


def test_what_a_killed_sweep_found_is_kept_and_its_processes_follow_it(
    start: Start, work: Path, tmp_path: Path
) -> None:
    state = work / "state.json"
    process = start("--state=state.json", "--processes=3")
    wait_for(lambda: all_at_work(tmp_path, state))
    first = searches(tmp_path)
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    wait_for(lambda: not any(map(is_alive, first.values())))
    again = start("--state=state.json", "--processes=2", "--json", slow_s=0.0)
    shown, errors = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 0, errors
    found = Advice.from_mapping(json.loads(shown), origin="standard output")
    assert {one.hardware_name for one in found.machines} == set(MACHINES)
    assert found.is_complete
    asked = [path.name.rpartition(".")[0] for path in (tmp_path / "searches").iterdir()]
    assert sorted(asked) == sorted([*MACHINES, "rtx-3090", "rtx-5090"]), "the quick one is not asked about again"


@pytest.mark.slow
def test_processes_that_do_not_follow_would_stay(start: Start, work: Path, tmp_path: Path) -> None:
    """The wrong variant: processes that only ignore Ctrl-C wait for ever for a parent that is dead."""
    process = start("--state=state.json", "--processes=3", slow_s=1.0, begin="deaf")
    wait_for(lambda: len(searches(tmp_path)) == len(MACHINES))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait(timeout=DEADLINE_S)  # not until nobody can write to its output: they still could
    time.sleep(2.0)
    left = [one for one in searches(tmp_path).values() if is_alive(one)]
    for one in children:
        with suppress(ProcessLookupError):
            os.kill(int(one), signal.SIGKILL)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    assert left


def test_a_process_that_is_ended_from_outside_is_told(start: Start, work: Path, tmp_path: Path) -> None:
    process = start("--state=state.json", "--processes=3")
    wait_for(lambda: all_at_work(tmp_path, work / "state.json"))
    os.kill(searches(tmp_path)["rtx-3090"], signal.SIGKILL)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert "3 processes that search ended by itself" in errors
    assert "Traceback" not in errors


def test_the_report_has_every_machine(protwin_here: Protwin, work: Path) -> None:
    decoder().save(work / "workload.json")
    for name, price in (("rtx-3090", 0.25), ("rtx-4090", 0.5)):
        priced = machine(name).model_copy(update={"price_usd_per_hour": price})
        (work / f"{name}.toml").write_text(hardware_to_toml(priced))
    given = ("--hardware", "rtx-3090.toml", "--hardware", "rtx-4090.toml", "--hardware", "a10", "--processes", "1")
    asked = ("--model", "workload.json", "--global-batch", "8", "--report", "advice.html")
    result = protwin_here("advise", *asked, *given)
    assert result.returncode == 0, result.stderr
    page = (work / "advice.html").read_text()
    check_self_contained(parse(page))
    for words in ("rtx-3090", "rtx-4090", "a10", 'id="figure-ranking"', 'id="figure-cost"', "3 of 3"):
        assert words in page
    listed = list_price(machine("a10"))
    assert listed is not None
    for text in (page, result.stdout):
        assert "Prices, as they were listed" in text
        assert str(listed.stated) in text
        assert listed.provider in text
        assert "Akash" not in text, "machines that state a price of their own are asked about"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "no-such-model", "--global-batch", "8", "--sequence-length", "64"), "no-such-model"),
        (("--model", "gpt2", "--global-batch", "8"), "fixes no batch"),
        (("--model", "gpt2", "--global-batch", "8", "--sequence-length", "64", "--dtype", "int8"), "cannot be trained"),
        (("--model", "gpt2", "--global-batch", "0", "--sequence-length", "64"), "--global-batch"),
        (("--model", "gpt2", "--global-batch", "8", "--sequence-length", "64", "--hardware", "rtx-1"), "rtx-1"),
        (("--model", "workload.json", "--global-batch", "7"), "do not divide the global batch of 7"),
        (("--model", "workload.json", "--global-batch", "8", "--sequence-length", "7"), "--sequence-length"),
        (
            ("--model", "workload.json", "--global-batch", "8", "--hardware", "rtx-3090", "--hardware", "other.toml"),
            "called rtx-3090 too",
        ),
        (("--model", "workload.json", "--global-batch", "8", "--state", "workload.json"), "--state"),
        (
            ("--model", "workload.json", "--global-batch", "8", "--hardware", "other.toml", "--output", "other.toml"),
            "other.toml",
        ),
        (("--model", "workload.json", "--global-batch", "8", "--report", "advice.json"), "HTML"),
        (("--model", "workload.json", "--global-batch", "8", "--max-gradient-norm", "-1"), "norm"),
        (("--model", "workload.json", "--global-batch", "8", "--ranks", "3"), "6 or 9, or 2 or 4 ranks"),
        (("--model", "workload.json", "--global-batch", "8", "--ranks", "4", "--hardware", "a10"), "no machine that"),
        (("--model", "workload.json", "--global-batch", "8", "--ranks", "0"), "--ranks"),
        (("--model", "workload.json", "--global-batch", "8", "--longest"), "have one length"),
        (("--model", "vit-huge", "--global-batch", "8", "--longest"), "without tokens"),
        (("--model", "gpt2", "--global-batch", "8", "--longest", "--sequence-length", "64"), "--sequence-length 64"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    protwin_here: Protwin, work: Path, arguments: tuple[str, ...], words: str
) -> None:
    decoder().save(work / "workload.json")
    other = machine("rtx-3090").model_copy(update={"price_usd_per_hour": 1.0})
    (work / "other.toml").write_text(hardware_to_toml(other))
    before = {path: path.read_bytes() for path in work.iterdir()}
    result = protwin_here("advise", "--processes", "1", *arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert {path: path.read_bytes() for path in work.iterdir()} == before


def test_numbers_of_devices_may_be_named(protwin_here: Protwin, work: Path) -> None:
    decoder().save(work / "workload.json")
    asked = ("--model", "workload.json", "--global-batch", "16", "--hardware", "a100-80gb-x8", "--hardware", "a10")
    result = protwin_here("advise", *asked, "--ranks", "2", "--ranks", "8", "--processes", "1", "--json")
    assert result.returncode == 0, result.stderr
    assert "a10 has fewer devices than --ranks names" in result.stderr
    found = Advice.from_mapping(json.loads(result.stdout), origin="standard output")
    assert found.ranks == (2, 8)
    assert {one.hardware_name for one in found.list_prices} == {"a100-80gb-x8", "a10"}
    assert all(one.stated and one.source for one in found.list_prices)
    rents = {one.hardware_name: one.usd_per_hour for one in found.list_prices}
    assert all(one.price_usd_per_hour == rents[one.hardware_name] for one in found.machines)
    assert {(one.hardware_name, one.num_ranks) for one in found.machines} == {("a100-80gb-x8", 2), ("a100-80gb-x8", 8)}
    assert all(one.plan is not None and one.plan.num_ranks == one.num_ranks for one in found.machines)
