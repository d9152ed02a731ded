"""What a configuration's ``architectures`` names: the class to build, and what its head is trained on.

A configuration says by the name of a class which head its model was published with; the class decides what labels are
and which shape they have.  Classes are told apart by the tables of transformers' auto classes, not by their names.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Any, Final

import torch

from ...shared.basics.errors import WorkloadError
from ...shared.basics.suggestions import did_you_mean


class Head(Enum):
    """What a loss is computed from besides the model's input."""

    TOKENS = auto()
    """``labels`` are tokens, (batch_size, length): language models, causal, masked or of sequences to sequences."""
    TOKEN_CLASSES = auto()
    """``labels`` are classes of tokens, (batch_size, sequence_length)."""
    CLASSES = auto()
    """``labels`` are classes of samples, (batch_size,), or figures where ``problem_type`` of the configuration says."""
    SPANS = auto()
    """``start_positions`` and ``end_positions``, (batch_size,): the places of answers."""
    CHOICES = auto()
    """Input of shape (batch_size, num_choices, sequence_length); ``labels``, (batch_size,), are the right choices."""
    TRANSCRIPTS = auto()
    """``labels`` are tokens that follow each other somewhere in the input, (batch_size, length): CTC, transducers."""
    MAPS = auto()
    """``labels`` are classes of pixels, (batch_size, height, width)."""
    FIGURES = auto()
    """``labels`` are figures of pixels, (batch_size, height, width): depths."""
    PAIRS = auto()
    """No labels: which text goes with which image is the place in the batch (``return_loss``)."""
    INPUT = auto()
    """No labels: the model is trained on its input, some of which it is not shown."""


_TEXT_HEADS: Final = (Head.TOKENS, Head.TOKEN_CLASSES, Head.CLASSES, Head.SPANS, Head.CHOICES)
"""Heads whose labels can be read off text."""


_TABLES: Final = (
    ("CAUSAL_LM", Head.TOKENS),
    ("MASKED_LM", Head.TOKENS),
    ("SEQ_TO_SEQ_CAUSAL_LM", Head.TOKENS),
    ("SEQUENCE_CLASSIFICATION", Head.CLASSES),
    ("NEXT_SENTENCE_PREDICTION", Head.CLASSES),
    ("TOKEN_CLASSIFICATION", Head.TOKEN_CLASSES),
    ("QUESTION_ANSWERING", Head.SPANS),
    ("MULTIPLE_CHOICE", Head.CHOICES),
    ("IMAGE_CLASSIFICATION", Head.CLASSES),
    ("IMAGE_TEXT_TO_TEXT", Head.TOKENS),
    ("MULTIMODAL_LM", Head.TOKENS),
    ("SPEECH_SEQ_2_SEQ", Head.TOKENS),
    ("CTC", Head.TRANSCRIPTS),
    ("VIDEO_CLASSIFICATION", Head.CLASSES),
    ("AUDIO_CLASSIFICATION", Head.CLASSES),
    ("AUDIO_XVECTOR", Head.CLASSES),
    ("ZERO_SHOT_IMAGE_CLASSIFICATION", Head.PAIRS),
    ("SEMANTIC_SEGMENTATION", Head.MAPS),
    ("DEPTH_ESTIMATION", Head.FIGURES),
    ("MASKED_IMAGE_MODELING", Head.INPUT),
    ("RNNT", Head.TRANSCRIPTS),
    ("TDT", Head.TRANSCRIPTS),
)
"""Tables of transformers' auto classes, and the head of the classes in each; a class in several has the first."""
SOUNDS: Final = ("input_features", "input_values")
"""Inputs of forward that are spectrograms or waveforms."""
_OWN: Final = tuple(table for table, _ in _TABLES)
_OWN_OF_IMAGES: Final = ("IMAGE_CLASSIFICATION", *_OWN)
_OWN_OF_PAIRS: Final = ("IMAGE_TEXT_TO_TEXT", "ZERO_SHOT_IMAGE_CLASSIFICATION", *_OWN)
_OWN_OF_SEQUENCES: Final = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", *_OWN[3:])
"""Tables in which the class of a configuration that names none is looked for, by what it describes."""


