"""From what a user calls a model to its workload: a saved workload, a configuration, or a name of the catalogue.

The trace of a configuration needs torch and lives in another folder, which names it in the entry-point group
``protwin.tracers``; it is imported only when nothing cheaper answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ..shared.errors import FileError, WorkloadError
from ..shared.files import read_mapping
from ..shared.models import model_configuration, read_model_configuration
from ..shared.workload import Workload
from .workload_cache import cache_key, load_cached, store_cached

Warn = Callable[[str], None]


def resolve_workload(
    model: str,
    *,
    batch_size: int | None,
    sequence_length: int | None,
    dtype: str | None,
    cache: Path | None,
    warn: Warn,
) -> Workload:
    """The workload that ``model`` names: a saved workload's path, a configuration's path, or a catalogue name.

    ``cache`` is the folder of traced workloads; None: trace anew and keep nothing.  ``warn`` gets a message if that
    folder cannot be written.  Raises ProtwinError if the model is unknown, its file is damaged, or the shape is
    missing (configurations) or another one (saved workloads).
    """
    path = Path(model)
    if path.suffix != ".json" and not path.is_file():
        name, configuration = model, model_configuration(model)
    else:
        content = read_mapping(path)
        if "kind" in content and "schema_version" in content:
            workload = Workload.from_mapping(content, origin=model)
            _check_shape(workload, model, batch_size=batch_size, sequence_length=sequence_length, dtype=dtype)
            return workload
        name, configuration = _name_of(path), read_model_configuration(path)
    if batch_size is None or sequence_length is None:
        raise WorkloadError(
            f"{model} is a configuration, which fixes no batch. Say its shape, for example "
            f"--batch-size {batch_size or 1} --sequence-length {sequence_length or 2048}."
        )
    trace = partial(
        _trace, configuration, name=name, batch_size=batch_size, sequence_length=sequence_length, dtype=dtype
    )
    if cache is None:
        return trace()
    key = cache_key(configuration, name=name, batch_size=batch_size, sequence_length=sequence_length, dtype=dtype)
    found = load_cached(cache, key)
    if found is None:
        found = trace()
        try:
            store_cached(cache, key, found)
        except FileError as error:
            warn(f"the traced workload is not kept: {error}")
    return found


def _name_of(path: Path) -> str:
    """A configuration's name: its folder where the file is called ``config.json``, as model folders have it."""
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _trace(
    configuration: Mapping[str, Any], *, name: str, batch_size: int, sequence_length: int, dtype: str | None
) -> Workload:
    tracers = {entry.name: entry for entry in entry_points(group="protwin.tracers")}
    assert "transformers" in tracers, "this package names it"
    traced = tracers["transformers"].load()(
        dict(configuration), name=name, batch_size=batch_size, sequence_length=sequence_length, dtype=dtype
    )
    assert isinstance(traced, Workload)
    return traced


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
