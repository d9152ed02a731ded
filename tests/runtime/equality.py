"""Training by a plan beside the plain loop: the same bits, and what it moved on the way."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from protwin.runtime import CpuDevice, carry_out
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import Chunk, Layout, build_layout
from protwin.shared.layout.travelling_inputs import input_bytes
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ActivationMode, Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.models import SEED, Case, differences, held
from tests.strategies.plans import plans

FAST_FOLDER = next((folder for folder in ("/dev/shm",) if os.access(folder, os.W_OK)), None)
"""A disk folder of memory, if the system has one: small writes to a real disk take milliseconds each."""

_PER_RUN = 4
_RUNS_PER_SEED = 100_000


def first(drawn: tuple[Plan, Layout]) -> Plan:
    return drawn[0]


class _Enough(Exception):
    """No more plans are wanted."""


def random_plans(
    workload: Workload, number: int, seed: int, optimizer: Optimizer = Optimizer.ADAMW, *, has_disk: bool = True
) -> list[Plan]:
    """So many different plans that ``workload`` can follow on one rank, the same ones for the same seed."""
    return different(plans(workload, optimizers=st.just(optimizer), has_disk=has_disk), number, seed)


def different(drawn: SearchStrategy[tuple[Plan, Layout]], number: int, seed: int) -> list[Plan]:
    """So many different plans of those that are ``drawn``, the same ones for the same seed.

    Hypothesis varies what it has drawn before, so that plans of one run of it are alike: each run gives a few.
    """
    found: dict[str, Plan] = {}
    for run in range(10 * number):
        _draw(found, min(number, len(found) + _PER_RUN), drawn, seed * _RUNS_PER_SEED + run)
        if len(found) == number:
            return list(found.values())
    raise AssertionError(f"{len(found)} different plans were drawn, {number} were wanted")


def _draw(found: dict[str, Plan], until: int, drawn: SearchStrategy[tuple[Plan, Layout]], seed: int) -> None:
    """Add plans to those ``found``, until there are so many or one run of Hypothesis has no more."""

    @hypothesis.seed(seed)
    @settings(
        max_examples=20 * _PER_RUN,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(one=drawn)
    def draw(one: tuple[Plan, Layout]) -> None:
        if len(found) == until:
            raise _Enough
        found.setdefault(one[0].identity, one[0])

    with suppress(_Enough):
        draw()


@dataclass(frozen=True)
class Outcome:
    """What a training by a plan gave."""

    losses: list[float]
    different: list[str]
    """Names of weights and buffers that are not, bit for bit, those of the plain loop."""
    num_gathers: int
    num_cpu_adam_steps: int
    to_device_bytes: int
    to_host_bytes: int
    peak_bytes: int
    guaranteed_bytes: int


def trained(case: Case, plan: Plan, device: CpuDevice | None = None) -> Outcome:
    """Train on all batches of the case, on ``device`` or on one of just the memory that is guaranteed to be enough."""
    model = case.build()
    losses = []
    guaranteed_bytes = guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes
    with (
        TemporaryDirectory(dir=FAST_FOLDER) as folder,
        carry_out(
            model,
            plan,
            case.workload,
            optimizer=case.make_optimizer,
            parameter_groups=case.groups(model),
            device=device or CpuDevice(guaranteed_bytes),
            disk_folder=folder,
        ) as training,
    ):
        torch.manual_seed(SEED)
        for batches in case.steps(plan.micro_batches):
            for batch in held(case, batches):
                loss = case.loss(model, batch)
                loss.backward()
                losses.append(loss.item())
            training.step()
    plain = case.plain_with(plan.micro_batches, plan.max_gradient_norm)
    return Outcome(
        losses,
        differences(model, plain.weights[-1]),
        num_gathers=training.num_gathers,
        num_cpu_adam_steps=training.num_cpu_adam_steps,
        to_device_bytes=training.bytes_host_to_device,
        to_host_bytes=training.bytes_device_to_host,
        peak_bytes=training.peak_device_bytes,
        guaranteed_bytes=guaranteed_bytes,
    )


def offloaded_chunks(workload: Workload, plan: Plan) -> list[Chunk]:
    """The chunks that the host has: those that come for stays, and those that it steps for the device."""
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
    kept = plan.n_persist + plan.n_host_stepped
    return [c for c in layout.chunks[plan.n_persist :] if c.id >= kept or c.is_trainable]


def swapped_bytes(workload: Workload, plan: Plan) -> int:
    """Bytes of saved activations and of blocks' inputs that travel in every forward."""
    modes = plan.modes(workload.num_blocks)
    saved = sum(workload.profile_of(b).swappable_bytes for b, mode in enumerate(modes) if mode is ActivationMode.SWAP)
    inputs = zip(input_bytes(workload), modes, strict=True)
    return saved + sum(size for size, mode in inputs if mode is ActivationMode.OFFLOAD_INPUT)


def miscounted(case: Case, plan: Plan, outcome: Outcome) -> list[str]:
    """What was not moved or not stepped as the plan says.

    Every offloaded chunk comes at least once per step, and each trainable one leaves and is stepped once.
    """
    workload, steps = case.workload, len(case.batches)
    offloaded = offloaded_chunks(workload, plan)
    trainable = [chunk for chunk in offloaded if chunk.is_trainable]
    members = [workload.parameters[placed.index] for chunk in trainable for placed in chunk.parameters]
    has_gradient = [p for p in members if p.trainable and not p.name.endswith("unused")]
    forwards, swapped = steps * plan.micro_batches, swapped_bytes(workload, plan)
    to_host_bytes = forwards * (sum(p.size_bytes for p in has_gradient) + swapped)
    to_device_bytes = steps * sum(chunk.size_bytes for chunk in offloaded) + forwards * swapped
    found = []
    if outcome.num_cpu_adam_steps != steps * len(trainable):
        found.append(f"{outcome.num_cpu_adam_steps} CPU Adam steps, expected {steps * len(trainable)}")
    if outcome.to_host_bytes != to_host_bytes:
        found.append(f"{outcome.to_host_bytes} bytes to the host, expected {to_host_bytes}")
    if outcome.num_gathers < steps * len(offloaded):
        found.append(f"{outcome.num_gathers} gathers, expected at least {steps * len(offloaded)}")
    if outcome.to_device_bytes < to_device_bytes:
        found.append(f"{outcome.to_device_bytes} bytes to the device, expected at least {to_device_bytes}")
    return found