@cache
def _heads() -> Mapping[str, Head]:
    """The head of every class that is known, by its name."""
    return {name: head for table, head in reversed(_TABLES) for name in _classes_in(f"MODEL_FOR_{table}")}


@cache
def _headless() -> frozenset[str]:
    """Classes that have no head: what is published as one of them is trained with its family's own."""
    return frozenset(_classes_in("MODEL"))


def _classes_in(table: str) -> Iterator[str]:
    from transformers.models.auto import modeling_auto

    for names in getattr(modeling_auto, f"{table}_MAPPING_NAMES", {}).values():
        yield from (names,) if isinstance(names, str) else names


def published_class(config: Any, name: str) -> Any | None:
    """The class of transformers that ``config.architectures`` names; None if it names none with a head.

    Raises WorkloadError, which calls the class by its name, if it is unknown, of another family, or has a head that no
    batch can be made for.
    """
    names = [found for found in getattr(config, "architectures", None) or () if isinstance(found, str)]
    if not names or (names[0] in _headless() and names[0] not in _heads()):
        return None
    import transformers

    published, remedy = names[0], "Correct the field architectures, or leave it out to train the family's own head."
    found: Any = getattr(transformers, published, None)
    if not hasattr(found, "config_class"):
        raise WorkloadError(
            f"transformers has no model {published!r}, which {name} names in architectures. "
            f"{did_you_mean(published, _heads())} {remedy}"
        )
    if not isinstance(config, found.config_class or object):
        raise WorkloadError(
            f"{name} names {published} in architectures, which is no {config.model_type} model. {remedy}"
        )
    takes, head = inspect.signature(found.forward).parameters, _heads().get(published)
    if head is None or any(wanted not in takes for wanted in _targets(head)):
        raise WorkloadError(
            f"{name} is a {published}, and protwin makes batches for language models, classification of text, images, "
            f"video and sound, question answering, multiple choice, transcripts, segmentation and pairs of text and "
            f"image alone. Trace the model itself with a batch of its own (protwin.runtime.trace). {remedy}"
        )
    return found


def own_class(config: Any, name: str) -> Any:
    """The class of transformers with the head that a family is published with, or that comes nearest to it.

    Raises WorkloadError if the family has none that a batch can be made for.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    for table in _own_tables(config):
        found = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").get(config.model_type)
        for published in (found,) if isinstance(found, str) else found or ():
            made: Any = getattr(transformers, published)
            if all(wanted in inspect.signature(made.forward).parameters for wanted in _targets(_heads()[published])):
                return made
    base = modeling_auto.MODEL_MAPPING_NAMES.get(config.model_type)
    without = (
        f"only {base if isinstance(base, str) else base[0]}, which has no loss"
        if base
        else "no model with a head that protwin knows"
    )
    raise WorkloadError(
        f"{name} is a {config.model_type}, for which transformers has {without}: there is nothing to train it by. Name "
        f"a class with a head in architectures, or trace a model that has a loss in Python: "
        f"protwin.runtime.trace(model, batch, loss=...)."
    )


def _own_tables(config: Any) -> tuple[str, ...]:
    if getattr(config, "is_encoder_decoder", False):
        return _OWN_OF_SEQUENCES
    if hasattr(config, "image_size") and hasattr(config, "patch_size") and not hasattr(config, "vocab_size"):
        return _OWN_OF_IMAGES
    return _OWN_OF_PAIRS if hasattr(config, "text_config") and hasattr(config, "vision_config") else _OWN


def _targets(head: Head) -> tuple[str, ...]:
    if head is Head.SPANS:
        return ("start_positions", "end_positions")
    if head is Head.PAIRS:
        return ("return_loss",)
    return () if head is Head.INPUT else ("labels",)


def reads_more_than_text(model: Any) -> bool:
    """Whether images or sounds stand in a sample's text, or go with it."""
    takes = inspect.signature(type(model).forward).parameters
    has_images = type(model).__name__ in _readers_of_images() and "pixel_values" in takes
    has_sounds = head_of(model) is Head.TOKENS and any(name in takes for name in SOUNDS)
    return has_images or has_sounds or head_of(model) not in _TEXT_HEADS


