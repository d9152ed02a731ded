"""Families of workloads, shipped and fitted here, equal traces at shapes that they were not fitted to."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from protwin.runtime.fakes.models import representatives
from protwin.runtime.model.configurations import build_model, quiet
from protwin.runtime.polynomials.families import family_of_configuration
from protwin.runtime.tracing import fake_subject, tracing
from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.catalogue.models import model_configuration, model_names
from protwin.shared.families.family import OutsideFamilyError, WorkloadFamily
from protwin.shared.families.shipped import shipped_family
from protwin.shared.schema.training_options import LoraOptions, TrainingOptions
from protwin.shared.schema.workload import DType, Workload

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
GEMMA2 = LLAMA | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 64, "num_hidden_layers": 6}
LORA = TrainingOptions(lora=LoraOptions(rank=4, targets=("q_proj", "v_proj")))


def same(first: Workload, second: Workload) -> bool:
    """Byte for byte, but for the versions of what traced them."""
    return first.to_json() == second.model_copy(update={"software": first.software}).to_json()


def shipped(name: str, dtype: DType = DType.BFLOAT16) -> WorkloadFamily:
    family = shipped_family(name, dtype)
    assert family is not None, f"{name} is not shipped in {dtype}"
    return family


# -- fitted here -----------------------------------------------------------------------------------------------------


@cache
def fitted(options: TrainingOptions) -> WorkloadFamily:
    return family_of_configuration(LLAMA, name="x", dtype="float32", options=options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [TrainingOptions(), LORA], ids=["full", "lora"])
def test_a_family_equals_the_trace(options: TrainingOptions) -> None:
    family = fitted(options)
    for batch, length in ((1, 77), (5, 19)):
        traced = workload_of_configuration(
            LLAMA, name="x", dtype="float32", batch_size=batch, sequence_length=length, options=options
        )
        assert same(family.at(batch_size=batch, sequence_length=length), traced), (batch, length)


def test_a_batch_of_one_is_another_program() -> None:
    """Its copies are views: the polynomials of larger batches would be wrong."""
    lone, several = fitted(TrainingOptions()).pieces
    assert (lone.most[0], several.least[0]) == (1, 2)
    shape = (1, 64)
    assert lone.shape_at(shape).observed != several.shape_at(shape).observed


def test_one_token_is_outside() -> None:
    with pytest.raises(OutsideFamilyError, match="sequence_length 1 is outside"):
        fitted(TrainingOptions()).at(batch_size=2, sequence_length=1)


# -- shipped ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "batch", "length"),
    [
        ("gpt2", DType.FLOAT16, 3, 1023),
        ("bert-large", DType.FLOAT32, 5, 333),
        ("mixtral-8x7b", DType.BFLOAT16, 1, 1001),
        ("vit-huge", DType.FLOAT32, 11, None),
        ("mistral-7b", DType.BFLOAT16, 2, 4095),
        ("mistral-7b", DType.BFLOAT16, 2, 4096),  # the window: masks, and another kernel of attention
    ],
)
def test_shipped_families_equal_fresh_traces(name: str, dtype: DType, batch: int, length: int | None) -> None:
    """Regenerate the catalogue (``make catalogue``) if the tracer has changed."""
    traced = workload_of_configuration(
        model_configuration(name).config, name=name, dtype=dtype, batch_size=batch, sequence_length=length
    )
    assert same(shipped(name, dtype).at(batch_size=batch, sequence_length=length), traced)


@pytest.mark.slow
def test_a_shipped_family_taken_at_random_equals_a_fresh_trace() -> None:
    chooser = random.Random(len(model_names()))
    several = [name for name in model_names() if not name.startswith(("t5", "gemma", "vit"))]
    name, batch, length = chooser.choice(several), chooser.randint(1, 9), chooser.randint(2, 500)
    dtype = model_configuration(name).dtype or DType.FLOAT32
    test_shipped_families_equal_fresh_traces(name, dtype, batch, length)


def test_encoder_and_decoder_have_lengths_of_their_own() -> None:
    """What frames of a recomputation hold is more than all else there, as it is of long sequences alone."""
    family = shipped("t5-small", DType.FLOAT32)
    assert family.variables == ("batch_size", "sequence_length", "target_length")
    model = build_model(model_configuration("t5-small").config, "t5-small", torch.float32)
    tensors = {
        name: torch.empty((3, length), dtype=torch.long, device="meta")
        for name, length in (("input_ids", 450), ("labels", 1400))
    }
    with quiet():
        traced = tracing.trace(model, tensors, name="t5-small")
    assert same(family.at(batch_size=3, sequence_length=450, target_length=1400), traced)
    both = family.at(batch_size=2, sequence_length=9)
    assert both == family.at(batch_size=2, sequence_length=9, target_length=9)


def test_limits_of_shipped_families() -> None:
    with pytest.raises(WorkloadError, match=r"sequence_length is 1025.*learned positions for 1024"):
        shipped("gpt2").at(batch_size=1, sequence_length=1025)
    edges = {(piece.least[1], piece.most[1]) for piece in shipped("mistral-7b").pieces}
    assert edges == {(2, 4095), (4096, None)}


# -- representatives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [("AAAAAAA", 3), ("ABABABABAB", 4), ("BAAAAAAA", 4), ("AAAABAAAA", 6), ("AB", 2), ("A", 1), ("ABCABCABCABC", 6)],
)
def test_rows_are_shortened_to_one_of_every_place(kinds: str, kept: int) -> None:
    remaining, stands_for = representatives(kinds)
    assert len(remaining) == kept
    short = [kinds[place] for place in remaining]

    def place(row: list[str] | str, index: int) -> tuple[str, str, str]:
        padded = ["", *row, ""]
        return padded[index], padded[index + 1], padded[index + 2]

    for index, stand_in in enumerate(stands_for):
        assert place(kinds, index) == place(short, stand_in)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configuration", "frozen"),
    [(GEMMA2, ()), (LLAMA | {"num_hidden_layers": 7}, ("model.embed_tokens", "model.layers.[0-2].*"))],
    ids=["gemma2", "frozen"],
)
def test_representatives_of_unequal_rows_stand_for_all(
    configuration: dict[str, Any], frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {
        "name": "x",
        "batch_size": 2,
        "sequence_length": 16,
        "options": TrainingOptions(frozen=frozen),
    }
    shortened = workload_of_configuration(configuration, **asked)
    spared: list[bool] = []
    monkeypatch.setattr(fake_subject, "keep_representatives", lambda *_: spared.append(True))
    assert same(workload_of_configuration(configuration, **asked), shortened)
    assert spared
