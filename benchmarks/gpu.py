"""The whole proof and the fidelity of predictions on one GPU, in under eight minutes: ``make bench-gpu``.

- Proof: every test marked ``gpu``: equality with the plain loop, freshness, memory, errors, labels, measuring.
- Cost: everything persistent and kept beside the plain loop.
- Memory: the allocator's peak against the schedule's account in every activation mode, and what is left.
- Fidelity: for two model families, calibrate by three plans, predict others, measure them; and whether transfers
  overlap where the simulator says so.

Writes one JSON with the date and the machine's name into benchmarks/results/, and into $OUT if that is set: after every
section, so that what was done is kept if time runs out.  Exit code 0 if everything was done and is as claimed, 1 if
not, 2 without a GPU.  ``--rehearse`` runs all of it but the proof on the CPU with tiny models, which shows that the
bench itself runs and nothing about a GPU; it keeps no result.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

# cuBLAS reads it when its first handle is made; the allocator when torch starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from gpu_fidelity import judge
from gpu_proof import prove
from gpu_runtime import account, compare_with_plain
from gpu_subject import Clock, Machine, OutOfTime, Section, find_machine, prepare
from rich.console import Console

from protwin.calibration.fitting.slowdowns import measure_slowdowns
from protwin.runtime.devices.probe import probe_hardware
from protwin.runtime.model.identity import software_versions
from protwin.shared.basics.documents import write_atomically

MINUTES: Final = 7.5
_PROOF_LIMIT_S: Final = 200.0
_PLAN_S: Final = 12.0
"""About what a plan takes: a copy of the model, pinning its home, eleven iterations."""
_FAMILIES: Final = ("llama", "gpt2")


def main() -> int:
    """Run the sections in turn; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"time for everything ({MINUTES})")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU with tiny models, keeping nothing")
    parser.add_argument("--proof-s", type=float, default=_PROOF_LIMIT_S, help="seconds for the proof; 0: none")
    options = parser.parse_args()
    machine = find_machine(is_rehearsal=options.rehearse)
    if machine is None:
        print("make bench-gpu needs a CUDA device; torch sees none here, so nothing was measured.", file=sys.stderr)
        return 2
    end_s = time.monotonic() + 60 * options.minutes
    proof_s = 0.0 if machine.is_rehearsal else options.proof_s
    bench = Bench(machine, Clock(end_s - proof_s))
    bench.run("machine", bench.measure_machine)
    for name in _FAMILIES:
        bench.run(f"fidelity: {name}", lambda section, name=name: bench.judge_family(section, name))
    if proof_s:
        bench.run("proof", lambda section: prove(section, Clock(end_s), limit_s=proof_s))
    return bench.finish()


class Bench:
    """The sections so far, and what later ones need of earlier ones."""

    def __init__(self, machine: Machine, clock: Clock) -> None:
        self.clock = clock
        self._machine = machine
        self._console = Console(highlight=False, width=160)
        self._sections: list[Section] = []
        self._hardware: Any = None
        self._contention: Any = None
        self._started = datetime.datetime.now(datetime.UTC)

    def run(self, name: str, work: Callable[[Section], None]) -> None:
        """Run one section, whatever becomes of it, and keep the result."""
        section = Section(name)
        self._sections.append(section)
        start = time.monotonic()
        try:
            work(section)
        except OutOfTime:
            section.not_done = section.not_done or "no time was left"
        except Exception as error:
            section.not_done = f"{type(error).__name__}: {error}"
            section.found["traceback"] = traceback.format_exc()
        section.seconds = time.monotonic() - start
        gc.collect()
        self._show(section)
        self._write()

    def measure_machine(self, section: Section) -> None:
        """Probe it, and measure how its lanes slow each other."""
        self.clock.check(20)
        seconds = 0.5 if self._machine.is_rehearsal else 6.0
        self._hardware = probe_hardware(seconds=seconds, device=self._machine.make_device())
        self._contention = measure_slowdowns(self._machine.make_device(), seconds=seconds)
        section.found["hardware"] = self._hardware.model_dump(mode="json")
        section.found["contention"] = [entry.model_dump(mode="json") for entry in self._contention]
        section.check("sets of lanes measured", len(self._contention), 1, at_least=True)

    def judge_family(self, section: Section, name: str) -> None:
        """One model: cost and memory of the runtime with the first family, fidelity with each."""
        if self._hardware is None or self._contention is None:
            section.not_done = "the machine was not measured"
            return
        self.clock.check(30)
        subject = prepare(name, self._machine, self._hardware)
        if name == _FAMILIES[0]:
            self.run("cost", lambda inner: compare_with_plain(inner, self.clock, self._machine, subject))
            self.run("memory", lambda inner: account(inner, self.clock, self._machine, subject))
        plan_s = 0.0 if self._machine.is_rehearsal else _PLAN_S
        judge(section, self.clock, self._machine, subject, self._contention, plan_s)

    def finish(self) -> int:
        """Say how it ended; gives the exit code."""
        is_met = all(section.is_met for section in self._sections)
        self._console.print("everything is as claimed" if is_met else "not everything is as claimed, see above")
        return 0 if is_met else 1

    def _show(self, section: Section) -> None:
        state = "as claimed" if section.is_met else section.not_done or "missed"
        self._console.print(f"{section.name}: {state} ({len(section.checks)} checks, {section.seconds:.0f} s)")
        for check in section.checks:
            if not check["is_met"] or section.name != "proof":
                sign = ">=" if check["at_least"] else "<="
                mark = " " if check["is_met"] else "!"
                self._console.print(
                    f" {mark} {check['name']}: {check['value']:.4g} (bound {sign} {check['bound']:.4g})"
                )

    def _write(self) -> None:
        if self._machine.is_rehearsal:
            return
        device = self._machine.make_device()
        result = {
            "date": self._started.isoformat(timespec="seconds"),
            "machine": device.description,
            "software": software_versions(),
            "is_as_claimed": all(section.is_met for section in self._sections),
            "sections": [vars(section) | {"is_met": section.is_met} for section in self._sections],
        }
        slug = re.sub(r"[^a-z0-9]+", "-", device.description.lower()).strip("-")[:60].strip("-")
        file_name = f"gpu-{self._started.date().isoformat()}-{slug}.json"
        content = json.dumps(result, indent=1) + "\n"
        folders = [Path(__file__).parent / "results", *([Path(os.environ["OUT"])] if os.environ.get("OUT") else [])]
        for folder in folders:
            write_atomically(folder / file_name, content)


if __name__ == "__main__":
    sys.exit(main())
