"""A checkpoint's weights as others read them: safetensors in shards with an index, written one tensor at a time.

[Note: Safetensors by themselves]
The library writes a file from tensors that are all in memory.  The format is simple enough to be written one tensor
after the other: eight bytes with the length of a header, the header as JSON, and the scalars side by side, little
endian.  The library reads it back, in ``from_pretrained`` too.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from ...shared.basics.documents import Document
from ...shared.basics.progress import OnProgress
from ..checkpoints.files import sync, write
from ..checkpoints.manifest import CONFIGURATION, WEIGHTS
from ..checkpoints.published import new_folder
from ..checkpoints.saved import Described, size_bytes_of
from ..checkpoints.saved_by_ranks import open_checkpoint

_NAMES: Final = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""Element types as safetensors calls them."""
_PATTERN: Final = "model{suffix}.safetensors"


class ConsolidatedWeights(Document):
    """A folder of weights that was written."""

    KIND: ClassVar[str] = "consolidated_weights"

    files: dict[str, int]
    """The bytes of each file of weights, by its name."""

    @classmethod
    def of(cls, files: Iterable[Path]) -> ConsolidatedWeights:
        """What ``consolidate`` has given."""
        return cls(files={file.name: file.stat().st_size for file in files})


def consolidate(folder: Path, into: Path, *, max_shard_bytes: int, on_progress: OnProgress) -> list[Path]:
    """Write the weights of the checkpoint in ``folder`` to the new folder ``into``; gives the files of weights.

    Parameters and persistent buffers, those of rank 0, in files of at most ``max_shard_bytes`` or of one tensor each,
    and ``model.safetensors.index.json`` if they are several, beside the model's configuration: what ``from_pretrained``
    reads.  Of a distillation these are the student's, without a configuration if its blocks have shapes of their own.
    One tensor is in memory at a time.  ``into`` is there when it is complete.  Raises FileError if the checkpoint is
    damaged, or ``into`` is not free or cannot be written.
    """
    # It takes half a second to import, and comes with transformers.
    from huggingface_hub import split_state_dict_into_shards_factory

    saved = open_checkpoint(folder)
    left_out, weights = saved.manifest.left_out, saved.weights
    full = {name if left_out is None else left_out.short(name): name for name in weights}
    described = {name: weights[of_training] for name, of_training in full.items()}
    split = split_state_dict_into_shards_factory(
        described, get_storage_size=size_bytes_of, filename_pattern=_PATTERN, max_shard_size=max_shard_bytes
    )
    total_bytes = sum(map(size_bytes_of, described.values()))
    done_bytes = 0

    def read(name: str) -> torch.Tensor:
        nonlocal done_bytes
        done_bytes += size_bytes_of(described[name])
        on_progress(done_bytes, total_bytes)
        return saved.weight(full[name])

    with new_folder(into, total_bytes) as part:
        for file, names in split.filename_to_tensors.items():
            write_safetensors(part / file, {name: described[name] for name in names}, read)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            write(part / f"{WEIGHTS}.index.json", json.dumps(index, indent=2, sort_keys=True).encode())
        if CONFIGURATION in saved.manifest.files:
            shutil.copyfile(saved.path / CONFIGURATION, part / CONFIGURATION)
    return [into / file for file in split.filename_to_tensors]


def write_safetensors(path: Path, described: Mapping[str, Described], read: Callable[[str], torch.Tensor]) -> None:
    """Write a file of tensors, each of which is read when it is its turn.  Raises OSError.

    Their order in the file is by size of their scalars, the widest first, so that all are aligned.
    """
    order = sorted(described, key=lambda name: (-described[name][1].itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        shape, dtype = described[name]
        begin, end = end, end + size_bytes_of(described[name])
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            stream.write(bytes_of(read(name)))
        sync(stream)


def bytes_of(tensor: torch.Tensor) -> Any:
    """The scalars of a tensor as they lie in a contiguous one."""
    assert sys.byteorder == "little"
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
