"""Every causal language model of transformers that can be built small trains in tiles of its MLPs as it does whole."""

from __future__ import annotations

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from protwin.runtime.model.blocks import find_blocks
from protwin.runtime.tiles.mlp_modules import find_mlps, in_tiles, modules_of
from protwin.shared.basics.errors import WorkloadError
from tests.runtime.tiles.small_families import WORDS, NotBuiltError, small, within
from tests.runtime.tiles.test_loss_families import GRADIENT_TOLERANCE, TOLERANCE, ran


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_no_family_is_silently_another_one(name: str) -> None:
    try:
        model = small(name)
    except NotBuiltError as error:
        pytest.skip(f"not built: {error}")
    tokens = torch.randint(3, WORDS, (3, 11), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": tokens, "labels": tokens}
    try:
        with within(60):
            loss, wanted = ran(model, given)
    except Exception as error:
        pytest.skip(f"does not train plain: {type(error).__name__}: {error}"[:200])
    if not (torch.equal(loss, ran(model, given)[0]) and loss.isfinite()):
        pytest.skip("is not the same twice")
    try:
        blocks = find_blocks(model)
        modules = modules_of(blocks, find_mlps(blocks))
    except WorkloadError:
        return  # refused by name
    with in_tiles(modules, 4):
        found, tiled = ran(model, given)
    torch.testing.assert_close(found, loss, rtol=TOLERANCE, atol=0)
    assert tiled.keys() == wanted.keys()
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for key, gradient in wanted.items():
        distance = float((tiled[key] - gradient).norm())
        assert distance <= GRADIENT_TOLERANCE * max(float(gradient.norm()), 1e-3 * largest), key
