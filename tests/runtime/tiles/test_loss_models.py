"""Language models of transformers compute their loss by tiles as they are, in training by a plan too."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from protwin.runtime import CpuDevice, carry_out, trace
from protwin.runtime.model.blocks import find_blocks
from protwin.runtime.tiles.loss_installing import final_of_loss, tiled_loss
from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import some_quick
from tests.runtime.eager_lanes import settled_lanes

WIDTH = {"vocab_size": 1000, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
GATED = WIDTH | {"intermediate_size": 48, "num_key_value_heads": 1}
GPT2 = {"vocab_size": 1000, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
TOLERANCE = 1e-6
CHUNK_BYTES = 40_000


def llama(**more: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GATED, **more))


def gpt2() -> nn.Module:
    """Its head is tied to its embedding."""
    config = transformers.GPT2Config(**GPT2, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config)


def gemma2() -> nn.Module:
    """It caps logits."""
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**GATED, head_dim=16, final_logit_softcapping=0.3, initializer_range=0.3)
    )


def cohere() -> nn.Module:
    return transformers.CohereForCausalLM(transformers.CohereConfig(**GATED, logit_scale=0.25))


def granite() -> nn.Module:
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**GATED, logits_scaling=7.0))


def mixtral() -> nn.Module:
    """Its loss has a part that comes from its routers."""
    config = transformers.MixtralConfig(**GATED, num_local_experts=4, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


def bert() -> nn.Module:
    """Its head stands within another module, and has a bias."""
    config = transformers.BertConfig(**WIDTH, intermediate_size=48, is_decoder=True)
    return transformers.BertLMHeadModel(config)


def bart() -> nn.Module:
    """Its decoder alone, which calls cross-entropy itself."""
    return transformers.BartForCausalLM(
        transformers.BartConfig(
            vocab_size=1000,
            d_model=32,
            decoder_layers=2,
            decoder_attention_heads=2,
            decoder_ffn_dim=48,
            forced_eos_token_id=None,
        )
    )


def bamba() -> nn.Module:
    """It penalises the logarithm of the sum of exponents (z-loss)."""
    return transformers.BambaForCausalLM(
        transformers.BambaConfig(
            **GATED, attn_layer_indices=[0, 1], mamba_n_heads=4, mamba_d_state=8, z_loss_coefficient=0.1
        )
    )


BUILDERS = (llama, gpt2, gemma2, cohere, granite, mixtral, bert, bart, bamba)


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().eval()


def batch(length: int = 11, samples: int = 3) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 1000, (samples, length), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 2:6] = -100
    return {"input_ids": tokens, "labels": labels}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.filterwarnings("default")  # transformers' own
@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_a_model_as_it_is_has_the_loss_and_gradients_of_whole_logits(build: Callable[[], nn.Module]) -> None:
    model, given = built(build), batch()
    whole = model(**given)
    (whole.loss * 3).backward()
    wanted = gradients(model)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    final = final_of_loss(model, find_blocks(model), 2)
    for tiles in (2, 7):
        with tiled_loss(model, tiles, final):
            found = model(**given)
            assert getattr(found, "logits", None) is None
            assert "logits" not in found
            (found.loss * 3).backward()
            with torch.no_grad():
                logits = model(input_ids=given["input_ids"]).logits
                assert torch.equal(logits, whole.logits), "without labels there are logits as ever"
        torch.testing.assert_close(found.loss, whole.loss, rtol=TOLERANCE, atol=0)
        tiled = gradients(model)
        assert tiled.keys() == wanted.keys()
        largest = max(float(gradient.abs().max()) for gradient in wanted.values())
        for name, gradient in wanted.items():
            assert float((tiled[name] - gradient).norm()) <= 2 * TOLERANCE * max(float(gradient.norm()), largest), name
    after = {name: dict(module.__dict__) for name, module in model.named_modules()}
    assert {name: set(has) for name, has in after.items()} == {name: set(has) for name, has in before.items()}


def test_a_loss_over_several_batches_is_divided_by_their_tokens() -> None:
    model, given = built(llama), batch()
    wanted = model(**given, num_items_in_batch=torch.tensor(77))
    with tiled_loss(model, 4):
        found = model(**given, num_items_in_batch=torch.tensor(77), return_dict=False)
    torch.testing.assert_close(found[0], wanted.loss, rtol=TOLERANCE, atol=0)
    assert found[1] is None or not isinstance(found[1], torch.Tensor)


@pytest.mark.filterwarnings("default")  # transformers' own
def test_an_adapter_beside_the_head_is_trained() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), options).eval()
    model(**batch()).loss.backward()
    wanted = gradients(model)
    with tiled_loss(model, 4):
        model(**batch()).loss.backward()
    found = gradients(model)
    assert found.keys() == wanted.keys()
    assert sum("lm_head" in name for name in found) == 2
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm()) <= 4 * TOLERANCE * float(gradient.norm()), name


class OwnLoss(nn.Module):
    """A head whose loss mixes tokens."""

    def __init__(self, loss: Callable[[Any, torch.Tensor], torch.Tensor], head: nn.Module | None) -> None:
        super().__init__()
        self.embedding, self.head, self.loss = nn.Embedding(1000, 8), head, loss

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        assert self.head is not None
        logits = self.head(self.embedding(input_ids))
        return {"loss": self.loss(logits, labels), "logits": logits}


class Mixing(nn.Linear):
    """Every token's logits depend on all tokens."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden - hidden.mean(dim=-2, keepdim=True))


