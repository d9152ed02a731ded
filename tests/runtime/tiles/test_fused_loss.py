"""Language models of transformers compute their loss fused as they are, in training by a plan too."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from protwin.runtime import CpuDevice, carry_out, trace, trace_within
from protwin.runtime.devices.ledger import MemoryLedger
from protwin.runtime.tiles.fused_loss import loss_as
from protwin.shared.basics.errors import PlanError, ScheduleError, WorkloadError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.phases.tiling import LossHead
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import some_quick
from tests.runtime.eager_lanes import settled_lanes
from tests.runtime.tiles.test_loss_models import (
    GATED,
    bart,
    batch,
    bert,
    built,
    cohere,
    gemma2,
    gpt2,
    gradients,
    granite,
    llama,
    mixtral,
)

CHUNK_BYTES = 40_000
LONG = batch(64, 4)


def shifting(**more: Any) -> nn.Module:
    """It cuts the last token's logits off, as models did before transformers had one loss for all."""

    class Shifting(transformers.LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:  # type: ignore[override]
            logits = self.lm_head(self.model(input_ids).last_hidden_state).float()
            loss = None
            if labels is not None:
                shifted = logits[..., :-1, :].contiguous()
                loss = functional.cross_entropy(shifted.view(-1, shifted.size(-1)), labels[..., 1:].reshape(-1))
            return {"loss": loss, "logits": logits}

    return Shifting(transformers.LlamaConfig(**GATED, **more))


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=1000, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


BUILDERS = (llama, gemma2, shifting, t5, gpt2, cohere, granite, mixtral, bert, bart)


@pytest.mark.filterwarnings("default")  # transformers' own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@some_quick("build", BUILDERS, ids=lambda build: build.__name__, quick=4)
def test_a_model_as_it_is_has_the_loss_and_gradients_of_an_eager_one(
    build: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    model, given = built(build).to(dtype), batch()
    whole = model(**given)
    loss = whole["loss"].detach()
    (whole["loss"] * 3).backward()
    wanted = gradients(model)
    with torch.no_grad():
        logits = model(**given)["logits"]
    with loss_as(model, LossHead.FUSED):
        found = model(**given)
        (found["loss"] * 3).backward()
        # Of a model that copies what it hands to its loss, they are still there.
        assert found.get("logits") is None or (build is shifting and torch.equal(found["logits"], whole["logits"]))
        with torch.no_grad():
            judged = model(**given)
            assert torch.equal(judged["logits"], logits), "without gradients there are logits as ever"
            # Some have other kernels without gradients.
            torch.testing.assert_close(judged["loss"], found["loss"].detach(), rtol=2e-3, atol=0)
            if build is not t5:  # it makes what its decoder reads of labels
                assert torch.equal(model(input_ids=given["input_ids"])["logits"], logits)
    # Logits that are not widened have a loss of the same 16 bit where it is eager, its sum rounded along the way.
    rtol = 1e-6 if loss.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found["loss"], loss.float(), rtol=rtol, atol=0)
    fused = gradients(model)
    assert fused.keys() == wanted.keys()
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        difference = float((fused[name] - gradient).norm()) / max(float(gradient.norm()), 1e-2 * largest)
        assert difference <= (2e-6 if dtype is torch.float32 else 2e-2), name
    assert "forward" not in model.__dict__


@some_quick(
    ("dtype", "is_offloaded"),
    [(torch.float32, False), (torch.bfloat16, True), (torch.float32, True), (torch.bfloat16, False)],
    quick=[(torch.float32, False), (torch.bfloat16, True)],
)
def test_training_by_a_plan_equals_the_eager_loop_in_the_memory_of_the_account(
    dtype: torch.dtype, is_offloaded: bool
) -> None:
    model, plain = built(llama).to(dtype), built(llama).to(dtype)
    known = trace(model, LONG, loss_head="fused", repeats=0)
    eager = trace(model, LONG, repeats=0)
    layout = layout_of(known, CHUNK_BYTES)
    plan = Plan(
        workload_id=known.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=0 if is_offloaded else len(layout.chunks),
        n_buffer=layout.min_buffers(0) if is_offloaded else 0,
        n_checkpoint=1,
        micro_batches=2,
    )
    wanted, found = [], []
    kwargs = {"lr": 1e-3, "foreach": False}
    if dtype is torch.float32:
        optimizer = torch.optim.AdamW(plain.parameters(), **kwargs)  # type: ignore[arg-type]
        for _ in range(3):
            for _ in range(2):
                loss = plain(**LONG).loss
                (loss / 2).backward()
                wanted.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    device = CpuDevice()
    with (
        carry_out(model, plan, known, optimizer=lambda p: torch.optim.AdamW(p, **kwargs), device=device) as training,  # type: ignore[arg-type]
        settled_lanes(training),
    ):
        for _ in range(3):
            for _ in range(2):
                loss = model(**LONG).loss
                (loss / 2).backward()
                found.append(loss.item())
                del loss
            training.step()
        measured = training.peak_device_bytes
    if wanted:
        assert found == pytest.approx(wanted, rel=5e-6)
    accounted = guaranteed_device_peak(compile_schedule(plan, known)).size_bytes
    assert abs(accounted / measured - 1) < 0.005
    other = guaranteed_device_peak(compile_schedule(plan.model_copy(update={"workload_id": eager.identity}), eager))
    # All logits are widened at once where they are so few; the copy of their log-softmax is not there.
    assert accounted <= other.size_bytes - 256 * 1000 * (4 if dtype is torch.float32 else 6) + 16 * 1024


@pytest.mark.filterwarnings("default")  # transformers' own
@some_quick("build", BUILDERS, ids=lambda build: build.__name__, quick=3)
def test_a_narrow_loss_is_cross_entropy_of_logits_as_they_are(build: Callable[[], nn.Module]) -> None:
    """The oracle is a model whose logits forget how to be widened, bit for bit."""
    dtype = torch.bfloat16
    model, given = built(build).to(dtype), batch()

    def unwidened(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    widen, head = torch.Tensor.float, model.get_output_embeddings()
    vocabulary = head.weight.shape[0]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            torch.Tensor,
            "float",
            lambda t: unwidened(t) if t.shape[-1] == vocabulary and t.dtype is dtype else widen(t),
        )
        (model(**given)["loss"] * 3).backward()
    wanted = gradients(model)
    with loss_as(model, LossHead.NARROW):
        found = model(**given)
        assert found["logits"] is not None, "nothing takes their place"
        (found["loss"] * 3).backward()
    assert found["loss"].dtype is dtype
    narrow = gradients(model)
    assert narrow.keys() == wanted.keys()
    assert all(torch.equal(narrow[name], gradient) for name, gradient in wanted.items())


def test_a_plan_trains_with_a_narrow_loss_in_the_memory_of_its_account() -> None:
    model = built(llama).bfloat16()
    known, eager = (trace(model, LONG, loss_head=head, repeats=0) for head in ("narrow", "eager"))
    plan = Plan(
        workload_id=known.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=0,
        n_buffer=layout_of(known, CHUNK_BYTES).min_buffers(0),
    )
    device = CpuDevice()
    with (
        carry_out(
            model, plan, known, optimizer=lambda p: torch.optim.AdamW(p, foreach=False), device=device
        ) as training,
        settled_lanes(training),
    ):
        for _ in range(3):
            loss = model(**LONG).loss
            loss.backward()
            assert loss.dtype is torch.bfloat16
            del loss
            training.step()
        measured = training.peak_device_bytes
    accounted = guaranteed_device_peak(compile_schedule(plan, known)).size_bytes
    assert abs(accounted / measured - 1) < 0.005
    other = guaranteed_device_peak(compile_schedule(plan.model_copy(update={"workload_id": eager.identity}), eager))
    assert accounted < other.size_bytes


def test_logits_are_not_widened_for_a_loss_without_gradients() -> None:
    model = built(llama).bfloat16()
    logits = LONG["input_ids"].numel() * 1000
    peaks = {}
    for head in (LossHead.EAGER, LossHead.FUSED):
        ledger = MemoryLedger()
        with loss_as(model, head), torch.no_grad(), ledger.metering():
            model(**LONG)
            peaks[head] = ledger.watched_peak_bytes
    # One widened copy is the scratch of so few logits.
    assert peaks[LossHead.EAGER] - peaks[LossHead.FUSED] == pytest.approx(4 * logits, rel=0.05)


def test_real_and_fake_tensors_tell_the_same() -> None:
    real = trace(built(llama).bfloat16(), LONG, loss_head="fused", repeats=0)
    with torch.device("meta"):
        model = llama().bfloat16()
    faked = trace(model, LONG, loss_head="fused")
    assert real.loss_head is faked.loss_head is LossHead.FUSED
    for name in ("epilogue_forward", "epilogue_backward"):
        one, other = getattr(real, name), getattr(faked, name)
        assert (one.net_bytes, one.peak_bytes, one.operations) == (other.net_bytes, other.peak_bytes, other.operations)
    again = Workload.from_mapping(json.loads(faked.to_json()), origin="a test")
    assert again.loss_head is LossHead.FUSED
    assert "loss_head" not in trace(model, LONG).to_json()


def test_models_that_have_no_such_loss_are_refused_by_name() -> None:
    classifier = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**GATED, num_labels=2))
    with pytest.raises(PlanError, match="loss fused: LlamaForSequenceClassification names no module that makes logits"):
        trace(classifier, {"input_ids": LONG["input_ids"], "labels": LONG["labels"][:, 0]}, loss_head="fused")
    with pytest.raises(PlanError, match="loss fused: the loss is a function outside of the model"):
        trace(llama(), LONG, loss=lambda output, _: output.logits.mean(), loss_head="fused")
    with pytest.raises(WorkloadError, match="loss_head is 'quick'; use eager, narrow or fused"):
        trace(llama(), LONG, loss_head="quick")
    with pytest.raises(WorkloadError, match="Name loss_tiles"):
        trace(llama(), LONG, loss_head="chunked")
    with pytest.raises(WorkloadError, match="2 ranks that share each sequence compute their part of the loss eager"):
        trace(llama(), LONG, loss_head="fused", sequence_ranks=2)


