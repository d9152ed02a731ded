"""What a model forgets of a first text while it learns a second one: whole, by LoRA and by orthogonal subspaces.

All three begin with the same weights and see the same batches.  What LoRA and OSFT train is of equal size: factors of
every linear map within the blocks, and nothing else.  Each has the learning rate of one small grid with which its loss
on sequences of the second text that are held out for this choice is least; losses are told of other sequences.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from ...runtime.commands.learning_rates import LearningRates, Schedule
from ...runtime.data.byte_text import python_reference
from ...runtime.data.sample_texts import library_source, sums
from ...runtime.model.adapters import add_lora, freeze
from ...runtime.model.configurations import build_model
from ...runtime.osft.orthogonal_model import make_orthogonal
from ...runtime.osft.projection import project_gradients, project_parameters

Batch = dict[str, torch.Tensor]

CONFIGURATION: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 160,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
_WHOLE: Final = ("model.embed_tokens", "lm_head", "model.norm", "*layernorm*")
"""What LoRA leaves as it is, and OSFT would train whole."""
_SUM_LINES: Final = 20_000
_FIRST_RATE: Final = 3e-3
_FIRST_DECAY: Final = 0.1
_WARMUP_STEPS: Final = 20
_SPLIT_SEED: Final = 0
_AT_ONCE: Final = 64
"""Sequences of an evaluation's batch."""


class Way(StrEnum):
    """How the second text is learned."""

    FULL = "full"
    LORA = "LoRA"
    OSFT = "OSFT"


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """How large everything is."""

    configuration: Mapping[str, Any]
    batch_size: int = 8
    sequence_length: int = 64
    first_steps: int = 1000
    """On the first text."""
    steps: int = 150
    """On every later one."""
    unfreeze_rank_ratio: float = 0.25
    rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2)
    """Peaks that each way chooses of."""
    num_validation: int = 64
    """Sequences that rates are chosen by."""
    num_tests: int = 256
    """Sequences whose loss is told."""


@dataclass(frozen=True)
class Text:
    """A text as bytes in sequences, shuffled once and split."""

    name: str
    training: torch.Tensor
    """(sequences, length); so are the others, of other sequences."""
    validation: torch.Tensor
    tests: torch.Tensor

    @classmethod
    def of(cls, name: str, content: bytes, lesson: Lesson) -> Text:
        """Of stretches that follow each other."""
        tokens = np.frombuffer(content, dtype=np.uint8).astype(np.int64)
        number = len(tokens) // lesson.sequence_length
        stretches = tokens[: number * lesson.sequence_length].reshape(number, -1)
        rows = torch.from_numpy(np.random.default_rng(_SPLIT_SEED).permutation(stretches))
        held = lesson.num_validation + lesson.num_tests
        return cls(name, rows[held:], rows[: lesson.num_validation], rows[lesson.num_validation : held])

    def batches(self, lesson: Lesson, steps: int, seed: int) -> Iterator[Batch]:
        """``steps`` of them, of sequences at random."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            rows = self.training[torch.randint(0, len(self.training), (lesson.batch_size,), generator=generator)]
            yield {"input_ids": rows, "labels": rows.clone()}


def documentation(lesson: Lesson) -> Text:
    """English: the Python language reference."""
    return Text.of("documentation", python_reference(), lesson)


def source_code(lesson: Lesson) -> Text:
    """Python: modules of the standard library."""
    return Text.of("source code", library_source(), lesson)


def sums_of_numbers(lesson: Lesson) -> Text:
    """A language of digits alone, made by a seed."""
    return Text.of("sums", sums(_SUM_LINES, _SPLIT_SEED), lesson)


@torch.no_grad()
def held_out_loss(model: Any, sequences: torch.Tensor) -> float:
    """Nats per byte, of a model in training mode, which it stays in."""
    model.eval()
    batches = torch.split(sequences, _AT_ONCE)
    parts = [float(model(input_ids=rows, labels=rows).loss) * len(rows) for rows in batches]
    model.train()
    return sum(parts) / len(sequences)


def learned_first(lesson: Lesson, text: Text, seed: int) -> Any:
    """A model of random weights that has learned the first text."""
    torch.manual_seed(seed)
    model = build_model(lesson.configuration, "demo-llama", torch.float32, device="cpu")
    model.config.use_cache = False
    rates = LearningRates(_FIRST_RATE, Schedule.LINEAR, _WARMUP_STEPS)
    train_plainly(model, text.batches(lesson, lesson.first_steps, seed), rates, lesson.first_steps, decay=_FIRST_DECAY)
    return model


def rates_of(peak: float) -> LearningRates:
    """Of the steps on a later text."""
    return LearningRates(peak, Schedule.LINEAR, _WARMUP_STEPS)


def train_plainly(
    model: Any, batches: Iterator[Batch], rates: LearningRates, steps: int, *, decay: float = 0.0
) -> list[float]:
    """The loop that everybody writes, with the projections of factorised maps where there are any; gives its losses."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=decay, fused=True)
    losses = []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rates.at(step, steps)
        loss = model(**batch).loss
        loss.backward()
        project_gradients(model)
        optimizer.step()
        project_parameters(model)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepared(base: Any, way: Way, lesson: Lesson, seed: int) -> Any:
    """A copy of ``base`` that is about to learn another text in this way."""
    model = copy.deepcopy(base)
    if way is Way.OSFT:
        make_orthogonal(model, unfreeze_rank_ratio=lesson.unfreeze_rank_ratio)
        freeze(model, _WHOLE)
    elif way is Way.LORA:
        torch.manual_seed(seed)
        add_lora(model, rank=equal_rank(base, lesson))
    return model


