"""From a model's configuration to a Workload, without weights: the model is built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import WorkloadError
from ...shared.basics.gc_pause import gc_paused
from ...shared.schema.hardware import DeviceKind
from ...shared.schema.training_options import FULL_TRAINING, TrainingOptions
from ...shared.schema.workload import DType, Workload
from ...shared.workloads.family import BATCH_SIZE, MAX_TOKENS, SEQUENCE_LENGTH, TARGET_LENGTH, Limit
from ..model.adapters import add_lora, freeze
from ..model.configurations import build_model, quiet, training_dtype
from ..model.heads import Head, Labels, head_of
from .tracing import trace

_LEARNED_POSITIONS: Final = ("bert", "gpt2", "gpt_neo", "opt")
"""Families whose table of positions ends."""
_AUTOCAST: Final = (DType.BFLOAT16, DType.FLOAT16)


@gc_paused()
def workload_of_configuration(
    configuration: Mapping[str, Any],
    *,
    name: str,
    batch_size: int,
    sequence_length: int | None,
    dtype: str | None = None,
    options: TrainingOptions = FULL_TRAINING,
    device_kind: DeviceKind = DeviceKind.CUDA,
    on_progress: Callable[[int, int], None] | None = None,
) -> Workload:
    """The workload of training the model that a Hugging Face ``config.json`` describes.

    ``dtype`` overrides the configuration's; without either, float32.  Batches are unpadded; models of images have no
    ``sequence_length``.  ``device_kind`` is what it is to train on.  Raises WorkloadError if transformers is missing,
    refuses the configuration, or the shape makes no sense for the model.
    """
    if batch_size < 1 or (sequence_length or 1) < 1 or batch_size * (sequence_length or 1) > MAX_TOKENS:
        raise WorkloadError(
            f"a batch of {batch_size} x {sequence_length} tokens cannot be traced; both must be positive and their "
            f"product at most 2**40."
        )
    model = configured_model(configuration, name, dtype, options)
    given = {BATCH_SIZE: batch_size, SEQUENCE_LENGTH: sequence_length, TARGET_LENGTH: sequence_length}
    check_limits(model, name, given)
    with quiet(), autocast_of(options):
        return trace(model, batch_of(model, given), name=name, device_kind=device_kind, on_progress=on_progress)


def configured_model(
    configuration: Mapping[str, Any], name: str, dtype: str | None, options: TrainingOptions
) -> nn.Module:
    """The model on the meta device, with what ``options`` add and freeze.  Raises WorkloadError."""
    model: nn.Module = build_model(configuration, name, training_dtype(configuration, dtype))
    apply_options(model, options)
    return model


def apply_options(model: nn.Module, options: TrainingOptions) -> None:
    """Add what ``options`` add to ``model`` and freeze what they freeze, in place.  Raises WorkloadError."""
    if options.lora is not None:
        add_lora(model, rank=options.lora.rank, targets=options.lora.targets)
    freeze(model, options.frozen)


def autocast_of(options: TrainingOptions) -> AbstractContextManager[Any]:
    """What forward runs within.  Raises WorkloadError if nothing computes in that element type."""
    if options.autocast is None:
        return nullcontext()
    if options.autocast not in _AUTOCAST:
        raise WorkloadError(f"autocast to {options.autocast} is not known; use {' or '.join(_AUTOCAST)}.")
    return torch.autocast("cpu", dtype=getattr(torch, options.autocast))


def variables_of(model: Any) -> tuple[str, ...]:
    """What the shape of the model's batch is made of."""
    if model.main_input_name == "pixel_values":
        return (BATCH_SIZE,)
    has_targets = model.config.is_encoder_decoder and head_of(model) is Head.TOKENS
    return (BATCH_SIZE, SEQUENCE_LENGTH, *((TARGET_LENGTH,) if has_targets else ()))


def limits_of(model: Any) -> tuple[Limit, ...]:
    """The longest sequence that the model has positions for."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if model.config.model_type not in _LEARNED_POSITIONS or limit is None:
        return ()
    return (Limit(variable=SEQUENCE_LENGTH, most=limit, reason=f"has learned positions for {limit} tokens"),)


def check_limits(model: Any, name: str, given: Mapping[str, int | None]) -> None:
    """Raise WorkloadError if the model cannot take a batch of this shape; the message names the field."""
    wanted = variables_of(model)
    for variable in (BATCH_SIZE, SEQUENCE_LENGTH):
        if variable in wanted and given[variable] is None:
            raise WorkloadError(f"{variable} is missing; {name} is trained on sequences. State it.")
        if variable not in wanted and given[variable] is not None:
            raise WorkloadError(f"{variable} is {given[variable]}, but {name} reads images. Leave it out.")
    for limit in limits_of(model):
        value = given[limit.variable]
        if value is not None and value > limit.most:
            raise WorkloadError(f"{name} {limit.reason} but {limit.variable} is {value}. Lower it.")


def batch_of(model: Any, given: Mapping[str, int | None]) -> dict[str, torch.Tensor]:
    """A batch of that shape on the meta device, as the model is trained on.

    Raises WorkloadError if the configuration does not say how many choices a sample has.
    """
    batch_size, length = given[BATCH_SIZE] or 0, given[SEQUENCE_LENGTH] or 0
    labels = Labels.of(model)
    if model.main_input_name == "pixel_values":
        config = model.config
        dims = config.image_size if isinstance(config.image_size, (list, tuple)) else (config.image_size,) * 2
        inputs = {"pixel_values": _empty((batch_size, config.num_channels, *dims), model.dtype)}
    else:
        choices = (labels.num_choices,) if labels.head is Head.CHOICES else ()
        inputs = {"input_ids": _empty((batch_size, *choices, length), torch.long)}
    target = TARGET_LENGTH if TARGET_LENGTH in variables_of(model) else SEQUENCE_LENGTH
    shapes = labels.shapes(batch_size, length, given[target] or 0)
    dtype = torch.float32 if labels.is_figures else torch.long
    return inputs | {name: _empty(shape, dtype) for name, shape in shapes.items()}


def _empty(dims: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype, device="meta")
