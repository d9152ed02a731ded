"""Trains under the plans that it is given, in a process of its own, and prints what was resident at most.

Called as ``python -m tests.calibration.resident '[{...knobs}, ...]'``; prints JSON: the process once it has trained
something small, and per plan what the account says and how much the resident memory rose.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from protwin.runtime import CpuDevice, carry_out, parameters_on_meta, trace
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.memory.host import host_memory
from tests.sim.hand_made import machine

NUM_BLOCKS = 4
NUM_STEPS = 3


class Block(nn.Module):
    """Two matrices of four times its width squared."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """A row of blocks, and a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = self.head(x).square().mean()
        return loss


def resident_bytes(key: str = "VmRSS") -> int:
    """A line of the kernel's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def train(model: nn.Module, plan: Plan, workload: Workload, batch: dict[str, torch.Tensor], weights: str) -> None:
    """A few steps, from files."""
    with carry_out(model, plan, workload, device=CpuDevice(), weights=weights) as training:
        for _ in range(NUM_STEPS):
            model(**batch).backward()
            training.step()


def measure(width: int, knobs: dict[str, Any], dtype: torch.dtype) -> dict[str, int]:
    """What one plan's account says, and what the training added to the process at most."""
    batch = {"x": torch.randn(256, width).to(dtype)}
    with torch.device("meta"):
        twin = Model(width).to(dtype)
    workload = trace(twin, {"x": torch.empty(256, width, dtype=dtype, device="meta")})
    plan = Plan(workload_id=workload.identity, **knobs)
    layout = build_layout(workload.parameters, num_blocks=NUM_BLOCKS, chunk_bytes=plan.chunk_bytes)
    schedule = compile_schedule(plan, workload, layout)
    with TemporaryDirectory() as folder:
        save_file(Model(width).to(dtype).state_dict(), Path(folder) / "model.safetensors")
        gc.collect()
        before = resident_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # forget the highest level so far
        with parameters_on_meta():
            model = Model(width).to(dtype)
        train(model, plan, workload, batch, folder)
        rise = resident_bytes("VmHWM") - before
    account = host_memory(
        schedule,
        workload.parameters,
        layout,
        machine(kind=DeviceKind.CPU),
        widens=plan.widens_on_host,
        device_peak_bytes=guaranteed_device_peak(schedule).size_bytes,
    )
    return {
        "rise_bytes": rise,
        "account_bytes": account.total_bytes - account.process_bytes,
        "loading_bytes": account.loading_bytes,
        "pinned_bytes": account.pinned_bytes,
        "state_bytes": account.state_bytes,
        "device_bytes": account.device_bytes,
    }


def main() -> None:
    torch.manual_seed(0)
    cases = json.loads(sys.argv[1])
    measure(32, {"chunk_bytes": 2**14, "n_persist": 1, "n_buffer": 2}, torch.float32)
    process = resident_bytes()
    results = [measure(case.pop("width"), case, torch.float32) for case in cases]
    sys.stdout.write(json.dumps({"process_bytes": process, "results": results}))


if __name__ == "__main__":
    main()
