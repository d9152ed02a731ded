"""Ctrl-C in the middle of the work of every command: exit code 130, one word, no thread, and no file.

Only a search, which has a plan from early on, writes it and says that nothing is proven about it.

The signal is a real one.  It is sent while the command reports its progress, or a moment later, from a thread and until
it has been taken ([Note: Signals that nobody hears]), so that it strikes within the work whatever the speed of the
machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from protwin.shared.catalogue.machines import machine
from protwin.shared.schema.plan import Plan
from tests.cli.saved import decoder
from tests.proof_size import some_quick

WATCHDOG_S = 600
"""No command takes so long to end, on any machine that runs these tests."""
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
SHAPE = ("--batch-size=2", "--sequence-length=16")
BLOCK_BYTES = 4 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)

INTERRUPTED = """
    import os, signal, sys, threading, time
    from contextlib import contextmanager

    import {module} as commands
    from protwin.shared.cli.main import main

    striking, taken = [], []

    def take(number, frame):
        taken.append(number)
        raise KeyboardInterrupt

    def strike():
        time.sleep({delay_s})
        while not taken:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    @contextmanager
    def interrupting(description):
        def report(done, total):
            if done >= {after} and not striking:
                striking.append(threading.Thread(target=strike))
                striking[0].start()
                if {delay_s} == 0:
                    time.sleep(3600)
        if {after} < 0:
            report(0, 0)
        yield report

    assert callable(commands.progress_bar)
    commands.progress_bar = interrupting
    signal.signal(signal.SIGINT, take)
    try:
        main()
    finally:
        striking[0].join()
        left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        if left:
            print("threads left:", left, file=sys.stderr)
"""
"""The command of this process, interrupted after so much progress (below 0: before any) and so many seconds."""


def interrupted(
    folder: Path,
    environment: dict[str, str],
    arguments: tuple[str, ...],
    *,
    module: str,
    after: float = 0,
    delay_s: float = 0.0,
) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(INTERRUPTED.format(module=module, after=after, delay_s=delay_s))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=False,
    )


def assert_nothing_is_left(result: subprocess.CompletedProcess[str], folder: Path, before: set[Path]) -> None:
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")
    assert files_below(folder) == before


def files_below(folder: Path) -> set[Path]:
    """Files of the folder that the command ran in, and of the cache beside it."""
    return {path for path in folder.parent.rglob("*") if path.is_file()}


SEARCH = ("search", "--model=workload.json", "--hardware=rtx-3090", "--output=found.json")


def test_before_a_search_has_found_anything(work: Path, environment: dict[str, str]) -> None:
    decoder().save(work / "workload.json")
    before = files_below(work)
    result = interrupted(work, environment, SEARCH, module="protwin.sim.commands.search", after=-1)
    assert_nothing_is_left(result, work, before)


@some_quick("as_json", [False, True], quick=1)
def test_in_the_middle_of_a_search(work: Path, environment: dict[str, str], as_json: bool) -> None:
    """The best plan so far is shown and written, and says that it is not certified wherever it stands."""
    decoder().save(work / "workload.json")
    before = files_below(work)
    arguments = (*SEARCH, "--report=search.html", *(("--json",) if as_json else ()))
    result = interrupted(work, environment, arguments, module="protwin.sim.commands.search")
    told = "interrupted: the best plan so far, which is not certified, is in found.json and search.html\n"
    assert (result.returncode, result.stderr) == (130, told)
    assert files_below(work) == before | {work / "found.json", work / "search.html"}
    plan = Plan.load(work / "found.json")
    assert plan.note is not None
    assert plan.note.startswith("Not certified: Ctrl-C ended the search when ")
    assert "it is not certified" in (work / "search.html").read_text(encoding="utf-8")
    simulate = ("simulate", "--plan=found.json", *SEARCH[1:3])
    simulated = subprocess.run(
        [sys.executable, "-c", "from protwin.shared.cli.main import main; main()", *simulate],
        **{"cwd": work, "env": environment, "timeout": WATCHDOG_S},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"warning: found.json: {plan.note}" in simulated.stderr
    if as_json:
        certificate = json.loads(result.stdout)["certificate"]
        assert certificate["is_interrupted"]
        assert certificate["num_simulated"] > 0
    else:
        assert "interrupted: this is the best plan so far, and it is not certified" in " ".join(result.stdout.split())


def test_after_a_search_while_questions_are_answered(work: Path, environment: dict[str, str]) -> None:
    """The plan is certified by then, and is written without a note."""
    decoder().save(work / "workload.json")
    code = """
        import os, signal
        import protwin.sim.questions.what_if as questions
        from protwin.shared.cli.main import main

        def interrupting(*_, **__):
            os.kill(os.getpid(), signal.SIGINT)

        questions.what_if = interrupting
        main()
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *SEARCH, "--what-if", "rtx-4090"],
        **{"cwd": work, "env": environment, "timeout": WATCHDOG_S},
        capture_output=True,
        text=True,
        check=False,
    )
    told = "interrupted: the plan, which is certified, is in found.json\n"
    assert (result.returncode, result.stderr) == (130, told)
    assert Plan.load(work / "found.json").note is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("shared.workloads.source", ("search", "--hardware=rtx-3090", "--output=plan.json")),
        ("runtime.commands.trace", ("trace", "--real", "--output=workload.json")),
    ],
    ids=["search", "trace --real"],
)
def test_in_the_middle_of_a_trace(
    module: str, arguments: tuple[str, ...], work: Path, environment: dict[str, str]
) -> None:
    """Nor is half a trace cached."""
    (work / "config.json").write_text(json.dumps(MODEL))
    before = files_below(work)
    command = (*arguments, "--model=config.json", *SHAPE)
    assert_nothing_is_left(interrupted(work, environment, command, module=f"protwin.{module}", after=1), work, before)


