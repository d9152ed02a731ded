"""What data sheets predict of the trainings that ``gpu_sheets.py`` measured: adds the figures to its file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from protwin.calibration.published.measured_runs import MeasuredRun
from protwin.calibration.published.run_predictions import hardware_of, plan_of, workload_of
from protwin.sim.engine.simulator import simulate


def predicted(step: dict[str, Any], machine: str) -> dict[str, float]:
    """Seconds and bytes of one measured training, from the data sheet of ``machine`` alone."""
    run = MeasuredRun.model_validate(
        {
            "id": step["name"],
            "class": "sheet",
            "source": "gpu_sheets",
            "model": step["model"],
            "batch_size": step["batch_size"],
            "sequence_length": step["sequence_length"],
            # FSDP2 computes in bfloat16 and steps float32 weights, as a plan with masters does.
            "dtype": "bfloat16" if step.get("sharded") else step["dtype"],
            "autocast": step["autocast"],
            "lora_rank": step["lora_rank"],
            "optimizer": step["optimizer"],
            "machine": machine,
            "checkpointed_frac": float(step["checkpointed"]),
            "measured": {"iteration_s": step["seconds"]},
        }
    )
    workload = workload_of(run)
    record = simulate(plan_of(run, workload), workload, hardware_of(run))
    assert record.device_reserved is not None
    return {
        "seconds": record.iteration_s,
        "allocated_bytes": record.guaranteed_peak_device_bytes,
        "reserved_bytes": record.device_reserved.expected_bytes,
    }


def main() -> int:
    """Add the predictions to the file, and print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--machine", default="h100-80gb", help="of the catalogue (h100-80gb)")
    options = parser.parse_args()
    content = json.loads(options.file.read_text(encoding="utf-8"))
    for step in content["steps"]:
        found = step["predicted"] = predicted(step, options.machine)
        errors = (f"{key} {found[key] / step[key] - 1:+.1%}" for key in found)
        print(f"{step['name']}: {step['seconds']:.4f} s; {', '.join(errors)}")
    content["predicted_on"] = options.machine
    options.file.write_text(json.dumps(content) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
