"""A checkpoint that several ranks write together, each its own part, into one folder that all of them see.

| file | who writes it | what it holds |
| --- | --- | --- |
| ``__R_0.distcp`` | rank R | its stretches of parameters, masters and optimizer state (``pieces``) |
| ``rank-R.pt`` | rank R | random states, data position, extra state; buffers, but for those that are as rank 0's |
| ``.metadata`` | rank 0 | torch's index of all pieces |
| ``training.pt`` | rank 0 | what all ranks have in common: step, knobs, scheduler, groups, shapes |
| ``config.json`` | rank 0 | of a transformers model, its configuration |
| ``checkpoint.json`` | rank 0, last | the manifest |

Parameters that are whole on every rank are written by one each, so that all write about as much.  Ranks of a pipeline
have some blocks each, which nobody else could write; their checkpoint is one of the whole.  Every rank hashes its own
files.  What one rank cannot write, none has written: the folder is replaced by rank 0 when all are done.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from ...shared.basics.disk_space import why_unwritable
from ...shared.basics.errors import FileError
from ..model.identity import software_versions
from ..model.nested_tensors import storage_bytes, tensors_in
from ..ranks.agreement import agree, agreed
from ..ranks.world import World, exchanged
from .files import pack, write
from .folder import replaced_folder
from .joined_stages import common_of_stages
from .manifest import (
    CONFIGURATION,
    INDEX,
    KNOWN,
    MANIFEST,
    TRAINING,
    LeftOut,
    Manifest,
    SavedFile,
    piece_file,
    rank_file,
    saved_file,
)
from .pieces import PieceWriter, Stretch


@dataclass(frozen=True, slots=True)
class RankContent:
    """What one rank gives to a checkpoint."""

    model_hash: str
    model_name: str
    step: int
    stretches: Sequence[Stretch]
    values: Mapping[str, Callable[[], Any]]
    """What of the optimizer's state is no stretch, by name."""
    common: Mapping[str, Any]
    """Equal on all ranks, or joined from all stages; rank 0's is written."""
    own: Mapping[str, Any]
    buffers: Mapping[str, torch.Tensor]
    """Those that ``state_dict`` does not hold."""
    persistent: Mapping[str, torch.Tensor]
    """Those that it holds."""
    configuration: str | None = None
    left_out: LeftOut | None = None
    """What it does not hold, if it does not hold everything."""
    num_stages: int = 1
    """Stages of a pipeline: neighbouring ranks have some blocks each (``joined_stages``)."""

    @property
    def size_bytes(self) -> int:
        """About what it needs on the disk, if nobody else has any of it."""
        in_pieces = sum(stretch.count * stretch.dtype.itemsize for stretch in self.stretches)
        return in_pieces + storage_bytes(tensors_in([self.own, self.buffers, self.persistent]))


_TOKEN: Final = ".token"
"""The file by which ranks see whether they look at one folder."""


def write_by_ranks(world: World, folder: str | Path, content: RankContent) -> None:
    """Write what all ranks give into ``folder``, in the place of the checkpoint that is there; to be called on all.

    Every file and folder is synced.  Raises, on all ranks alike, FileError if one of them cannot write, if they do not
    see the same folder, or if its content could not be read back, PlanError if they differ in what they have in common,
    and RanksError if one of them ends; ``folder`` is as it was then.
    """
    if content.num_stages > 1:
        content = replace(content, common=common_of_stages(world, content.common, content.num_stages))
    agree(world, {"the folder of the checkpoint": str(Path(folder).resolve())} | _facts(content))
    need_bytes = sum(exchanged(world, content.size_bytes))
    with ExitStack() as stack:

        def begin() -> tuple[Path, str] | None:
            if world.rank:
                return None
            part = stack.enter_context(replaced_folder(folder, manifest=MANIFEST, known=KNOWN, need_bytes=need_bytes))
            token = secrets.token_hex()
            with _telling(folder, need_bytes):
                write(part / _TOKEN, token.encode())
            return part, token

        first = exchanged(world, agreed(world, begin))[0]
        assert first is not None
        part, token = first
        agreed(world, lambda: _check_shared(part, token))
        _write_parts(world, folder, part, content, need_bytes)
        # Complete: the folder takes its place.
        agreed(world, stack.close)


