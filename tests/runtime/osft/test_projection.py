"""Projections: what is left is orthogonal to what is frozen, through a whole training, and frozen factors stay."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from protwin.runtime import make_orthogonal, project_gradients, project_parameters
from protwin.runtime.osft.linear import OrthogonalLinear
from protwin.runtime.osft.projection import project_, projected
from protwin.shared.phases.subspaces import SubspaceAxis
from tests.runtime.models import llama, token_batches
from tests.runtime.osft.overlaps import overlaps

AXES = list(SubspaceAxis)


def bases(axis: SubspaceAxis, length: int, frozen: int, trained: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Orthonormal frozen vectors and any others, in float64, as ``axis`` has them."""
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(length, length, generator=generator, dtype=torch.float64))
    values = torch.randn(length, trained, generator=generator, dtype=torch.float64)
    return (q[:, :frozen], values) if axis is SubspaceAxis.COLUMNS else (q[:, :frozen].T, values.T)


def by_projector(values: torch.Tensor, frozen: torch.Tensor, axis: SubspaceAxis) -> torch.Tensor:
    """By the projector onto the orthogonal complement, from the pseudo-inverse: another way than the code's."""
    vectors = frozen if axis is SubspaceAxis.COLUMNS else frozen.T
    projector = torch.eye(len(vectors), dtype=torch.float64) - vectors @ torch.linalg.pinv(vectors)
    return projector @ values if axis is SubspaceAxis.COLUMNS else values @ projector


@given(st.sampled_from(AXES), st.integers(2, 9), st.data())
@settings(max_examples=40)
def test_what_lies_in_the_frozen_span_is_taken_away(axis: SubspaceAxis, length: int, data: st.DataObject) -> None:
    frozen_count = data.draw(st.integers(1, length - 1))
    trained = data.draw(st.integers(1, 4))
    frozen, values = bases(axis, length, frozen_count, trained, data.draw(st.integers(0, 99)))
    expected = by_projector(values, frozen, axis)
    found = projected(values, frozen, axis)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(projected(found, frozen, axis), found, atol=1e-12, rtol=0)
    in_place = values.clone()
    project_(in_place, frozen, axis)
    assert torch.equal(in_place, found)


@pytest.mark.parametrize("axis", AXES)
def test_narrow_values_are_projected_in_float32(axis: SubspaceAxis) -> None:
    """The result is the nearest bfloat16 of what float32 gives; in bfloat16 throughout it is not."""
    frozen, values = (one.bfloat16() for one in bases(axis, 64, 40, 16, 3))
    expected = projected(values.float(), frozen.float(), axis).bfloat16()
    found = projected(values, frozen, axis)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    along = frozen.T @ values if axis is SubspaceAxis.COLUMNS else values @ frozen.T
    narrow = values - (frozen @ along if axis is SubspaceAxis.COLUMNS else along @ frozen)
    assert not torch.equal(narrow, expected)


def after_training(steps: int, *, gradients: bool = True, parameters: bool = True) -> tuple[nn.Module, nn.Module]:
    """The model before and after."""
    model = llama(num_layers=2)
    make_orthogonal(model, unfreeze_rank_ratio=0.4)
    before = copy.deepcopy(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for batch in token_batches(steps):
        model(**batch).loss.backward()
        if gradients:
            project_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if parameters:
            project_parameters(model)
        optimizer.zero_grad()
    return before, model


def test_fifty_steps_stay_orthogonal_and_frozen_factors_as_they_were() -> None:
    before, after = after_training(50)
    assert overlaps(after) <= 1e-5
    trained, same = dict(after.named_parameters()), []
    for name, parameter in before.named_parameters():
        assert torch.equal(parameter, trained[name]) != parameter.requires_grad, name
        same.append(parameter.requires_grad)
    assert False in same


def test_without_a_projection_of_parameters_they_leave_the_subspace() -> None:
    """Adam scales every entry by another number, so that projected gradients alone do not do."""
    _, after = after_training(50, parameters=False)
    assert overlaps(after) > 0.01


def test_gradients_are_orthogonal_before_the_step() -> None:
    model = llama(num_layers=1)
    make_orthogonal(model, unfreeze_rank_ratio=0.5)
    model(**token_batches(1)[0]).loss.backward()
    maps = [module for module in model.modules() if isinstance(module, OrthogonalLinear)]

    def largest() -> float:
        return max((m.u_high.T @ m.u_low.grad).norm().item() / m.u_low.grad.norm().item() for m in maps)

    assert largest() > 0.01
    singular = [m.s_low.grad.clone() for m in maps]
    project_gradients(model)
    assert largest() <= 1e-5
    assert all(torch.equal(m.s_low.grad, old) for m, old in zip(maps, singular, strict=True))


def test_what_has_no_gradient_or_nothing_frozen_is_left() -> None:
    model = llama(num_layers=1)
    make_orthogonal(model, unfreeze_rank_ratio=1.0)
    project_gradients(model)
    before = copy.deepcopy(model.state_dict())
    project_parameters(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
