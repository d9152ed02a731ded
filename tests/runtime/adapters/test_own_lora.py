"""The command line's own LoRA is PEFT's: what it computes, what it learns, what it takes, and what it is saved as.

PEFT keeps adapters in float32 beside a base in 16 bits unless it is told not to; the command line's have the base's
element type unless they are told to have another (``--lora-dtype``).
"""

from __future__ import annotations

import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from protwin.calibration.published.workloads import partly_trained_workload
from protwin.runtime import CpuDevice, add_lora, carry_out, quantize, trace
from protwin.runtime.checkpoints.published import save_published
from protwin.runtime.model.adapters import LowRankLinear
from protwin.runtime.model.configurations import build_model
from protwin.shared import WorkloadError
from protwin.shared.phases.phase import Phase
from protwin.shared.schema.training_options import LoraOptions
from protwin.shared.schema.workload import DType, Workload
from tests.proof_size import examples
from tests.runtime.models import adamw, gpt2, llama, snapshot, token_batches, uncached
from tests.runtime.resuming import offloaded

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT's, of transformers
MAPS = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
}
BUILT = {"llama": partial(llama, num_layers=3), "gpt2": partial(gpt2, num_layers=3)}
WIDE = {
    "llama": {"model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_key_value_heads": 2},
    "gpt2": {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 120, "n_positions": 64},
}
WIDE["llama"] |= {"num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 120}


def of_peft(
    model: Any, rank: int, targets: tuple[str, ...], alpha: float, *, is_wide: bool = False, **options: Any
) -> Any:
    configuration = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=[*targets], fan_in_fan_out=model.config.model_type == "gpt2", **options
    )
    return peft.get_peft_model(model, configuration, autocast_adapter_dtype=is_wide)


def drawn(seed: int) -> tuple[str, int, tuple[str, ...], int, int]:
    """A family, a rank, maps, and the shape of a batch."""
    chance = random.Random(seed)
    family = ("llama", "gpt2")[seed % 2]
    maps = MAPS[family]
    targets = tuple(name for name in maps if chance.random() < 0.5) or maps[:1]
    return family, chance.randint(1, 9), targets, chance.randint(1, 3), chance.randint(2, 24)


PHASES = ("forward", "backward", "checkpoint_forward", "recompute", "checkpoint_backward")


def made(phase: Phase) -> Phase:
    """The phase with what it makes, and without when that goes: PEFT's functions hold some for a call longer."""
    tensors = {
        name: tuple(size_bytes for size_bytes in getattr(phase, name) if size_bytes > 0)
        for name in ("changes", "adding_changes")
    }
    return phase.model_copy(update=tensors)


def phases(workload: Workload) -> dict[str, Any]:
    """Everything that costs anything: operations, levels, saved bytes of every section in every mode."""
    does = {
        name: getattr(workload, name)
        for name in ("prologue_forward", "epilogue_forward", "epilogue_backward", "prologue_backward", "resident_bytes")
    }
    profiles = []
    for block in range(workload.num_blocks):
        profile = workload.profile_of(block)
        update = {name: made(getattr(profile, name)) for name in PHASES}
        recomputed = [
            of.model_copy(update={"recompute": made(of.recompute), "forward_changes": ()}) for of in profile.selective
        ]
        profiles.append(profile.model_copy(update=update | {"selective": tuple(recomputed)}))
    found = {name: made(of) if isinstance(of, Phase) else of for name, of in does.items()}
    return found | {"profiles": profiles}


