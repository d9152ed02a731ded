"""Weights in safetensors files, read stretch by stretch: each process reads what it keeps, and keeps nothing else.

Files are mapped into memory while one stretch is copied out of them: their pages are the operating system's, which
takes them back when memory is short.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import safetensors
import torch
from torch import nn

from ...shared.basics.errors import FileError, PlanError, ProtwinError
from ...shared.phases.quantization import Quantization
from ..model.pretrained import SAVED_DTYPES, first_line, some, weight_files
from ..model.strides import contiguous_strides, copy_strided, in_memory_order
from ..osft.saved_factors import FactorReader, SavedFactor, saved_factors
from ..osft.spread_reader import SpreadReader
from ..quantized.gptq import PACKED, GptqLinear
from ..quantized.gptq_files import check_groups, check_packed_format, fill_shifts
from ..quantized.quantizing import chosen_maps, pack, quantization
from ..ranks.placing import hand_out
from ..ranks.world import World
from .meta_parameters import check_exchangeable, set_values
from .parameter_values import ParameterValues, Wanted

_T = TypeVar("_T")
_PLACES: Final = 64
_PLACE_BYTES: Final = 4096
"""How many places of a file, and how much of each, tell files of different weights apart."""
_COMPARED: Final = 2**22
"""Scalars that are compared at once."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor of a file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """The name that safetensors has for it."""


@dataclass(frozen=True)
class SavedWeights:
    """The weights of a folder: ``model.safetensors``, or several files with an index."""

    folder: Path
    renamed: Mapping[str, str] = field(default_factory=dict)
    """What the files call otherwise than the model's ``state_dict``, by its name there."""
    factors: Mapping[str, SavedFactor] = field(default_factory=dict)
    """Factors that are made of dense weights in the files, by the model's names of them."""
    reader: FactorReader = field(default_factory=FactorReader, compare=False)
    """Makes these."""

    def for_model(self, model: nn.Module) -> SavedWeights:
        """The same for ``model``: where it has factorised maps, with the factors of the weights in the files."""
        return replace(self, factors=saved_factors(model))

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files.  Raises FileError if one is missing."""
        return tuple(weight_files(self.folder))

    @cached_property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """All that can be read: what the files hold, by the names in them, with factors in the place of dense weights.

        Raises FileError if a file is damaged.
        """
        found = dict(self._in_files)
        for name, factor in self.factors.items():
            held = self._in_files.get(self._name_of(factor.weight))
            if held is not None and held.shape == factor.dense_shape:
                found.pop(held.name, None)
                found[name] = replace(held, name=name, shape=factor.shape)
        return found

    def _name_of(self, name: str) -> str:
        """What the files call what the model calls ``name``."""
        return self.renamed.get(name, name)

    @cached_property
    def _in_files(self) -> Mapping[str, SavedTensor]:
        """All that the files hold, by the names in them.  Raises FileError if a file is damaged."""
        found: dict[str, SavedTensor] = {}
        for path in self.files:
            with _opened(path) as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    if name in found:
                        raise FileError(f"{name} is in {found[name].file} and in {path}. Get the folder again.")
                    held = opened.get_slice(name)
                    found[name] = SavedTensor(name, path, tuple(held.get_shape()), str(held.get_dtype()))
        return found

    def find(self, names: Iterable[str]) -> list[SavedTensor]:
        """What the files hold of a tensor that the model has under these names."""
        saved = dict.fromkeys(self._name_of(name) for name in names)
        return [self.tensors[name] for name in saved if name in self.tensors]

    def whole(self, like: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        """A tensor such as ``like``, which the model has under these names, on the host.

        Raises FileError if the files lack it, or cannot be read.
        """
        held = self.find(names)
        if not held:
            raise FileError(
                f"{self.folder} lacks {names[0]}. Name a folder with the tensors of the model's state_dict()."
            )
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        self.read(held[0], like, slice(0, like.numel()), in_memory_order(made))
        return made

    def read(self, held: SavedTensor, like: torch.Tensor, stretch: slice, place: torch.Tensor) -> None:
        """Write the scalars ``stretch`` of ``held``, as they lie in a tensor such as ``like``, into ``place`` (n,).

        Other element types are converted.  Raises FileError if the file cannot be read.
        """
        if stretch.start >= stretch.stop:
            return
        factor = self.factors.get(held.name)
        if factor is not None:
            whole = self.reader.read(factor, like.dtype, lambda: self.dense(factor))
            place.copy_(in_memory_order(copy_strided(whole, like))[stretch])
            return
        with _opened(held.file) as opened:
            if not held.shape or like.stride() != contiguous_strides(held.shape):
                whole = opened.get_tensor(held.name)
                place.copy_(in_memory_order(copy_strided(whole, like))[stretch])
                return
            row = like.numel() // held.shape[0]
            first, last = stretch.start // row, -(-stretch.stop // row)
            rows = opened.get_slice(held.name)[first:last].reshape(-1)
            place.copy_(rows[stretch.start - first * row : stretch.stop - first * row])

    def dense(self, factor: SavedFactor) -> torch.Tensor:
        """The weight that ``factor`` is of.  Raises FileError."""
        held = self._in_files[self._name_of(factor.weight)]
        with _opened(held.file) as opened:
            weight: torch.Tensor = opened.get_tensor(held.name)
            return weight

    def fingerprint(self) -> str:
        """A hash of names, shapes, element types and samples of the values, the same for equal folders anywhere."""
        digest = hashlib.sha256()
        for held in sorted(self.tensors.values(), key=lambda held: held.name):
            digest.update(repr((held.name, held.shape, held.dtype)).encode())
        for path in self.files:
            try:
                with path.open("rb") as stream:
                    size_bytes = path.stat().st_size
                    for number in range(_PLACES):
                        stream.seek(size_bytes * number // _PLACES)
                        digest.update(stream.read(_PLACE_BYTES))
            except OSError as error:
                raise FileError(f"{path} cannot be read: {first_line(error)}.") from error
        return digest.hexdigest()[:16]

    # -- what a model wants of them ----------------------------------------------------------------------------------

    def check(self, model: nn.Module, *, fills_all: bool) -> None:
        """Raise, before anything moves, FileError unless the files hold the weights of ``model``, and nothing else.

        Parameters on the meta device are to be filled; those that have values keep them.  ``fills_all``: whether what
        the files lack is a fault, as it is where nobody else has it.  Raises PlanError if no parameter is to be filled,
        or if one has values and the files have others for it.
        """
        parameters = names_of(model.named_parameters(remove_duplicate=False))
        if not any(parameter.is_meta for parameter, _ in parameters):
            raise PlanError(
                f"weights = {self.folder} is given, but every parameter of the model has values already. Build it "
                f"under torch.device('meta'), or leave weights out."
            )
        for parameter, names in parameters:
            if not parameter.is_meta and self.find(names):
                raise PlanError(
                    f"parameter {names[0]} has values, and {self.folder} has others for it. Leave it on the meta "
                    f"device to have it filled, or take it out of the files."
                )
        if reasons := self.misfits(model, fills_all=fills_all):
            raise FileError(
                f"the weights in {self.folder} are of another model: {'; '.join(reasons):.400}. Name a folder with the "
                f"tensors of the model's state_dict()."
            )
        for parameter, names in parameters:
            self._check_equal(self.find(names), parameter, names)
            if parameter.is_meta:
                check_exchangeable(names[0], parameter)

    def misfits(self, model: nn.Module, *, fills_all: bool) -> list[str]:
        """Why the files cannot fill ``model``: what they lack, have besides, or have otherwise.  As of ``check``."""
        parameters = names_of(model.named_parameters(remove_duplicate=False))
        buffers = names_of(persistent_buffers(model))
        reasons: list[str] = []
        known: set[str] = set()
        missing: list[str] = []
        for tensor, names in (*parameters, *buffers):
            held = self.find(names)
            known.update(one.name for one in held)
            reasons += filter(None, (_misfit(one, tensor, names[0]) for one in held))
            if tensor.is_meta and not held:
                missing.append(names[0])
        if missing and fills_all:
            reasons.insert(0, f"they lack {some(sorted(missing))}")
        if unexpected := sorted(self.tensors.keys() - known):
            reasons.append(f"they have {some(unexpected)} besides")
        return reasons

    def _check_equal(self, held: Sequence[SavedTensor], like: torch.Tensor, names: Sequence[str]) -> None:
        """Raise FileError if the files have different values for the names of one tied parameter."""
        for other in held[1:]:
            for begin in range(0, like.numel(), _COMPARED):
                stretch = slice(begin, min(begin + _COMPARED, like.numel()))
                one, two = (torch.empty(stretch.stop - begin, dtype=torch.float64) for _ in range(2))
                self.read(held[0], like, stretch, one)
                self.read(other, like, stretch, two)
                if not torch.equal(one.view(torch.int64), two.view(torch.int64)):
                    raise FileError(
                        f"{held[0].name} and {other.name} differ in {self.folder}, but they are one parameter of the "
                        f"model ({' and '.join(names)}). Untie it, or save the folder again from a model that has it "
                        f"tied."
                    )


def names_of(named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[Any, list[str]]]:
    """Every tensor once, with all the names that it has."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a ``state_dict`` has."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


