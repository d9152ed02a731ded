"""A linear map by the factors of its weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...shared.basics.errors import WorkloadError
from ...shared.factors.sizes import FACTOR_NAMES
from ..model.parameters import asks_for_facts
from .factorisation import Factors


class DenseWeight(torch.Tensor):
    """The facts of a weight that is there in factors alone."""

    @classmethod
    def of(cls, shape: tuple[int, ...], like: torch.Tensor) -> DenseWeight:
        """Of ``shape``, and otherwise as ``like``; it has no memory."""
        return cls._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Answer what asks for facts.  Raises WorkloadError of anything else."""
        if asks_for_facts(function):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise _refusal(function)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Of what torch's own code asks.  Raises WorkloadError."""
        raise _refusal(function)


def _refusal(function: Any) -> WorkloadError:
    return WorkloadError(
        f"the model computes with the weight of a factorised map itself ({getattr(function, '__name__', function)}) "
        f"and not by calling the map. Leave this map out of the targets."
    )


class OrthogonalLinear(nn.Module):
    """y = ((x V_high^T) * S_high) U_high^T + ((x V_low^T) * S_low) U_low^T + b, for x (..., m) and y (..., n).

    Six parameters, of which the low ones are trained; without frozen directions the high ones are None.  Autograd keeps
    x once, and of the trained part x V_low^T and its product with S_low, (tokens, r) each; of the frozen part it keeps
    nothing.
    """

    u_high: nn.Parameter | None
    s_high: nn.Parameter | None
    v_high: nn.Parameter | None
    u_low: nn.Parameter
    s_low: nn.Parameter
    v_low: nn.Parameter

    def __init__(
        self,
        factors: Factors,
        bias: nn.Parameter | None,
        *,
        dense_class: type[nn.Module] = nn.Linear,
        is_transposed: bool = False,
    ) -> None:
        """``bias`` (n,) is taken as it is.

        ``dense_class`` is the class of the dense map; ``is_transposed``: whether it has its weight as (m, n).
        """
        super().__init__()
        has_frozen = factors.s_high.numel() > 0
        for name, factor in factors.named().items():
            is_trained = name.endswith("_low")
            kept = nn.Parameter(factor, requires_grad=is_trained) if is_trained or has_frozen else None
            self.register_parameter(name, kept)
        self.bias = bias
        self.out_features, self.in_features = factors.u_low.shape[0], factors.v_low.shape[1]
        self.dense_class = dense_class
        self.is_transposed = is_transposed

    @property
    def num_frozen(self) -> int:
        """Directions that are not trained."""
        return 0 if self.s_high is None else self.s_high.numel()

    @property
    def factors(self) -> Factors:
        """The six; where nothing is frozen, the high ones are empty."""
        low = (self.u_low, self.s_low, self.v_low)
        if self.u_high is not None and self.s_high is not None and self.v_high is not None:
            return Factors(self.u_high, self.s_high, self.v_high, *low)
        none = (self.u_low.new_empty(self.out_features, 0), self.s_low.new_empty(0))
        return Factors(*none, self.v_low.new_empty(0, self.in_features), *low)

    @property
    def weight(self) -> torch.Tensor:
        """Shape, element type and device of the dense weight, without values: models ask their maps for these.

        Whoever computes with it gets WorkloadError.
        """
        shape = (self.out_features, self.in_features)
        return DenseWeight.of(shape[::-1] if self.is_transposed else shape, self.u_low)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., m) to (..., n)."""
        rows = x.reshape(-1, self.in_features)
        low = nn.functional.linear(rows, self.v_low)
        # Under autocast the product is narrower than the factors, and would be widened by theirs.
        low = low * self.s_low.to(low.dtype)
        if self.u_high is None or self.s_high is None or self.v_high is None:
            y = nn.functional.linear(low, self.u_low, self.bias)
        else:
            high = nn.functional.linear(rows, self.v_high)
            high = high * self.s_high.to(high.dtype)
            # Not in place: autocast casts operands of ``addmm``, and none of ``addmm_``.
            y = torch.addmm(nn.functional.linear(high, self.u_high, self.bias), low, self.u_low.t())
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes, for ``repr``."""
        trained = self.s_low.numel()
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, frozen={self.num_frozen}, "
            f"trained={trained}, bias={self.bias is not None}"
        )


def factor_names(path: str, module: OrthogonalLinear) -> dict[str, str]:
    """The full names of the factors of the module at ``path``, by what they are called in it."""
    prefix = f"{path}." if path else ""
    return {name: f"{prefix}{name}" for name in FACTOR_NAMES if getattr(module, name) is not None}
