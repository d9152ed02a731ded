"""Casts of weights that autocast keeps nowhere: ``cache_enabled=False``, and weights that are views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

from protwin.runtime import CpuDevice, carry_out, trace
from protwin.runtime.tracing.configurations import autocast_of
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.methods.runtime_profile import OF_FLAT_PARAMETERS, Runtime
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.training_options import TrainingOptions
from protwin.shared.schema.workload import DType
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.hooks.test_weight_casts import LAYERS, MODELS, build
from tests.runtime.models import point_batches

ANEW = TrainingOptions(autocast=DType.BFLOAT16, autocast_cache=False)
WIDTH = 64


@pytest.mark.parametrize("n_checkpoint", [0, 2, LAYERS])
@pytest.mark.parametrize("name", MODELS)
def test_measured_peaks_are_within_the_account(name: str, n_checkpoint: int) -> None:
    """Of a loop under autocast without its cache, on a device with as much memory as is guaranteed."""
    model, batch = build(name), point_batches(1)[0]

    def loss_of(output: torch.Tensor, _: Any = None) -> torch.Tensor:
        return nn.functional.cross_entropy(output.float(), batch["classes"])

    with autocast_of(ANEW):
        workload = trace(model, {"points": batch["points"]}, loss=loss_of, repeats=0)
    plan = Plan(workload_id=workload.identity, chunk_bytes=2**20, n_persist=1, n_buffer=3, n_checkpoint=n_checkpoint)
    guaranteed = guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes
    with carry_out(model, plan, workload, device=CpuDevice(budget_bytes=guaranteed)) as training:
        for _ in range(6):
            with autocast_of(ANEW):
                loss = loss_of(model(points=batch["points"]))
            loss.backward()
            training.step()
        measured = training.record().peak_device_bytes
    assert guaranteed * 0.85 < measured <= guaranteed


class _Casts(TorchDispatchMode):
    """Counts casts of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten._to_copy.default and args[0].shape == (WIDTH, WIDTH)
        return func(*args, **(kwargs or {}))


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(self.map(x))


@pytest.mark.filterwarnings("ignore")
def test_flat_parameters_are_cast_wherever_they_are_used(tmp_path: Path) -> None:
    """PyTorch's own systems with one rank: a map that runs twice is cast twice by FSDP alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        by_fsdp2 = _Twice()
        fully_shard(by_fsdp2, mesh=init_device_mesh("cpu", (1,)))
        models: dict[Runtime, nn.Module] = {
            Runtime.OURS: _Twice(),
            Runtime.DDP: DDP(_Twice()),
            Runtime.FSDP2: by_fsdp2,
            Runtime.FSDP: FSDP(_Twice(), device_id=torch.device("cpu")),
        }
        for runtime, model in models.items():
            with _Casts() as casts, torch.autocast("cpu", dtype=torch.bfloat16):
                model(torch.randn(3, WIDTH))
            assert casts.number == (2 if runtime in OF_FLAT_PARAMETERS else 1), runtime
    finally:
        dist.destroy_process_group()
