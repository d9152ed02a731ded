"""Projections: what keeps trained factors orthogonal to frozen ones, as pure functions and for a plain loop.

Gradients are projected when they are complete, before their norm is taken and before the optimizer steps; the factors
themselves behind it, since Adam scales every entry by another number and so leaves the subspace:

    dU <- dU - U_high (U_high^T dU)        dV <- dV - (dV V_high^T) V_high

A norm is so of what is stepped: a component that is taken away does not count towards its limit.
Source: orthogonal subspace fine-tuning, https://arxiv.org/abs/2504.07097, section 3; order against the norm: ours.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ...shared.phases.subspaces import SubspaceAxis
from .linear import OrthogonalLinear
from .precision import computed, computing


def coefficients(frozen: torch.Tensor, values: torch.Tensor, axis: SubspaceAxis) -> torch.Tensor:
    """How far ``values`` point along ``frozen``: U_high^T dU (k, r) of columns, dV V_high^T (r, k) of rows.

    In float32 at least.  Shapes are those of ``Subspace``.
    """
    with computing(values.device):
        wide = _common(frozen, values)
        frozen, values = frozen.detach().to(wide), values.detach().to(wide)
        return frozen.t() @ values if axis is SubspaceAxis.COLUMNS else values @ frozen.t()


def take_away_(values: torch.Tensor, frozen: torch.Tensor, along: torch.Tensor, axis: SubspaceAxis) -> None:
    """``values`` less what ``along`` (``coefficients``) makes of ``frozen``, in place; float32 at least between."""
    with computing(values.device):
        wide = values.detach().to(along.dtype)
        frozen = frozen.detach().to(along.dtype)
        first, second = (frozen, along) if axis is SubspaceAxis.COLUMNS else (along, frozen)
        wide.addmm_(first, second, alpha=-1)
        if wide.dtype != values.dtype:
            values.copy_(wide)


def project_(values: torch.Tensor, frozen: torch.Tensor, axis: SubspaceAxis) -> None:
    """Take out of ``values`` what lies in the span of ``frozen``, in place.

    Columns: ``values`` (n, r) and ``frozen`` (n, k); rows: (r, m) and (k, m).  Computed in float32 at least; needs
    room for k r coefficients, and for both matrices in float32 where they are narrower.
    """
    with computing(values.device):
        kind = _common(frozen, values)
        wide, frozen = values.detach().to(kind), frozen.detach().to(kind)
        take_away_(wide, frozen, coefficients(frozen, wide, axis), axis)
        if wide.dtype != values.dtype:
            values.copy_(wide)


def _common(frozen: torch.Tensor, values: torch.Tensor) -> torch.dtype:
    return torch.promote_types(computed(frozen.dtype), computed(values.dtype))


def projected(values: torch.Tensor, frozen: torch.Tensor, axis: SubspaceAxis) -> torch.Tensor:
    """``project_``, of a copy."""
    copy = values.detach().clone()
    project_(copy, frozen, axis)
    return copy


def subspaces_of(module: OrthogonalLinear) -> Iterator[tuple[nn.Parameter, nn.Parameter, SubspaceAxis]]:
    """The frozen and the trained factor of both sides of a map; none if nothing is frozen, or nothing trained."""
    if module.u_high is not None and module.u_low.requires_grad:
        yield module.u_high, module.u_low, SubspaceAxis.COLUMNS
    if module.v_high is not None and module.v_low.requires_grad:
        yield module.v_high, module.v_low, SubspaceAxis.ROWS


def project_gradients(model: nn.Module) -> None:
    """Take out of the gradients of ``model`` what points along frozen factors, in place.

    In a plain loop: behind the last backward of a step, before clipping and ``optimizer.step()``.
    """
    for frozen, trained, axis in _all_subspaces(model):
        if trained.grad is not None:
            project_(trained.grad, frozen, axis)


def project_parameters(model: nn.Module) -> None:
    """Make the trained factors of ``model`` orthogonal to the frozen ones, in place: behind ``optimizer.step()``."""
    for frozen, trained, axis in _all_subspaces(model):
        project_(trained.data, frozen, axis)


def _all_subspaces(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter, SubspaceAxis]]:
    for module in model.modules():
        if isinstance(module, OrthogonalLinear):
            yield from subspaces_of(module)
