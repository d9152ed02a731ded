"""What a configuration names in ``architectures`` is what is traced, with labels of its head's shape; or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from protwin.runtime.data.byte_text import head_batches
from protwin.runtime.model.configurations import build_model
from protwin.runtime.model.heads import Head, Labels, head_of
from protwin.runtime.tracing.configurations import batch_of, workload_of_configuration
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.families.family import BATCH_SIZE, SEQUENCE_LENGTH, TARGET_LENGTH
from tests.proof_size import some_quick

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LLAMA = {"model_type": "llama", **SIZES}
BERT = {"model_type": "bert", **SIZES}
T5 = {
    "model_type": "t5",
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 16,
    "num_heads": 2,
    "num_layers": 2,
    "vocab_size": 256,
    "decoder_start_token_id": 0,
}
VIT = {"model_type": "vit", **SIZES, "image_size": 32, "patch_size": 8}
del VIT["vocab_size"]

BATCH, LENGTH, CHOICES = 3, 16, 5
NAMED: tuple[tuple[dict[str, Any], str, str, dict[str, tuple[int, ...]]], ...] = (
    (LLAMA, "LlamaForCausalLM", "CausalLM", {"labels": (BATCH, LENGTH)}),
    (LLAMA, "LlamaForSequenceClassification", "SequenceClassification", {"labels": (BATCH,)}),
    (LLAMA, "LlamaForTokenClassification", "TokenClassification", {"labels": (BATCH, LENGTH)}),
    (
        LLAMA,
        "LlamaForQuestionAnswering",
        "QuestionAnswering",
        {"start_positions": (BATCH,), "end_positions": (BATCH,)},
    ),
    (BERT, "BertForMaskedLM", "MaskedLM", {"labels": (BATCH, LENGTH)}),
    (BERT, "BertForTokenClassification", "TokenClassification", {"labels": (BATCH, LENGTH)}),
    (BERT, "BertForMultipleChoice", "MultipleChoice", {"labels": (BATCH,)}),
    (BERT, "BertForNextSentencePrediction", "NextSentencePrediction", {"labels": (BATCH,)}),
    (T5, "T5ForConditionalGeneration", "Seq2SeqLM", {"labels": (BATCH, LENGTH)}),
    (T5, "T5ForTokenClassification", "TokenClassification", {"labels": (BATCH, LENGTH)}),
    (VIT, "ViTForImageClassification", "ImageClassification", {"labels": (BATCH,)}),
)


def configured(config: dict[str, Any], published: str, **changes: Any) -> dict[str, Any]:
    return config | {"architectures": [published], "num_labels": 7, "num_choices": CHOICES} | changes


def expected_model(config: dict[str, Any], factory: str) -> Any:
    """Built by the auto class of the head's name, which knows nothing of ``architectures``."""
    fields = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    with torch.device("meta"):
        made = getattr(transformers, f"AutoModelFor{factory}")
        return made.from_config(transformers.AutoConfig.for_model(config["model_type"], **fields))


@some_quick(("config", "published", "factory", "labels"), NAMED, quick=5, ids=[case[1] for case in NAMED])
def test_what_is_named_is_traced(
    config: dict[str, Any], published: str, factory: str, labels: dict[str, tuple[int, ...]]
) -> None:
    named = configured(config, published)
    workload = workload_of_configuration(
        named, name="mine", batch_size=BATCH, sequence_length=None if config is VIT else LENGTH
    )
    model = expected_model(named, factory)
    assert type(model).__name__ == published
    assert {p.name: p.shape for p in workload.parameters} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    inputs = {"input_ids", "pixel_values"}
    assert {k: shape for k, shape in workload.batch_shapes.items() if k not in inputs} == labels
    if published == "BertForMultipleChoice":
        assert workload.batch_shapes["input_ids"] == (BATCH, CHOICES, LENGTH)
        assert workload.num_tokens == BATCH * CHOICES * LENGTH


@pytest.mark.parametrize(
    ("changes", "shape", "dtype"),
    [
        ({"num_labels": 7}, (BATCH,), torch.long),
        ({"num_labels": 1}, (BATCH,), torch.float32),
        ({"num_labels": 4, "problem_type": "regression"}, (BATCH, 4), torch.float32),
        ({"num_labels": 9, "problem_type": "multi_label_classification"}, (BATCH, 9), torch.float32),
        ({"num_labels": 4, "problem_type": "single_label_classification"}, (BATCH,), torch.long),
    ],
)
def test_the_problem_decides_what_a_label_is(changes: dict[str, Any], shape: tuple[int, ...], dtype: Any) -> None:
    """The real model takes what is traced, and its loss is finite."""
    model = build_model(
        configured(LLAMA, "LlamaForSequenceClassification", **changes), "mine", torch.float32, device="cpu"
    )
    meta = batch_of(model, {BATCH_SIZE: BATCH, SEQUENCE_LENGTH: LENGTH, TARGET_LENGTH: LENGTH})
    assert (tuple(meta["labels"].shape), meta["labels"].dtype) == (shape, dtype)
    (batch,) = head_batches(model, b"to be or not to be, " * 9, batch_size=BATCH, sequence_length=LENGTH, num_batches=1)
    assert {key: (t.shape, t.dtype) for key, t in batch.items()} == {k: (t.shape, t.dtype) for k, t in meta.items()}
    assert torch.isfinite(model(**batch).loss)


