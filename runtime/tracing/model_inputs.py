"""The batch that a model of transformers is trained on, from its class's signature and its configuration.

[Note: What decides a batch]
The parameters that a class's forward takes say by their names what they are: ``input_ids`` are tokens, ``pixel_values``
images, ``input_features`` spectrograms, ``input_values`` waveforms.  The configuration, or a part of it, says how large
they are (``image_size``, ``num_mel_bins``).  Where images or sounds stand in text, as many tokens of the text as the
model makes features of them are placeholders; the model itself is asked for the features (``get_image_features``).
Values matter to such models: they look for placeholders, and count patches.  So integers are real where they are few.
A family needs no entry here: what none of these rules covers is refused, with the names of what is wanted.

[Note: How large an image is]
A model that takes images of any size gets, in text, the largest square one whose placeholders fill at most half of the
sequence.  Outside of text it needs ``image_size`` in its configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...shared.basics.errors import WorkloadError
from ...shared.families.family import BATCH_SIZE, SEQUENCE_LENGTH, TARGET_LENGTH
from ..model.configurations import first_line
from ..model.heads import SOUNDS, Head, Labels, head_of, reads_more_than_text
from .fake import fake_batch, fake_model
from .known_values import KnownValues, looks_at_values, values_known

Inputs = dict[str, Any]
_IMAGES: Final = "pixel_values"
_VIDEOS: Final = "pixel_values_videos"
_WAVES: Final = "input_values"
_SPECTRA: Final = "input_features"
_TOKENS: Final = "input_ids"
_CHANNELS: Final = ("num_channels", "in_channels", "in_chans")
_SIZES: Final = ("image_size", "crop_size", "img_size")
_BINS: Final = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size")
_FRAMES: Final = ("num_frames", "frames_per_clip")
_FIRST_TOKEN: Final = 5
"""Lower ones are often padding, the beginning or the end."""
_FRAMES_PER_TOKEN: Final = 8
"""Of a spectrogram of 100 frames a second, for about 12 characters a second of speech."""
_SAMPLES_PER_TOKEN: Final = 1280
"""Of a waveform of 16,000 samples a second, likewise."""


def part_with(config: Any, *fields: str) -> tuple[Any, str] | None:
    """The part of a configuration that has one of ``fields``, and which: the configuration itself, else its parts."""
    parts = [config]
    for part in parts:
        for field in fields:
            if getattr(part, field, None) is not None:
                return part, field
        parts += [getattr(part, name, None) for name in getattr(part, "sub_configs", {})]
    return None


def _value(config: Any, *fields: str) -> Any | None:
    found = part_with(config, *fields)
    return None if found is None else getattr(*found)


@dataclass(frozen=True)
class _Modality:
    """What stands in text, in place of some of its tokens."""

    name: str
    """As in ``get_image_features`` and ``image_token_id``."""
    inputs: Inputs


class ModelInputs:
    """Makes batches for one model, on the meta device but for integers that are few."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._config = model.config
        self._takes = inspect.signature(type(model).forward).parameters
        self._labels = Labels.of(model)
        self._main = self._main_input()

    def _main_input(self) -> str:
        """The input that a sample's length is told of."""
        main = self._model.main_input_name
        required = [p.name for p in self._takes.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        known = (_TOKENS, _IMAGES, _VIDEOS, *SOUNDS)
        beside = [name for name in required if name not in ("self", main, *known)]
        if main in known and main in self._takes and not beside:
            return str(main)
        wanted = ", ".join(dict.fromkeys([str(main), *beside]))
        raise WorkloadError(
            f"{type(self._model).__name__} is given {wanted}, and protwin knows no rule for the size of "
            f"{', '.join(beside) or main}. Trace it with a batch of its own in Python: protwin.runtime.trace(model, "
            f"batch)."
        )

    @property
    def variables(self) -> tuple[str, ...]:
        """What the shape of the batch is made of."""
        if self._main == _TOKENS:
            has_targets = self._config.is_encoder_decoder and head_of(self._model) is Head.TOKENS
            return (BATCH_SIZE, SEQUENCE_LENGTH, *((TARGET_LENGTH,) if has_targets else ()))
        has_length = self._main in SOUNDS and self._fixed_frames() is None
        if has_length or self._labels.head is Head.TOKENS or _TOKENS in self._required():
            return (BATCH_SIZE, SEQUENCE_LENGTH)
        return (BATCH_SIZE,)

    def reads(self) -> str:
        """What a model without a sequence reads, in words."""
        return "sounds" if self._main in SOUNDS else "images"

    def _required(self) -> list[str]:
        return [name for name, p in self._takes.items() if p.default is p.empty]

    def batches(self, given: Mapping[str, int | None]) -> Iterator[Inputs]:
        """Batches of the shape, the likeliest first: which way round a spectrogram is the model alone knows."""
        batch_size, length = given[BATCH_SIZE] or 0, given.get(SEQUENCE_LENGTH) or 0
        target = given.get(TARGET_LENGTH) or length
        for inputs in self._inputs(batch_size, length):
            yield inputs | self._targets(inputs, batch_size, length, target)

    def _inputs(self, batch_size: int, length: int) -> Iterator[Inputs]:
        if self._main == _TOKENS:
            choices = (self._labels.num_choices,) if self._labels.head is Head.CHOICES else ()
            shape = (batch_size, *choices, length)
            if self._labels.head is Head.PAIRS:
                yield self._images(batch_size) | {_TOKENS: self._tokens(shape)}
            elif not self._is_text_with_more():
                yield {_TOKENS: _integers(shape)}
            else:
                yield from self._text_with_more(batch_size, length)
        elif self._main == _IMAGES:
            text = {_TOKENS: self._tokens((batch_size, length))} if _TOKENS in self._required() else {}
            yield self._images(batch_size) | text | self._masked_patches(batch_size)
        elif self._main == _VIDEOS:
            yield self._videos(batch_size)
        else:
            yield from self._sounds(batch_size, length)

    # -- text --------------------------------------------------------------------------------------------------------

    def _is_text_with_more(self) -> bool:
        return self._labels.head is Head.TOKENS and reads_more_than_text(self._model)

    def _tokens(self, shape: Sequence[int]) -> torch.Tensor:
        return _integers(shape, fill=self._filler())

    def _filler(self) -> int:
        """A token that stands for nothing else."""
        text = self._config.get_text_config()
        taken = {
            value
            for part in (self._config, text)
            for name, value in part.to_dict().items()
            if isinstance(value, int) and "token" in name
        }
        most = getattr(text, "vocab_size", None) or _FIRST_TOKEN + 1
        return next((token for token in range(min(_FIRST_TOKEN, most - 1), most) if token not in taken), 0)

    def _text_with_more(self, batch_size: int, length: int) -> Iterator[Inputs]:
        """Text in which one image stands, or one sound."""
        if _IMAGES in self._takes:
            modalities = list(self._images_in_text(length))
        else:
            modalities = [_Modality("audio", sounds) for sounds in self._sounds(1, length)]
        reasons: list[Exception] = []
        for modality in modalities:
            try:
                tokens = self._with_placeholders(batch_size, length, modality)
            except WorkloadError:
                raise
            except Exception as error:
                # Whatever a family raises about a shape that is not its own.
                reasons.append(error)
            else:
                yield tokens | _of_samples(modality.inputs, batch_size)
        if len(reasons) == len(modalities):
            shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in modalities[0].inputs.items())
            reason = next((each for each in reasons if looks_at_values(each)), reasons[0])
            raise WorkloadError(
                f"{type(self._model).__name__} makes no features of one {modalities[0].name} ({shapes}): "
                f"{first_line(reason)}. Trace it with a batch of its own in Python: protwin.runtime.trace(model, "
                f"batch)."
            ) from reason

    def _images_in_text(self, length: int) -> Iterator[_Modality]:
        if "image_grid_thw" in self._takes:
            yield _Modality("image", self._patches(length))
            return
        images = self._images(1)
        tiled = images | {_IMAGES: images[_IMAGES].unsqueeze(1)}
        sizes = {"image_sizes": torch.tensor([images[_IMAGES].shape[-2:]])} if "image_sizes" in self._takes else {}
        # One image per sample, or a list of images or tiles, which are one dim more.
        yield _Modality("image", images)
        if sizes:
            yield _Modality("image", images | sizes)
        yield _Modality("image", tiled)
        if sizes:
            yield _Modality("image", tiled | sizes)

    def _patches(self, length: int) -> Inputs:
        """An image as rows of patches, and how many there are in time, height and width; of one sample."""
        side = _value(self._config, *_SIZES)
        part = self._config.vision_config
        patch, merged = part.patch_size, getattr(part, "spatial_merge_size", 1)
        if isinstance(side, int):
            across = max(1, side // (patch * merged)) * merged
        else:
            across = max(1, isqrt(length // 2)) * merged
        frames = getattr(part, "temporal_patch_size", 1)
        width = (_value(part, *_CHANNELS) or 3) * frames * patch * patch
        return {
            _IMAGES: _empty((across * across, width), self._model.dtype),
            "image_grid_thw": torch.tensor([[1, across, across]]),
        }

    def _with_placeholders(self, batch_size: int, length: int, modality: _Modality) -> Inputs:
        """Tokens, with as many placeholders after the first as the model makes features of one image or sound."""
        token = _value(self._config, *(f"{modality.name}_token_{end}" for end in ("id", "index")))
        tokens = self._tokens((batch_size, length))
        if token is None:
            return {_TOKENS: tokens}
        num_features = self._num_features(modality)
        starts = _value(self._config, f"{modality.name}_start_token_id", "vision_start_token_id")
        if num_features + 2 > length:
            raise WorkloadError(
                f"{modality.name}s take {num_features} tokens each of {type(self._model).__name__}'s text, and "
                f"sequence_length is {length}. Raise it to {num_features + 2} at least."
            )
        if not tokens.is_meta:
            tokens[:, 0] = starts if isinstance(starts, int) else tokens[:, 0]
            tokens[:, 1 : num_features + 1] = token
        types = {
            name: (tokens == token).long() if not tokens.is_meta else _integers(tokens.shape)
            for name in ("mm_token_type_ids", "token_type_ids")
            if name in self._takes
        }
        return {_TOKENS: tokens} | types

    def _num_features(self, modality: _Modality) -> int:
        """Rows that stand for one image or sound, counted in a run of that part of the model on fake tensors."""
        extract = f"get_{modality.name}_features"
        if not hasattr(self._model, extract):
            raise WorkloadError(
                f"{type(self._model).__name__} does not tell what it makes of one {modality.name}. Trace it with a "
                f"batch of its own in Python: protwin.runtime.trace(model, batch)."
            )
        mode = FakeTensorMode()
        twin: Any = fake_model(self._model, mode)
        takes = inspect.signature(getattr(twin, extract)).parameters
        given = {name: value for name, value in modality.inputs.items() if name in takes}
        with values_known(mode):
            found = getattr(twin, extract)(**fake_batch(given, mode, with_values=True))  # type: ignore[arg-type]
        pooled = getattr(found, "pooler_output", None)
        rows = pooled if pooled is not None else getattr(found, "last_hidden_state", found)
        tensors = list(rows) if isinstance(rows, list | tuple) else [rows]
        return sum(tensor.numel() // tensor.shape[-1] for tensor in tensors)

    # -- images ------------------------------------------------------------------------------------------------------

    def _image_dims(self) -> tuple[int, int, int]:
        """Channels, height and width.  Raises WorkloadError if the configuration does not say."""
        channels, size = _value(self._config, *_CHANNELS), _value(self._config, *_SIZES)
        if size is None or channels is None:
            missing = "image_size" if size is None else "num_channels"
            raise WorkloadError(
                f"the configuration of {type(self._model).__name__} has no {missing}, which a batch of images needs. "
                f"Add it."
            )
        if isinstance(size, Mapping):
            size = (size["height"], size["width"]) if "height" in size else tuple(size.values())
        height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (_one(size),) * 2
        return _one(channels), height, width

    def _images(self, batch_size: int) -> Inputs:
        frames = _value(self._config, *_FRAMES) if self._is_of_frames() else None
        dims = (batch_size, *((frames,) if frames else ()), *self._image_dims())
        return {_IMAGES: _empty(dims, self._model.dtype)}

    def _is_of_frames(self) -> bool:
        return "Video" in type(self._model).__name__

    def _videos(self, batch_size: int) -> Inputs:
        frames = _value(self._config, *_FRAMES) or 1
        return {_VIDEOS: _empty((batch_size, frames, *self._image_dims()), self._model.dtype)}

    def _masked_patches(self, batch_size: int) -> Inputs:
        if self._labels.head is not Head.INPUT or "bool_masked_pos" not in self._takes:
            return {}
        _, height, width = self._image_dims()
        patch = _value(self._config, "patch_size")
        across = int(_one(patch) or 1) * int((getattr(self._config, "encoder_stride", 0) and 1) or 1)
        return {"bool_masked_pos": torch.zeros((batch_size, (height // across) * (width // across)), dtype=torch.bool)}

    # -- sounds ------------------------------------------------------------------------------------------------------

    def _fixed_frames(self) -> int | None:
        """Frames or samples that every sound has; None if they are as many as wanted."""
        if self._main == _WAVES or _SPECTRA not in self._takes:
            is_spectrum = part_with(self._config, "num_mel_bins") and part_with(self._config, "max_length")
            is_text = self._labels.head is Head.TOKENS
            return int(_value(self._config, "max_length")) if is_spectrum and not is_text else None  # type: ignore[arg-type]
        positions = _value(self._config, "max_source_positions")
        return 2 * int(positions) if positions is not None else None

    def _sounds(self, batch_size: int, length: int) -> Iterator[Inputs]:
        bins, frames, dtype = _value(self._config, *_BINS), self._fixed_frames(), self._model.dtype
        if _WAVES in self._takes and self._main != _SPECTRA:
            if frames is not None:
                yield {_WAVES: _empty((batch_size, frames, int(bins or 1)), dtype)}
                return
            # A decoder's text has the length; a second of sound goes with some twelve characters.
            samples = length if self._labels.head is not Head.TOKENS else length * _SAMPLES_PER_TOKEN
            yield {_WAVES: _empty((batch_size, samples), dtype)}
            yield {_WAVES: _empty((batch_size, 1, samples), dtype)}
            return
        if bins is None:
            raise WorkloadError(
                f"the configuration of {type(self._model).__name__} does not say how many bands a spectrogram has. Add "
                f"num_mel_bins, or trace the model with a batch of its own in Python: protwin.runtime.trace(model, "
                f"batch)."
            )
        frames = frames or (length if self._labels.head is not Head.TOKENS else length * _FRAMES_PER_TOKEN)
        masks = [name for name in ("input_features_mask", "feature_attention_mask") if name in self._takes]
        more = {name: torch.ones((batch_size, frames), dtype=torch.long) for name in masks}
        yield {_SPECTRA: _empty((batch_size, int(bins), frames), dtype)} | more
        yield {_SPECTRA: _empty((batch_size, frames, int(bins)), dtype)} | more

    # -- labels ------------------------------------------------------------------------------------------------------

    def _targets(self, inputs: Inputs, batch_size: int, length: int, target: int) -> Inputs:
        head = self._labels.head
        if head is Head.PAIRS:
            return {"return_loss": True}
        if head in (Head.MAPS, Head.FIGURES):
            shape = (batch_size, *inputs[_IMAGES].shape[-2:])
            return {"labels": _integers(shape) if head is Head.MAPS else _empty(shape, self._model.dtype)}
        if head is Head.TRANSCRIPTS:
            frames = max(inputs[self._main].shape[1:])
            per_token = _SAMPLES_PER_TOKEN if self._main == _WAVES else _FRAMES_PER_TOKEN
            return {"labels": self._tokens((batch_size, max(1, frames // per_token)))}
        text = inputs.get(_TOKENS)
        if head is Head.TOKENS and text is not None and not text.is_meta and TARGET_LENGTH not in self.variables:
            return {"labels": text.clone()}
        if head is Head.TOKENS and (text is None or not text.is_meta):
            return {"labels": self._tokens((batch_size, target))}
        shapes = self._labels.shapes(batch_size, length, target)
        dtype = torch.float32 if self._labels.is_figures else torch.long
        return {name: _empty(shape, dtype) for name, shape in shapes.items()}


def _one(value: Any) -> int:
    """The figure of a field that may list one for every dim or part."""
    return int(value[0] if isinstance(value, list | tuple) else value)


def _of_samples(inputs: Inputs, batch_size: int) -> Inputs:
    """The inputs of one sample for all of them, one after the other."""
    return {name: value.repeat(batch_size, *(1,) * (value.dim() - 1)) for name, value in inputs.items()}


def _integers(shape: Sequence[int], fill: int = 0) -> torch.Tensor:
    """Integers with values where they are few."""
    size = 1
    for dim in shape:
        size *= dim
    if size > KnownValues.MOST:
        return _empty(shape, torch.long)
    return torch.full(tuple(shape), fill, dtype=torch.long)


def _empty(dims: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(dims), dtype=dtype, device="meta")
