"""The processes of one contestant: started, asked, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

_WORKER: Final = Path(__file__).with_name("peers_worker.py")
START_S: Final = 180.0
BUILD_S: Final = 600.0
"""DeepSpeed compiles its CPU Adam when it is first used, which takes minutes on a slow machine."""
_ANSWER_S: Final = 90.0
_END_S: Final = 10.0


class ContestantError(Exception):
    """Why a contestant cannot go on, in the words of the table."""


def extensions_folder() -> Path:
    """Where torch keeps what it compiles for this environment."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path(sys.prefix) / "torch_extensions"))


def break_stale_locks() -> None:
    """Remove the locks of builds that were killed: torch waits for them without end.  Only while no contestant runs."""
    for lock in extensions_folder().glob("**/lock"):
        lock.unlink()


class Processes:
    """One process per rank."""

    def __init__(self, contestant: str, num_ranks: int, threads: int, folder: Path, start_s: float = START_S) -> None:
        """Start all ranks and wait until they are ready.  Raises ContestantError, with nothing left running."""
        folder.mkdir(parents=True)
        self._ranks: list[_Rank] = []
        try:
            for rank in range(num_ranks):
                command = [sys.executable, str(_WORKER), contestant, f"--threads={threads}", f"--rank={rank}"]
                command += [f"--ranks={num_ranks}", f"--meeting-place={folder / 'meeting-place'}"]
                command.append(f"--plans={folder.parent / 'plans'}")
                self._ranks.append(_Rank(command, threads, folder / f"rank-{rank}.log"))
            self.about = str(self._answers(start_s)[0]["about"])
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's answer.  Raises ContestantError, with nothing left running."""
        try:
            for rank in self._ranks:
                rank.send(request)
            return self._answers(_ANSWER_S)
        except BaseException:
            self.close()
            raise

    def _answers(self, patience_s: float) -> list[dict[str, Any]]:
        return [rank.answer(patience_s) for rank in self._ranks]

    def close(self) -> None:
        """End every process.  Idempotent."""
        for rank in self._ranks:
            rank.close_input()
        for rank in self._ranks:
            rank.end()
        self._ranks.clear()


class _Rank:
    def __init__(self, command: list[str], threads: int, log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": str(threads),
                    "TORCH_EXTENSIONS_DIR": str(extensions_folder()),
                    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
                },
            )
        self._received = b""

    def send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self, patience_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        until_s = time.monotonic() + patience_s
        while b"\n" not in self._received:
            if not select.select([self._process.stdout], [], [], max(0.0, until_s - time.monotonic()))[0]:
                raise ContestantError(f"failed: no answer for {patience_s:.0f} s")
            more = os.read(self._process.stdout.fileno(), 2**16)
            if not more:
                raise self._ended()
            self._received += more
        line, self._received = self._received.split(b"\n", 1)
        content: dict[str, Any] = json.loads(line)
        if "not_installed" in content:
            raise ContestantError(f"not installed: {content['not_installed']}")
        if "failed" in content:
            raise ContestantError(f"failed: {content['failed']}")
        return content

    def _ended(self) -> ContestantError:
        status = self._process.wait()
        lines = self._log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        return ContestantError(f"failed: its process ended with status {status}: {last}")

    def close_input(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def end(self) -> None:
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
