"""``protwin trace`` and ``protwin run`` of orthogonal subspace fine-tuning, end to end."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan, TrainingMethod
from protwin.shared.schema.workload import Workload
from tests.cli.conftest import Protwin, protwin_here, variables, work
from tests.runtime.models import llama

__all__ = ["protwin_here", "variables", "work"]

RATIO = ("--unfreeze-rank-ratio", "0.25", "--osft-target", "up_proj")


def test_a_traced_model_is_trained_and_saved_dense(protwin_here: Protwin, work: Path) -> None:
    llama(num_layers=1, vocab_size=256).save_pretrained(work / "base")
    shape = ("--batch-size", "1", "--sequence-length", "16")
    found = protwin_here(
        "trace", "--model", "base/config.json", *shape, "--dtype", "float32", *RATIO, "--output", "workload.json"
    )
    assert found.returncode == 0, found.stderr
    workload = Workload.load(work / "workload.json")
    assert len(workload.subspaces) == 2
    plan = Plan(
        workload_id=workload.identity,
        method=TrainingMethod.OSFT,
        chunk_bytes=2**13,
        n_persist=0,
        n_buffer=layout_of(workload, 2**13).min_buffers(0),
    )
    plan.save(work / "plan.json")
    text = ("run", "--plan", "plan.json", "--workload", "workload.json", "--model", "base/config.json", "--steps", "3")
    for arguments, message in (
        (text, "Say the ratio that it was searched with"),
        ((*text, "--unfreeze-rank-ratio", "0.5", "--osft-target", "up_proj"), "u_high has the shape [56, 16] and not"),
        ((*text, "--unfreeze-rank-ratio", "0.25", "--osft-target", "nothing"), "no linear map is called 'nothing'"),
        ((*text, *RATIO, "--method", "full"), "--method full factorises nothing"),
    ):
        refused = protwin_here(*arguments)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert message in refused.stderr
    result = protwin_here(*text, *RATIO, "--save", "tuned")
    assert result.returncode == 0, result.stderr
    tuned = LlamaForCausalLM.from_pretrained(work / "tuned")
    assert {"model.layers.0.mlp.up_proj.weight"} <= set(tuned.state_dict())
    assert torch.isfinite(tuned(torch.arange(8)[None]).logits).all()
