"""A weight as the factors of its singular value decomposition: frozen ones of the leading directions, trained others.

W (n x m) = U_high diag(S_high) V_high + U_low diag(S_low) V_low, with the largest k singular values in the first part
and the other r = min(n, m) - k in the second.
Source: orthogonal subspace fine-tuning, https://arxiv.org/abs/2504.07097.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...shared.basics.errors import WorkloadError
from ...shared.factors.sizes import FACTOR_NAMES
from .precision import computed, stored


@dataclass(frozen=True, slots=True)
class Factors:
    """A factorised weight (n x m).  Where nothing is frozen, k is 0."""

    u_high: torch.Tensor
    """(n, k), orthonormal columns."""
    s_high: torch.Tensor
    """(k,), falling."""
    v_high: torch.Tensor
    """(k, m), orthonormal rows."""
    u_low: torch.Tensor
    """(n, r)"""
    s_low: torch.Tensor
    """(r,)"""
    v_low: torch.Tensor
    """(r, m)"""

    def named(self) -> dict[str, torch.Tensor]:
        """The six by their names."""
        return {name: getattr(self, name) for name in FACTOR_NAMES}


def factorise(weight: torch.Tensor, frozen: int, *, name: str = "the weight") -> Factors:
    """The factors of ``weight`` (n x m), the leading ``frozen`` of its min(n, m) directions apart.

    They lie where ``weight`` does and have its element type; the decomposition computes in float32 at least.  The
    largest entry of every left vector, in absolute value, is positive, the first of several equal ones.  Singular
    values beyond the range of the type become the largest that it holds.  Raises WorkloadError, with ``name``, if an
    entry is not finite.
    """
    if not bool(torch.isfinite(weight).all()):
        raise WorkloadError(f"{name} has entries that are not finite and cannot be factorised. Load its weights again.")
    with torch.no_grad():
        u, s, v = torch.linalg.svd(weight.detach().to(computed(weight.dtype)), full_matrices=False)
        largest = u.abs().argmax(dim=0, keepdim=True)
        signs = torch.where(u.gather(0, largest) < 0, -1.0, 1.0).to(u.dtype).squeeze(0)
        u, v = u * signs, v * signs.unsqueeze(1)
        parts = (u[:, :frozen], s[:frozen], v[:frozen], u[:, frozen:], s[frozen:], v[frozen:])
        return Factors(*(stored(part, weight.dtype).clone(memory_format=torch.contiguous_format) for part in parts))


def reconstruct(factors: Factors) -> torch.Tensor:
    """The weight (n, m) that the factors stand for, in their type, computed in float32 at least."""
    wide = computed(factors.u_low.dtype)
    with torch.no_grad():
        wide_factors = {name: factor.detach().to(wide) for name, factor in factors.named().items()}
        weight = (wide_factors["u_low"] * wide_factors["s_low"]) @ wide_factors["v_low"]
        weight += (wide_factors["u_high"] * wide_factors["s_high"]) @ wide_factors["v_high"]
        return stored(weight, factors.u_low.dtype)
