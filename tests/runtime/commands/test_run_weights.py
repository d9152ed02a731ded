"""The model of a folder that is read into its chunks is the one that transformers loads, to the last file it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from protwin.runtime import CpuDevice, carry_out, trace
from protwin.runtime.chunks import saved_weights
from protwin.runtime.commands.random_model import drawn_model
from protwin.runtime.commands.run_budget import check_host
from protwin.runtime.commands.run_weights import FolderModel
from protwin.runtime.model.configurations import build_model
from protwin.runtime.model.pretrained import load_pretrained
from protwin.runtime.tracing.configurations import apply_options
from protwin.shared import PlanError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.phases.quantization import Quantization, QuantizedType
from protwin.shared.schema.schedule import Memory
from protwin.shared.schema.training_options import FULL_TRAINING, LoraOptions, QuantizationOptions, TrainingOptions
from protwin.shared.schema.workload import Workload
from tests.proof_size import some_quick
from tests.runtime.models import token_batches
from tests.runtime.resuming import offloaded
from tests.runtime.small_language import make_folder

LORA = TrainingOptions(lora=LoraOptions(rank=4, targets=("q_proj", "down_proj")))
DORA = TrainingOptions(lora=LoraOptions(rank=4, targets=("q_proj", "down_proj"), use_dora=True))
"""Its magnitudes begin as norms of weights that lie in files."""
VOCABULARY = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": None}


def gpt2_without_its_head(folder: Path) -> Path:
    """As many are published: names lack what the model is called within the whole."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, **VOCABULARY))
    model.transformer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without_generation(folder: Path) -> Path:
    (folder / "generation_config.json").unlink()
    return folder


FOLDERS = {
    "plain": lambda folder: make_folder(folder),
    "several files": lambda folder: make_folder(folder, shard_size="40KB"),
    "tied": lambda folder: make_folder(folder, tie_word_embeddings=True),
    "narrow": lambda folder: make_folder(folder, dtype=torch.bfloat16),
    "no generation": lambda folder: without_generation(make_folder(folder)),
    "another prefix": gpt2_without_its_head,
}


def folder_model(folder: Path, options: TrainingOptions = FULL_TRAINING) -> FolderModel:
    configuration = json.loads((folder / "config.json").read_text())
    return FolderModel(folder, configuration, "base", torch.float32, options, 3, is_converting=True)


def loaded(folder: Path, options: TrainingOptions) -> Any:
    asked = folder_model(folder, options)
    model = load_pretrained(folder, asked.configuration, "base", torch.float32, is_converting=True)
    torch.manual_seed(3)
    apply_options(model, options)
    return model


def refuse(_: nn.Module | None) -> None:
    raise AssertionError("the model was loaded whole")


def workload_of(model: nn.Module) -> Workload:
    return trace(model, token_batches(1)[0], repeats=0)


@some_quick(
    ("kind", "options"),
    [("plain", DORA), *((kind, FULL_TRAINING) for kind in FOLDERS), ("plain", LORA), ("tied", LORA), ("narrow", DORA)],
    quick=2,
)
def test_it_is_what_transformers_loads(kind: str, options: TrainingOptions, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path / "base")
    expected = loaded(folder, options)
    built = folder_model(folder, options).build(refuse)
    assert built.weights is not None
    assert torch.equal(torch.rand(3), (loaded(folder, options), torch.rand(3))[1]), "other random numbers follow"
    plan = offloaded(workload_of(expected))
    carry_out(built.model, plan, workload_of(built.model), device=CpuDevice(), weights=built.weights).close()
    own, theirs = dict(built.model.named_buffers()), dict(expected.named_buffers())
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in theirs)
    state, wanted = built.model.state_dict(), expected.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert all(module.training for module in built.model.modules())
    if options == FULL_TRAINING:
        for model, name in ((built.model, "own"), (expected, "theirs")):
            model.save_pretrained(tmp_path / name)
        for path in (tmp_path / "theirs").iterdir():
            assert (tmp_path / "own" / path.name).read_bytes() == path.read_bytes(), path.name


