"""From what a user calls a model to its workload: a saved workload, a configuration, or a name of the catalogue.

Full training of a model of the catalogue is answered from the family of workloads that comes with the package, and so
is training with low-rank adapters beside the usual maps.  The trace of anything else needs torch and lives in another
folder, which names it in the entry-point group ``protwin.tracers``; it is imported only when nothing cheaper answers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Final

from ..basics.arguments import wrong_name
from ..basics.documents import read_mapping
from ..basics.errors import FileError, WorkloadError
from ..basics.plugins import plugin
from ..basics.progress import progress_bar
from ..basics.suggestions import listed
from ..catalogue.models import ModelConfiguration, known_model, load_model_configuration, published_dtype
from ..catalogue.own_code import OwnCode
from ..phases.packing import Packing, parse_packed_lengths
from ..phases.tiling import checked_loss_head
from ..schema.hardware import Device, DeviceKind, Hardware
from ..schema.training_options import FULL_TRAINING, TrainingOptions
from ..schema.workload import DType, DTypeOrigin, Workload
from ..students.student import Student
from .cache import TraceRequest, cache_key, load_cached, store_cached
from .check import check_saved, check_tiles, other_training
from .dtypes import choose_dtype
from .untraced import shipped_workload

Warn = Callable[[str], None]
_USUAL_LENGTH: Final = 2048
_LONGEST_FIELDS: Final = ("max_position_embeddings", "n_positions", "max_seq_len")
"""What configurations call the most tokens of a sample."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """What decides a workload."""

    model: str
    """A saved workload's path, a configuration's path, or a name of the catalogue."""
    _: KW_ONLY
    batch_size: int | None = None
    """Samples per micro-batch; None: a saved workload's."""
    sequence_length: int | None = None
    """Tokens of one sample; None: a saved workload's, or of images alone."""
    dtype: str | None = None
    """None: the element type that the model was published in, or what ``choose_dtype`` has for it."""
    options: TrainingOptions = FULL_TRAINING
    """What of the model is trained, and how."""
    device: Device | None = None
    """What it is to train on: decides which kernels run and, without ``dtype``, in which element type."""
    device_kind: DeviceKind = DeviceKind.CUDA
    """Stands in for a device that is not described."""
    student: Student | None = None
    """Every block of which learns beside the model's."""
    code: OwnCode | None = None
    """Files that the model is made by, if these may run."""
    packed_lengths: str | None = None
    """Samples in each row, end to end (``parse_packed_lengths``)."""
    mlp_tiles: Sequence[int] = ()
    """Numbers of tiles that the workload shall know beside 1; a saved workload has to know them."""
    loss_tiles: Sequence[int] = ()
    """The same of head and loss."""
    sequence_ranks: Sequence[int] = ()
    """The same of ranks that share each sequence."""


def load_workload(
    name_or_path: str | Path,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    dtype: str | None = None,
    hardware: Hardware | None = None,
    options: TrainingOptions = FULL_TRAINING,
    packed_lengths: str | None = None,
    mlp_tiles: Sequence[int] = (),
    loss_tiles: Sequence[int] = (),
    sequence_ranks: Sequence[int] = (),
) -> Workload:
    """What training does with one batch: of a model of the catalogue, of a ``config.json``, or from a saved file.

    A saved workload has its shape; a model needs ``batch_size`` (samples) and, unless it takes images alone,
    ``sequence_length`` (tokens of one sample).  ``dtype`` replaces the element type that the model was published in;
    without it, a model that was published in float32 is trained in bfloat16, or float16, if ``hardware`` computes in
    it (``choose_dtype``).  ``options`` say what is trained, and how the loss is made.
    ``mlp_tiles`` and ``loss_tiles``: numbers of tiles that MLPs, and head and loss, may run in (``Workload.tilings``);
    ``sequence_ranks``: numbers of ranks that may share each sequence
    (``Workload.sequence_sharings``).  ``packed_lengths``: samples that lie end to end in rows of ``sequence_length``
    tokens, told to the attention kernel (``parse_packed_lengths``).  Models of the catalogue in full training need no
    torch; others are traced, which does.  Raises CatalogueError, FileError or WorkloadError.
    """
    if not isinstance(name_or_path, str | Path):
        raise wrong_name(name_or_path, "a model, or the path of its config.json or of a saved workload")
    asked = WorkloadRequest(
        str(name_or_path),
        batch_size=batch_size,
        sequence_length=sequence_length,
        dtype=dtype,
        options=options,
        device=None if hardware is None else hardware.device,
        packed_lengths=packed_lengths,
        mlp_tiles=mlp_tiles,
        loss_tiles=loss_tiles,
        sequence_ranks=sequence_ranks,
    )
    return resolve_workload(asked)