def _facts(content: RankContent) -> dict[str, str]:
    """What would be lost of every rank but rank 0."""
    common = content.common
    return {
        "the step": str(content.step),
        "the scheduler's state": str(common["scheduler"]),
        "the scale of losses": str(common["loss_scaler"]),
        "the options of parameter groups": str([group["options"] for group in common["optimizer"]["groups"]]),
    }


def _check_shared(part: Path, token: str) -> None:
    """Raise FileError unless this rank sees what rank 0 has written."""
    try:
        seen = (part / _TOKEN).read_text()
    except OSError as error:
        seen, reason = "", f": {error.strerror or error}"
    else:
        reason = ""
    if seen != token:
        raise FileError(
            f"{part.parent} is not the folder that rank 0 sees under this name{reason}. Name one on a file system that "
            f"all ranks share."
        )


def _write_parts(world: World, folder: str | Path, part: Path, content: RankContent, need_bytes: int) -> None:
    """All files, the manifest last."""
    rank = world.rank
    hashes = exchanged(world, {name: _hash(buffer) for name, buffer in _all_buffers(content).items()})
    writer = PieceWriter(part, content.stretches, content.values)
    plans = exchanged(world, writer.plan())

    def write_own() -> tuple[Any, dict[str, SavedFile]]:
        with _telling(folder, need_bytes):
            own = _own_file(content, {} if rank == 0 else hashes[0])
            pack(part / rank_file(rank), own, "data_position, or a module's extra state")
            results = writer.write(rank, plans)
            return results, {name: saved_file(part / name) for name in (rank_file(rank), piece_file(rank))}

    written = exchanged(world, agreed(world, write_own))

    def write_common() -> None:
        if rank:
            return
        with _telling(folder, need_bytes):
            (part / _TOKEN).unlink()
            writer.finish([results for results, _ in written])
            pack(part / TRAINING, content.common, "the scheduler's state or options of the optimizer")
            if content.configuration is not None:
                write(part / CONFIGURATION, content.configuration.encode())
            names = [INDEX, TRAINING, *([] if content.configuration is None else [CONFIGURATION])]
            files = {name: saved_file(part / name) for name in names}
            for _, of_rank in written:
                files |= of_rank
            facts = (content.model_hash, content.model_name, content.step)
            write_manifest(part, *facts, files, world.num_ranks, content.left_out)

    agreed(world, write_common)


def write_manifest(
    part: Path,
    model_hash: str,
    model_name: str,
    step: int,
    files: Mapping[str, SavedFile],
    num_ranks: int,
    left_out: LeftOut | None,
) -> None:
    """Write the manifest of ``files``.  Raises OSError."""
    manifest = Manifest(
        model_hash=model_hash,
        model_name=model_name,
        step=step,
        num_ranks=num_ranks,
        left_out=left_out,
        software=software_versions(),
        files=dict(sorted(files.items())),
    )
    write(part / MANIFEST, manifest.sealed().to_json().encode())


def _own_file(content: RankContent, of_rank_0: Mapping[str, str]) -> dict[str, Any]:
    """The content of the rank's file: buffers that are as rank 0's are left out."""
    kinds = {"buffers": content.buffers, "persistent": content.persistent}
    changed = {
        kind: {name: buffer for name, buffer in buffers.items() if of_rank_0.get(name) != _hash(buffer)}
        for kind, buffers in kinds.items()
    }
    return {**content.own, **changed}


def _all_buffers(content: RankContent) -> dict[str, torch.Tensor]:
    return {**content.buffers, **content.persistent}


def _hash(buffer: torch.Tensor) -> str:
    data = buffer.contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(f"{buffer.dtype} {tuple(buffer.shape)} ".encode() + data.numpy().tobytes()).hexdigest()


@contextmanager
def _telling(folder: str | Path, need_bytes: int) -> Iterator[None]:
    """Within the block, what cannot be written is a FileError; nothing has become of it."""
    try:
        yield
    except OSError as error:
        raise FileError(
            f"{why_unwritable(folder, error, need_bytes=need_bytes)} What was there before is as it was."
        ) from error
