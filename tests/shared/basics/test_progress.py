"""The progress bar: on a terminal, on standard error, and only for work that takes a while."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import textwrap

import pytest

WORK = """
import time
from protwin.shared.basics import progress
progress.PATIENCE_S = {patience_s}
with progress.progress_bar("measuring") as on_progress:
    for done in range(1, 6):
        on_progress(done, 5)
        time.sleep(0.05)
print("done")
"""


def errors_on_a_terminal(code: str) -> str:
    """What ``code`` writes to a terminal as standard error."""
    ours, theirs = pty.openpty()
    try:
        result = subprocess.run(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=theirs,
            timeout=600,
            check=True,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80"},
        )
        assert result.stdout == b"done\n"
        os.write(theirs, b"end")
        shown = b""
        while not shown.endswith(b"end"):  # a terminal may hand over less at once
            shown += os.read(ours, 100_000)
        return shown.decode()
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.skipif(not hasattr(pty, "openpty"), reason="needs a pseudo-terminal")
def test_long_work_shows_a_bar() -> None:
    shown = errors_on_a_terminal(WORK.format(patience_s=0))
    assert "measuring" in shown
    assert "100%" in shown
    assert shown.removesuffix("end").endswith("\r\033[K"), "the bar goes when the work ends"


@pytest.mark.skipif(not hasattr(pty, "openpty"), reason="needs a pseudo-terminal")
def test_interrupted_work_leaves_no_bar() -> None:
    """Ctrl-C, which then is told on a line of its own."""
    interrupted = WORK.replace("        time.sleep(0.05)", "        if done == 3: raise KeyboardInterrupt")
    code = "try:\n" + textwrap.indent(interrupted.format(patience_s=0).replace('print("done")\n', ""), "    ")
    shown = errors_on_a_terminal(code + 'except KeyboardInterrupt:\n    print("done")\n')
    assert " 60%" in shown
    assert "80%" not in shown
    assert shown.removesuffix("end").endswith("\r\033[K")


@pytest.mark.skipif(not hasattr(pty, "openpty"), reason="needs a pseudo-terminal")
@pytest.mark.parametrize("number", [0, 1])
def test_work_that_tells_nothing_shows_that_it_goes_on(number: int) -> None:
    """As long as imports take; the bar goes all the same, and what is told is what is shown from then on."""
    silent = WORK.replace("    for done", "    time.sleep(1)\n    for done").replace("range(1, 6)", f"range({number})")
    shown = errors_on_a_terminal(silent.format(patience_s=0))
    assert shown.count("  0% 0:00") >= 1
    assert shown.removesuffix("end").endswith("\r\033[K")


@pytest.mark.skipif(not hasattr(pty, "openpty"), reason="needs a pseudo-terminal")
def test_of_bars_within_each_other_the_inner_one_speaks() -> None:
    silent = WORK.replace("    for done", "    time.sleep(1)\n    for done")
    outer = 'from protwin.shared.basics.progress import progress_bar\nwith progress_bar("outer"):\n'
    shown = errors_on_a_terminal(outer + textwrap.indent(silent.format(patience_s=0), "    "))
    assert "measuring" in shown
    assert "outer" not in shown.split("measuring", 1)[1].split("100%")[0]


@pytest.mark.skipif(not hasattr(pty, "openpty"), reason="needs a pseudo-terminal")
def test_short_work_shows_none() -> None:
    assert errors_on_a_terminal(WORK.format(patience_s=1e9)) == "end"


def test_nobody_who_watches_gets_nothing() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WORK.format(patience_s=0)], capture_output=True, timeout=600, check=True
    )
    assert (result.stdout, result.stderr) == (b"done\n", b"")
