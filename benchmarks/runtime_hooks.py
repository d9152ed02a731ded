"""What hooks of other systems take the host in Python, per module and per parameter, beside an operation of a model.

Models of tiny weights, so that nothing but the host works: stacks of blocks, once with one parameter a module and once
with two, once with twice the modules for the same parameters.  Three models give what each module and each parameter
takes, forward and backward, less what the plain loop takes of the same model.  All contestants take turns in bursts,
and the quickest burst of each counts.  The unit is an operation of a model: forward of a Llama block of tiny weights
over the operations that it dispatches, views left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

NUM_BLOCKS: Final = 12
MODULES: Final = 6
WIDTH: Final = 4
BURST: Final = 5
_SYSTEMS: Final = ("plain", "ddp", "fsdp", "fsdp2", "deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3")


class Shell(nn.Module):
    """A module without parameters around another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the inner one does."""
        out: torch.Tensor = self.inner(x)
        return out


class Norm(nn.Module):
    """One operation with one parameter, or with two."""

    def __init__(self, *, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scaled and shifted."""
        return nn.functional.layer_norm(x, (WIDTH,), self.weight, self.bias)


def block(*, has_bias: bool, is_wrapped: bool) -> nn.Module:
    """``MODULES`` modules with parameters, each in a shell or not."""
    own = [Norm(has_bias=has_bias) for _ in range(MODULES)]
    return nn.Sequential(*(Shell(module) if is_wrapped else module for module in own))


VARIANTS: Final[dict[str, dict[str, bool]]] = {
    "one": {"has_bias": False, "is_wrapped": False},
    "two": {"has_bias": True, "is_wrapped": False},
    "shells": {"has_bias": False, "is_wrapped": True},
}


class Contestant:
    """A model of one variant in one system."""

    def __init__(self, system: str, variant: str) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(*(block(**VARIANTS[variant]) for _ in range(NUM_BLOCKS)))
        self._engine: Any = None
        if system == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        elif system == "fsdp":
            from torch.distributed.fsdp import FullyShardedDataParallel

            for number, inner in enumerate(self.model):
                self.model[number] = FullyShardedDataParallel(inner, device_id=torch.device("cpu"))
            self.model = FullyShardedDataParallel(self.model, device_id=torch.device("cpu"))
        elif system == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (1,))
            for inner in self.model:
                fully_shard(inner, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        elif system.startswith("deepspeed"):
            import deepspeed

            zero = {"stage": int(system[-1]), "stage3_param_persistence_threshold": 0, "overlap_comm": True}
            configuration = {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "steps_per_print": 10**9,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": zero,
            }
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
            self._engine, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=configuration)
        self._batch = torch.ones(1, WIDTH)

    def step(self) -> tuple[float, float]:
        """Seconds of one forward and of its backward."""
        start = time.perf_counter()
        if self._engine is not None:
            loss = self._engine(self._batch).sum()
            middle = time.perf_counter()
            self._engine.backward(loss)
            end = time.perf_counter()
            self._engine.step()
        else:
            loss = self.model(self._batch).sum()
            middle = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            for parameter in self.model.parameters():
                parameter.grad = None
        return middle - start, end - middle

    def burst(self) -> tuple[float, float]:
        """Medians of one burst."""
        steps = [self.step() for _ in range(BURST)]
        forward, backward = zip(*steps, strict=True)
        return statistics.median(forward), statistics.median(backward)


class _Counter(TorchDispatchMode):
    """Counts operations that a device would launch."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Views launch nothing."""
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


def operation_of_a_model() -> Callable[[], float]:
    """Seconds of forward of a Llama block of tiny weights over its operations."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    configuration = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=8
    )
    configuration._attn_implementation = "sdpa"
    layer, rotary = LlamaDecoderLayer(configuration, 0), LlamaRotaryEmbedding(configuration)
    hidden = torch.ones(1, 4, 16, requires_grad=True)
    embeddings = rotary(hidden, torch.arange(4)[None])
    with _Counter() as counter:
        layer(hidden, position_embeddings=embeddings)

    def seconds() -> float:
        times = []
        for _ in range(4 * BURST):
            start = time.perf_counter()
            layer(hidden, position_embeddings=embeddings)
            times.append(time.perf_counter() - start)
        return statistics.median(times) / counter.number

    return seconds


def main() -> None:
    """Measure, and print seconds per module and per parameter, in microseconds and in operations of a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bursts", type=int, default=20)
    parser.add_argument("--systems", nargs="*", default=_SYSTEMS, choices=_SYSTEMS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    systems = ["plain", *(system for system in options.systems if system != "plain")]
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting-place"
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
        _measure(systems, options.bursts)
        dist.destroy_process_group()


def _measure(systems: list[str], num_bursts: int) -> None:
    contestants = {(system, variant): Contestant(system, variant) for system in systems for variant in VARIANTS}
    unit = operation_of_a_model()
    quickest: dict[tuple[str, str], tuple[float, float]] = {}
    units = []
    for number in range(num_bursts + 1):
        for key, contestant in contestants.items():
            forward, backward = contestant.burst()
            before = quickest.get(key, (float("inf"), float("inf")))
            if number:  # the first burst warms up
                quickest[key] = min(before[0], forward), min(before[1], backward)
        units.append(unit())
    operation_s = min(units)
    print(f"an operation of a model: {operation_s * 1e6:.2f} microseconds")
    print(f"{'system':16} {'':9} {'a module':>18} {'a parameter':>18} {'beside, a block':>18}")
    num_modules, num_parameters = NUM_BLOCKS * MODULES, NUM_BLOCKS * MODULES
    for system in systems:
        if system == "plain":
            continue
        for phase, name in enumerate(("forward", "backward")):
            more = {v: quickest[system, v][phase] - quickest["plain", v][phase] for v in VARIANTS}
            module_s = (more["shells"] - more["one"]) / num_modules
            parameter_s = (more["two"] - more["one"]) / num_parameters
            # A block is a module too.
            block_s = (more["one"] - num_parameters * parameter_s) / NUM_BLOCKS - (MODULES + 1) * module_s
            shown = (f"{s * 1e6:8.1f} us {s / operation_s:6.1f}" for s in (module_s, parameter_s, block_s))
            print(f"{system:16} {name:9} {' '.join(shown)}")


if __name__ == "__main__":
    main()
