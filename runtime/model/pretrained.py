"""Weights in the Hugging Face form: a folder with ``config.json`` and safetensors files, loaded and checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import safetensors
import torch

from ...shared.basics.errors import FileError
from ...shared.catalogue.own_code import OwnCode
from .configurations import build_model, quiet

_WHOLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_NAMED: Final = 3
"""Parameters that a message names."""
SAVED_DTYPES: Final = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The names that safetensors has for element types of weights that can be trained."""


def load_pretrained(
    folder: Path,
    configuration: Mapping[str, Any],
    name: str,
    dtype: torch.dtype,
    *,
    is_converting: bool,
    code: OwnCode | None = None,
) -> Any:
    """The model of transformers whose weights lie in ``folder``, in ``dtype``, on the host and in training mode.

    It is made without memory and then filled tensor by tensor, so that no weight is there twice.  ``is_converting``:
    weights of another element type are converted; ``code``: files that the model is made by.  Raises FileError if files
    are missing or damaged, if they hold the weights of another model than ``configuration``'s or of another element
    type, and WorkloadError if transformers refuses the configuration.
    """
    twin = build_model(configuration, name, dtype, code=code)
    files = weight_files(folder)
    if not is_converting:
        check_dtypes(folder, files, twin, dtype)
    try:
        with quiet(), no_progress_bar():
            model, found = type(twin).from_pretrained(
                folder,
                config=twin.config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, safetensors.SafetensorError) as error:
        raise FileError(f"the weights in {folder} cannot be loaded: {first_line(error)}") from error
    _check_found(folder, found)
    return model.train()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of ``folder``.  Raises FileError if there are none, or if one of several is missing."""
    if not folder.is_dir():
        raise FileError(f"{folder} is no folder. Name one with config.json and {_WHOLE}.")
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    index = folder / _INDEX
    if not index.is_file():
        raise FileError(
            f"{folder} holds neither {_WHOLE} nor {_INDEX}. Name a folder that save_pretrained() wrote, or save the "
            f"model again with it."
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{index} is damaged: {first_line(error)}. Get the folder again.") from error
    for name in names:
        if not (folder / str(name)).is_file():
            raise FileError(f"{folder} lacks {name}, which {_INDEX} names. Get the folder again.")
    return [folder / str(name) for name in names]


def load_generation(model: Any, folder: Path) -> None:
    """Give ``model``, if it generates, the settings of ``folder`` for that, as ``from_pretrained`` does."""
    from transformers import GenerationConfig

    if not model.can_generate():
        return
    with quiet():
        try:
            settings = GenerationConfig.from_pretrained(folder)
        except OSError:
            # There is no file of them; older folders have them in the model's configuration.
            settings = GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)
    model.generation_config = settings


def check_dtypes(folder: Path, files: Sequence[Path], twin: Any, dtype: torch.dtype) -> None:
    """Raise FileError if a parameter has another element type in the files than in ``twin``."""
    prefix = f"{twin.base_model_prefix}."
    own = {name: parameter.dtype for name, parameter in twin.named_parameters(remove_duplicate=False)}
    wrong: dict[str, list[str]] = {}
    for name, saved in _saved_dtypes(files):
        expected = own.get(name, own.get(prefix + name))
        if expected is not None and saved != str(expected).removeprefix("torch."):
            wrong.setdefault(saved, []).append(name)
    if wrong:
        saved, names = next(iter(wrong.items()))
        wanted = str(dtype).removeprefix("torch.")
        raise FileError(
            f"the weights in {folder} are {saved} ({some(names)}), but the plan is for {wanted}. Search a plan with "
            f"--dtype {saved}, or pass --dtype {wanted} to have them converted."
        )


def _saved_dtypes(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Name and element type of every tensor in the files; reads their heads alone."""
    for path in files:
        try:
            with safetensors.safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    kind = opened.get_slice(name).get_dtype()
                    yield name, SAVED_DTYPES.get(kind, str(kind))
        except (OSError, safetensors.SafetensorError) as error:
            raise FileError(f"{path} cannot be read: {first_line(error)}. Get the file again.") from error


def _check_found(folder: Path, found: Mapping[str, Any]) -> None:
    """Raise FileError unless the files held exactly the weights of the model."""
    reasons = []
    if missing := sorted(found["missing_keys"]):
        reasons.append(f"they lack {some(missing)}")
    if unexpected := sorted(found["unexpected_keys"]):
        reasons.append(f"they have {some(unexpected)} besides")
    if mismatched := sorted(found["mismatched_keys"]):
        name, saved, own = mismatched[0]
        reasons.append(f"{name} is {list(saved)} in them and {list(own)} in the model")
    reasons += [first_line(text) for text in found.get("error_msgs") or ()]
    if reasons:
        raise FileError(
            f"the weights in {folder} are of another model than its config.json: {'; '.join(reasons):.400}. Name a "
            f"folder whose configuration and weights belong together."
        )


def some(names: Sequence[str]) -> str:
    """The first of ``names``, and how many more there are."""
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def first_line(error: object) -> str:
    """What is wrong, in short."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep transformers' bars out of our output."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
