"""Batches for models with random weights: of text where text is all that they read, else with noise to see and hear."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...shared.basics.errors import WorkloadError
from ...shared.families.family import BATCH_SIZE, SEQUENCE_LENGTH, TARGET_LENGTH
from ...shared.schema.training_options import ImageOptions
from ...shared.schema.workload import Workload
from ..data.byte_text import byte_batches, head_batches
from ..data.sources import Batch, DataSource
from ..fakes.models import fake_batch, fake_model
from ..fakes.running import running_fakes
from ..model.batches import BatchRefusedError, batch_shapes, loss_of
from ..model.heads import Head, Labels, reads_more_than_text
from ..timing.within_budget import meta_twin
from ..tracing.configurations import check_limits
from ..tracing.model_inputs import Inputs, ModelInputs

_TOKENS = "input_ids"


def reads_text_alone(model: Any) -> bool:
    """Whether a batch of ``model``, of transformers, is made of text and what follows from it."""
    return getattr(model, "main_input_name", _TOKENS) == _TOKENS and not reads_more_than_text(model)


def random_batches(
    model: Any,
    text: bytes,
    *,
    name: str,
    batch_size: int,
    sequence_length: int | None,
    num_batches: int | None,
    seed: int = 0,
    images: ImageOptions | None = None,
) -> Iterator[dict[str, Any]]:
    """``num_batches`` batches as ``model``, of transformers, is trained on: ``text``, and noise where it sees or hears.

    None of them: endless.  Raises FileError if the text is shorter than one sequence, WorkloadError if no batch of
    this shape can be made.
    """
    if reads_text_alone(model):
        if images is not None:
            ModelInputs(model, images)  # refuses them
        if sequence_length is None:
            raise WorkloadError(f"sequence_length is missing; {name} is trained on text. State it.")
        return head_batches(
            model, text, batch_size=batch_size, sequence_length=sequence_length, num_batches=num_batches, seed=seed
        )
    given = {BATCH_SIZE: batch_size, SEQUENCE_LENGTH: sequence_length, TARGET_LENGTH: sequence_length}
    check_limits(model, name, given)
    inputs = ModelInputs(model, images)
    likeliest = list(inputs.batches(given))
    return _filled(model, inputs, _accepted(model, likeliest), text, num_batches, seed)


def batches_of(
    model: Any,
    workload: Workload,
    text: bytes,
    *,
    num_batches: int | None,
    seed: int = 0,
    images: ImageOptions | None = None,
) -> Iterator[dict[str, Any]]:
    """The same of the shapes that a model which sees or hears was traced with.

    Raises WorkloadError if it was traced with a batch of its own, as which none can be made up.
    """
    inputs, shapes = ModelInputs(model, images), workload.batch_shapes
    lengths = dict.fromkeys((*shapes.get(_TOKENS, ())[-1:], *shapes.get("labels", ())[-1:]))
    lengths |= dict.fromkeys(shape[-1] for shape in shapes.values() if shape)
    has_length = SEQUENCE_LENGTH in inputs.variables
    for length in lengths if has_length else (None,):
        given = {BATCH_SIZE: workload.num_samples, SEQUENCE_LENGTH: length, TARGET_LENGTH: length}
        try:
            likely = [batch for batch in inputs.batches(given) if batch_shapes(batch) == shapes]
        except WorkloadError:
            continue  # Another length may do.
        if likely:
            return _filled(model, inputs, likely[0], text, num_batches, seed)
    stated = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    raise WorkloadError(
        f"the workload's batch ({stated}) is none that is made up for {type(model).__name__}. Trace the model from its "
        f"configuration (protwin trace --model), with the same --image-size and --images as here, or train it with "
        f"batches of its own in Python (protwin.runtime.carry_out)."
    )


@dataclass(frozen=True)
class NoiseSource(DataSource):
    """Pictures or sounds of noise, with a text where the model reads one beside them."""

    model: Any
    """A model of transformers, on any device."""
    workload: Workload
    text: bytes
    seed: int
    images: ImageOptions | None = None
    name = "noise"

    @property
    def identity(self) -> Mapping[str, int | str]:
        """Seed and text, and whose batches they are."""
        return {"seed": self.seed, "text": hashlib.sha256(self.text).hexdigest(), "of": type(self.model).__name__}

    def batches(self, num_before: int) -> Iterator[Batch]:
        """Drawn again rather than kept."""
        endless = batches_of(self.model, self.workload, self.text, num_batches=None, seed=self.seed, images=self.images)
        return islice(endless, num_before, None)


def _accepted(model: Any, batches: list[Inputs]) -> Inputs:
    """The first that the model does not refuse: the way round of a spectrogram, or a list of tiles."""
    for batch in batches if len(batches) > 1 else ():
        mode = FakeTensorMode()
        # Copied before: a mode of fake tensors takes no weights, which are not copied either.
        twin = fake_model(meta_twin(model), mode)
        try:
            with running_fakes(mode, with_values=True):
                loss_of(twin, fake_batch(batch, mode, with_values=True), None)
        except BatchRefusedError:
            continue
        return batch
    return batches[0]


def _filled(
    model: Any, inputs: ModelInputs, likely: Inputs, text: bytes, num_batches: int | None, seed: int
) -> Iterator[dict[str, Any]]:
    labels, generator = Labels.of(model), torch.Generator().manual_seed(seed)
    tokens = torch.tensor(inputs.plain_tokens(256))
    shape = likely[_TOKENS].shape if _TOKENS in likely else None
    rows = None
    if shape is not None:
        rows = byte_batches(text, batch_size=shape[:-1].numel(), sequence_length=shape[-1], num_batches=None, seed=seed)
    for _ in count() if num_batches is None else range(num_batches):
        made = dict(likely)
        if rows is not None and shape is not None:
            words = tokens[next(rows)[_TOKENS].reshape(shape) % len(tokens)]
            is_word = likely[_TOKENS] == inputs.filler if not likely[_TOKENS].is_meta else torch.ones(shape).bool()
            made[_TOKENS] = torch.where(is_word, words, torch.zeros(()).long() if is_word.all() else likely[_TOKENS])
        for name, value in likely.items():
            if name != _TOKENS and isinstance(value, torch.Tensor):
                made[name] = _value(name, value, made, labels, tokens, generator)
        yield made


def _value(
    name: str, like: torch.Tensor, made: Inputs, labels: Labels, tokens: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Something of the shape and element type of ``like`` for an input of this name."""
    shape, is_label = like.shape, name in ("labels", "start_positions", "end_positions")
    if like.is_floating_point():
        noise = torch.rand(shape, generator=generator) if is_label else torch.randn(shape, generator=generator)
        return noise.to(like.dtype)
    if like.dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not is_label:
        return torch.zeros(shape, dtype=like.dtype) if like.is_meta else like.clone()
    if labels.head in (Head.TOKENS, Head.TRANSCRIPTS):
        text = made.get(_TOKENS)
        if labels.head is Head.TOKENS and text is not None and text.shape == shape:
            return text.clone()  # type: ignore[no-any-return]
        return tokens[torch.randint(len(tokens), shape, generator=generator)]
    most = made[_TOKENS].shape[-1] if labels.head is Head.SPANS else labels.num_labels
    return torch.randint(max(1, most), shape, generator=generator)
