"""Orthogonal subspace fine-tuning saved and resumed: exactly, under another plan, and with the same ratio alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, carry_out, make_dense, make_orthogonal
from protwin.runtime.checkpoints.published import save_published
from protwin.runtime.osft.orthogonal_model import orthogonal_maps
from protwin.shared.basics.errors import ProtwinError
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan, ProjectionPlace, TrainingMethod
from tests.runtime.models import SEED, Case, differences, llama, token_batches

TARGETS = ("up_proj", "o_proj")


def build(ratio: float = 0.4) -> nn.Module:
    torch.manual_seed(SEED)
    model = llama(num_layers=2)
    make_orthogonal(model, unfreeze_rank_ratio=ratio, targets=TARGETS)
    return model


def plan_of(case: Case, chunk_bytes: int, n_persist: int, place: ProjectionPlace) -> Plan:
    layout = layout_of(case.workload, chunk_bytes)
    return Plan(
        workload_id=case.workload.identity,
        method=TrainingMethod.OSFT,
        chunk_bytes=chunk_bytes,
        n_persist=min(n_persist, len(layout.chunks)),
        n_buffer=layout.min_buffers(n_persist) if n_persist < len(layout.chunks) else 0,
        projects_gradients_on=place,
    )


def train(
    case: Case, model: nn.Module, plan: Plan, steps: slice, save: Path | None, resume: Path | None
) -> list[float]:
    losses = []
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=CpuDevice()) as training:
        if resume is not None:
            assert training.resume(resume).step == steps.start
        for batch in case.batches[steps]:
            loss = case.loss(model, batch)
            loss.backward()
            losses.append(loss.item())
            training.step()
        if save is not None:
            training.save(save)
    return losses


def test_it_goes_on_exactly_under_another_plan(tmp_path: Path) -> None:
    case = Case(build, token_batches())
    away = plan_of(case, 2**13, 0, ProjectionPlace.DEVICE)
    here = plan_of(case, 2**20, 99, ProjectionPlace.HOST)
    for first, second in ((away, here), (here, away)):
        saved = tmp_path / f"{first.n_persist}"
        losses = train(case, case.build(), first, slice(0, 2), saved, None)
        # Of other weights: all that counts is in the checkpoint.
        torch.manual_seed(SEED + 1)
        other = llama(num_layers=2)
        make_orthogonal(other, unfreeze_rank_ratio=0.4, targets=TARGETS)
        losses += train(case, other, second, slice(2, 4), None, saved)
        assert losses == case.plain.losses
        assert differences(other, case.plain.weights[-1]) == []


def test_a_checkpoint_of_another_ratio_is_refused_by_name(tmp_path: Path) -> None:
    case, other = Case(build, token_batches()), Case(partial(build, 0.5), token_batches())
    train(case, case.build(), plan_of(case, 2**20, 99, ProjectionPlace.HOST), slice(0, 1), tmp_path / "saved", None)
    model = other.build()
    with pytest.raises(ProtwinError, match=r"saved with another unfreeze_rank_ratio: .*u_high is \[32, 19\] there"):
        train(other, model, plan_of(other, 2**13, 0, ProjectionPlace.HOST), slice(1, 2), None, tmp_path / "saved")
    assert differences(model, other.build().state_dict()) == []


def test_what_is_published_is_dense_and_learns_a_third_task(tmp_path: Path) -> None:
    case = Case(build, token_batches())
    model = case.build()
    train(case, model, plan_of(case, 2**13, 1, ProjectionPlace.HOST), slice(0, 3), None, None)
    save_published(tmp_path / "saved", model, None, base="")
    loaded = type(model).from_pretrained(tmp_path / "saved")
    assert not orthogonal_maps(loaded)
    logits = [one.eval()(**case.batches[0]).logits for one in (loaded, model)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
    assert len(make_orthogonal(loaded, unfreeze_rank_ratio=0.2, targets=TARGETS)) == 4
    third = Case(lambda: loaded, token_batches())
    assert train(third, loaded, plan_of(third, 2**13, 0, ProjectionPlace.HOST), slice(0, 1), None, None)
    assert len(make_dense(loaded)) == 4
