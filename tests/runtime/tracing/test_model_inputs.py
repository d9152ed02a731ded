"""What a model reads beside text is derived from its signature and its configuration, and the real model takes it."""

from __future__ import annotations

import pytest
import torch

from protwin.runtime import trace
from protwin.runtime.data.byte_text import head_batches
from protwin.runtime.fakes import known_values
from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.basics.errors import ScheduleError, WorkloadError
from protwin.shared.phases.quantization import Quantization, QuantizedType
from protwin.shared.records.question import sequence_length_of
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.training_options import LoraOptions, QuantizationOptions, TrainingOptions
from protwin.shared.schema.workload import OperationClass, Phase, Workload
from tests.proof_size import some_quick
from tests.runtime.modalities import MODALITIES, SPEECH, model_and_batch


def traced(name: str) -> Workload:
    """As it trains on a CPU, whose dropout keeps other masks than a GPU's."""
    config, length, _ = MODALITIES[name]
    return workload_of_configuration(
        config, name=name, batch_size=2, sequence_length=length, device_kind=DeviceKind.CPU
    )


def products(phase: Phase) -> int:
    return sum(op.flops * op.count for op in phase.operations if op.operation_class is OperationClass.MATMUL)


@some_quick("name", MODALITIES, quick=["clip", "wav2vec2", "whisper"])
def test_the_trace_without_weights_is_the_real_one(name: str) -> None:
    """The real model learns from the batch, and does on it what was traced: blocks, operations and bytes."""
    fake = traced(name)
    assert fake.batch_shapes == MODALITIES[name][2]
    model, batch = model_and_batch(name)
    loss = model(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)
    model.zero_grad()
    real = trace(model, batch, repeats=0)
    assert [block.name for block in fake.blocks] == [block.name for block in real.blocks]
    for block, other in zip(fake.blocks, real.blocks, strict=True):
        one, two = fake.profiles[block.profile], real.profiles[other.profile]
        assert one.forward.net_bytes == two.forward.net_bytes, block.name
        assert one.backward.net_bytes == two.backward.net_bytes
        assert products(one.forward) == products(two.forward) > 0


def test_blocks_are_in_the_order_in_which_they_run() -> None:
    """The text is listed first, the image runs first."""
    clip = [block.name for block in traced("clip").blocks]
    assert clip == [f"{part}_model.encoder.layers.{i}" for part in ("vision", "text") for i in range(3)]


@pytest.mark.slow
def test_blocks_behind_the_features_that_are_taken_are_not_trained() -> None:
    llava = [block.name for block in traced("llava").blocks]
    assert [name for name in llava if "vision" in name] == [
        f"model.vision_tower.encoder.layers.{i}" for i in range(2)
    ], llava
    assert len(llava) == 5


def test_names_of_blocks_that_are_given_are_not_reordered() -> None:
    model, batch = model_and_batch("clip")
    with pytest.raises(ScheduleError, match="must run the same blocks in the same order"):
        trace(model, batch, repeats=0, blocks=["text_model.encoder.layers", "vision_model.encoder.layers"])


def test_without_values_models_that_look_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: integers of the batch without their values."""
    monkeypatch.setattr(known_values, "looks_at_values", lambda _: False)
    with pytest.raises(WorkloadError, match="values that only a run with weights has"):
        traced("qwen2_vl")


def test_what_is_drawn_by_chance_is_named() -> None:
    with pytest.raises(WorkloadError, match=r"set to 0: layerdrop 0\.1"):
        workload_of_configuration(SPEECH, name="speech", batch_size=2, sequence_length=2560)


@pytest.mark.parametrize("packed", [QuantizedType.NF4, pytest.param(QuantizedType.INT8, marks=pytest.mark.slow)])
def test_packed_models_read_the_images_of_the_plain_ones(packed: QuantizedType) -> None:
    pytest.importorskip("bitsandbytes")
    config, length, shapes = MODALITIES["llava"]
    how = Quantization(type=packed, blocksize=64 if packed is QuantizedType.NF4 else None)
    options = TrainingOptions(lora=LoraOptions(rank=2), quantized=QuantizationOptions(how=how))
    found = workload_of_configuration(config, name="mine", batch_size=2, sequence_length=length, options=options)
    assert found.batch_shapes == shapes
    assert {p.quantized for p in found.parameters if p.quantized} == {how}


def test_an_image_that_fills_the_text_is_refused() -> None:
    config = MODALITIES["llava"][0]
    with pytest.raises(WorkloadError, match=r"images take 4 tokens each .* Raise it to 6 at least"):
        workload_of_configuration(config, name="mine", batch_size=2, sequence_length=5)


@pytest.mark.parametrize(("name", "wrong"), [("segformer", 8), ("whisper", None), ("clip", None)])
def test_a_length_is_asked_for_where_there_is_one(name: str, wrong: int | None) -> None:
    message = "Leave it out" if wrong else "State it"
    with pytest.raises(WorkloadError, match=message):
        workload_of_configuration(MODALITIES[name][0], name=name, batch_size=2, sequence_length=wrong)


def test_a_model_s_own_refusal_is_told_where_its_blocks_run_in_another_order() -> None:
    """Its images come first, and then the text is longer than its table of positions: the order is no reason."""
    with pytest.raises(WorkloadError, match=r"refuses the batch .*input_ids \[2, 65\].*max_position_embeddings"):
        workload_of_configuration(MODALITIES["clip"][0], name="mine", batch_size=2, sequence_length=65)


@pytest.mark.parametrize(("name", "length"), [("whisper", 6), ("wav2vec2", None), ("clip", 6), ("segformer", None)])
def test_tokens_are_those_of_the_text(name: str, length: int | None) -> None:
    """Of what a decoder writes too; what reads sounds and has none is asked for their length, and counts samples."""
    found = traced(name)
    assert sequence_length_of(found) == length
    assert found.num_tokens == 2 * (length or 1)


@pytest.mark.parametrize("name", ["clip", "qwen2_vl", "whisper"])
def test_text_is_no_training_of_what_reads_more(name: str) -> None:
    model, _ = model_and_batch(name, device="meta")
    with pytest.raises(WorkloadError, match="batches of its own"):
        next(head_batches(model, b"to be " * 99, batch_size=2, sequence_length=6, num_batches=1))
