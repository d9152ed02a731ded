"""FLOPs that a traced model needs, where not all of it is trained."""

from __future__ import annotations

import pytest

from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.records.flops import model_flops
from protwin.shared.records.question import question_of
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.question import Question
from protwin.shared.schema.training_options import LoraOptions, TrainingOptions
from protwin.shared.schema.workload import DType, Workload
from protwin.shared.tables.question import question_table
from tests.proof_size import some_quick

D, INNER, VOCABULARY, LAYERS, LENGTH, BATCH = 64, 128, 96, 3, 32, 2
CONFIGURATION = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": D,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
}
TOKENS = BATCH * LENGTH
LAYER = 2 * TOKENS * (4 * D * D + 3 * D * INNER)
ATTENTION = 4 * TOKENS * LENGTH * D
HEAD = 2 * TOKENS * D * VOCABULARY
FORWARD = LAYERS * (LAYER + ATTENTION) + HEAD


def traced(options: TrainingOptions) -> Workload:
    return workload_of_configuration(
        CONFIGURATION, name="x", batch_size=BATCH, sequence_length=LENGTH, dtype="bfloat16", options=options
    )


def asked(workload: Workload) -> Question:
    return question_of(workload, Plan(workload_id=workload.identity, chunk_bytes=2**20, n_persist=0, n_buffer=1))


@some_quick(
    ("frozen", "backward"),
    [
        ((), 2 * FORWARD),
        # Nothing before the second layer is trained: backward ends there, with the gradient of its first norm.
        (("model.embed_tokens", "model.layers.0"), 2 * (FORWARD - LAYER - ATTENTION)),
        # The head has no gradient of its own and hands one on.
        (("lm_head",), 2 * FORWARD - HEAD),
        # Layers hand gradients on to the embedding, and have none for their weights but for the norms'.
        (
            ("model.layers.*_proj.weight",),
            LAYERS * (LAYER + 2 * ATTENTION) + 2 * HEAD,
        ),
    ],
    quick=2,
)
def test_frozen_weights_need_no_gradient(frozen: tuple[str, ...], backward: int) -> None:
    workload = traced(TrainingOptions(frozen=frozen))
    # Rotary angles are products as well, far below a percent.
    assert model_flops(workload) == pytest.approx(FORWARD + backward, rel=2e-3)


def test_the_question_names_what_is_trained() -> None:
    lora = asked(traced(TrainingOptions(lora=LoraOptions(rank=4, targets=("q_proj", "down_proj")))))
    assert (lora.lora_rank, set(lora.lora_targets), lora.frozen) == (4, {"q_proj", "down_proj"}, ())
    assert lora.num_trained == LAYERS * 4 * ((D + D) + (INNER + D))
    assert "LoRA of rank 4 on " in question_table(lora).rows[0][1]
    frozen = asked(traced(TrainingOptions(frozen=("model.embed_tokens", "model.layers.0", "model.layers.1"))))
    assert frozen.frozen == ("model.embed_tokens", "model.layers.0-1")
    assert frozen.num_parameters - frozen.num_trained == VOCABULARY * D + 2 * (4 * D * D + 3 * D * INNER + 2 * D)


def test_autocast_is_told_from_the_weights() -> None:
    workload = workload_of_configuration(
        CONFIGURATION,
        name="x",
        batch_size=BATCH,
        sequence_length=LENGTH,
        dtype="float32",
        options=TrainingOptions(autocast=DType.BFLOAT16),
    )
    found = asked(workload)
    assert (found.weight_dtype, found.compute_dtype, found.gradient_dtype) == (
        DType.FLOAT32,
        DType.BFLOAT16,
        DType.FLOAT32,
    )
    assert (found.is_autocast, found.master_dtype) == (True, None)
    assert any("computes in bfloat16, by autocast" in words for _, words in question_table(found).rows)