@pytest.mark.parametrize(("vocabulary", "most"), [(65, 64), (256, 255), (300, 255)])
def test_text_is_of_tokens_that_the_model_has(vocabulary: int, most: int) -> None:
    """A vocabulary of characters has fewer tokens than there are bytes."""
    config = LLAMA | {"vocab_size": vocabulary}
    model = build_model(configured(config, "LlamaForCausalLM"), "mine", torch.float32, device="cpu")
    (batch,) = head_batches(model, bytes(range(256)), batch_size=BATCH, sequence_length=256, num_batches=1)
    assert batch["input_ids"].max() == batch["labels"].max() == most
    assert torch.isfinite(model(**{key: tokens[:, :LENGTH] for key, tokens in batch.items()}).loss)


@pytest.mark.parametrize(("config", "published"), [(c, p) for c, p, _, _ in NAMED if c is not VIT])
def test_batches_of_text_are_as_traced(config: dict[str, Any], published: str) -> None:
    model = build_model(configured(config, published), "mine", torch.float32, device="cpu")
    meta = batch_of(model, {BATCH_SIZE: BATCH, SEQUENCE_LENGTH: LENGTH, TARGET_LENGTH: LENGTH})
    text = bytes(range(256)) * 2
    first, again = (
        list(head_batches(model, text, batch_size=BATCH, sequence_length=LENGTH, num_batches=3, seed=5))
        for _ in range(2)
    )
    for batch, same in zip(first, again, strict=True):
        assert {key: (t.shape, t.dtype) for key, t in batch.items()} == {k: (t.shape, t.dtype) for k, t in meta.items()}
        assert all(torch.equal(batch[key], same[key]) for key in batch)
        loss = model(**batch).loss
        assert torch.isfinite(loss)
    classes = {Head.TOKEN_CLASSES: 7, Head.CLASSES: 7, Head.CHOICES: CHOICES}.get(head_of(model))
    if classes is not None and published != "BertForNextSentencePrediction":
        seen = torch.cat([batch["labels"].flatten() for batch in first]).unique()
        assert len(seen) > 1
        assert int(seen.max()) < classes


@pytest.mark.parametrize(
    ("config", "published", "reason"),
    [
        (LLAMA, "LLaMAForCausalLM", "no model 'LLaMAForCausalLM'.*Did you mean LlamaForCausalLM"),
        (LLAMA, "GPT2LMHeadModel", "names GPT2LMHeadModel in architectures, which is no llama model"),
        (LLAMA, "Trainer", "no model 'Trainer'"),
        (BERT, "BertForPreTraining", "is a BertForPreTraining, and protwin makes batches for"),
        ({"model_type": "wav2vec2"}, "Wav2Vec2ForPreTraining", "is a Wav2Vec2ForPreTraining"),
        ({"model_type": "detr"}, "DetrForObjectDetection", "is a DetrForObjectDetection"),
        ({"model_type": "resnet"}, "ResNetForImageClassification", "no image_size"),
        (BERT | {"num_choices": None}, "BertForMultipleChoice", "Add num_choices"),
        (LLAMA | {"pad_token_id": None}, "LlamaForSequenceClassification", "no pad_token_id.*Add it"),
    ],
    ids=lambda value: value if isinstance(value, str) and "For" in value and " " not in value else "",
)
def test_what_cannot_be_built_is_refused_by_name(config: dict[str, Any], published: str, reason: str) -> None:
    with pytest.raises(WorkloadError, match=reason):
        workload_of_configuration(
            config | {"architectures": [published]},
            name="mine",
            batch_size=BATCH,
            sequence_length=None if published.startswith(("Detr", "ResNet")) else LENGTH,
        )


@pytest.mark.parametrize("architectures", [None, [], ["BertModel"], [3]])
def test_a_model_without_a_head_is_trained_with_its_familys(architectures: Any) -> None:
    model = build_model(BERT | {"architectures": architectures}, "mine", torch.float32)
    assert Labels.of(model).head is Head.TOKENS