def with_loss(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> nn.Module:
    class Own(transformers.LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            return {"loss": loss(logits.flatten(0, 1), labels.flatten())}

    return Own(transformers.LlamaConfig(**GATED))


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda logits, _: logits.mean(), "no cross-entropy of what its head gives"),
        (lambda logits, labels: functional.cross_entropy(logits, labels, torch.ones(1000)), "no cross-entropy"),
        (lambda logits, labels: functional.cross_entropy(logits, labels) + logits.logsumexp(-1).mean(), "logsumexp"),
        (lambda logits, labels: logits.logsumexp(-1).mean() + functional.cross_entropy(logits, labels), "logsumexp"),
        (lambda logits, labels: 2 * functional.cross_entropy(logits, labels) + (logits * logits).mean(), "mul"),
        (
            lambda logits, labels: functional.cross_entropy(logits, labels) + functional.cross_entropy(logits, labels),
            "cross_entropy",
        ),
    ],
)
def test_what_else_reads_the_logits_is_refused_by_name(loss: Any, what: str) -> None:
    model = with_loss(loss)
    with loss_as(model, LossHead.FUSED), pytest.raises(ScheduleError, match=what):
        model(**LONG)


def test_a_loss_that_is_computed_outside_of_the_model_is_refused() -> None:
    model = llama()
    with (
        loss_as(model, LossHead.FUSED),
        pytest.raises(ScheduleError, match=r"trained without labels.*or train with loss eager"),
    ):
        model(input_ids=LONG["input_ids"])


def test_within_a_budget_it_is_timed_so() -> None:
    model = built(llama)
    known = trace_within(model, LONG, CpuDevice(budget_bytes=8 * 2**20), loss_head="fused", repeats=1)
    assert known.loss_head is LossHead.FUSED
    assert known.identity == trace(model, LONG, loss_head="fused", repeats=0).identity
    assert known.epilogue_backward.measured_s
    assert "forward" not in model.__dict__