class SavedValues:
    """Fills chunks from files; what these lack, as ``others`` do."""

    def __init__(
        self, saved: SavedWeights, model: nn.Module, others: ParameterValues, world: World | None = None
    ) -> None:
        """``world``: the ranks that fill theirs together, each from the same files; None: there is one."""
        found = names_of(model.named_parameters(remove_duplicate=False))
        self._held = {id(parameter): saved.find(names)[:1] for parameter, names in found}
        self._saved, self._others, self._world = saved, others, world
        self._spread: SpreadReader | None = None
        held = [(saved.factors[one.name], parameter.dtype) for parameter, _ in found for one in self._factor(parameter)]
        if world is not None and held:
            self._spread = SpreadReader(
                saved.reader, held, saved.dense, self.made, rank=world.rank, num_ranks=world.num_ranks
            )

    def made(self, make: Callable[[], _T]) -> _T:
        """On all ranks."""
        return self._others.made(make)

    def fill(self, wanted: Sequence[Wanted]) -> None:
        """Read what the files have; then the others give the rest.  Raises FileError."""
        together = [] if self._spread is None else [one for one in wanted if self._factor(one.parameter)]
        alone = [one for one in wanted if one not in together]
        self.made(lambda: self._read(alone))
        for one in together:
            self._read_together(one)
        self._others.fill([one for one in alone if not self._held[id(one.parameter)]])

    def _factor(self, parameter: torch.Tensor) -> list[SavedTensor]:
        """Itself, if it is a factor of a weight in the files."""
        return [one for one in self._held[id(parameter)] if one.name in self._saved.factors]

    def _read(self, wanted: Sequence[Wanted]) -> None:
        rank = 0 if self._world is None else self._world.rank
        for one in wanted:
            for held in self._held[id(one.parameter)]:
                self._saved.read(held, one.parameter, one.own(rank), one.place)

    def _read_together(self, one: Wanted) -> None:
        """The rank that has decomposed its weight gives every rank what it wants of a factor."""
        assert self._spread is not None
        assert self._world is not None
        (held,) = self._factor(one.parameter)
        giver, whole = self._spread.read(self._saved.factors[held.name])
        hand_out(
            self._world, one, None if whole is None else in_memory_order(copy_strided(whole, one.parameter)), giver
        )


