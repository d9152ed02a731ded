"""What the GPU bench measures with: the machine, a clock that runs out, models that keep it busy, and checks."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, Final

import torch

from protwin.calibration.fitting.calibrate import run_plan
from protwin.calibration.fitting.subject import Subject
from protwin.runtime.data.byte_text import byte_batches, python_reference
from protwin.runtime.devices.cpu_device import CpuDevice
from protwin.runtime.devices.cuda_device import CudaDevice
from protwin.runtime.devices.device import TrainingDevice
from protwin.runtime.model.batches import Batch
from protwin.runtime.model.configurations import build_model
from protwin.runtime.tracing.tracing import trace
from protwin.shared.basics.units import format_bytes
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record

BATCHES_OF_A_RUN: Final = 11
"""Three iterations that warm up and are watched, eight that count."""
_LARGE_DEVICE_BYTES: Final = 30 * 2**30
_LLAMA: Final = {"model_type": "llama", "vocab_size": 8192, "max_position_embeddings": 1024}
_GPT2: Final = {
    "model_type": "gpt2",
    "vocab_size": 8192,
    "n_positions": 1024,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
_NO_TOKENS: Final = {"bos_token_id": None, "eos_token_id": None}


class OutOfTime(Exception):
    """The time of the bench is used up."""


@dataclass(frozen=True)
class Clock:
    """Says when to stop."""

    end_s: float

    def left_s(self) -> float:
        """Seconds left; negative if there are none."""
        return self.end_s - time.monotonic()

    def check(self, needed_s: float = 0.0) -> None:
        """Raise OutOfTime if less than ``needed_s`` are left."""
        if self.left_s() < needed_s:
            raise OutOfTime


@dataclass(frozen=True)
class Machine:
    """The device under test; in a rehearsal the CPU in its place."""

    make_device: Callable[[], TrainingDevice]
    target: torch.device
    is_rehearsal: bool = False

    def other_bytes(self, batch: Batch) -> int:
        """Device memory that is no part of a training on ``batch``: workspaces of libraries, and what was there."""
        gc.collect()
        if self.target.type != "cuda":
            return 0
        torch.cuda.synchronize(self.target)
        torch.cuda.empty_cache()
        assert isinstance(batch, dict)
        return torch.cuda.memory_allocated(self.target) - sum(t.numel() * t.element_size() for t in batch.values())


def find_machine(*, is_rehearsal: bool) -> Machine | None:
    """The first CUDA device, or the CPU for a rehearsal; None if there is no CUDA device."""
    if is_rehearsal:
        return Machine(CpuDevice, torch.device("cpu"), is_rehearsal=True)
    return Machine(CudaDevice, torch.device("cuda", 0)) if torch.cuda.is_available() else None


@dataclass
class Section:
    """One part of the bench: what was found, and whether it is what was claimed."""

    name: str
    checks: list[dict[str, Any]] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    not_done: str = ""
    """Why it ended early; empty if it did not."""

    def check(self, name: str, value: float, bound: float, *, at_least: bool = False) -> None:
        """Note a figure and the most (or least) that it may be."""
        is_met = value >= bound if at_least else value <= bound
        self.checks.append({"name": name, "value": value, "bound": bound, "at_least": at_least, "is_met": bool(is_met)})

    @property
    def is_met(self) -> bool:
        """Whether it was done and everything is as claimed."""
        return not self.not_done and bool(self.checks) and all(check["is_met"] for check in self.checks)


def prepare(name: str, machine: Machine, hardware: Hardware) -> Subject:
    """A model of family ``name``, traced and timed on the machine; the model itself stays on the host.

    On an accelerator a block takes milliseconds: a Llama in bfloat16 of 51 million parameters per block on 8192
    tokens, a GPT-2 in float32 of 28 million on 4096; half as wide on a device of less than 30 GiB.
    """
    configuration, dtype, batch_size, length = _shape(name, machine, hardware)
    torch.manual_seed(0)
    model = build_model(configuration, name, dtype, device="cpu")
    batches = byte_batches(python_reference(), batch_size=batch_size, sequence_length=length, num_batches=1)
    batch = {key: tensor.to(machine.target) for key, tensor in next(batches).items()}
    twin = copy.deepcopy(model).to(machine.target)
    workload = trace(twin, batch, name=name, repeats=5)
    del twin
    gc.collect()
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    return Subject(model, batch, workload, hardware, machine.make_device, optimizer)


def _shape(name: str, machine: Machine, hardware: Hardware) -> tuple[dict[str, Any], torch.dtype, int, int]:
    if machine.is_rehearsal:
        width, layers, batch_size, length, dtype = 64, 4, 2, 32, torch.float32
    else:
        is_large = hardware.device.memory_bytes >= _LARGE_DEVICE_BYTES
        width, layers, length = (2048 if name == "llama" else 1536) // (1 if is_large else 2), 8, 1024
        batch_size, dtype = (8, torch.bfloat16) if name == "llama" else (4, torch.float32)
    heads = max(2, width // 128)
    if name == "llama":
        shape = {
            "hidden_size": width,
            "intermediate_size": 11 * width // 4,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
        }
        return _LLAMA | _NO_TOKENS | shape, dtype, batch_size, length
    return _GPT2 | _NO_TOKENS | {"n_embd": width, "n_layer": layers, "n_head": heads}, dtype, batch_size, length


def measure(subject: Subject, plan: Plan, *, batches: int = BATCHES_OF_A_RUN) -> Record:
    """Train a copy of the model by ``plan``, alone on the device."""
    gc.collect()
    return run_plan(
        copy.deepcopy(subject.model),
        plan,
        subject.workload,
        repeat(subject.batch, batches * plan.micro_batches),
        optimizer=subject.make_optimizer,
        device=subject.make_device(),
        hardware_name=subject.hardware.name,
    )


def described(subject: Subject) -> dict[str, Any]:
    """A few words about a subject, for the result."""
    parameters = list(subject.model.parameters())
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "size": format_bytes(sum(parameter.numel() * parameter.element_size() for parameter in parameters)),
        "dtype": str(parameters[0].dtype),
        "tokens": subject.workload.num_tokens,
        "block_forward_s": subject.workload.profile_of(0).forward.measured_s,
        "block_backward_s": subject.workload.profile_of(0).backward.measured_s,
    }
