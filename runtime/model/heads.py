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
)
"""Tables of transformers' auto classes, and the head of the classes in each; a class in several has the first."""
_INPUTS: Final = ("input_ids", "pixel_values")


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
    takes = inspect.signature(found.forward).parameters
    main_input = getattr(found, "main_input_name", None)
    head = _heads().get(published)
    if (
        head is None
        or main_input not in _INPUTS
        or any(wanted not in takes for wanted in (*_targets(head), main_input))
    ):
        raise WorkloadError(
            f"{name} is a {published}, and protwin makes batches for language models, classification of text and "
            f"images, question answering and multiple choice alone. Trace the model itself with a batch of its own "
            f"(protwin.runtime.trace). {remedy}"
        )
    if main_input == "pixel_values" and not (hasattr(config, "image_size") and hasattr(config, "num_channels")):
        missing = "image_size" if not hasattr(config, "image_size") else "num_channels"
        raise WorkloadError(f"the configuration of {name} has no {missing}, which a batch of images needs. Add it.")
    return found


def _targets(head: Head) -> tuple[str, ...]:
    return ("start_positions", "end_positions") if head is Head.SPANS else ("labels",)


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
        """Shape of every label, by name."""
        if self.head is Head.TOKENS:
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