@pytest.mark.parametrize("seed", range(examples(40, 2)))
def test_it_costs_what_pefts_costs(seed: int) -> None:
    """On the meta device, at random ranks, maps and shapes: every phase is equal, figure by figure."""
    family, rank, targets, batch_size, length = drawn(seed)
    dtype = (torch.bfloat16, torch.float32)[seed // 2 % 2]
    tokens = torch.empty((batch_size, length), dtype=torch.long, device="meta")
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    own, theirs = (build_model(WIDE[family], family, dtype) for _ in range(2))
    dropout, use_dora = ((0.2, True), (0.1, False), (0.0, True), (0.0, False))[seed // 2 % 4]
    if family == "gpt2" and use_dora:
        # Of a transposed matrix behind dropout PEFT makes a parameter in every step, and a gradient that nobody reads.
        dropout = 0.0
    # Of a base in float32 that is nothing else.
    is_wide = seed % 3 == 0
    options: dict[str, Any] = {"dropout": dropout, "use_dora": use_dora, "dtype": torch.float32 if is_wide else None}
    add_lora(own, rank=rank, targets=targets, **options)
    theirs = of_peft(theirs, rank, targets, rank, is_wide=is_wide, lora_dropout=dropout, use_dora=use_dora)
    found, expected = trace(own, batch), trace(theirs, batch)
    assert phases(found) == phases(expected)
    # Theirs have other names, and as many bytes in every block.
    for trained in (True, False):
        sizes = [
            sorted(
                (p.block, p.shape, p.dtype) for p in one.parameters if p.trainable is trained and p.block is not None
            )
            for one in (found, expected)
        ]
        assert sizes[0] == sizes[1]


@pytest.mark.parametrize("seed", range(examples(20, 3)))
def test_it_learns_what_pefts_learns(seed: int) -> None:
    """With the same matrices, the same losses and the same matrices afterwards, bit for bit."""
    family, rank, targets, _, _ = drawn(seed)
    alpha = random.Random(seed).choice((1.0, 3.5, 16.0))
    use_rslora = seed % 3 == 1
    own, theirs = (uncached(BUILT[family]().eval()) for _ in range(2))
    dropout, use_dora = ((0.0, False), (0.1, False), (0.0, True), (0.2, True))[seed % 4]
    add_lora(own, rank=rank, targets=targets, alpha=alpha, use_rslora=use_rslora, dropout=dropout, use_dora=use_dora)
    theirs = of_peft(theirs, rank, targets, alpha, use_rslora=use_rslora, lora_dropout=dropout, use_dora=use_dora)
    _drop_in_adapters_alone(own, theirs)
    pairs = [
        (parameter, theirs.get_parameter(name))
        for name, parameter in ((of_pefts(name), p) for name, p in own.named_parameters() if p.requires_grad)
    ]
    assert len(pairs) == sum(parameter.requires_grad for parameter in theirs.parameters())
    magnitudes = [(one, other) for one, other in pairs if one.ndim == 1]
    assert bool(magnitudes) == use_dora
    assert all(torch.equal(one, other) for one, other in magnitudes), "they begin alike"
    torch.manual_seed(seed)
    with torch.no_grad():
        for one, other in pairs:
            other.copy_(one.normal_(std=0.2) if one.ndim > 1 else one.mul_(1.25))
    optimizers = [adamw([{"params": list(members)}]) for members in zip(*pairs, strict=True)]
    for batch in token_batches(3):
        losses = []
        for model, optimizer in zip((own, theirs), optimizers, strict=True):
            torch.manual_seed(seed + 1)
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    assert all(torch.equal(one, other) for one, other in pairs)
    assert all(one.any() for one, _ in pairs)


def of_pefts(name: str) -> str:
    """What PEFT calls the matrix ``name``."""
    name = name.replace("lora_magnitude", "lora_magnitude_vector.default.weight")
    return "base_model.model." + re.sub(r"lora_([ab])$", lambda m: f"lora_{m[1].upper()}.default.weight", name)


def _drop_in_adapters_alone(own: Any, theirs: Any) -> None:
    """Of models that are in evaluation mode."""
    for part in own.modules():
        if isinstance(part, LowRankLinear):
            part.train()
    for part in theirs.modules():
        if isinstance(part, peft.tuners.lora.LoraLayer):
            part.train()


@pytest.mark.parametrize(
    "options",
    [{}, {"alpha": 7.5}, {"alpha": 16.0, "use_rslora": True}, {"alpha": 3.0, "dropout": 0.25, "use_dora": True}],
    ids=["usual", "alpha", "rsLoRA", "DoRA"],
)
@pytest.mark.parametrize("family", BUILT)
def test_peft_reads_what_is_saved_of_it(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    own = BUILT[family]()
    add_lora(own, rank=5, targets=MAPS[family][:2], **options)
    own.eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in own.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    save_published(tmp_path / "adapter", own, None, base="base")
    theirs = peft.PeftModel.from_pretrained(BUILT[family]().eval(), tmp_path / "adapter")
    tokens = token_batches(1)[0]["input_ids"]
    with torch.no_grad():
        logits = [model(input_ids=tokens).logits for model in (own, theirs, BUILT[family]().eval())]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    layer = next(part for part in theirs.modules() if isinstance(part, peft.tuners.lora.LoraLayer))
    assert layer.scaling["default"] == options.get("alpha", 5) / (5**0.5 if "use_rslora" in options else 5)
    assert isinstance(layer.lora_dropout["default"], torch.nn.Dropout) == ("dropout" in options)
    assert layer.use_dora["default"] == ("use_dora" in options)


def test_adapters_of_another_dtype_train_in_it_and_are_saved_so(tmp_path: Path) -> None:
    """In float32 beside bfloat16, as PEFT has them: no master, and what is written is what was trained."""
    model = llama(num_layers=2).bfloat16()
    add_lora(model, rank=4, targets=["q_proj", "down_proj"], dtype=torch.float32)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    batch = token_batches(1)[0]
    known = trace(model, batch, repeats=0)
    narrow = llama(num_layers=2).bfloat16()
    add_lora(narrow, rank=4, targets=["q_proj", "down_proj"])
    assert trace(narrow, batch, repeats=0).identity != known.identity
    with carry_out(model, offloaded(known), known, optimizer=adamw, device=CpuDevice()) as training:
        loss = model(**batch).loss
        loss.backward()
        training.step()
    save_published(tmp_path / "adapter", model, None, base="base")
    theirs = peft.PeftModel.from_pretrained(llama(num_layers=2).bfloat16(), tmp_path / "adapter")
    written = {name: p for name, p in theirs.named_parameters() if "lora_" in name}
    assert {p.dtype for p in written.values()} == {torch.float32}
    assert all(torch.equal(written[of_pefts(name)], p) for name, p in trained.items())
    with pytest.raises(WorkloadError, match=r"dtype is torch\.int8; low-rank maps are trained in float32, bfloat16"):
        add_lora(llama(), rank=2, dtype=torch.int8)


def test_it_begins_as_pefts_does() -> None:
    """A from the same distribution, of the same bound and spread, and B of zeros."""
    own, theirs = llama(hidden_size=256, num_layers=1), llama(hidden_size=256, num_layers=1)
    add_lora(own, rank=64, targets=["q_proj"])
    theirs = of_peft(theirs, 64, ("q_proj",), 64)
    matrices = [{of_pefts(n): p for n, p in own.named_parameters() if p.requires_grad}, snapshot(theirs)]
    for name in matrices[0]:
        one, other = (found[name].detach() for found in matrices)
        assert one.shape == other.shape
        if "lora_B" in name:
            assert not one.any()
            assert not other.any()
        else:
            assert one.std().item() == pytest.approx(other.std().item(), rel=0.02)
            assert one.abs().max().item() == pytest.approx(256**-0.5, rel=0.01)
            assert other.abs().max().item() == pytest.approx(256**-0.5, rel=0.01)


def test_a_scale_that_is_not_alpha_by_r_is_noticed() -> None:
    """The wrong variant: rsLoRA's scale."""
    own, theirs = (uncached(llama().eval()) for _ in range(2))
    add_lora(own, rank=4, targets=("q_proj",), alpha=8)
    theirs = of_peft(theirs, 4, ("q_proj",), 8, use_rslora=True)
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            if parameter.requires_grad:
                theirs.get_parameter(of_pefts(name)).copy_(parameter.fill_(0.1))
    batch = token_batches(1)[0]
    assert own(**batch).loss.item() != theirs(**batch).loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_parts_that_are_trained_whole_beside_it_cost_what_pefts_do(dropout: float) -> None:
    """``modules_to_save``: a trained copy beside the frozen original, whose bytes stay."""
    name, paths = "llama", ("model.embed_tokens", "lm_head")
    tokens = torch.empty((2, 11), dtype=torch.long, device="meta")
    found = partly_trained_workload(
        WIDE[name],
        name,
        batch_size=2,
        sequence_length=11,
        dtype=DType.BFLOAT16,
        lora=LoraOptions(rank=4, dropout=dropout),
        trained_whole=paths,
    )
    model = of_peft(
        build_model(WIDE[name], name, torch.bfloat16),
        4,
        MAPS[name],
        4,
        modules_to_save=["embed_tokens", "lm_head"],
        lora_dropout=dropout,
    )
    expected = trace(model, {"input_ids": tokens, "labels": tokens.clone()})
    assert phases(found) == phases(expected)
    for trained in (True, False):
        sizes = [sum(p.size_bytes for p in one.parameters if p.trainable is trained) for one in (found, expected)]
        assert sizes[0] == sizes[1] > 0


def test_a_plan_trains_dora_with_dropout_to_the_bits_of_the_loop() -> None:
    """Blocks that are recomputed drop again what they dropped."""

    def built() -> Any:
        model = uncached(llama(num_layers=3))
        torch.manual_seed(4)
        add_lora(model, rank=3, targets=("q_proj", "up_proj", "down_proj"), dropout=0.3, use_dora=True)
        return model

    model, batches = built(), token_batches(3)
    workload = trace(model, batches[0], repeats=0)
    found: list[list[float]] = []
    trained = []
    for plan in (None, offloaded(workload)):
        model = built()
        torch.manual_seed(9)
        if plan is None:
            optimizer = adamw([{"params": [p for p in model.parameters() if p.requires_grad]}])
            found.append([])
            for batch in batches:
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found[-1].append(loss.item())
        else:
            checkpointed = plan.model_copy(update={"n_checkpoint": 2})
            with carry_out(model, checkpointed, workload, optimizer=adamw, device=CpuDevice()) as training:
                found.append([])
                for batch in batches:
                    loss = model(**batch).loss
                    loss.backward()
                    training.step()
                    found[-1].append(loss.item())
        trained.append(snapshot(model))
    assert found[0] == found[1]
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def test_what_makes_no_sense_is_refused_before_anything_is_adapted() -> None:
    model = llama(num_layers=1)
    for options, said in (
        ({"dropout": 1.0}, "from 0 to below 1"),
        ({"dropout": -0.1}, "from 0 to below 1"),
        ({"dropout": float("nan")}, "from 0 to below 1"),
        ({"alpha": 0.0}, "above 0 and finite"),
    ):
        with pytest.raises(WorkloadError, match=said):
            add_lora(model, rank=2, **options)
    quantize(model)
    with pytest.raises(WorkloadError, match=r"q_proj is packed into few bits, and DoRA takes norms"):
        add_lora(model, rank=2, targets=("q_proj",), use_dora=True)
    assert not any(isinstance(part, LowRankLinear) for part in model.modules())
