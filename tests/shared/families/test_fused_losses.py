"""What a fused loss takes without a trace is what a trace of it gives, figure by figure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.basics.errors import ProtwinError, WorkloadError
from protwin.shared.catalogue.models import load_model_configuration
from protwin.shared.families.family import OutsideFamilyError
from protwin.shared.families.fused_losses import making_loss
from protwin.shared.observed.assembly import TracedShape
from protwin.shared.observed.fused_loss import UnknownLossError, with_loss
from protwin.shared.phases.quantization import Quantization, QuantizedType
from protwin.shared.phases.tiling import LossHead
from protwin.shared.schema.plan import ActivationMode
from protwin.shared.schema.schedule import OuterSection, TaskKind
from protwin.shared.schema.training_options import LoraOptions, OsftOptions, QuantizationOptions, TrainingOptions
from protwin.shared.schema.workload import Workload
from protwin.shared.workloads.source import WorkloadRequest, load_workload, untraced_workload
from protwin.shared.workloads.untraced import resolve_family

FUSED = TrainingOptions(loss_head=LossHead.FUSED)
NARROW = TrainingOptions(loss_head=LossHead.NARROW)
KEPT = {"keeps_outputs": True}
KEEPING = TrainingOptions(keeps_outputs=True)
NARROW_LORA = NARROW.model_copy(update={"lora": LoraOptions(rank=8)})
LORA = FUSED.model_copy(update={"lora": LoraOptions(rank=8)})
QLORA = LORA.model_copy(
    update={"quantized": QuantizationOptions(how=Quantization(type=QuantizedType.NF4, blocksize=64))}
)
BESIDE = {"software", "published_dtype", "dtype_origin", "rotary_tokens", "traced_with"}

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "shape", "dtype", "options", "more"),
    [
        ("gpt2", (1, 1000), "bfloat16", FUSED, {}),
        pytest.param("smollm2-135m", (2, 96), "bfloat16", FUSED, {"mlp_tiles": (4,), "loss_tiles": (4,)}, marks=slow),
        pytest.param("smollm2-135m", (2, 600), "bfloat16", LORA, {}, marks=slow),
        pytest.param("smollm2-135m", (1, 256), "bfloat16", QLORA, {}, marks=slow),
        pytest.param("gpt2", (3, 100), "float32", FUSED, {}, marks=slow),
        pytest.param("gemma-2-9b", (2, 512), "bfloat16", FUSED, {}, marks=slow),
        pytest.param("gemma-2-9b", (1, 512), "float32", FUSED, {}, marks=slow),
        pytest.param("llama-3-8b", (1, 4096), "bfloat16", FUSED, {}, marks=slow),
        pytest.param("mixtral-8x7b", (1, 512), "bfloat16", FUSED, {}, marks=slow),
        pytest.param("opt-1.3b", (2, 300), "float16", FUSED, {}, marks=slow),
        pytest.param("qwen3-0.6b", (1, 7), "float32", FUSED, {}, marks=slow),
        pytest.param("t5-small", (2, 64), "float32", FUSED, {}, marks=slow),
        pytest.param("bert-large", (2, 64), "float32", FUSED, {}, marks=slow),
        ("gpt2", (1, 1000), "bfloat16", KEEPING, {}),
        pytest.param("smollm2-135m", (2, 96), "bfloat16", KEEPING, {"mlp_tiles": (4,)}, marks=slow),
        pytest.param("smollm2-135m", (2, 600), "float16", NARROW_LORA.model_copy(update=KEPT), {}, marks=slow),
        pytest.param("qwen3-0.6b", (1, 7), "float32", KEEPING, {}, marks=slow),
        pytest.param("gemma-2-9b", (2, 512), "bfloat16", KEEPING, {}, marks=slow),
        pytest.param("llama-3-8b", (1, 4096), "bfloat16", FUSED.model_copy(update=KEPT), {}, marks=slow),
        pytest.param("mixtral-8x7b", (1, 512), "bfloat16", NARROW.model_copy(update=KEPT), {}, marks=slow),
        pytest.param("opt-1.3b", (2, 300), "float16", KEEPING, {}, marks=slow),
        pytest.param("bert-large", (2, 64), "float32", KEEPING, {}, marks=slow),
        ("gpt2", (1, 1000), "bfloat16", NARROW, {}),
        pytest.param("smollm2-135m", (2, 96), "bfloat16", NARROW, {"mlp_tiles": (4,), "loss_tiles": (4,)}, marks=slow),
        pytest.param("smollm2-135m", (2, 600), "float16", NARROW_LORA, {}, marks=slow),
        pytest.param("qwen3-0.6b", (1, 7), "float32", NARROW, {}, marks=slow),
        pytest.param("gemma-2-9b", (2, 512), "bfloat16", NARROW, {}, marks=slow),
        pytest.param("llama-3-8b", (1, 4096), "bfloat16", NARROW, {}, marks=slow),
        pytest.param("mixtral-8x7b", (1, 512), "bfloat16", NARROW, {}, marks=slow),
        pytest.param("opt-1.3b", (2, 300), "float16", NARROW, {}, marks=slow),
        pytest.param("t5-small", (2, 64), "float32", NARROW, {}, marks=slow),
        pytest.param("bert-large", (2, 64), "float32", NARROW, {}, marks=slow),
    ],
)
def test_a_loss_made_otherwise_needs_no_trace(
    model: str, shape: tuple[int, int], dtype: str, options: TrainingOptions, more: dict[str, Any]
) -> None:
    samples, tokens = shape
    asked = WorkloadRequest(model, batch_size=samples, sequence_length=tokens, dtype=dtype, options=options, **more)
    found = untraced_workload(asked)
    assert found is not None
    assert found.loss_head is (options.loss_head or LossHead.EAGER)
    described = load_model_configuration(model)
    traced = workload_of_configuration(
        described.config,
        name=described.name,
        batch_size=samples,
        sequence_length=tokens,
        dtype=dtype,
        options=options,
        **more,
    )
    assert found.model_dump(exclude=BESIDE) == traced.model_dump(exclude=BESIDE)


def loaded(model: str, tokens: int, options: TrainingOptions, **more: Any) -> Workload:
    return load_workload(model, batch_size=1, sequence_length=tokens, dtype="bfloat16", options=options, **more)


def test_whole_logits_are_held_once() -> None:
    """Of llama-3-8b at 8,192 tokens: 2 bytes of each logit, where eager has 2 and two times 4."""
    eager, fused = (loaded("llama-3-8b", 8192, options) for options in (TrainingOptions(), FUSED))
    logits = 8192 * 128256
    saved = eager.epilogue_forward.peak_bytes - fused.epilogue_forward.peak_bytes
    assert saved == pytest.approx(8 * logits, rel=0.01)
    assert eager.epilogue_forward.net_bytes - fused.epilogue_forward.net_bytes == pytest.approx(2 * logits, rel=0.01)
    moved = [
        sum(o.bytes_moved * o.count for phase in (w.epilogue_forward, w.epilogue_backward) for o in phase.operations)
        for w in (eager, fused)
    ]
    # Widened (2, 4), log-softmax (4, 4), picked (4), and back (4; 4, 4, 4; 4, 2) against 2 and (2, 2).
    assert moved[0] - moved[1] == pytest.approx((6 + 8 + 4 + 8 + 12 + 6 - 6) * logits, rel=0.15)
    assert fused.identity != eager.identity
    assert fused.profiles == eager.profiles
    assert fused.model_hash == eager.model_hash
    packed = loaded("llama-3-8b", 8192, FUSED, packed_lengths="4096,4096")
    assert packed.epilogue_forward.peak_bytes == fused.epilogue_forward.peak_bytes


def test_narrow_logits_are_never_widened() -> None:
    """Of llama-3-8b at 8,192 tokens: 2 bytes of each logit and of their log-softmax, where eager has 2, 4 and 4."""
    eager, narrow = (loaded("llama-3-8b", 8192, options) for options in (TrainingOptions(), NARROW))
    logits = 8192 * 128256
    saved = eager.epilogue_forward.peak_bytes - narrow.epilogue_forward.peak_bytes
    assert saved == pytest.approx(6 * logits, rel=0.01)
    assert eager.epilogue_forward.net_bytes - narrow.epilogue_forward.net_bytes == pytest.approx(2 * logits, rel=0.01)
    # Log-softmax, its gradient and that of the loss: 12 and 6 bytes of each.
    moved = [
        sum(o.bytes_moved * o.count for phase in (w.epilogue_forward, w.epilogue_backward) for o in phase.operations)
        for w in (eager, narrow)
    ]
    assert moved[0] - moved[1] == pytest.approx((6 + 4 + 2 + 4 + 6 + 6) * logits, rel=0.01)
    assert len({narrow.identity, eager.identity, loaded("llama-3-8b", 8192, FUSED).identity}) == 3
    whole = load_workload("qwen3-0.6b", batch_size=1, sequence_length=64, dtype="float32", options=NARROW)
    assert (
        whole.epilogue_forward
        == load_workload("qwen3-0.6b", batch_size=1, sequence_length=64, dtype="float32").epilogue_forward
    ), "in float32 there is nothing to widen"


def seen_of(model: str) -> TracedShape:
    family = resolve_family(model, dtype="bfloat16")
    assert family is not None
    return family.piece_at((1, 64)).shape_at((1, 64))


@pytest.mark.parametrize("head", [LossHead.FUSED, LossHead.NARROW])
@pytest.mark.parametrize(
    ("kind", "place", "changes"),
    [
        (TaskKind.FORWARD, -3, {"name": "_softmax"}),
        (TaskKind.FORWARD, -2, {"name": "nll_loss2d_forward"}),
        (TaskKind.FORWARD, -4, {"name": "_log_softmax"}),
        (TaskKind.FORWARD, -1, {"name": "mul"}),
        (TaskKind.BACKWARD, 1, {"name": "_softmax_backward_data"}),
        (TaskKind.BACKWARD, 2, {"name": "clone"}),
    ],
)
def test_an_epilogue_of_another_form_is_not_guessed(
    kind: TaskKind, place: int, changes: dict[str, str], head: LossHead
) -> None:
    shape = seen_of("llama-3-8b")
    with_loss(shape, head)
    keep = shape.observed[ActivationMode.KEEP]
    key = (kind, OuterSection.EPILOGUE)
    calls = list(keep[key].calls)
    calls[place] = replace(calls[place], **changes)  # type: ignore[arg-type]
    changed = {**keep, key: replace(keep[key], calls=calls)}
    other = replace(shape, observed={**shape.observed, ActivationMode.KEEP: changed})
    with pytest.raises(UnknownLossError):
        with_loss(other, head)


def test_logits_of_samples_are_none_of_tokens() -> None:
    shape = seen_of("llama-3-8b")
    other = replace(shape, batch_shapes={**shape.batch_shapes, "labels": (64,)})
    with pytest.raises(UnknownLossError, match="another form"):
        with_loss(other, LossHead.FUSED)
    family = resolve_family("llama-3-8b", dtype="bfloat16")
    assert family is not None
    with pytest.raises(OutsideFamilyError, match="nothing is known exactly of a fused loss"):
        family.at(batch_size=1, sequence_length=64, change=making_loss(lambda *_: other, LossHead.FUSED))


def asked(model: str, options: TrainingOptions, **more: Any) -> Workload:
    known = {"batch_size": 1, "sequence_length": 64, "dtype": "bfloat16"}
    return load_workload(model, options=options, **{**known, **more})


def test_what_goes_not_together_gets_one_message(tmp_path: Any) -> None:
    with pytest.raises(WorkloadError, match="2 ranks that share each sequence compute their part of the loss eager"):
        asked("smollm2-135m", FUSED, sequence_ranks=(2,))
    with pytest.raises(ValueError, match=r"chunked is Plan\.loss_tiles"):
        TrainingOptions(loss_head=LossHead.CHUNKED)
    with pytest.raises(ValueError, match=r"chunked is Plan\.loss_tiles"):
        Workload(**{**dict(asked("smollm2-135m", FUSED)), "loss_head": "chunked"})
    saved = str(tmp_path / "workload.json")
    asked("smollm2-135m", FUSED).save(saved)
    assert asked(saved, FUSED).loss_head is asked(saved, TrainingOptions()).loss_head is LossHead.FUSED
    with pytest.raises(ProtwinError, match=r"--loss eager is asked for, .* traced with loss fused"):
        asked(saved, TrainingOptions(loss_head=LossHead.EAGER))
    asked("smollm2-135m", TrainingOptions()).save(saved)
    with pytest.raises(ProtwinError, match=r"--loss fused is asked for, .* traced with loss eager"):
        asked(saved, FUSED)


def test_a_saved_workload_says_whether_the_loop_holds_outputs(tmp_path: Any) -> None:
    saved = str(tmp_path / "workload.json")
    asked("smollm2-135m", KEEPING).save(saved)
    assert asked(saved, KEEPING).keeps_outputs
    assert asked(saved, TrainingOptions()).keeps_outputs, "a workload is as it was traced"
    asked("smollm2-135m", TrainingOptions()).save(saved)
    with pytest.raises(ProtwinError, match=r"--keeps-outputs is asked for, .* holds the loss alone"):
        asked(saved, KEEPING)


def test_outputs_of_an_encoder_beside_are_traced() -> None:
    """They hold its hidden states too, which a family does not tell."""
    options = TrainingOptions(keeps_outputs=True)
    given: dict[str, Any] = {"batch_size": 1, "sequence_length": 64, "dtype": "float32", "options": options}
    assert untraced_workload(WorkloadRequest("t5-small", **given)) is None
    assert untraced_workload(WorkloadRequest("gpt2", **given)) is not None


def test_factors_and_a_fused_loss_are_traced_together() -> None:
    options = FUSED.model_copy(update={"osft": OsftOptions(unfreeze_rank_ratio=0.25)})
    asked = WorkloadRequest("smollm2-135m", batch_size=1, sequence_length=64, dtype="bfloat16", options=options)
    assert untraced_workload(asked) is None


def test_options_without_it_are_kept_as_before() -> None:
    assert "loss_head" not in TrainingOptions().model_dump()
    assert FUSED.is_full
    assert FUSED.is_fused
    assert not TrainingOptions(loss_head=LossHead.EAGER).is_fused
