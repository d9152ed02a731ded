"""A model that is trained for a measurement, and is to be afterwards what it was, to the bit.

[Note: Weights in a file]
Training changes weights, and a copy of them in memory would be a second one.  So they are written to a file before the
first step, and read back into their places after the last one, whatever has happened in between: an error may leave
parameters half stepped, or NaN where a disk has failed.  Parameters on the meta device have their values in other files
already, and go back there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import BinaryIO

import torch
from torch import nn

from ...shared.basics.errors import FileError
from ...shared.basics.units import format_bytes
from ..chunks.meta_parameters import set_values
from ..model.kept_tensors import attributes_as_found
from ..model.ownership import check_untaken
from ..model.snapshot import left_as_found
from ..model.strides import in_memory_order

_STRETCH_BYTES = 2**26
"""What is copied from a device at once."""


@contextmanager
def trained_as_found(model: nn.Module, *, folder: str | Path | None = None) -> Iterator[None]:
    """Within the block the model is trained; afterwards it is bit for bit what it was, whether or not that has failed.

    Weights, gradients, buffers, attributes, hooks on forward, training flags, ``use_cache``, and the random states of
    Python, numpy and torch.  Trainings within the block are to be closed when it ends.  The weights are in a file in
    ``folder`` meanwhile, by default that of temporary files: as many bytes as they have (Note: Weights in a file).
    Parameters and modules stay the same objects; weights may lie at another address.  Raises FileError if there is no
    room, or if the file cannot be read back, and PlanError if a plan is being carried out on the model.
    """
    check_untaken(model)
    with ExitStack() as undo:
        undo.enter_context(attributes_as_found(model))
        undo.enter_context(left_as_found(model))
        undo.enter_context(_weights_as_found(model, Path(folder or gettempdir())))
        yield


@contextmanager
def _weights_as_found(model: nn.Module, folder: Path) -> Iterator[None]:
    parameters = list(model.parameters())
    places = [parameter.device for parameter in parameters]
    kept = [parameter for parameter in parameters if not parameter.is_meta]
    with ExitStack() as undo:
        file = undo.enter_context(_opened(folder))
        try:
            for parameter in kept:
                _write(file, parameter)
            file.flush()
        except OSError as error:
            size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in kept)
            raise FileError(
                f"the model's weights ({format_bytes(size_bytes)}) cannot be kept in {folder} while it is trained: "
                f"{error.strerror or error}. Name a folder with room for them."
            ) from error
        try:
            yield
        finally:
            try:
                file.seek(0)
                for parameter in kept:
                    _read(file, parameter)
            except OSError as error:
                raise FileError(
                    f"the model's weights cannot be read back from {folder}: {error.strerror or error}. They are those "
                    f"of a short training now; load the model again."
                ) from error
            finally:
                for parameter, place in zip(parameters, places, strict=True):
                    if place.type == "meta" and not parameter.is_meta:
                        set_values(parameter, parameter.detach().to("meta"))


def _opened(folder: Path) -> BinaryIO:
    try:
        return TemporaryFile(dir=folder)
    except OSError as error:
        raise FileError(
            f"the model's weights cannot be kept in {folder} while it is trained: {error.strerror or error}. Name "
            f"another folder."
        ) from error


def _stretches(parameter: nn.Parameter) -> Iterator[torch.Tensor]:
    """(n,) views of the bytes of a dense parameter, as they lie in memory."""
    flat = in_memory_order(parameter.detach()).view(torch.uint8)
    return iter(torch.split(flat, _STRETCH_BYTES))


def _write(file: BinaryIO, parameter: nn.Parameter) -> None:
    for stretch in _stretches(parameter):
        file.write(stretch.cpu().numpy().data)


def _read(file: BinaryIO, parameter: nn.Parameter) -> None:
    for stretch in _stretches(parameter):
        read = torch.empty(stretch.numel(), dtype=torch.uint8) if stretch.is_cuda else stretch
        view, done = read.numpy().data, 0
        while done < len(view):
            if (more := file.readinto(view[done:])) == 0:  # type: ignore[attr-defined]
                raise OSError("the file has become shorter")
            done += more
        if read is not stretch:
            stretch.copy_(read)