def _ignore(_: str) -> None:
    """Warnings say why something takes long; who calls from Python waits anyway."""


def resolve_workload(asked: WorkloadRequest, *, cache: Path | None = None, warn: Warn = _ignore) -> Workload:
    """The workload that is asked for: saved, known, or traced.

    A student's is not traced where the model is one of the catalogue and the student's blocks have its sizes
    (``catalogue_pairs.py``).  ``cache`` is the folder of traced workloads; None: trace anew and keep nothing.  ``warn``
    gets a message if that folder cannot be written; that a model is traced is ordinary.

    Raises ProtwinError if the model is unknown, its file is damaged, or the shape is missing (configurations) or
    another one (saved workloads).
    """
    model, dtype, device = asked.model, asked.dtype, asked.device
    saved = _saved_workload(model)
    if saved is not None:
        return _as_asked(saved, asked)
    _check_goes_together(asked)
    if dtype is not None:
        choose_dtype(None, dtype, device)  # refused before any file is read
    described = load_model_configuration(model)
    chosen = choose_dtype(published_dtype(described.config), dtype, device)
    is_published = dtype is None and chosen.origin is DTypeOrigin.PUBLISHED
    request = _request(asked, described, None if is_published else chosen.dtype)
    found = shipped_workload(described, request) if known_model(model) is not None else None
    return chosen.note_in(found if found is not None else _traced(request, cache, warn), described.config)


def _as_asked(saved: Workload, asked: WorkloadRequest) -> Workload:
    """``saved``.  Raises WorkloadError if something else is asked for than the workload that was saved."""
    check_saved(saved, asked.model, asked.options, asked.student)
    if asked.packed_lengths is not None:
        raise WorkloadError(
            f"{asked.model} is a workload, whose samples lie in rows as they were traced. Leave --packed-lengths out, "
            f"or name the model that it was traced from."
        )
    check_tiles(saved, asked.model, asked.mlp_tiles, asked.loss_tiles, asked.sequence_ranks)
    _check_shape(
        saved, asked.model, batch_size=asked.batch_size, sequence_length=asked.sequence_length, dtype=asked.dtype
    )
    return saved


def _check_goes_together(asked: WorkloadRequest) -> None:
    """Raise WorkloadError if options are asked for that no workload of a model has together."""
    options, is_learnt = asked.options, asked.student is not None
    others = other_training(options.model_copy(update={"autocast": None, "autocast_cache": True}))
    others += ["--loss"] if options.other_loss is not None else []
    others += ["--keeps-outputs"] if options.keeps_outputs else []
    if is_learnt and others:
        raise WorkloadError(
            f"a student's file says what of it is learnt, block by block. Leave out {listed(others)}, or --student."
        )
    if options.is_lowered and (is_learnt or _beside_one(asked.sequence_ranks)):
        how = "learns from another model" if is_learnt else "shares its sequences among ranks"
        raise WorkloadError(
            f"--compile and --float8 say how a model's own training is computed, but this one {how}. Leave them out."
        )
    if options.other_loss is not None:
        checked_loss_head(options.other_loss, asked.sequence_ranks)
    mlp_counts, loss_counts = _beside_one(asked.mlp_tiles), _beside_one(asked.loss_tiles)
    if is_learnt and (mlp_counts or loss_counts):
        counts = {"mlp_tiles": mlp_counts, "loss_tiles": loss_counts}
        tiles = [f"{knob} {', '.join(map(str, numbers))}" for knob, numbers in counts.items() if numbers]
        raise WorkloadError(
            f"tiles are asked for ({listed(tiles)}), but blocks that learn from a teacher's have none. Leave them out, "
            f"or --student."
        )


