"""Every causal language model of transformers that can be built small has the loss and gradients of whole logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from protwin.runtime.model.blocks import find_blocks
from protwin.runtime.tiles import deferred_hidden
from protwin.runtime.tiles.loss_installing import final_of_loss, tiled_loss
from protwin.shared.basics.errors import PlanError, ScheduleError, WorkloadError
from tests.runtime.tiles.small_families import WORDS, NotBuiltError, small, within

TOLERANCE, GRADIENT_TOLERANCE = 2e-6, 1e-4


def ran(model: nn.Module, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    loss = model(**given).loss
    (loss * 3).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), found


def compared(name: str) -> str:
    """What came of one family: ``final`` modules ran by tiles, or whole."""
    try:
        model = small(name)
    except NotBuiltError as error:
        pytest.skip(f"not built: {error}")
    tokens = torch.randint(3, WORDS, (3, 11), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 2:6] = -100
    given = {"input_ids": tokens, "labels": labels}
    try:
        with within(60):
            loss, wanted = ran(model, given)
            again, _ = ran(model, given)
    except Exception as error:
        pytest.skip(f"does not train plain: {type(error).__name__}: {error}"[:200])
    if not (torch.equal(loss, again) and loss.isfinite()):
        pytest.skip("is not the same twice")
    try:
        final = final_of_loss(model, find_blocks(model), 2)
    except (PlanError, ScheduleError) as error:
        return f"refused: {error}"
    except WorkloadError as error:
        pytest.skip(str(error)[:200])
    made: list[deferred_hidden.DeferredHidden] = []
    for tiles in (2, 7):
        with tiled_loss(model, tiles, final), noting(made):
            try:
                found, tiled = ran(model, given)
            except ScheduleError as error:
                return f"refused: {error}"
        torch.testing.assert_close(found, loss, rtol=TOLERANCE, atol=0)
        assert tiled.keys() == wanted.keys()
        largest = max(float(gradient.norm()) for gradient in wanted.values())
        for key, gradient in wanted.items():
            distance = float((tiled[key] - gradient).norm())
            assert distance <= GRADIENT_TOLERANCE * max(float(gradient.norm()), 1e-3 * largest), key
    if not made:
        return "whole"
    return "whole: the norm was wanted" if any(one.if_computed() is not None for one in made) else "tiles"


@contextmanager
def noting(made: list[deferred_hidden.DeferredHidden]) -> Iterator[None]:
    """Within the block, stand-ins are noted."""
    own = deferred_hidden._made

    def note(*args: Any) -> Any:
        result = own(*args)
        made.append(result)
        return result

    deferred_hidden._made = note
    try:
        yield
    finally:
        deferred_hidden._made = own


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_no_family_is_silently_another_one(name: str) -> None:
    if (outcome := compared(name)).startswith("refused"):
        assert "loss_tiles" in outcome
