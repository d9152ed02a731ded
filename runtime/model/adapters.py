"""Training a part of a model: parameters that are frozen, and small trained matrices beside frozen linear maps (LoRA).

Source: LoRA (arXiv 2106.09685), section 4.1: h = W x + (alpha / r) B A x, with A random and B zero at the beginning;
rsLoRA (arXiv 2312.03732): alpha / sqrt(r) in the place of alpha / r; DoRA (arXiv 2402.09353), section 4.3: every output
has a trained magnitude, and the norm that it is divided by is a constant of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ...shared.basics.errors import WorkloadError
from ...shared.basics.suggestions import did_you_mean
from ...shared.factors.adapted_maps import check_rank, chosen_maps
from ...shared.schema.training_options import ADAPTER_DTYPES, LoraOptions
from ...shared.schema.workload import DType
from .blocks import find_blocks


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Take the parameters that ``patterns`` name out of training, in place.

    A pattern is a name (``"model.embed_tokens"``: all that lies below it), or has wildcards
    (``"model.layers.[0-9].*"``).  A tied parameter is meant by any of its names.  Raises WorkloadError if a pattern
    names nothing, or if nothing is left to train.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        meant = [parameter for name, parameter in named if _names_parameter(name, pattern)]
        if not meant:
            parts = dict.fromkeys(path for path, _ in model.named_modules() if path and path.count(".") < 3)
            raise WorkloadError(
                f"no parameter is called {pattern!r}, which is to be frozen. {did_you_mean(pattern, parts):.300}"
            )
        for parameter in meant:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for _, parameter in named):
        raise WorkloadError(f"freezing {', '.join(patterns)} leaves no parameter to train. Leave some out.")


class LowRankLinear(nn.Module):
    """A frozen linear map with a trained product of two thin matrices beside it."""

    def __init__(
        self,
        base: nn.Module,
        sizes: tuple[int, int],
        *,
        options: LoraOptions,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``sizes``: inputs and outputs of ``base``."""
        super().__init__()
        num_in, num_out = sizes
        weight = base.weight
        assert isinstance(weight, torch.Tensor)
        own = None if options.dtype is None else getattr(torch, options.dtype)
        place: dict[str, Any] = {"dtype": own or dtype or weight.dtype, "device": device or weight.device}
        self.base = base
        self.base.requires_grad_(False)
        rank = options.rank
        self.lora_a = nn.Parameter(torch.empty(rank, num_in, **place))
        self.lora_b = nn.Parameter(torch.zeros(num_out, rank, **place))
        self.options = options
        self.alpha = float(rank) if options.alpha is None else options.alpha
        self.scale = self.alpha / math.sqrt(rank) if options.use_rslora else self.alpha / rank
        if not self.lora_a.is_meta:
            nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        if options.use_dora:
            self.lora_magnitude = nn.Parameter(torch.empty(num_out, **place | {"dtype": own or weight.dtype}))
            if not (weight.is_meta or self.lora_magnitude.is_meta):
                self.begin_at(weight)

    def begin_at(self, weight: torch.Tensor) -> None:
        """Let the magnitudes be those of the base's ``weight``, as it is stored: DoRA begins as the base alone."""
        with torch.no_grad():
            # B is zero.  As PEFT does, so that zeros have its sign.
            added = self.lora_b @ self.lora_a
            self.lora_magnitude.copy_(self._norms(weight.to(added.device), added))

    @property
    def weight(self) -> torch.Tensor:
        """The base's matrix: models ask their maps for its dtype."""
        weight = self.base.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The base's: layers of state spaces hand it to functions that map by themselves."""
        bias = getattr(self.base, "bias", None)
        assert bias is None or isinstance(bias, torch.Tensor)
        return bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The base's map plus the scaled low-rank one: PEFT's operators in PEFT's order, so that plans are for both."""
        mapped: torch.Tensor = self.base(x)
        drops = self.training and self.options.dropout > 0
        x, dtype = x.to(self.lora_a.dtype), mapped.dtype
        # What was mapped goes before the sum is cast, and what is dropped from before the second product, as in PEFT.
        if self.options.use_dora:
            mapped = mapped + self._in_direction(self._dropped(x), None if drops else mapped)
        else:
            mapped = (
                mapped
                + nn.functional.linear(nn.functional.linear(self._dropped(x), self.lora_a), self.lora_b) * self.scale
            )
        return mapped.to(dtype)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, self.options.dropout, self.training) if self.options.dropout else x

    def _low_rank(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(nn.functional.linear(x, self.lora_a), self.lora_b)

    def _in_direction(self, x: torch.Tensor, mapped: torch.Tensor | None) -> torch.Tensor:
        """What DoRA adds to the base's map of its input; ``mapped`` is that of ``x``, None: ``x`` has gaps."""
        added = self._product().to(x.dtype)
        weight = self.weight.to(x.dtype)
        norms = self._norms(weight, added.detach()).detach()
        factor = (self.lora_magnitude / norms).view(1, -1)
        low_rank = self._low_rank(x)
        if mapped is None:
            mapped = nn.functional.linear(x, weight if isinstance(self.base, nn.Linear) else weight.T)
        else:
            bias = self.base.bias
            mapped = mapped - bias if isinstance(bias, torch.Tensor) else mapped
        return (factor - 1) * mapped + factor * low_rank * self.scale

    def _product(self) -> torch.Tensor:
        """B A (outputs, inputs), by the maps themselves."""
        eye = torch.eye(self.lora_a.shape[1], device=self.lora_a.device, dtype=self.lora_a.dtype)
        return self._low_rank(eye).T

    def _norms(self, weight: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """Of every output's row of the adapted weight (outputs,)."""
        dense = weight if isinstance(self.base, nn.Linear) else weight.T
        norms: torch.Tensor = torch.linalg.norm(dense + self.scale * added, dim=1)
        return norms.to(dense.dtype)


def add_lora(
    model: nn.Module,
    *,
    rank: int,
    targets: Sequence[str] = (),
    alpha: float | None = None,
    use_rslora: bool = False,
    dropout: float = 0.0,
    use_dora: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> list[str]:
    """Freeze ``model`` and put low-rank matrices beside linear maps of its blocks, in place; gives their paths.

    ``targets`` are the maps' names within a block, or the ends of them (``"q_proj"``, ``"mlp.up_proj"``); none: all
    linear maps.  The scale is alpha / rank, or alpha / sqrt(rank) with ``use_rslora``; without ``alpha`` that is the
    rank.  It costs nothing.  ``dropout`` is the part of what the matrices read that is dropped in training;
    ``use_dora`` adds a trained magnitude for each output.  The matrices have ``dtype``, which what they read is cast
    to, or that of the map that they lie beside, of a packed one that which it computes in, and lie where it does, or on
    ``device``.  Raises WorkloadError if a number or dtype makes no sense, a target names nothing, or a map is packed
    that would have magnitudes.
    """
    _check_numbers(rank, alpha, dropout)
    options = LoraOptions(
        rank=rank,
        alpha=alpha,
        use_rslora=use_rslora,
        dropout=dropout,
        use_dora=use_dora,
        dtype=None if dtype is None else _adapter_dtype(dtype),
    )
    maps = linear_maps(model)
    sizes_of = {path: sizes for path, (_, sizes) in maps.items()}
    chosen = chosen_maps(sizes_of, rank=rank, targets=targets, model_class=type(model).__name__)
    for path in chosen:
        weight = maps[path][0].weight
        assert isinstance(weight, torch.Tensor)
        if use_dora and not weight.is_floating_point():
            raise WorkloadError(
                f"{path} is packed into few bits, and DoRA takes norms of its weight in every step. Leave out "
                f"use_dora, or load the model unpacked."
            )
    model.requires_grad_(False)
    for path in chosen:
        module, sizes = maps[path]
        parent, _, name = path.rpartition(".")
        beside = _dtype_beside(module, model)
        adapted = LowRankLinear(module, sizes, options=options, device=device, dtype=beside)
        setattr(model.get_submodule(parent), name, adapted)
    return chosen


def linear_maps(model: nn.Module) -> dict[str, tuple[nn.Module, tuple[int, int]]]:
    """The linear maps of a model's blocks, with their inputs and outputs, by path and in order."""
    return {
        f"{block.name}.{path}": (module, sizes)
        for block in find_blocks(model)
        for path, module in block.module.named_modules()
        if (sizes := _sizes(module)) is not None
    }


def _check_numbers(rank: int, alpha: float | None, dropout: float) -> None:
    """Raise WorkloadError if one makes no sense."""
    check_rank(rank)
    if alpha is not None and not 0 < alpha < math.inf:
        raise WorkloadError(f"alpha is {alpha!r}; it must be above 0 and finite. Leave it out for a scale of 1.")
    if not 0 <= dropout < 1:
        raise WorkloadError(f"dropout is {dropout!r}; it is the part that is dropped, from 0 to below 1.")


def _adapter_dtype(dtype: torch.dtype) -> DType:
    """Raises WorkloadError if no adapter is trained in it."""
    known = {getattr(torch, name): name for name in ADAPTER_DTYPES}
    if dtype not in known:
        raise WorkloadError(f"dtype is {dtype}; low-rank maps are trained in {', '.join(ADAPTER_DTYPES)}.")
    return known[dtype]


def _dtype_beside(module: nn.Module, model: nn.Module) -> torch.dtype:
    """The element type of matrices beside a linear map: that of its products."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if weight.is_floating_point():
        return weight.dtype
    computed = getattr(module, "compute_dtype", None)
    if isinstance(computed, torch.dtype):
        return computed
    # Packed into eight bits: it computes in the element type of what it is given.
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear map; None for any other module."""
    if isinstance(module, nn.Linear):
        # One of another name may map and do more, such as Llama 4's router, which gives scores of experts too.
        is_map = type(module).forward is nn.Linear.forward or "Linear" in type(module).__name__
        return (module.in_features, module.out_features) if is_map else None
    if type(module).__name__ == "Conv1D":
        # transformers' linear map of GPT-2, whose matrix is transposed.
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        return weight.shape[0], weight.shape[1]
    return None


def _names_parameter(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)
