"""How far the trained factors of a model are from being orthogonal to the frozen ones."""

from __future__ import annotations

from torch import nn

from protwin.runtime.osft.linear import OrthogonalLinear


def overlaps(model: nn.Module) -> float:
    """The largest of the norms of U_high^T U_low and V_low V_high^T, in float64."""
    found = []
    for module in model.modules():
        if isinstance(module, OrthogonalLinear) and module.u_high is not None and module.v_high is not None:
            found.append((module.u_high.double().T @ module.u_low.double()).norm().item())
            found.append((module.v_low.double() @ module.v_high.double().T).norm().item())
    assert found
    return max(found)
