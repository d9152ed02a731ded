"""What data sheets predict of the trainings that ``gpu_sheets.py`` measured, whole and by kind of kernel.

Adds the figures to its file.  Kernels are those of one step under the profiler, told apart by their names.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from protwin.calibration.published.measured_runs import MeasuredRun
from protwin.calibration.published.run_predictions import hardware_of, plan_of, workload_of
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import OperationClass
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.simulator import simulate
from protwin.sim.operations.roofline import operation_s

_PRODUCTS: Final = re.compile("nvjet|gemm|cutlass(?!.*fmha)|cublas", re.IGNORECASE)
_ATTENTION: Final = re.compile("sdpa|fmha|flash", re.IGNORECASE)
_KIND_OF_CLASS: Final = {OperationClass.MATMUL: "products", OperationClass.ATTENTION: "attention"}
_OPTIMIZER: Final = re.compile("Optimizer|multi_tensor_apply")
_BUSY_FRAC: Final = 0.9
_FULL_CLOCK_FRAC: Final = 0.98
_SETTLED_S: Final = 10.0


def _kind(kernel: str) -> str:
    """The kind of a kernel that the profiler names."""
    for kind, pattern in (("attention", _ATTENTION), ("products", _PRODUCTS), ("optimizer", _OPTIMIZER)):
        if pattern.search(kernel):
            return kind
    return "others"


def by_kind(step: dict[str, Any]) -> dict[str, float]:
    """Measured seconds of the kernels of one step."""
    found: dict[str, float] = defaultdict(float)
    for name, _, microseconds in step["kernels"]:
        found[_kind(name)] += microseconds / 1e6
    return dict(found)


def predicted(step: dict[str, Any], machine: str) -> dict[str, Any]:
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
    workload, hardware = workload_of(run), hardware_of(run)
    plan = plan_of(run, workload)
    record = simulate(plan, workload, hardware)
    assert record.device_reserved is not None
    kinds: dict[str, float] = defaultdict(float)
    costs = CostModel.of(workload, hardware).stepping(plan.optimizer)
    for task in compile_schedule(plan, workload).tasks:
        if task.kind is TaskKind.DEVICE_ADAM:
            kinds["optimizer"] += costs.task_s(task)
        for operation in task.phase.operations if task.phase is not None else ():
            kind = _KIND_OF_CLASS.get(operation.operation_class, "others")
            kinds[kind] += operation_s(operation, hardware.device)
    return {
        "kinds": dict(kinds),
        "seconds": record.iteration_s,
        "allocated_bytes": record.guaranteed_peak_device_bytes,
        "reserved_bytes": record.device_reserved.expected_bytes,
    }


def limited_exponent(content: dict[str, Any]) -> float:
    """How clocks follow a power limit: the logarithm of the clock's share over that of the power's, by the board.

    What products alone would draw at the full clock is on a line through trainings that kept the device busy at 98 % of
    it or more; what they draw, and at which clock, was read while nothing else ran, ten seconds after they began.
    """
    full_mhz = max(step["clock_mhz"] for step in content["steps"])
    shares, watts = [], []
    for step in content["steps"]:
        of_kind = by_kind(step)
        in_matrices = (of_kind.get("products", 0.0) + of_kind.get("attention", 0.0)) / step["seconds"]
        is_busy = sum(of_kind.values()) >= _BUSY_FRAC * step["seconds"]
        in_16_bits = step["dtype"] != "float32" or step["autocast"] is not None or step.get("sharded", False)
        if is_busy and in_16_bits and step["clock_mhz"] >= _FULL_CLOCK_FRAC * full_mhz:
            shares.append(in_matrices)
            watts.append(step["power_w"])
    of_products = float(np.polyval(np.polyfit(shares, watts, 1), 1.0))
    (alone,) = (found for found in content["sustained"] if found["what"].endswith("random"))
    late = np.median([reading for reading in alone["board"] if reading[0] >= _SETTLED_S], axis=0)
    drawn_w, clock_mhz = late[1], late[2]
    print(f"products alone: {of_products:.0f} W at {full_mhz:.0f} MHz; {drawn_w:.0f} W at {clock_mhz:.0f} MHz")
    return math.log(clock_mhz / full_mhz) / math.log(drawn_w / of_products)


def main() -> int:
    """Add the predictions to the file, and print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--machine", default="h100-80gb", help="of the catalogue (h100-80gb)")
    options = parser.parse_args()
    content = json.loads(options.file.read_text(encoding="utf-8"))
    for step in content["steps"]:
        found = step["predicted"] = predicted(step, options.machine)
        step["kinds"] = by_kind(step)
        errors = [
            f"{key} {found[key] / step[key] - 1:+.1%}" for key in ("seconds", "allocated_bytes", "reserved_bytes")
        ]
        errors += [
            f"{kind} {1e3 * found['kinds'].get(kind, 0):.1f} of {1e3 * s:.1f} ms" for kind, s in step["kinds"].items()
        ]
        print(f"{step['name']}: {step['seconds']:.4f} s; {', '.join(errors)}")
    print(f"clocks under a power limit: limit over power to the power of {limited_exponent(content):.2f}")
    content["predicted_on"] = options.machine
    options.file.write_text(json.dumps(content) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
