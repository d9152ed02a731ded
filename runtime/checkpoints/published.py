"""A finished model as others read it: the folder that ``from_pretrained`` takes, or the adapter beside a base model.

Adapters are written in PEFT's form (``adapter_config.json``, ``adapter_model.safetensors``), for its
``PeftModel.from_pretrained``: h = W x + (lora_alpha / r) B A x, with the matrices under the names of their maps.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import safetensors
import torch
from safetensors.torch import save_file
from torch import nn

from ...shared.basics.disk_space import why_unwritable
from ...shared.basics.errors import FileError
from ..model.adapters import LowRankLinear
from ..model.configurations import quiet
from ..model.heads import reads_forward
from ..model.pretrained import no_progress_bar
from ..osft.orthogonal_model import dense_state_dict, orthogonal_maps
from .folder import sync_folder

_PREFIX: Final = "base_model.model."
"""Of PEFT's own modules around the model."""


def check_free(folder: Path) -> None:
    """Raise FileError unless ``folder`` can become a new one: it is missing or empty, and can be made."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "a file" if not folder.is_dir() else "not empty"
        raise FileError(f"{folder} is {what}. Name a new folder for the finished model.")
    above = next(place for place in folder.resolve().parents if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise FileError(f"{folder} cannot be written: {above} is not writable for you. Name another folder.")


def save_published(folder: Path, model: Any, tokenizer: Any | None, *, base: str) -> None:
    """Write ``model``, a model of transformers, and its tokenizer into the new folder ``folder``.

    Of a model with low-rank matrices these alone are written; ``base`` is what they were trained beside.  Factorised
    maps are written as dense ones.  The folder
    is there when it is complete.  Raises FileError if it cannot be written, or is not free.
    """
    adapted = {path: part for path, part in model.named_modules() if isinstance(part, LowRankLinear)}
    need_bytes = sum(p.nbytes for p in model.parameters() if not adapted or p.requires_grad)
    with new_folder(folder, need_bytes) as part, quiet(), no_progress_bar():
        if adapted:
            _save_adapter(part, adapted, base, is_causal=reads_forward(model))
        else:
            # Of factorised maps the dense weights: whoever loads them knows of no factors.
            dense = dense_state_dict(model) if orthogonal_maps(model) else None
            model.save_pretrained(part, state_dict=dense)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)


@contextmanager
def new_folder(folder: Path, need_bytes: int) -> Iterator[Path]:
    """A folder to write into, which becomes ``folder`` when the block ends, its files on the disk."""
    check_free(folder)
    path = folder.resolve()
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        yield part
        for written in part.rglob("*"):
            if written.is_file():
                with written.open("rb+") as stream:
                    os.fsync(stream.fileno())
        sync_folder(part)
        os.rename(part, path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            shutil.rmtree(part)
        if isinstance(error, OSError | safetensors.SafetensorError):
            raise FileError(why_unwritable(folder, error, need_bytes=need_bytes)) from error
        raise


def _save_adapter(folder: Path, adapted: dict[str, LowRankLinear], base: str, *, is_causal: bool) -> None:
    first = next(iter(adapted.values()))
    rank = first.lora_a.shape[0]
    alpha = float(first.alpha)
    configuration = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if is_causal else None,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "use_rslora": first.options.use_rslora,
        "lora_dropout": first.options.dropout,
        "use_dora": first.options.use_dora,
        "bias": "none",
        "fan_in_fan_out": any(not isinstance(part.base, nn.Linear) for part in adapted.values()),
        "target_modules": sorted(adapted),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(configuration, indent=2) + "\n", encoding="utf-8")
    weights: dict[str, torch.Tensor] = {}
    for path, part in adapted.items():
        weights[f"{_PREFIX}{path}.lora_A.weight"] = part.lora_a.detach().cpu().contiguous()
        weights[f"{_PREFIX}{path}.lora_B.weight"] = part.lora_b.detach().cpu().contiguous()
        if part.options.use_dora:
            weights[f"{_PREFIX}{path}.lora_magnitude_vector"] = part.lora_magnitude.detach().cpu().contiguous()
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