@cache
def _readers_of_images() -> frozenset[str]:
    return frozenset({*_classes_in("MODEL_FOR_IMAGE_TEXT_TO_TEXT"), *_classes_in("MODEL_FOR_MULTIMODAL_LM")})


def head_of(model: Any) -> Head:
    """What the head of a model of transformers is trained on; tokens if its class is not known."""
    return _heads().get(type(model).__name__, Head.TOKENS)


def reads_forward(model: Any) -> bool:
    """Whether a model of transformers predicts each token from those before it: a causal language model."""
    return type(model).__name__ in _causal()


@cache
def _causal() -> frozenset[str]:
    return frozenset(_classes_in("MODEL_FOR_CAUSAL_LM"))


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a head whose configuration says how many there are."""

    head: Head
    num_labels: int
    num_choices: int
    is_figures: bool
    """Whether they are numbers to come near to (regression) or a yes or no for every class, and no classes."""

    @classmethod
    def of(cls, model: Any) -> Labels:
        """Raises WorkloadError if the configuration does not say how many choices a sample has."""
        config, head = model.config, head_of(model)
        num_labels = int(getattr(config, "num_labels", 2) or 2)
        num_choices = getattr(config, "num_choices", None) if head is Head.CHOICES else 1
        if not isinstance(num_choices, int) or num_choices < 1:
            raise WorkloadError(
                f"{type(model).__name__} is trained on several choices per sample, and the configuration does not say "
                f"on how many. Add num_choices (4 in SWAG)."
            )
        problem = getattr(config, "problem_type", None)
        is_figures = problem in ("regression", "multi_label_classification") or (problem is None and num_labels == 1)
        is_pairs = type(model).__name__ in set(_classes_in("MODEL_FOR_NEXT_SENTENCE_PREDICTION"))
        return cls(
            head=head,
            num_labels=2 if is_pairs else num_labels,
            num_choices=num_choices,
            is_figures=head is Head.CLASSES and is_figures and not is_pairs,
        )

    def shapes(self, batch_size: int, input_length: int, target_length: int) -> dict[str, tuple[int, ...]]:
        """Shape of every label, by name; pixels have the shape of their image instead."""
        if self.head in (Head.PAIRS, Head.INPUT):
            return {}
        if self.head in (Head.TOKENS, Head.TRANSCRIPTS):
            return {"labels": (batch_size, target_length)}
        if self.head is Head.TOKEN_CLASSES:
            return {"labels": (batch_size, input_length)}
        if self.is_figures and self.num_labels > 1:
            return {"labels": (batch_size, self.num_labels)}
        return dict.fromkeys(_targets(self.head), (batch_size,))

    def read_off(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Labels that follow from ``tokens``, (batch_size, ..., length), so that there is something to learn."""
        if self.head is Head.TOKENS:
            return {"labels": tokens.clone()}
        if self.head is Head.TOKEN_CLASSES:
            return {"labels": tokens % self.num_labels}
        first = tokens.reshape(len(tokens), -1)[:, 0]
        if self.head is Head.SPANS:
            start = first % tokens.shape[-1]
            return {"start_positions": start, "end_positions": (start + 1).clamp(max=tokens.shape[-1] - 1)}
        if self.is_figures:
            bits = (first[:, None] >> torch.arange(self.num_labels).clamp(max=7)) & 1
            return {"labels": (bits if self.num_labels > 1 else first[:, None] / 255).float().squeeze(-1)}
        return {"labels": first % (self.num_choices if self.head is Head.CHOICES else self.num_labels)}
