"""The weights of ``protwin run --weights``: read into chunks where the files have the model's own names.

transformers renames, splits and joins the tensors of some families while it loads them.  Such a model is loaded whole,
by transformers itself, before it moves into its chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ...shared.schema.training_options import QuantizationOptions, TrainingOptions
from ..chunks.meta_parameters import parameters_on_meta
from ..chunks.saved_weights import SavedWeights, are_packed, fill_packed
from ..model.adapters import LowRankLinear
from ..model.configurations import build_model
from ..model.pretrained import check_dtypes, load_generation, load_pretrained
from ..osft.cache import FactorCache
from ..osft.orthogonal_model import orthogonal_maps
from ..osft.saved_factors import FactorReader
from ..quantized.quantizing import quantize
from ..ranks.world import met_group
from ..tracing.configurations import apply_options
from .run_ranks import FACTORISING_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model that is about to be trained."""

    model: nn.Module
    weights: SavedWeights | None = None
    """What fills its parameters on the meta device; None: it has values."""
    was_whole: bool = False
    """Whether it was loaded whole, since the files have its tensors otherwise than it has."""


@dataclass(frozen=True, slots=True)
class FolderModel:
    """The model of a folder in the Hugging Face form."""

    folder: Path
    configuration: Mapping[str, Any]
    name: str
    dtype: torch.dtype
    options: TrainingOptions
    seed: int
    """Of low-rank matrices."""
    is_converting: bool
    """Whether weights of another element type are converted."""
    cache: FactorCache | None = None
    """Of factorised weights."""
    num_ranks: int = 1
    """Ranks that build it together."""

    def build(self, before_loading: Callable[[nn.Module | None], None]) -> BuiltModel:
        """The model in training mode, without the memory of its weights wherever the files can fill it.

        Packed maps have memory, and are packed one after the other.  ``before_loading`` is called before weights are
        loaded: with a model of the sizes that then lie in memory, None for those of the model as it is trained.  Raises
        FileError if files are missing or damaged, or have another element type that is not to be converted, and what
        ``load_pretrained`` does.
        """
        with parameters_on_meta():
            model = build_model(self.configuration, self.name, self.dtype, device="cpu")
        saved = SavedWeights(self.folder)
        if not self.is_converting:
            check_dtypes(self.folder, saved.files, model, self.dtype)
        load_generation(model, self.folder)
        if self.options.quantized is not None:
            return self._packed(model, saved, self.options.quantized, before_loading)
        self._adapt(model)
        renamed = _renamed(model, saved.tensors)
        saved = SavedWeights(self.folder, renamed, reader=FactorReader(self.cache)).for_model(model)
        if not saved.misfits(model, fills_all=True):
            _begin_at_saved(model, saved)
            return BuiltModel(model.train(), saved)
        before_loading(None)
        model = self._loaded_whole()
        with sharing_decompositions(self.options, self.num_ranks) as group:
            self._adapt(model, group)
        return BuiltModel(model, was_whole=True)

    def _packed(
        self,
        model: nn.Module,
        saved: SavedWeights,
        packed: QuantizationOptions,
        before_loading: Callable[[nn.Module | None], None],
    ) -> BuiltModel:
        """The same with packed maps, from ``model`` without memory."""
        saved = SavedWeights(self.folder, _renamed(model, saved.tensors))
        was_whole = not are_packed(saved, packed.how) and bool(saved.misfits(model, fills_all=True))
        if was_whole:
            before_loading(model.requires_grad_(False))
            model = self._loaded_whole()
            quantize(model, packed.how.type, double=packed.how.double, blocksize=packed.how.blocksize)
        else:
            before_loading(None)
            fill_packed(model, saved, packed.how, skip=packed.skipped, head=packed.head)
        self._adapt(model)
        return BuiltModel(model.train(), was_whole=was_whole)

    def _loaded_whole(self) -> nn.Module:
        made: nn.Module = load_pretrained(
            self.folder, self.configuration, self.name, self.dtype, is_converting=self.is_converting
        )
        return made

    def _adapt(self, model: nn.Module, group: ProcessGroup | None = None) -> None:
        torch.manual_seed(self.seed)
        # No file has low-rank matrices: they have values, whatever they lie beside.
        options = self.options.model_copy(update={"quantized": None})
        apply_options(model, options, device=torch.device("cpu"), cache=self.cache, group=group)


def _begin_at_saved(model: nn.Module, saved: SavedWeights) -> None:
    """Give DoRA its first magnitudes, which are norms of weights that lie in files still: one is read at a time."""
    for path, part in model.named_modules():
        if isinstance(part, LowRankLinear) and part.options.use_dora and part.weight.is_meta:
            part.begin_at(saved.whole(part.weight, [f"{path}.base.weight"]))


def sharing_decompositions(options: TrainingOptions, num_ranks: int) -> AbstractContextManager[ProcessGroup | None]:
    """Within the block, the ranks that decompose weights which all of them have; None if it takes no others.

    There is no training yet in which they know each other.
    """
    if options.osft is None or num_ranks == 1:
        return nullcontext()
    return met_group(num_ranks, timeout_s=FACTORISING_TIMEOUT_S)


def _renamed(model: Any, saved: Mapping[str, object]) -> dict[str, str]:
    """What the files call the tensors of ``model``, where that is something else than it does.

    They do not know that maps have low-rank matrices beside them, and may leave out or add what the model without its
    head is called within the whole.
    """
    prefix = f"{model.base_model_prefix}."
    bases = [f"{path}.base." for path, part in model.named_modules() if isinstance(part, LowRankLinear)]
    found: dict[str, str] = {}
    factorised = {f"{path}.weight": path for path in orthogonal_maps(model)}
    for name in (*model.state_dict(), *factorised):
        base = next((base for base in bases if name.startswith(base)), None)
        plain = name if base is None else f"{base.removesuffix('base.')}{name.removeprefix(base)}"
        spellings = (plain, plain.removeprefix(prefix), prefix + plain)
        found[name] = next((spelling for spelling in spellings if spelling in saved), plain)
    return found