def _misfit(held: SavedTensor, tensor: torch.Tensor, name: str) -> str | None:
    """Why ``held`` cannot fill ``tensor``."""
    if held.shape != tuple(tensor.shape):
        return f"{held.name} is {list(held.shape)} in them and {list(tensor.shape)} in the model"
    if tensor.is_floating_point() and held.dtype in SAVED_DTYPES:
        return None
    if getattr(torch, _OTHER_DTYPES.get(held.dtype, ""), None) is tensor.dtype:
        return None
    return f"{held.name} is {held.dtype} in them and {str(tensor.dtype).removeprefix('torch.')} in the model ({name})"


_OTHER_DTYPES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "C64": "complex64",
}
"""Element types that are taken as they are alone."""


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Raises FileError if it cannot be read."""
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            yield opened
    except (OSError, safetensors.SafetensorError) as error:
        raise FileError(f"{path} cannot be read: {first_line(error)}. Get the file again.") from error


# -- packed as they are read -------------------------------------------------------------------------------------


def load_quantized(
    model: nn.Module,
    weights: str | Path | None,
    to: str = "nf4",
    *,
    double: bool = False,
    blocksize: int | None = None,
    compute_dtype: torch.dtype | None = None,
    skip: Sequence[str] = (),
    head: bool = False,
) -> list[str]:
    """Fill ``model``, on the meta device (``parameters_on_meta``), from a folder of safetensors, and pack it meanwhile.

    Every tensor is read by itself; the weight of a linear map is packed, as ``quantize`` does, before the next one is
    read.  So host memory holds the packed model and one weight at most.  Files that AutoGPTQ has packed (``qweight``)
    are taken as they are, ``to`` ``"gptq"`` or ``"gptq-8bit"`` in groups of ``blocksize``.  None for ``weights``:
    random ones, as the model's own ``_init_weights`` or each module's ``reset_parameters`` draws them.  Gives the paths
    of the packed maps.  Raises WorkloadError as ``quantize``, and FileError if the files are of another model or packed
    otherwise, with nothing filled; FileError if a file cannot be read.
    """
    how = quantization(to, double=double, blocksize=blocksize)
    saved = None if weights is None else SavedWeights(Path(weights))
    return fill_packed(model, saved, how, compute_dtype=compute_dtype, skip=skip, head=head)


def fill_packed(
    model: nn.Module,
    saved: SavedWeights | None,
    how: Quantization,
    *,
    compute_dtype: torch.dtype | None = None,
    skip: Sequence[str] = (),
    head: bool = False,
) -> list[str]:
    """What ``load_quantized`` does, from files that may call tensors otherwise than the model does."""
    chosen = chosen_maps(model, how, skip=skip, compute_dtype=compute_dtype, head=head)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise PlanError(
                f"buffer {name} is on the meta device. Build the model within protwin.runtime.parameters_on_meta(), "
                f"which leaves buffers real."
            )
    if saved is None:
        _fill_at_random(model, chosen, how, compute_dtype)
        return chosen
    if are_packed(saved, how):
        _fill_as_packed(model, saved, chosen, how)
        return chosen
    saved.check(model, fills_all=True)
    packed = {f"{path}.weight" for path in chosen}
    for parameter, names in names_of(model.named_parameters(remove_duplicate=False)):
        if parameter.is_meta and names[0] not in packed:
            set_values(parameter, saved.whole(parameter, names))
    for buffer, names in names_of(persistent_buffers(model)):
        if saved.find(names):
            buffer.copy_(saved.whole(buffer, names))
    for path in chosen:
        weight = model.get_submodule(path).weight
        assert isinstance(weight, torch.Tensor)
        names = [f"{path}.weight"]
        pack(model, path, how, compute_dtype, lambda w=weight, n=names: saved.whole(w, n))  # type: ignore[misc]
    return chosen


def are_packed(saved: SavedWeights, how: Quantization) -> bool:
    """Whether the files hold packed maps, which are taken as they are."""
    return how.type.is_grouped and any(name.endswith(f".{PACKED}") for name in saved.tensors)


def _fill_as_packed(model: nn.Module, saved: SavedWeights, chosen: Sequence[str], how: Quantization) -> None:
    """Fill ``model`` from files whose linear maps are packed already.  Raises FileError if they are so otherwise."""
    check_packed_format(saved.folder)
    dense = {path: model.get_submodule(path) for path in chosen}
    try:
        for path in chosen:
            pack(model, path, how, None)
            made = model.get_submodule(path)
            assert isinstance(made, GptqLinear)
            fill_shifts(made)
            bias = saved.find([f"{path}.bias"])
            if bias and made.bias is None:
                # AutoGPTQ gives every map one, of zeros where there was none, and adds it.
                made.bias = nn.Parameter(torch.empty(bias[0].shape, dtype=made.compute_dtype, device="meta"), False)
        saved.check(model, fills_all=True)
        for path in chosen:
            made = model.get_submodule(path)
            assert isinstance(made, GptqLinear)
            check_groups(made, saved.whole(made.g_idx, [f"{path}.g_idx"]), path)
    except ProtwinError:
        for path, linear in dense.items():
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, linear)
        raise
    for parameter, names in names_of(model.named_parameters(remove_duplicate=False)):
        if parameter.is_meta:
            set_values(parameter, saved.whole(parameter, names))
    for buffer, names in names_of(persistent_buffers(model)):
        if saved.find(names):
            buffer.copy_(saved.whole(buffer, names))


def _fill_at_random(
    model: nn.Module, chosen: Sequence[str], how: Quantization, compute_dtype: torch.dtype | None
) -> None:
    """Draw the weights of every module, and pack it, if it is to be, before the next one is drawn.

    As transformers does: parts before the whole, which may write to its parts, each by the model that it belongs to.
    """
    seen: set[int] = set()

    def fill(path: str, module: nn.Module, draw: Any) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        draw = getattr(module, "_init_weights", draw)
        for name, part in list(module.named_children()):
            fill(f"{path}.{name}" if path else name, part, draw)
        own = [parameter for parameter in module._parameters.values() if parameter is not None and parameter.is_meta]
        for parameter in own:
            set_values(parameter, torch.zeros(parameter.shape, dtype=parameter.dtype))
        if draw is not None:
            draw(module)
        elif own and hasattr(module, "reset_parameters"):
            reset: Any = module.reset_parameters
            reset()
        if path in chosen:
            pack(model, path, how, compute_dtype)
            for parameter in model.get_submodule(path).parameters():
                # What transformers calls a weight that is not to be drawn.
                vars(parameter)["_is_hf_initialized"] = True

    with torch.no_grad():
        fill("", model, None)