def test_what_transformers_converts_is_loaded_whole(tmp_path: Path) -> None:
    """Its files have the matrices of experts one by one, and the model has them in one tensor."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        **VOCABULARY,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path / "base")
    asked: list[nn.Module | None] = []
    built = folder_model(tmp_path / "base").build(asked.append)
    assert asked == [None]
    assert built.weights is None
    assert built.was_whole
    expected = loaded(tmp_path / "base", FULL_TRAINING).state_dict()
    state = built.model.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_the_host_has_to_hold_what_the_plan_keeps_there_and_a_chunk(tmp_path: Path) -> None:
    workload = workload_of(loaded(make_folder(tmp_path / "base"), FULL_TRAINING))
    plan = offloaded(workload)
    schedule = compile_schedule(plan, workload)
    need_bytes = schedule.static_bytes(Memory.PINNED_HOST) + schedule.static_bytes(Memory.HOST)
    need_bytes += max(b.size_bytes for b in schedule.buffers if b.slot is not None and b.memory is Memory.DEVICE)
    check_host(plan, workload, 2 * need_bytes, num_processes=2, is_cpu=False)
    for wrong in ({"num_processes": 3, "is_cpu": False}, {"num_processes": 2, "is_cpu": True}):
        with pytest.raises(PlanError, match=r"of host memory in each of . processes, with the chunk"):
            check_host(plan, workload, 2 * need_bytes, **wrong)


# -- packed weights ------------------------------------------------------------------------------------------------

PACKED = TrainingOptions(
    lora=LoraOptions(rank=2), quantized=QuantizationOptions(how=Quantization(type=QuantizedType.NF4, blocksize=64))
)


def same_state(one: nn.Module, other: nn.Module) -> bool:
    own, theirs = one.state_dict(), other.state_dict()
    return own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in own)


@some_quick("kind", ["plain", "tied", "several files"], quick=1)
def test_the_weights_of_a_folder_are_packed_one_after_the_other(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than one lies there unpacked, and they are those of a model that was loaded whole, then packed."""
    folder = FOLDERS[kind](tmp_path / "base")
    unpacked = []

    def noting(model: nn.Module, *given: Any) -> None:
        blocks = [m for m in model.model.layers.modules() if type(m) is nn.Linear]
        unpacked.append(sum(not m.weight.is_meta for m in blocks))
        pack(model, *given)

    pack = saved_weights.pack
    with monkeypatch.context() as patch:
        patch.setattr(saved_weights, "pack", noting)
        built = folder_model(folder, PACKED).build(lambda whole: unpacked.append(whole is not None))
    assert unpacked == [0] * (1 + 3 * 7)
    assert not built.was_whole
    assert same_state(built.model, loaded(folder, PACKED))
    assert all(module.training for module in built.model.modules())


def test_what_transformers_converts_is_loaded_whole_before_it_is_packed(tmp_path: Path) -> None:
    """The host is asked for the room of the unpacked weights first."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(**shape, num_key_value_heads=1, num_local_experts=2, **VOCABULARY)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "base")
    asked: list[nn.Module | None] = []
    built = folder_model(tmp_path / "base", PACKED).build(asked.append)
    assert built.was_whole
    (whole,) = asked
    assert whole is not None
    plain = loaded(tmp_path / "base", FULL_TRAINING)
    assert sum(p.nbytes for p in whole.parameters()) == sum(p.nbytes for p in plain.parameters())
    assert not any(parameter.requires_grad for parameter in whole.parameters()), "no optimizer's state is asked for"
    assert same_state(built.model, loaded(tmp_path / "base", PACKED))


@some_quick("family", ["qwen2", "whisper", "mixtral", "bert", "vit"], quick=2)
def test_random_weights_are_those_that_transformers_draws(family: str) -> None:
    """Drawn whole by transformers, then packed: parts before the whole, each by the model that it belongs to."""
    config = {"model_type": family} | SMALL[family]
    built = drawn_model(config, family, "float32", 3, PACKED)
    whole: Any = build_model(config, family, torch.float32, device="cpu")
    torch.manual_seed(3)
    for module in whole.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    whole.initialize_weights()
    apply_options(whole, PACKED)
    assert same_state(built, whole)


_DECODER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL: dict[str, dict[str, Any]] = {
    "qwen2": {**_DECODER, "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": True},
    "mixtral": {**_DECODER, "vocab_size": 100, "num_local_experts": 2},
    "bert": {**_DECODER, "vocab_size": 100, "architectures": ["BertForMaskedLM"]},
    "vit": _DECODER,
    "whisper": {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "vocab_size": 100,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
    },
}