def _request(asked: WorkloadRequest, described: ModelConfiguration, dtype: DType | None) -> TraceRequest:
    """What to trace, or to find among what was traced.  Raises WorkloadError if the batch has no shape."""
    batch_size, sequence_length = asked.batch_size, asked.sequence_length
    if batch_size is None or (sequence_length is None and _has_sequence(described)):
        options, names = f"--batch-size {batch_size or 1}", "batch_size"
        if _has_sequence(described):
            options += f" --sequence-length {sequence_length or _usual_length(described)}"
            names += " and sequence_length"
        raise WorkloadError(f"{asked.model} fixes no batch. Say its shape, for example {options} (in Python {names}).")
    return TraceRequest(
        described.config,
        described.name,
        batch_size,
        sequence_length,
        dtype,
        asked.options,
        asked.device_kind if asked.device is None else asked.device.kind,
        asked.student,
        asked.code,
        _packing(described, asked.packed_lengths, sequence_length, asked.student),
        _beside_one(asked.mlp_tiles),
        _beside_one(asked.loss_tiles),
        _beside_one(asked.sequence_ranks),
    )


def _usual_length(described: ModelConfiguration) -> int:
    """Tokens that people train on, if the model has positions for as many."""
    known = (described.config.get(name) for name in ("max_position_embeddings", "n_positions"))
    return min([2048, *(length for length in known if isinstance(length, int) and length > 0)])


def _packing(
    described: ModelConfiguration, lengths: str | None, sequence_length: int | None, student: Student | None
) -> Packing | None:
    """Raises WorkloadError if there is no row for samples, or if they are learnt from."""
    if lengths is None:
        return None
    if student is not None or sequence_length is None:
        reason = "reads no sequences" if student is None else "is a teacher, whose rows are one sample each"
        raise WorkloadError(f"packed lengths are {lengths}, but {described.name} {reason}. Leave --packed-lengths out.")
    return parse_packed_lengths(lengths, sequence_length)


def _beside_one(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(counts) - {1}))


def untraced_workload(asked: WorkloadRequest) -> Workload | None:
    """The workload of a model of the catalogue as ``resolve_workload`` has it, where that takes no trace; else None.

    For batches that nobody has asked for.  Raises WorkloadError if the model has none of this shape.
    """
    if known_model(asked.model) is None:
        return None
    described = load_model_configuration(asked.model)
    chosen = choose_dtype(published_dtype(described.config), asked.dtype, asked.device)
    found = shipped_workload(described, _request(asked, described, chosen.dtype))
    return None if found is None else chosen.note_in(found, described.config)


def is_saved_workload(model: str) -> bool:
    """Whether ``model`` names the file of a workload, which has one shape."""
    return _saved_workload(model) is not None


def saved_sizes(model: str, global_batch: int, num_ranks: int = 1) -> tuple[int, ...] | None:
    """The one size that a saved workload's micro-batches have; None for models that have a workload at any size.

    Raises WorkloadError if it does not divide each rank's part of ``global_batch``.
    """
    saved = _saved_workload(model)
    if saved is None:
        return None
    samples, of_one = saved.num_samples, global_batch // num_ranks
    if of_one % samples:
        part = f"each rank's {of_one} of " if num_ranks > 1 else ""
        raise WorkloadError(
            f"{model} is a workload of {samples} samples, which do not divide {part}the global batch of "
            f"{global_batch}. Choose a multiple of {samples * num_ranks}, or name the model that it was traced from."
        )
    return (samples,)


