"""From a model and a batch to a Workload: what every section does, in either activation mode, and how long it takes.

The model's own iteration runs under the memory ledger with the hooks that the runtime uses, once with every block in
mode KEEP and once with every block in mode CHECKPOINT, so that what is traced is what will run.  Real tensors are then
timed without the ledger; fake tensors (a model on the meta device) have no times, and the simulator uses a roofline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..shared.errors import WorkloadError
from ..shared.plan import ActivationMode
from ..shared.schedule import Part, TaskKind
from ..shared.workload import Block, DType, Workload
from .batches import Batch, Loss, batch_shapes, batch_tensors, count_samples_and_tokens
from .blocks import NamedBlock, find_blocks
from .fake import fake_batch, fake_model, keep_representatives
from .fake_products import FakeGroupedProducts
from .identity import device_description, model_hash, software_versions
from .observing import PhaseKey, observe_sections
from .parameters import compute_dtype, describe_parameters
from .profiles import Assembly
from .snapshot import left_as_found
from .stopwatch import WARM_UP_ITERATIONS, time_sections

TRACED_MODES: Final = (ActivationMode.KEEP, ActivationMode.CHECKPOINT)
"""SWAP computes what KEEP does; how much of it can travel is counted along with it."""


def trace(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss | None = None,
    blocks: str | Sequence[str] | None = None,
    repeats: int = 5,
    name: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Workload:
    """Trace one training iteration of ``model`` on ``batch``.

    A model with real weights is run and timed (``repeats`` iterations in each activation mode; 0 for none), and is
    left bit for bit as it was.  A model on the meta device is traced with fake tensors: no memory, no times.
    ``loss`` gives the scalar loss from (output, batch) where the model does not; ``blocks`` names the blocks where
    they are not found.  Raises WorkloadError if the model cannot be traced.
    """
    _check_model(model)
    num_samples, num_tokens = count_samples_and_tokens(batch)
    named = find_blocks(model, blocks)
    if any(parameter.is_meta for parameter in model.parameters()):
        profiled = _profile_fake(model, batch, loss, blocks, on_progress)
    else:
        profiled = _profile_real(model, batch, loss, named, repeats, on_progress)
    assembly, stands_for = profiled
    profiles, profile_of_traced = assembly.profiles()
    profile_of = [profile_of_traced[traced] for traced in stands_for]
    parameters = describe_parameters(model, named)
    return Workload(
        model_name=name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__,
        model_hash=model_hash(model),
        batch_shapes=batch_shapes(batch),
        num_samples=num_samples,
        num_tokens=num_tokens,
        compute_dtype=compute_dtype(parameters),
        parameters=parameters,
        blocks=tuple(Block(name=b.name, profile=p) for b, p in zip(named, profile_of, strict=True)),
        profiles=profiles,
        prologue_forward=assembly.outer_phase(TaskKind.FORWARD, Part.PROLOGUE),
        epilogue_forward=assembly.outer_phase(TaskKind.FORWARD, Part.EPILOGUE),
        epilogue_backward=assembly.outer_phase(TaskKind.BACKWARD, Part.EPILOGUE),
        prologue_backward=assembly.outer_phase(TaskKind.BACKWARD, Part.PROLOGUE),
        resident_bytes=_resident_bytes(model, batch),
        traced_with="real" if assembly.is_real else "fake",
        measured_on=device_description(next(model.parameters()).device) if assembly.is_timed else None,
        software=software_versions(),
    )


def _profile_real(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    blocks: Sequence[NamedBlock],
    repeats: int,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[Assembly, list[int]]:
    progress = _Progress(len(TRACED_MODES) * (2 + (repeats + WARM_UP_ITERATIONS if repeats else 0)), on_progress)
    with left_as_found(model):
        observed = {
            mode: observe_sections(model, batch, loss, blocks, mode, progress.advance, passes=2)
            for mode in TRACED_MODES
        }
        seconds: dict[ActivationMode, dict[PhaseKey, float]] = {mode: {} for mode in TRACED_MODES}
        if repeats > 0:
            seconds = time_sections(model, batch, loss, blocks, TRACED_MODES, repeats, progress.advance)
    return Assembly(len(blocks), observed, seconds, is_real=True), list(range(len(blocks)))


def _profile_fake(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    names: str | Sequence[str] | None,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[Assembly, list[int]]:
    """Observe the model with fake tensors, representatives in place of a row of equal blocks."""
    mode = FakeTensorMode()
    twin, twin_batch = fake_model(model, mode), fake_batch(batch, mode)
    blocks = find_blocks(twin, names)
    stands_for = keep_representatives(twin, blocks)
    if stands_for is None:
        stands_for = list(range(len(blocks)))
    else:
        blocks = find_blocks(twin, blocks[0].name.rpartition(".")[0])
    progress = _Progress(len(TRACED_MODES), on_progress)
    with mode, FakeGroupedProducts(), left_as_found(twin):
        observed = {
            m: observe_sections(twin, twin_batch, loss, blocks, m, progress.advance, passes=1) for m in TRACED_MODES
        }
    return Assembly(len(blocks), observed, {m: {} for m in TRACED_MODES}, is_real=False), stands_for


def _check_model(model: nn.Module) -> None:
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise WorkloadError(f"{type(model).__name__} has no trainable parameter. Set requires_grad on some.")
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        raise WorkloadError(
            "the model checkpoints activations itself. Call model.gradient_checkpointing_disable(): the plan decides "
            "which blocks are checkpointed (n_checkpoint)."
        )
    unknown = {str(p.dtype) for p in model.parameters()} - {f"torch.{dtype}" for dtype in DType}
    if unknown:
        raise WorkloadError(f"parameters of dtype {', '.join(sorted(unknown))} are not supported.")


class _Progress:
    def __init__(self, total: int, report: Callable[[int, int], None] | None) -> None:
        self._total, self._done, self._report = total, 0, report

    def advance(self) -> None:
        self._done += 1
        if self._report is not None:
            self._report(self._done, self._total)


def _resident_bytes(model: nn.Module, batch: Batch) -> int:
    tensors = [*model.buffers(), *batch_tensors(batch).values()]
    seen = {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(seen.values())
