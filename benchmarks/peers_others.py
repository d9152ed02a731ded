"""The contestants of the peers' bench that are not ours: the plain loop, FSDP2 and DeepSpeed ZeRO-3."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers_subject import BATCH_SIZE, LEARNING_RATE, WEIGHT_DECAY, make_model


def join_ranks(rank: int, num_ranks: int, meeting_place: Path, *, sets_environment: bool = True) -> None:
    """Make the gloo group of all ranks, which meet in a file that does not exist yet.

    ``sets_environment``: as a launcher does, for those who look for it.
    """
    if sets_environment:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=num_ranks)


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


class Plain:
    """The loop that everybody writes."""

    about = "everything stays where it is"

    def __init__(self) -> None:
        self.model = make_model()
        self._optimizer = _adamw(self.model)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One training step; gives its loss."""
        loss = self.model(**batch).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.item())

    def synchronize(self) -> None:
        """Nothing runs beside the loop."""

    def close(self) -> None:
        """Leave the group of ranks, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()


class Ddp(Plain):
    """``DistributedDataParallel`` with its defaults."""

    about = "DistributedDataParallel, torch's fused AdamW"

    def __init__(self, num_ranks: int) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.model = DistributedDataParallel(make_model())
        self._optimizer = _adamw(self.model)


class Fsdp2(Plain):
    """``fully_shard`` on every block and on the model; the mesh is on the CPU, and so is the offload where wanted."""

    def __init__(self, num_ranks: int, *, offloads: bool = True) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        self.model = make_model()
        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (num_ranks,))}
        if offloads:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for block in self.model.model.layers:
            fully_shard(block, **options)
        fully_shard(self.model, **options)
        self._optimizer = _adamw(self.model)
        policy = "CPUOffloadPolicy(pin_memory=False)" if offloads else "no offload policy"
        self.about = f"fully_shard per block, {policy}, torch's fused AdamW"


class DeepSpeedZero3(Plain):
    """ZeRO-3 with parameters and optimizer on the CPU."""

    def __init__(self, num_ranks: int) -> None:
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        model = make_model()
        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adamw_mode=True)
        to_cpu = {"device": "cpu", "pin_memory": False}
        configuration = {
            "train_micro_batch_size_per_gpu": BATCH_SIZE // num_ranks,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": 3, "offload_param": to_cpu, "offload_optimizer": to_cpu},
        }
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration)
        self.about = (
            f"DeepSpeed {deepspeed.__version__}, offload_param and offload_optimizer to the CPU, DeepSpeedCPUAdam, "
            f"gradient_clipping 0"
        )

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One training step; gives its loss."""
        loss = self._engine(**batch).loss
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.item())
