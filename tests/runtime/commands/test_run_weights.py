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
from protwin.runtime.commands.run_budget import check_host
from protwin.runtime.commands.run_weights import FolderModel
from protwin.runtime.model.pretrained import load_pretrained
from protwin.runtime.tracing.configurations import apply_options
from protwin.shared import PlanError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.schedule import Memory
from protwin.shared.schema.training_options import FULL_TRAINING, LoraOptions, TrainingOptions
from protwin.shared.schema.workload import Workload
from tests.proof_size import some_quick
from tests.runtime.models import token_batches
from tests.runtime.resuming import offloaded
from tests.runtime.small_language import make_folder

LORA = TrainingOptions(lora=LoraOptions(rank=4, targets=("q_proj", "down_proj")))
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


def refuse() -> None:
    raise AssertionError("the model was loaded whole")


def workload_of(model: nn.Module) -> Workload:
    return trace(model, token_batches(1)[0], repeats=0)


@some_quick(
    ("kind", "options"), [*((kind, FULL_TRAINING) for kind in FOLDERS), ("plain", LORA), ("tied", LORA)], quick=3
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
    asked: list[bool] = []
    built = folder_model(tmp_path / "base").build(lambda: asked.append(True))
    assert asked == [True]
    assert built.weights is None
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
