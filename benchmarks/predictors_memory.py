"""Peak device memory of one training step of a catalogue model: by MemTracker, and by the simulator.

[Note: Masks]
On fake tensors transformers cannot see that a batch has no padding, so it builds a mask, and with a mask it repeats
keys and values for every head instead of letting the kernel share them.  Training on real tensors does neither.  Both
are asked about what trains; with the mask MemTracker's peak of llama-3-8b, plain, is 3.3 % higher (keys and values of
32 blocks, 33 MB each).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from predictors_rows import Row
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from protwin.runtime.fakes.models import plain_batches
from protwin.runtime.model.configurations import build_model, quiet
from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.catalogue.machines import machine
from protwin.shared.catalogue.models import model_configuration
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Content, Memory
from protwin.sim.engine.simulator import simulate

CHUNK_BYTES = 2**31


@dataclass(frozen=True)
class Case:
    """One step of training: everything on the device, all blocks kept or all checkpointed."""

    model: str
    batch_size: int
    sequence_length: int
    dtype: str
    is_checkpointed: bool
    has_optimizer: bool
    """Whether AdamW steps (fused); without it, forward and backward alone."""

    @property
    def name(self) -> str:
        """The case in words."""
        blocks = "checkpointed" if self.is_checkpointed else "plain"
        step = "with AdamW" if self.has_optimizer else "forward and backward"
        return f"{self.model}, {self.batch_size} x {self.sequence_length}, {self.dtype}, {blocks}, {step}"

    def of_model(self, model: str) -> Case:
        """The same of another model."""
        return replace(self, model=model)


@dataclass(frozen=True)
class Peak:
    """Bytes alive on the device at their highest."""

    total_bytes: int
    parameter_bytes: int
    optimizer_bytes: int

    @property
    def rest_bytes(self) -> int:
        """Gradients, activations and temporaries."""
        return self.total_bytes - self.parameter_bytes - self.optimizer_bytes


def predict_ours(case: Case) -> Peak:
    """The simulated peak of the plan that keeps every chunk on the device."""
    workload = workload_of_configuration(
        model_configuration(case.model).config,
        name=case.model,
        batch_size=case.batch_size,
        sequence_length=case.sequence_length,
        dtype=case.dtype,
    )
    layout = layout_of(workload, CHUNK_BYTES)
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=len(layout.chunks),
        n_buffer=0,
        n_checkpoint=workload.num_blocks if case.is_checkpointed else 0,
    )
    curve = simulate(plan, workload, machine("h200-141gb"), layout=layout).curve(Memory.DEVICE)
    assert curve is not None
    held = {holding.content: holding.size_bytes for holding in curve.alive_at_peak}
    state_bytes = held.get(Content.OPTIMIZER_STATE, 0)
    return Peak(
        total_bytes=curve.peak_bytes if case.has_optimizer else curve.peak_bytes - state_bytes,
        parameter_bytes=held[Content.PARAMETERS],
        optimizer_bytes=state_bytes if case.has_optimizer else 0,
    )


def measure_theirs(case: Case) -> Peak:
    """MemTracker's peak over the steps of the model as it trains, on fake tensors; see [Note: Masks]."""
    described = model_configuration(case.model)
    with quiet(), FakeTensorMode(), plain_batches():
        model = build_model(described.config, case.model, getattr(torch, case.dtype), device="cpu")
        model.train()
        if case.is_checkpointed:
            for block in model.model.layers:
                _checkpoint(block)
        tokens = torch.zeros((case.batch_size, case.sequence_length), dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True) if case.has_optimizer else None
        tracker = MemTracker()
        tracker.track_external(model, tokens, *([optimizer] if optimizer is not None else []))
        with tracker:
            # The first step makes the optimizer's state, the second one is like all that follow.
            for _ in range(2 if optimizer is not None else 1):
                model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
                tracker.reset_mod_stats()
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    by_name = {getattr(kind, "value", kind): size_bytes for kind, size_bytes in snapshot.items()}
    return Peak(
        total_bytes=by_name["Total"],
        parameter_bytes=by_name["Parameter"],
        optimizer_bytes=by_name["Optstate"],
    )


def compare(case: Case, ours: Peak, theirs: Peak, *, ours_s: float, theirs_s: float) -> list[Row]:
    """Every account of both, with what is known to differ."""

    def row(account: str, unit: str, of_ours: float, of_theirs: float, why: str, *, is_comparable: bool = True) -> Row:
        return Row("MemTracker", case.name, account, unit, of_ours, of_theirs, is_comparable, why)

    rows = [
        row("peak", "B", ours.total_bytes, theirs.total_bytes, "the sum of what follows"),
        row("parameters", "B", ours.parameter_bytes, theirs.parameter_bytes, "ours: chunks, aligned parameters"),
    ]
    if case.has_optimizer:
        why = "two moments each; ours also counts every parameter's step"
        rows.append(row("optimizer state", "B", ours.optimizer_bytes, theirs.optimizer_bytes, why))
    why = "theirs rounds each storage up to 512 bytes; ours keeps the last block's output until its backward"
    rows.append(row("gradients, activations", "B", ours.rest_bytes, theirs.rest_bytes, why))
    why = "ours: a trace of three blocks in both modes, which answers every plan; theirs: the step itself"
    return [*rows, row("time to answer", "s", ours_s, theirs_s, why, is_comparable=False)]


def _checkpoint(block: torch.nn.Module) -> None:
    forward = block.forward

    def again(*args: object, **kwargs: object) -> object:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = again  # type: ignore[method-assign]