def _traced(request: TraceRequest, cache: Path | None, warn: Warn) -> Workload:
    """The workload from the cache, else from a trace, which is then kept."""
    if cache is None:
        return _trace(request)
    key = cache_key(request)
    found = load_cached(cache, key)
    if found is None:
        found = _trace(request)
        try:
            store_cached(cache, key, found)
        except FileError as error:
            warn(f"the traced workload is not kept: {error}")
    return found


def usual_shape(model: str) -> tuple[int, int | None]:
    """Samples and tokens of a small batch of a model: one sample, of 2,048 tokens or as many as the model takes.

    None for models of images alone.  Raises CatalogueError or FileError.
    """
    described = load_model_configuration(model)
    longest = [described.config[field] for field in _LONGEST_FIELDS if isinstance(described.config.get(field), int)]
    return 1, min([_USUAL_LENGTH, *longest]) if _has_sequence(described) else None


def _has_sequence(described: ModelConfiguration) -> bool:
    """Whether a batch is guaranteed to have a second dim.

    Images have none, and what a family without a vocabulary of its own reads the trace alone knows.
    """
    return "vocab_size" in described.config


def _saved_workload(model: str) -> Workload | None:
    """The workload in the file ``model``; None if that is a catalogue name, no file, or a file of something else."""
    if known_model(model) is not None or not os.path.isfile(model):
        return None
    content = read_mapping(model)
    return Workload.from_mapping(content, origin=model) if content.get("kind") == Workload.KIND else None


def _trace(request: TraceRequest) -> Workload:
    with progress_bar(f"tracing {request.name}") as on_progress:
        is_full = request.student is None
        names = ("mlp_tiles", "loss_tiles", "sequence_ranks", "packing")
        tiles = {name: getattr(request, name) for name in names}
        try:
            traced = plugin("protwin.tracers", "transformers" if is_full else "students")(
                request.configuration,
                name=request.name,
                batch_size=request.batch_size,
                sequence_length=request.sequence_length,
                dtype=request.dtype,
                device_kind=request.device_kind,
                on_progress=on_progress,
                options=request.options,
                **(tiles if is_full else {"student": request.student, "code": request.code}),
            )
        except ModuleNotFoundError as error:
            error.add_note(f"{_beyond_shipped(request)} is known by a trace alone")
            raise
    assert isinstance(traced, Workload)
    return traced


def _beyond_shipped(request: TraceRequest) -> str:
    """What is asked for that is traced, in words."""
    parts = []
    if request.sequence_ranks:
        numbers = " and ".join(map(str, request.sequence_ranks))
        parts.append(f"with {numbers} ranks that share each sequence (--sequence-ranks)")
    if request.mlp_tiles or request.loss_tiles:
        parts.append("in tiles (--mlp-tiles, --loss-tiles)")
    options = request.options.model_dump(exclude_defaults=True)
    parts += [f"with {', '.join(name.replace('_', ' ') for name in options)}"] if options else []
    return " ".join([request.name, *(["of such a batch"] if not parts else [" and ".join(parts)])])


def _check_shape(
    workload: Workload, origin: str, *, batch_size: int | None, sequence_length: int | None, dtype: str | None
) -> None:
    """Raise WorkloadError if the user asks for another shape than the saved one."""
    found = {
        "--batch-size": (batch_size, workload.num_samples),
        "--sequence-length": (sequence_length, workload.num_tokens // workload.num_samples),
        "--dtype": (dtype, str(workload.compute_dtype)),
    }
    for option, (asked, saved) in found.items():
        if asked is not None and asked != saved:
            raise WorkloadError(
                f"{origin} is a workload of {option} {saved}, but {asked} is asked for. Leave {option} out, "
                f"or trace the model anew."
            )