@pytest.mark.slow
@pytest.mark.parametrize("link", [(), ("--host-to-device=1B/s",)], ids=["at work", "waiting for a link"])
def test_in_the_middle_of_a_run(link: tuple[str, ...], work: Path, environment: dict[str, str]) -> None:
    """Lanes are threads: they end too, even one that a slow link would keep for hours."""
    from protwin.runtime import workload_of_configuration

    (work / "config.json").write_text(json.dumps(MODEL))
    workload = workload_of_configuration(MODEL, name="work", batch_size=2, sequence_length=16)
    workload.save(work / "workload.json")
    Plan(workload_id=workload.identity, chunk_bytes=BLOCK_BYTES, n_persist=1, n_buffer=3).save(work / "plan.json")
    before = files_below(work)
    command = (
        *("run", "--plan=plan.json", "--workload=workload.json", "--model=config.json", "--steps=1000000"),
        *("--output=measured.json", "--timeline=timeline.json", *link),
    )
    after, delay_s = (-1, 2.0) if link else (2, 0.2)
    result = interrupted(
        work, environment, command, module="protwin.runtime.commands.run_training", after=after, delay_s=delay_s
    )
    assert_nothing_is_left(result, work, before)


@pytest.mark.slow
def test_in_the_middle_of_a_calibration(work: Path, environment: dict[str, str]) -> None:
    from protwin.runtime.devices.machine import machine_name

    (work / "config.json").write_text(json.dumps(MODEL))
    machine("rtx-3090").model_copy(update={"name": machine_name()}).save(work / "machine.json")
    before = files_below(work)
    command = (
        *("calibrate", "--model=config.json", *SHAPE, "--hardware=machine.json", "--steps=100000"),
        *("--workload-output=workload.json", "--output=calibration.json"),
    )
    result = interrupted(work, environment, command, module="protwin.calibration.commands.calibrate", delay_s=1.0)
    assert_nothing_is_left(result, work, before)


@pytest.mark.slow
def test_in_the_middle_of_a_probe(work: Path, environment: dict[str, str]) -> None:
    before = files_below(work)
    command = ("hardware", "probe", "--seconds=90", "--output=machine.toml")
    # 18 parts share the seconds, so it strikes within the second of them.
    result = interrupted(work, environment, command, module="protwin.sim.commands.hardware", after=0, delay_s=1.0)
    assert_nothing_is_left(result, work, before)
