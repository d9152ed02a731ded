"""``protwin run --osft-cache``: weights are decomposed once, and a run that reads their factors has the same bits.

Also that a model saved dense is the one that was trained, and that a run resumes exactly under another plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from protwin.runtime import CpuDevice, carry_out, make_orthogonal
from protwin.runtime.optimizers.named import named_optimizer
from protwin.runtime.tracing.tracing import trace
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan, TrainingMethod
from protwin.shared.schema.workload import Workload
from tests.cli.conftest import Protwin, protwin_here, variables, work
from tests.runtime.models import differences
from tests.runtime.small_language import chats, make_folder, write_rows

__all__ = ["protwin_here", "variables", "work"]

MAPS = ("up_proj", "o_proj")
RATIO = ("--unfreeze-rank-ratio", "0.25", *(word for name in MAPS for word in ("--osft-target", name)))


def make_base(work: Path) -> None:
    """A model with its tokenizer, and rows to train it on."""
    make_folder(work / "base")
    write_rows(work / "chats.jsonl", chats(12))


def factorised(work: Path) -> Any:
    """The model of ``base`` as it starts."""
    model = LlamaForCausalLM.from_pretrained(work / "base").train()
    make_orthogonal(model, unfreeze_rank_ratio=0.25, targets=MAPS)
    return model


def osft_plan(work: Path, name: str, *, chunk_bytes: int, n_persist: int) -> None:
    """A plan of the model in ``base``, beside its workload."""
    tokens = torch.zeros(1, 128, dtype=torch.long)
    workload = trace(factorised(work), {"input_ids": tokens, "labels": tokens}, repeats=0)
    workload.save(work / "workload.json")
    layout = layout_of(workload, chunk_bytes)
    persistent = min(n_persist, len(layout.chunks))
    Plan(
        workload_id=workload.identity,
        method=TrainingMethod.OSFT,
        chunk_bytes=chunk_bytes,
        n_persist=persistent,
        n_buffer=layout.min_buffers(persistent) if persistent < len(layout.chunks) else 0,
    ).save(work / f"{name}.json")


@pytest.mark.slow
@pytest.mark.parametrize("source", ["--weights", "--model"])
def test_a_second_run_decomposes_nothing_and_has_the_same_bits(protwin_here: Protwin, work: Path, source: str) -> None:
    """Of weights that fill chunks from files, and of random ones."""
    make_base(work)
    osft_plan(work, "away", chunk_bytes=2**13, n_persist=0)
    named = ("--weights", "base", "--data", "chats.jsonl") if source == "--weights" else (source, "base/config.json")
    run = ("run", "--plan", "away.json", "--workload", "workload.json", *named, "--steps", "2", *RATIO)
    cached = (*run, "--osft-cache", "kept/factors")
    saved = {}
    for name, arguments in (("none", run), ("first", cached), ("second", cached)):
        result = protwin_here(*arguments, "--save", name)
        assert result.returncode == 0, result.stderr
        told = {
            "none": "",
            "first": "factors of 6 weights: 0 read from kept/factors, 6 decomposed and kept there",
            "second": "factors of 6 weights: 6 read from kept/factors, 0 decomposed and kept there",
        }[name]
        assert ("factors of" in result.stdout) == bool(told)
        assert told in result.stdout
        saved[name] = LlamaForCausalLM.from_pretrained(work / name).state_dict()
    assert all(torch.equal(saved["none"][key], saved[name][key]) for name in saved for key in saved["none"])

    for number, path in enumerate(sorted((work / "kept" / "factors").iterdir())):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if number else b"")
    result = protwin_here(*cached)
    assert "0 read from kept/factors, 6 decomposed" in result.stdout, "damaged files count as missing"


def test_a_cache_without_factors_is_refused(protwin_here: Protwin, work: Path) -> None:
    make_base(work)
    osft_plan(work, "away", chunk_bytes=2**13, n_persist=0)
    Plan.load(work / "away.json").model_copy(update={"method": TrainingMethod.FULL}).save(work / "full.json")
    (work / "file").write_text("")
    rest = ("--workload", "workload.json", "--model", "base/config.json", "--osft-cache")
    for arguments, message in (
        (("run", "--plan", "full.json", *rest, "kept"), "none are factorised"),
        (("run", "--plan", "away.json", *RATIO, *rest, "file/kept"), "file is a file. Name a folder"),
    ):
        refused = protwin_here(*arguments)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert message in refused.stderr
    assert (work / "file").read_text() == ""


@pytest.mark.slow
def test_a_run_resumes_exactly_under_another_plan_and_is_saved_as_what_was_trained(
    protwin_here: Protwin, work: Path
) -> None:
    make_base(work)
    osft_plan(work, "away", chunk_bytes=2**13, n_persist=0)
    osft_plan(work, "here", chunk_bytes=2**22, n_persist=99)

    def run(plan: str, steps: int, folder: str, *further: str) -> None:
        fixed = ("--workload", "workload.json", "--weights", "base", "--data", "chats.jsonl", *RATIO)
        result = protwin_here(
            "run", "--plan", f"{plan}.json", *fixed, "--steps", str(steps), "--checkpoint", folder, *further
        )
        assert result.returncode == 0, result.stderr

    run("here", 4, "straight", "--save", "uninterrupted")
    run("away", 2, "broken")
    run("here", 4, "broken", "--resume", "--save", "resumed")
    ends = [LlamaForCausalLM.from_pretrained(work / name) for name in ("uninterrupted", "resumed")]
    assert differences(ends[1], ends[0].state_dict()) == []
    assert differences(ends[1], LlamaForCausalLM.from_pretrained(work / "base").state_dict()), "it has learned"

    # The checkpoint has the factors themselves: in a factorised model they give the logits of the dense one.
    model, plan = factorised(work), Plan.load(work / "away.json")
    optimizer = named_optimizer(plan.optimizer, lr=1e-4)
    workload = Workload.load(work / "workload.json")
    with carry_out(model, plan, workload, optimizer=optimizer, device=CpuDevice()) as training:
        assert training.resume(work / "broken").step == 4
    tokens = torch.arange(16)[None]
    logits = [one.eval()(tokens).logits for one in (model, ends[1], factorised(work))]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=0)
    assert (logits[1] - logits[2]).abs().max() > 1e-4, "what was not trained is further away"