def equal_rank(base: Any, lesson: Lesson) -> int:
    """The rank with which LoRA trains as many scalars as OSFT does, or as near to that as there is one."""
    factorised, thin = prepared(base, Way.OSFT, lesson, 0), copy.deepcopy(base)
    add_lora(thin, rank=1)
    return max(1, round(num_trained(factorised) / num_trained(thin)))


def num_trained(model: Any) -> int:
    """Scalars that are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a way came to, with one learning rate."""

    way: Way
    rate: float
    num_trained: int
    validation_loss: float
    """Of the second text, that rates are chosen by."""
    first_before: float
    first_after: float
    """Losses of the first text's tests, before the second was learned and afterwards."""
    second_before: float
    second_after: float
    losses: tuple[float, ...]
    """Of the steps."""

    @property
    def forgotten(self) -> float:
        """By how much the loss on the first text rose."""
        return self.first_after - self.first_before


def learned(
    base: Any,
    way: Way,
    rate: float,
    first: Text,
    second: Text,
    lesson: Lesson,
    seed: int,
    train: Callable[[Any, Iterator[Batch], LearningRates], list[float]] | None = None,
) -> tuple[Learned, Any]:
    """``second`` learned in one way with one rate, and the model; ``train`` in place of the plain loop."""
    model = prepared(base, way, lesson, seed)
    trained = num_trained(model)
    with_plan = partial(train_plainly, steps=lesson.steps) if train is None else train
    losses = with_plan(model, second.batches(lesson, lesson.steps, seed), rates_of(rate))
    outcome = Learned(
        way=way,
        rate=rate,
        num_trained=trained,
        validation_loss=held_out_loss(model, second.validation),
        first_before=held_out_loss(base, first.tests),
        first_after=held_out_loss(model, first.tests),
        second_before=held_out_loss(base, second.tests),
        second_after=held_out_loss(model, second.tests),
        losses=tuple(losses),
    )
    return outcome, model


def best_of(tried: Sequence[Learned]) -> Learned:
    """The rate that a way chooses."""
    return min(tried, key=lambda one: one.validation_loss)
