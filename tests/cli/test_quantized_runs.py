"""``protwin run --quantize``: what was searched with the same options is carried out, as a plain loop trains it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from protwin.calibration import calibrate
from protwin.runtime import quantize
from protwin.shared.catalogue.machines import hardware_to_toml
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import Workload
from tests.calibration.fitting.test_budgeted import HERE
from tests.cli.conftest import Protwin
from tests.cli.refusals import refusal
from tests.cli.test_fine_tuning import RATE, learned, sequences_by_hand
from tests.proof_size import some_quick
from tests.runtime.quantized.models import packed_blocks
from tests.runtime.resuming import same_bits
from tests.runtime.small_language import chats, make_folder, write_rows

LORA = ("--lora-rank=4", "--lora-targets=q_proj,down_proj")
SHAPE = ("--batch-size=2", "--sequence-length=128", "--dtype=float32")
HOW = {
    "nf4": ("--quantize=nf4",),
    "nf4, double": ("--quantize=nf4", "--double-quantize", "--quantization-blocksize=32"),
    "fp4": ("--quantize=fp4", "--quantization-blocksize=128"),
    "int8": ("--quantize=int8",),
}
BY_HAND: dict[str, dict[str, Any]] = {
    "nf4": {"kind": "nf4"},
    "nf4, double": {"kind": "nf4", "double": True, "blocksize": 32},
    "fp4": {"kind": "fp4", "blocksize": 128},
    "int8": {"kind": "int8"},
}


def searched(protwin: Protwin, folder: Path, how: Sequence[str], *options: str) -> Plan:
    """The plan of a small budget, and its workload, beside the folder of the base and its data."""
    make_folder(folder / "base")
    write_rows(folder / "chats.jsonl", chats(12))
    asked = ("--model=base/config.json", "--hardware=rtx-3090", *SHAPE, *LORA, *how)
    result = protwin("search", *asked, "--chunk-bytes=16KiB", *options, "--output=plan.json")
    assert result.returncode == 0, result.stderr
    return Plan.load(folder / "plan.json")


def run(*options: str) -> tuple[str, ...]:
    return (
        "run",
        "--plan=plan.json",
        "--weights=base",
        *SHAPE,
        *LORA,
        "--lora-alpha=8",
        "--learning-rate=0.01",
        *options,
    )


def by_hand(folder: Path, name: str, steps: int, model: Any = None) -> dict[str, torch.Tensor]:
    """PEFT's adapter beside packed layers, of bitsandbytes or those of ``model``, trained by the loop that everybody
    writes; in PEFT's form."""
    rows = chats(12)
    orders = [np.random.default_rng((0, epoch)).permutation(len(rows)).tolist() for epoch in range(9)]
    sequences = iter(sequences_by_hand(folder / "base", rows, orders))
    if model is None:
        model = packed_blocks(AutoModelForCausalLM.from_pretrained(folder / "base").train(), **BY_HAND[name])
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's own, of transformers
        adapted: Any = peft.get_peft_model(model, config)
    adapted.train()
    # PEFT draws more random numbers than it keeps.
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if ".lora_A." in name:
            torch.nn.init.kaiming_uniform_(parameter, a=5**0.5)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=RATE, fused=True)
    for _ in range(steps):
        pair = [next(sequences), next(sequences)]
        batch = {name: torch.cat([one[name] for one in pair]) for name in pair[0]}
        assert learned(batch)
        adapted(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(peft.get_peft_model_state_dict(adapted))


@some_quick("name", list(HOW), quick=["nf4, double"])
def test_a_folder_is_packed_and_tuned_by_the_plan_that_was_searched(
    protwin_here: Protwin, work: Path, name: str
) -> None:
    plan = searched(protwin_here, work, HOW[name], "--n-persist=0")
    assert plan.n_persist == 0
    result = protwin_here(
        *run(*HOW[name]), "--data=chats.jsonl", "--steps=5", "--save=adapter", "--output=measured.json"
    )
    assert result.returncode == 0, result.stderr
    assert Record.load(work / "measured.json").plan == plan
    assert "loaded whole" not in result.stdout + result.stderr
    assert same_bits(load_file(work / "adapter" / "adapter_model.safetensors"), by_hand(work, name, 5))


@pytest.mark.slow
@pytest.mark.parametrize("is_packed", [False, True], ids=["packed by the run", "packed already"])
def test_a_folder_in_groups_is_tuned_by_the_plan_that_was_searched(
    protwin_here: Protwin, work: Path, *, is_packed: bool
) -> None:
    how = ("--quantize=gptq", "--quantization-blocksize=32")
    make_folder(work / "base", hidden_size=64, intermediate_size=96)
    model = AutoModelForCausalLM.from_pretrained(work / "base").train()
    quantize(model, "gptq", blocksize=32)
    if is_packed:
        tensors = {key: value for key, value in model.state_dict().items() if not key.endswith("shifts")}
        save_file(tensors, work / "base" / "model.safetensors", {"format": "pt"})
    write_rows(work / "chats.jsonl", chats(12))
    asked = ("--model=base/config.json", "--hardware=rtx-3090", *SHAPE, *LORA, *how, "--chunk-bytes=16KiB")
    assert protwin_here("search", *asked, "--n-persist=0", "--output=plan.json").returncode == 0
    result = protwin_here(*run(*how), "--data=chats.jsonl", "--steps=4", "--save=adapter")
    assert result.returncode == 0, result.stderr
    assert "loaded whole" not in result.stdout + result.stderr
    model.requires_grad_(False)
    expected = by_hand(work, "gptq", 4, model)
    assert same_bits(load_file(work / "adapter" / "adapter_model.safetensors"), expected)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_packing_alone(protwin_here: Protwin, work: Path) -> None:
    """Types of four bits have parameters of the same names and shapes, so that nothing but words tells them apart."""
    searched(protwin_here, work, HOW["nf4"])
    tuning = ("--data=chats.jsonl", "--checkpoint=kept")
    begun = protwin_here(*run(*HOW["nf4"], *tuning), "--steps=2")
    assert begun.returncode == 0, begun.stderr
    searched(protwin_here, work, ["--quantize=fp4"])
    other = protwin_here(*run("--quantize=fp4", *tuning), "--steps=3", "--resume")
    assert other.returncode == 2
    assert "saved with --quantize nf4, but this run is with --quantize fp4: the same bytes" in other.stderr
    searched(protwin_here, work, HOW["nf4"], "--n-persist=0")
    result = protwin_here(*run(*HOW["nf4"], *tuning), "--steps=3", "--resume", "--save=adapter")
    assert result.returncode == 0, result.stderr
    assert same_bits(load_file(work / "adapter" / "adapter_model.safetensors"), by_hand(work, "nf4", 3))


@pytest.mark.slow
def test_a_model_of_another_packing_than_the_workloads_is_refused(protwin_here: Protwin, work: Path) -> None:
    searched(protwin_here, work, HOW["nf4"])
    traced = ("trace", "--model=base/config.json", *SHAPE, *LORA, *HOW["nf4"], "--output=workload.json")
    assert protwin_here(*traced).returncode == 0
    asked = (*run("--quantize=fp4"), "--workload=workload.json", "--data=chats.jsonl", "--steps=1")
    assert "is quantized to fp4 and not to nf4" in refusal(protwin_here, work, asked)


@pytest.mark.slow
def test_random_weights_are_packed_too(protwin_here: Protwin, work: Path) -> None:
    searched(protwin_here, work, HOW["int8"])
    trying = ("run", "--plan=plan.json", "--model=base/config.json", *SHAPE, *LORA, *HOW["int8"], "--steps=3")
    result = protwin_here(*trying)
    assert result.returncode == 0, result.stderr
    assert "over 3 steps" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--quantize=nf4",), "packed weights cannot be trained"),
        (("--quantize=nf5", "--lora-rank=4"), "nf5"),
        (("--double-quantize", "--lora-rank=4"), "--quantize is not"),
        (("--quantize=nf4", "--lora-rank=4", "--use-dora"), "--use-dora takes norms of unpacked weights"),
        (("--use-dora",), "--use-dora is given, but --lora-rank is missing"),
        (("--lora-dropout=1", "--lora-rank=4"), "from 0 to below 1"),
        (("--quantize=int8", "--quantization-blocksize=64", "--lora-rank=4"), "one scale for each output"),
        (("--quantize=nf4", "--quantization-blocksize=48", "--lora-rank=4"), "must be one of 32, 64"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
@pytest.mark.parametrize("command", ["run", "calibrate", "validate"])
def test_what_makes_no_sense_is_refused(
    protwin_here: Protwin, folder: Path, command: str, options: tuple[str, ...], words: str
) -> None:
    measured = ("--hardware=machine.toml", "--batch-size=1", "--sequence-length=8")
    of_command = ("--plan=plan.json",) if command == "run" else measured
    assert words in refusal(protwin_here, folder, (command, "--model=gpt2", *of_command, *options))


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--device-budget=2MiB",)], ids=["resident", "within a budget"])
def test_a_machine_is_measured_and_predictions_are_judged_with_packed_weights(
    protwin_here: Protwin, work: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setitem(calibrate.__kwdefaults__, "slowdown_seconds", 0.1)
    make_folder(work / "base")
    (work / "machine.toml").write_text(hardware_to_toml(HERE))
    asked = ("--model=base/config.json", "--hardware=machine.toml", *SHAPE, *LORA, *HOW["nf4, double"], *options)
    result = protwin_here("calibrate", *asked, "--steps=2", "--workload-output=timed.json", "--output=factors.json")
    assert result.returncode == 0, result.stderr
    timed = Workload.load(work / "timed.json")
    packed = [parameter for parameter in timed.parameters if parameter.quantized is not None]
    assert len(packed) == 3 * 7
    assert {parameter.quantized.words for parameter in packed if parameter.quantized is not None} == {
        "nf4 in blocks of 32, double quantized"
    }
    assert timed.is_measured
    if not options:
        judged = protwin_here("validate", *asked, "--plans=3", "--minutes=2")
        assert judged.returncode == 0 or "the machine is too noisy" in judged.stderr, judged.stderr
