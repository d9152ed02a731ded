"""Packing a model: the bits of bitsandbytes' own way, block by block from files, and refusals by name."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

from protwin.runtime import (
    CpuDevice,
    add_lora,
    carry_out,
    load_quantized,
    make_orthogonal,
    parameters_on_meta,
    quantize,
    trace,
    trace_distillation,
)
from protwin.runtime.chunks import saved_weights
from protwin.runtime.quantized import quantizing
from protwin.shared.basics.errors import ProtwinError, WorkloadError
from tests.runtime.models import adamw, gpt2, llama, token_batches
from tests.runtime.quantized.models import adapted, packed_blocks, qlora
from tests.runtime.resuming import offloaded

HOW: dict[str, dict[str, Any]] = {
    "nf4": {},
    "nf4, double": {"to": "nf4", "double": True},
    "fp4 in blocks of 128": {"to": "fp4", "blocksize": 128},
    "int8": {"to": "int8"},
}


def packed(model: nn.Module, name: str) -> nn.Module:
    """By bitsandbytes alone."""
    how = HOW[name]
    rest = {key: value for key, value in how.items() if key != "to"}
    return packed_blocks(model, how.get("to", "nf4"), compute=torch.float32, **rest)


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    return all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("name", HOW)
def test_a_model_is_packed_as_bitsandbytes_packs_it(name: str) -> None:
    model = llama(num_layers=2)
    paths = quantize(model, **HOW[name])
    assert len(paths) == 14
    assert "lm_head" not in paths
    assert same(model, packed(llama(num_layers=2), name))


@pytest.mark.parametrize("name", ["nf4, double", "int8"])
def test_what_stays_on_the_meta_device_has_the_sizes_of_what_does_not(name: str) -> None:
    """A trace of either is of the same parameters and bytes: nobody needs weights to be told what training takes."""
    batch = token_batches(1)[0]
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = llama(num_layers=2)
        quantize(model, **HOW[name])
        add_lora(model, rank=2, targets=["q_proj"])
        found.append(trace(model, batch, repeats=0))
    assert found[0].parameters == found[1].parameters
    assert found[0].model_hash == found[1].model_hash
    if name != "int8":  # on CUDA, for which a model without weights is traced, eight bits run other kernels
        assert found[0].profiles[0].forward.peak_bytes == found[1].profiles[0].forward.peak_bytes


@pytest.mark.parametrize("name", ["nf4, double", "int8"])
def test_a_model_is_packed_from_files_with_one_weight_at_a_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama(num_layers=2).save_pretrained(tmp_path)
    with parameters_on_meta():
        model = llama(num_layers=2)
    unpacked: list[int] = []

    def noting(*given: Any) -> None:
        maps = [m for m in model.modules() if type(m) is nn.Linear and m is not model.lm_head]
        unpacked.append(sum(not m.weight.is_meta for m in maps))
        pack(*given)

    pack = saved_weights.pack
    monkeypatch.setattr(saved_weights, "pack", noting)
    load_quantized(model, tmp_path, **HOW[name])
    assert unpacked == [0] * 14, "no weight lies in memory unpacked beside the one that is packed"
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert same(model, packed(llama(num_layers=2), name))


def test_a_package_of_kernels_for_inference_is_not_missed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On some CPUs bitsandbytes warns of it as it is first imported; what it says later is heard."""
    module = "bitsandbytes.backends.cpu.ops"
    warner = logging.getLogger(module)
    assert sys.modules[module].logger is warner  # type: ignore[attr-defined]

    def first_import(name: str) -> Any:
        warner.warning("Failed to load CPU gemm_4bit_forward")
        return import_module(name)

    monkeypatch.setattr(quantizing, "import_module", first_import)
    quantize(llama(num_layers=1))
    assert not caplog.records
    warner.warning("later")
    assert [record.message for record in caplog.records] == ["later"]


def test_an_absent_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ``pip install 'protwin[bitsandbytes]'``: protwin is on no index, where its name is another's."""
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", None)
    with pytest.raises(WorkloadError, match=r"needs bitsandbytes.* Install it: pip install 'bitsandbytes>=[\d.]+'$"):
        quantize(llama(), "nf4")


def test_random_weights_are_packed_as_they_are_drawn() -> None:
    with parameters_on_meta():
        model = llama(num_layers=2, hidden_size=64)  # bitsandbytes unpacks rows of part of a block wrongly by AVX-512
    torch.manual_seed(5)
    load_quantized(model, None, "nf4")
    weight = model.model.layers[1].mlp.up_proj.weight
    unpacked = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
    assert unpacked.std().item() == pytest.approx(model.config.initializer_range, rel=0.1)
    assert torch.equal(model.model.norm.weight, torch.ones(64))


