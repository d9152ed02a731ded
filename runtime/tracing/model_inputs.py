"""The batch that a model of transformers is trained on, from its class's signature and its configuration.

[Note: What decides a batch]
The parameters that a class's forward takes say by their names what they are: ``input_ids`` are tokens, ``pixel_values``
images, ``input_features`` spectrograms, ``input_values`` waveforms.  The configuration, or a part of it, says how large
they are (``image_size``, ``num_mel_bins``).  Where images or sounds stand in text, as many tokens of the text as the
model makes features of them are placeholders; the model itself is asked for the features (``get_image_features``).
Values matter to such models: they look for placeholders, and count patches.  So integers are real where they are few.
A family needs no entry here: what none of these rules covers is refused, with the names of what is wanted.

[Note: How large an image is]
Without a stated size, a model that takes images of any size gets, in text, the largest square one whose placeholders
fill at most half of the sequence, with those of the sample's other images.  Outside of text it needs ``image_size`` in
its configuration.  Models that cut an image into tiles are asked for the features of one tile, of two, and so on, until
they take the number: it follows from the size by a rule of each family.

[Note: What images hold]
Some models leave out images that are all zeros, as padding.  So images are ones where they are small enough to be held:
a trace carries these values along (``fakes/known_values.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isqrt, prod
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...shared.basics.errors import WorkloadError
from ...shared.families.family import BATCH_SIZE, SEQUENCE_LENGTH, TARGET_LENGTH
from ...shared.schema.training_options import ImageOptions
from ..fakes.known_values import KnownValues, looks_at_values, values_known
from ..fakes.models import fake_batch, fake_model
from ..model.configurations import first_line
from ..model.heads import SOUNDS, Head, Labels, head_of, reads_more_than_text
from ..quantized.states import states_as_parameters

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
_COLOURS: Final = 3
"""Channels of images that are cut into patches, where nothing says otherwise."""
_MOST_TILES: Final = 10
_FIRST_TOKEN: Final = 5
"""Lower ones are often padding, the beginning or the end."""
_FRAMES_PER_TOKEN: Final = 8
"""Of a spectrogram of 100 frames a second, for about 12 characters a second of speech."""
_SAMPLES_PER_TOKEN: Final = 1280
"""Of a waveform of 16,000 samples a second, likewise."""


def part_with(config: Any, *fields: str) -> tuple[Any, str] | None:
    """The part of a configuration that has one of ``fields``, and which: the configuration itself, else its parts."""
    for part in _parts(config):
        for field in fields:
            if getattr(part, field, None) is not None:
                return part, field
    return None


def _parts(config: Any) -> Iterator[Any]:
    """A configuration and its parts, the outer ones first."""
    parts = [config]
    for part in parts:
        yield part
        parts += [getattr(part, name, None) for name in getattr(part, "sub_configs", {})]


def _value(config: Any, *fields: str) -> Any | None:
    found = part_with(config, *fields)
    return None if found is None else getattr(*found)


@dataclass(frozen=True)
class _Modality:
    """What stands in text, in place of some of its tokens."""

    name: str
    """As in ``get_image_features`` and ``image_token_id``."""
    inputs: Inputs
    """Of one image or sound."""
    is_listed: bool = False
    """Whether a sample has a list of them, in a dim of its own."""

    def of(self, batch_size: int, per_sample: int) -> Inputs:
        """Those of all samples."""
        if not self.is_listed:
            return _of_samples(self.inputs, batch_size * per_sample)
        return {
            name: value.repeat(batch_size, per_sample, *(1,) * (value.dim() - 2)) if value.dim() > 2 else value
            for name, value in self.inputs.items()
        }


class ModelInputs:
    """Makes batches for one model, on the meta device but for integers that are few."""

    def __init__(self, model: Any, images: ImageOptions | None = None) -> None:
        """``images``: their size and number where samples have any.  Raises WorkloadError if the model reads none."""
        self._model = model
        self._config = model.config
        self._size = None if images is None else images.size
        self._per_sample = 1 if images is None else images.per_sample
        self._takes = inspect.signature(type(model).forward).parameters
        self._labels = Labels.of(model)
        self._main = self._main_input()
        if images is not None:
            self._check_images(images)

    def _check_images(self, images: ImageOptions) -> None:
        kind, stands_in_text = type(self._model).__name__, self._main == _TOKENS and self._is_text_with_more()
        if _IMAGES not in self._takes or not (self._main in (_IMAGES, _VIDEOS) or self._reads_images()):
            raise WorkloadError(f"{kind} reads no images. Leave --image-size and --images out.")
        if images.per_sample > 1 and not stands_in_text:
            raise WorkloadError(f"{kind} takes one image per sample, not {images.per_sample}. Leave --images out.")

    def _reads_images(self) -> bool:
        return self._is_text_with_more() or self._labels.head is Head.PAIRS

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
        elif self._main == _IMAGES and _TOKENS in self._required() and self._is_text_with_more():
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
        return _integers(shape, fill=self.filler)

    @property
    def filler(self) -> int:
        """A token that stands for nothing else."""
        return self.plain_tokens(1)[0]

    def plain_tokens(self, most: int) -> list[int]:
        """Tokens that stand for nothing else: at least one, and at most so many."""
        text = self._config.get_text_config()
        taken = {
            value
            for part in (self._config, text)
            for name, value in part.to_dict().items()
            if isinstance(value, int) and "token" in name
        }
        size = getattr(text, "vocab_size", None) or _FIRST_TOKEN + 1
        plain = (token for token in range(min(_FIRST_TOKEN, size - 1), size) if token not in taken)
        return list(islice(plain, most)) or [0]

    def _text_with_more(self, batch_size: int, length: int) -> Iterator[Inputs]:
        """Text in which one image stands, or one sound."""
        if _IMAGES in self._takes:
            modalities = self._images_in_text(length)
        else:
            modalities = (_Modality("audio", sounds) for sounds in self._sounds(1, length))
        tried: list[_Modality] = []
        reasons: list[Exception] = []
        for modality in modalities:
            tried.append(modality)
            try:
                tokens = self._with_placeholders(batch_size, length, modality)
            except WorkloadError:
                raise
            except Exception as error:
                # Whatever a family raises about a shape that is not its own.
                reasons.append(error)
            else:
                yield tokens | modality.of(batch_size, self._number_of(modality))
        if len(reasons) == len(tried):
            shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in tried[0].inputs.items())
            reason = next((each for each in reasons if looks_at_values(each)), reasons[0])
            raise WorkloadError(
                f"{type(self._model).__name__} makes no features of one {tried[0].name} ({shapes}): "
                f"{first_line(reason)}. Trace it with a batch of its own in Python: protwin.runtime.trace(model, "
                f"batch)."
            ) from reason

    def _images_in_text(self, length: int) -> Iterator[_Modality]:
        if "image_grid_thw" in self._takes:
            yield _Modality("image", self._patches(length))
            return
        images = self._images(1)
        listed = images | {_IMAGES: images[_IMAGES].unsqueeze(1)}
        sizes = {"image_sizes": torch.tensor([images[_IMAGES].shape[-2:]])} if "image_sizes" in self._takes else {}
        # One image per sample, or a list of images or tiles, which are one dim more.
        yield _Modality("image", images)
        if sizes:
            yield _Modality("image", images | sizes)
        yield _Modality("image", listed, is_listed=True)
        for number in range(1, _MOST_TILES + 1) if sizes else ():
            tiles = {_IMAGES: listed[_IMAGES].repeat(1, number, 1, 1, 1)}
            yield _Modality("image", images | tiles | sizes)

    def _number_of(self, modality: _Modality) -> int:
        """Images or sounds in the text of one sample."""
        return self._per_sample if modality.name == "image" else 1

    def _patches(self, length: int) -> Inputs:
        """An image as rows of patches, and how many there are in time, height and width; of one sample."""
        side = _value(self._config, *_SIZES)
        part = self._config.vision_config
        patch, merged = part.patch_size, getattr(part, "spatial_merge_size", 1)
        if self._size is not None:
            down, across = (self._whole_patches(pixels, patch * merged) * merged for pixels in self._size)
        elif isinstance(side, int):
            down = across = max(1, side // (patch * merged)) * merged
        else:
            down = across = max(1, isqrt(length // 2 // self._per_sample)) * merged
        frames = getattr(part, "temporal_patch_size", 1)
        width = (_value(part, *_CHANNELS) or 3) * frames * patch * patch
        return {
            _IMAGES: _seen((down * across, width), self._model.dtype),
            "image_grid_thw": torch.tensor([[1, down, across]]),
        }

    def _whole_patches(self, pixels: int, patch: int) -> int:
        if pixels % patch:
            raise WorkloadError(
                f"{type(self._model).__name__} reads images in patches of {patch} pixels, and a side of {pixels} is no "
                f"whole number of them. Make it {max(1, pixels // patch) * patch} in --image-size."
            )
        return pixels // patch

    def _with_placeholders(self, batch_size: int, length: int, modality: _Modality) -> Inputs:
        """Tokens, with as many placeholders after each beginning as the model makes features of an image or sound."""
        token = _value(self._config, *(f"{modality.name}_token_{end}" for end in ("id", "index")))
        tokens = self._tokens((batch_size, length))
        if token is None:
            self._check_no_token(modality)
            return {_TOKENS: tokens}
        num_features, number = self._num_features(modality), self._number_of(modality)
        starts = _value(self._config, f"{modality.name}_start_token_id", "vision_start_token_id")
        if (least := (num_features + 1) * number + 1) > length:
            raise WorkloadError(
                f"{modality.name}s take {num_features} tokens each of {type(self._model).__name__}'s text, "
                f"{number} of them and what stands around them {least}, and sequence_length is {length}. Raise it to "
                f"{least} at least."
                if number > 1
                else f"{modality.name}s take {num_features} tokens each of {type(self._model).__name__}'s text, and "
                f"sequence_length is {length}. Raise it to {least} at least."
            )
        for begin in range(0, number * (num_features + 1), num_features + 1) if not tokens.is_meta else ():
            tokens[:, begin] = starts if isinstance(starts, int) else tokens[:, begin]
            tokens[:, begin + 1 : begin + num_features + 1] = token
        types = {
            name: (tokens == token).long() if not tokens.is_meta else _integers(tokens.shape)
            for name in ("mm_token_type_ids", "token_type_ids")
            if name in self._takes
        }
        return {_TOKENS: tokens} | types

    def _check_no_token(self, modality: _Modality) -> None:
        """Raise WorkloadError if the configuration has a field for a token that stands for images or sounds, unset."""
        fields = [f"{modality.name}_token_{end}" for end in ("id", "index")]
        unset = [field for field in fields for part in _parts(self._config) if hasattr(part, field)]
        if unset:
            raise WorkloadError(
                f"the configuration of {type(self._model).__name__} leaves {unset[0]} open, the token that stands for "
                f"{modality.name}s in text. Add it."
            )

    def _num_features(self, modality: _Modality) -> int:
        """Rows that stand for one image or sound, counted in a run of that part of the model on fake tensors."""
        extract = f"get_{modality.name}_features"
        if not hasattr(self._model, extract):
            raise WorkloadError(
                f"{type(self._model).__name__} does not tell what it makes of one {modality.name}. Trace it with a "
                f"batch of its own in Python: protwin.runtime.trace(model, batch)."
            )
        mode = FakeTensorMode()
        with states_as_parameters(self._model):
            # A packed weight outside such a block is no plain tensor, and cannot be faked.
            twin: Any = fake_model(self._model, mode)
        takes = inspect.signature(getattr(twin, extract)).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
        is_known = set(inspect.signature(type(self._model).forward).parameters) if takes_all else set(takes)
        given = {name: value for name, value in modality.inputs.items() if name in is_known}
        with values_known(mode):
            found = getattr(twin, extract)(**fake_batch(given, mode, with_values=True))  # type: ignore[arg-type]
        pooled = getattr(found, "pooler_output", None)
        rows = pooled if pooled is not None else getattr(found, "last_hidden_state", found)
        tensors = list(rows) if isinstance(rows, list | tuple) else [rows]
        return sum(tensor.numel() // tensor.shape[-1] for tensor in tensors)

    # -- images ------------------------------------------------------------------------------------------------------

    def _image_dims(self) -> tuple[int, int, int]:
        """Channels, height and width.  Raises WorkloadError if the configuration does not say."""
        channels, size = _value(self._config, *_CHANNELS), self._size or _value(self._config, *_SIZES)
        if channels is None and any(getattr(part, "patch_size", None) for part in _parts(self._config)):
            channels = _COLOURS
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
        return {_IMAGES: _seen(dims, self._model.dtype)}

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


def _seen(dims: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Figures of images: [Note: What images hold]."""
    if prod(dims) > KnownValues.MOST:
        return _empty(dims, dtype)
    return torch.ones(tuple(dims), dtype=dtype)


def _empty(dims: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(dims), dtype=dtype, device="meta")