def test_what_cannot_be_tiled_is_refused_by_name() -> None:
    def mixing(logits: Any, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.mean(dim=1), labels[:, 0])

    given = batch()
    mixed = pytest.raises(ScheduleError, match=r"it uses Tensor\.mean between")
    with tiled_loss(model := OwnLoss(mixing, nn.Linear(8, 1000)), 2), mixed:
        model(**given)
    with (
        tiled_loss(model := OwnLoss(lambda logits, labels: labels.float().mean(), nn.Linear(8, 1000)), 2),
        pytest.raises(ScheduleError, match="no cross-entropy of what its head gives"),
    ):
        model(**given)
    for head, named in ((None, "names no module that makes logits"), (Mixing(8, 1000), "Mixing, in the head of")):
        with pytest.raises(PlanError, match=named), tiled_loss(OwnLoss(mixing, head), 2):
            pass
    for tiles in (0, -1, 2**40):
        with pytest.raises(PlanError, match="must be a whole number from 1"), tiled_loss(built(llama), tiles):
            pass
    with (
        tiled_loss(model := built(llama), 2),
        pytest.raises(ScheduleError, match="is trained without labels"),
    ):
        model(input_ids=given["input_ids"])
    with pytest.raises(PlanError, match="a function of whole logits outside of the model"):
        trace(built(llama), given, loss=lambda output, _: output.logits.sum(), repeats=0, loss_tiles=(2,))


# -- from the trace to the plan ----------------------------------------------------------------------------------------


LONG = batch(64, 4)
"""256 tokens, whose logits are larger than anything else."""


@lru_cache
def workload(build: Callable[[], nn.Module]) -> Workload:
    return trace(built(build), LONG, repeats=0, loss_tiles=(4, 2, 8) if build is llama else (4,))


def plan_of(known: Workload, *, is_offloaded: bool, **knobs: Any) -> Plan:
    layout = layout_of(known, CHUNK_BYTES)
    num_chunks = len(layout.chunks)
    return Plan(
        workload_id=known.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=0 if is_offloaded else num_chunks,
        n_buffer=layout.min_buffers(0) + 1 if is_offloaded else 0,
        **knobs,
    )


@pytest.mark.parametrize("is_offloaded", [False, True])
@some_quick("build", [llama, gpt2, gemma2], ids=lambda build: build.__name__, quick=2)
def test_a_plan_with_tiles_trains_as_the_plain_loop_within_its_account(
    build: Callable[[], nn.Module], is_offloaded: bool
) -> None:
    known, micro_batches = workload(build), 2 if is_offloaded else 1
    plan = plan_of(known, is_offloaded=is_offloaded, loss_tiles=4, micro_batches=micro_batches, optimizer=Optimizer.SGD)
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
    plain, model, device = built(build), built(build), CpuDevice()
    optimizer, wanted = make(plain.parameters()), []
    for _ in range(3):
        for _ in range(micro_batches):
            loss = plain(**LONG).loss
            (loss / micro_batches).backward()
            wanted.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with carry_out(model, plan, known, optimizer=make, device=device) as training, settled_lanes(training):
        found = []
        for _ in range(3):
            for _ in range(micro_batches):
                loss = model(**LONG).loss
                (loss / micro_batches).backward()
                found.append(loss.item())
                del loss
            training.optimizer.step()
            training.optimizer.zero_grad()
        measured = training.peak_device_bytes
        assert (training.counts.num_gathers > 0) is is_offloaded
    assert found == pytest.approx(wanted, rel=5e-6)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert float((one - other).detach().norm()) <= 2e-6 * max(1.0, float(other.detach().norm())), name
    accounted = guaranteed_device_peak(compile_schedule(plan, known)).size_bytes
    assert abs(accounted / measured - 1) < 0.005
    whole = guaranteed_device_peak(compile_schedule(plan.model_copy(update={"loss_tiles": 1}), known)).size_bytes
    assert accounted < whole


def test_bytes_of_logits_fall_as_one_over_tiles() -> None:
    known = workload(llama)
    token_bytes = 4 * 1000
    peaks = {1: known.epilogue_forward.peak_bytes} | {
        tiling.loss_tiles: tiling.epilogue_forward.peak_bytes for tiling in known.loss_tilings
    }
    assert list(peaks) == [1, 2, 4, 8]
    tokens = {tiles: 256 // tiles for tiles in peaks}
    fell = (peaks[2] - peaks[4]) / (tokens[2] - tokens[4])
    assert (peaks[4] - peaks[8]) / (tokens[4] - tokens[8]) == pytest.approx(fell, rel=0.01)
    assert fell >= 2 * token_bytes, "logits and their gradients, of each token in a tile"
    assert sum(tiling.epilogue_backward.flops for tiling in known.loss_tilings) < known.epilogue_backward.flops


def test_fake_tensors_tell_the_same() -> None:
    with torch.device("meta"):
        model = llama()
    faked = trace(model, LONG, loss_tiles=(8,))
    real = {tiling.loss_tiles: tiling for tiling in workload(llama).loss_tilings}
    assert [tiling.loss_tiles for tiling in faked.loss_tilings] == [8]
    for tiling in faked.loss_tilings:
        assert tiling.epilogue_forward.net_bytes == real[tiling.loss_tiles].epilogue_forward.net_bytes
        assert tiling.epilogue_forward.peak_bytes == real[tiling.loss_tiles].epilogue_forward.peak_bytes


def test_a_plan_with_tiles_that_nobody_traced_gets_one_message() -> None:
    known = workload(llama)
    with pytest.raises(PlanError, match=r"loss_tiles: 3, .* knows 1, 2, 4, 8"):
        compile_schedule(plan_of(known, is_offloaded=False, loss_tiles=3), known)