def test_own_adapters_train_beside_a_packed_base_as_in_a_plain_loop() -> None:
    def built() -> nn.Module:
        model = llama(num_layers=2)
        quantize(model, "nf4", double=True)
        torch.manual_seed(2)
        add_lora(model, rank=2, targets=["q_proj", "up_proj"])
        return model

    plain, batches, losses = built(), token_batches(), []
    optimizer = adamw([{"params": [p for p in plain.parameters() if p.requires_grad]}])
    for batch in batches:
        loss = plain(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model = built()
    workload, found = trace(model, batches[0], repeats=0), []
    with carry_out(model, offloaded(workload), workload, optimizer=adamw, device=CpuDevice()) as training:
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            training.step()
            found.append(loss.item())
        assert training.num_gathers > 0
    assert found == losses
    assert same(model, plain)


# -- refusals --------------------------------------------------------------------------------------------------------


def refused_after(change: Callable[[nn.Module], None], **how: Any) -> str:
    model = qlora("nf4", **how)
    change(model)
    before = json.dumps([(n, str(type(p))) for n, p in model.named_parameters()])
    with pytest.raises(WorkloadError) as refused:
        trace(model, token_batches(1)[0], repeats=0)
    assert json.dumps([(n, str(type(p))) for n, p in model.named_parameters()]) == before, "nothing is half done"
    return str(refused.value)


def first_map(model: nn.Module) -> Any:
    return next(module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit))


def test_what_cannot_be_trained_with_is_refused_by_name() -> None:
    def trained(model: nn.Module) -> None:
        layer = first_map(model)
        layer.weight = bnb.nn.Params4bit(
            layer.weight.data.view(-1).view(torch.bfloat16), requires_grad=True, quant_state=layer.weight.quant_state
        )

    def unpacked(model: nn.Module) -> None:
        model.base_model.model.model.layers[0].mlp.gate_proj = bnb.nn.Linear4bit(32, 56, bias=False)

    def in_sixteen(model: nn.Module) -> None:
        model.base_model.model.model.layers[0].mlp.gate_proj = bnb.nn.Linear8bitLt(32, 56, bias=False)

    def embedded(model: nn.Module) -> None:
        model.base_model.model.model.embed_tokens = bnb.nn.Embedding4bit(64, 32).to("cpu")

    def computing(model: nn.Module) -> None:
        first_map(model).compute_dtype = torch.float64

    def biased(model: nn.Module) -> None:
        layer = first_map(model)
        layer.compute_dtype, layer.bias = torch.bfloat16, nn.Parameter(torch.zeros(32), requires_grad=False)

    for change, words in (
        (trained, "requires a gradient"),
        (unpacked, "is not quantized yet"),
        (in_sixteen, "has_fp16_weights"),
        (embedded, "quantized embeddings"),
        (computing, "float16, bfloat16 or float32"),
        (biased, "its bias is torch.float32"),
    ):
        assert words in refused_after(change), words


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"to": "nf5"}, "nf4"),
        ({"to": "nf4", "blocksize": 48}, "blocksize is 48"),
        ({"to": "int8", "double": True}, "int8"),
        ({"to": "nf4", "skip": ["q_prj"]}, "q_proj"),
        ({"to": "nf4", "compute_dtype": torch.int8}, "compute_dtype"),
        ({"to": "int8", "compute_dtype": torch.float32}, "compute_dtype"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, Any], words: str) -> None:
    model = llama(num_layers=1)
    with pytest.raises(WorkloadError, match=words):
        quantize(model, **asked)
    assert not any(isinstance(module, bnb.nn.Linear4bit) for module in model.modules())


def test_a_model_that_cannot_be_packed_is_refused() -> None:
    half = llama(num_layers=1).half()
    with pytest.raises(WorkloadError, match="Give both one element type"):
        quantize(half, compute_dtype=torch.bfloat16)
    with pytest.raises(WorkloadError, match="no linear maps"):
        quantize(gpt2(num_layers=1))
    with pytest.raises(WorkloadError, match="part of an adapter"):
        quantize(adapted(llama(num_layers=1)))
    again = llama(num_layers=1)
    quantize(again)
    with pytest.raises(WorkloadError, match="already"):
        quantize(again)


def test_methods_that_train_weights_refuse_packed_ones_by_name() -> None:
    model = llama(num_layers=1)
    quantize(model)
    with pytest.raises(WorkloadError, match="q_proj is quantized to nf4, but orthogonal"):
        make_orthogonal(model, unfreeze_rank_ratio=0.5)
    with pytest.raises(WorkloadError, match="q_proj is quantized to nf4, but a distillation"):
        trace_distillation(llama(num_layers=1), model, token_batches(1)[0], nn.functional.mse_loss)


def test_files_of_another_model_are_refused_before_anything_is_filled(tmp_path: Path) -> None:
    llama(num_layers=1).save_pretrained(tmp_path)
    with parameters_on_meta():
        model = llama(num_layers=2)
    with pytest.raises(ProtwinError, match="lack"):
        load_quantized(model, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())
