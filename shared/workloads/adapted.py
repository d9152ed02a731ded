"""Workloads of models of the catalogue with low-rank adapters, from what is shipped and without a trace."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from ..factors.adapted_maps import ADAPTED_CLASS, BASE, LOW_RANK_NAMES, chosen_maps
from ..factors.structure import ModelStructure
from ..families.architectures import program_of, sizes_of
from ..families.family import Change, WorkloadFamily
from ..families.sized import RANK, SizedFamily
from ..phases.quantization import Quantization
from ..schema.training_options import LoraOptions, QuantizationOptions
from ..schema.workload import DType, OuterSection, Parameter, Uses, in_forward_order
from .packed_maps import PACKED_CLASSES, packed_parameters, unpacking

_LINEAR: Final = {"Linear": False, "Conv1D": True}
"""Classes of linear maps, and whether their weight is transposed."""
_PACKABLE: Final = "Linear"
_HEAD: Final = "lm_head"
"""What gives a model's outputs, and is never packed."""


@dataclass(frozen=True, slots=True)
class AdaptedFamily:
    """A model with adapters at every shape of its batch."""

    family: WorkloadFamily
    packed: tuple[tuple[int, int], ...] = ()
    """Inputs and outputs of the maps whose weights are packed."""
    how: Quantization | None = None
    """How they are."""

    @property
    def change(self) -> Change | None:
        """Of what a trace of ``family`` sees, where weights are packed."""
        return None if self.how is None else unpacking(self.packed, self.family.compute_dtype, self.how)

    def in_dtype(self, dtype: DType) -> AdaptedFamily:
        """The same in a twin's element type."""
        return replace(self, family=self.family.in_dtype(dtype))


def adapted_family(
    family: WorkloadFamily,
    lora: LoraOptions,
    configuration: Mapping[str, Any],
    quantized: QuantizationOptions | None = None,
) -> AdaptedFamily | None:
    """The same model with adapters, beside packed weights if so, from its family of full training.

    None where a trace is needed: with dropout, DoRA or adapters of another dtype, where the model's program is not
    known with adapters beside these maps, and where it is not clear what its maps are, or which of them are packed.
    Raises WorkloadError as ``chosen_maps``.
    """
    from ..families.shipped import shipped_sized

    if lora.dropout or lora.use_dora or lora.dtype not in (None, family.compute_dtype):
        return None
    program, sizes = program_of(configuration), sizes_of(configuration)
    own = DType.BFLOAT16 if family.compute_dtype is DType.FLOAT16 else family.compute_dtype
    if program is None or sizes is None or own not in (family.compute_dtype, *family.twins):
        return None
    model = _Model.of(family.in_dtype(own))
    targets = None if model is None else model.targets(lora)
    if model is None or targets is None:
        return None
    sized = shipped_sized(program, targets, own)
    if sized is None or family.model_name not in sized.models:
        return None
    adapted = adapted_by(sized, model.family, sizes, lora, quantized)
    return None if adapted is None else adapted.in_dtype(family.compute_dtype)


def adapted_by(
    sized: SizedFamily,
    family: WorkloadFamily,
    sizes: Mapping[str, int],
    lora: LoraOptions,
    quantized: QuantizationOptions | None = None,
) -> AdaptedFamily | None:
    """A model of ``sizes`` with adapters, as ``sized`` has it; None if that knows no such model.

    ``family``: that of full training, in the element type of ``sized``.
    """
    model, values = _Model.of(family), sized.values_of({RANK: lora.rank, **sizes})
    if model is None or values is None or family.variables != sized.shape_variables:
        return None
    packed = {} if quantized is None else model.packed(quantized, lora.rank)
    pieces = sized.pieces_beside(values, family.pieces)
    if not pieces or packed is None or model.targets(lora) != sized.targets:
        return None
    how = None if quantized is None else quantized.how
    if how is not None:
        for path, (num_in, num_out) in packed.items():
            how.check_sizes(path, num_in, num_out)
    if how is not None and not model.is_last_adapted(sized.targets):
        return None
    adapted = {path: model.maps[path] for path in model.chosen(lora)}
    bases = {f"{path}.{BASE}" if path in adapted else path: sizes for path, sizes in packed.items()}
    parameters = list(_parameters(family.parameters, adapted, lora.rank))
    if how is not None:
        parameters = list(packed_parameters(parameters, bases, how))
    modules = list(_modules(model.structure, set(adapted)))
    if how is not None:
        modules = [(path, PACKED_CLASSES[how.type] if path in bases else found) for path, found in modules]
    hashes = {}
    for dtype in (family.compute_dtype, *family.twins):
        swapped = [p.model_copy(update={"dtype": dtype}) if p.dtype == family.compute_dtype else p for p in parameters]
        hashes[dtype] = model.structure.hash_of(modules, swapped)
    changed = {
        "model_hash": hashes.pop(family.compute_dtype),
        "twins": hashes,
        "parameters": tuple(parameters),
        "pieces": pieces,
        "structure": None,
    }
    return AdaptedFamily(family.model_copy(update=changed), tuple(packed.values()), how)


@dataclass(frozen=True, slots=True)
class _Model:
    """A family of full training, and the linear maps of its model's blocks."""

    family: WorkloadFamily
    structure: ModelStructure
    maps: Mapping[str, tuple[int, int]]
    """Inputs and outputs, by path."""
    classes: Mapping[str, str]
    """Of the maps."""

    @classmethod
    def of(cls, family: WorkloadFamily) -> Self | None:
        """None where it is not clear what the maps are."""
        if family.structure is None:
            return None
        weights = {parameter.name: parameter for parameter in family.parameters}
        maps: dict[str, tuple[int, int]] = {}
        classes: dict[str, str] = {}
        blocks = set(family.block_names)
        for path, module_class in family.structure.modules():
            if not _lies_in(path, blocks):
                continue
            if module_class not in _LINEAR:
                if "Linear" in module_class:
                    return None  # of a class whose sizes are not known
                continue
            weight = weights.get(f"{path}.weight")
            if weight is None or len(weight.shape) != 2 or weight.aliases:
                return None
            num_out, num_in = reversed(weight.shape) if _LINEAR[module_class] else weight.shape
            maps[path], classes[path] = (num_in, num_out), module_class
        return cls(family, family.structure, maps, classes)

    def chosen(self, lora: LoraOptions) -> list[str]:
        """The maps that are adapted.  Raises WorkloadError as ``chosen_maps``."""
        model_class = next(found for _, found in self.structure.modules())
        return chosen_maps(self.maps, rank=lora.rank, targets=lora.targets, model_class=model_class)

    def targets(self, lora: LoraOptions) -> tuple[str, ...] | None:
        """The maps that are adapted, by their paths within a block; None unless they are the same in every block."""
        paths = self.chosen(lora)
        found = {
            tuple(path.removeprefix(f"{block}.") for path in paths if path.startswith(f"{block}."))
            for block in self.family.block_names
        }
        return found.pop() if len(found) == 1 else None

    def packed(self, quantized: QuantizationOptions, rank: int) -> dict[str, tuple[int, int]] | None:
        """The maps whose weights are packed; None where it is not clear which products are theirs."""
        outside = [
            path
            for path, found in self.structure.modules()
            if found == _PACKABLE and path not in self.maps and path != _HEAD
        ]
        found = {path: sizes for path, sizes in self.maps.items() if self.classes[path] == _PACKABLE}
        if quantized.skipped or quantized.head or quantized.products is not None or outside or not found:
            return None
        # Matrices of adapters that are as large as a map look like it.
        return None if any(rank in sizes for sizes in found.values()) else found

    def is_last_adapted(self, targets: Sequence[str]) -> bool:
        """Whether the last map of a block is adapted: if not, recomputation ends elsewhere with packed weights."""
        return all(next(reversed(self.within(block)), None) in targets for block in self.family.block_names)

    def within(self, block: str) -> list[str]:
        """The maps of a block, by their paths within it."""
        return [path.removeprefix(f"{block}.") for path in self.maps if path.startswith(f"{block}.")]


def _lies_in(path: str, blocks: Collection[str]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:length]) in blocks for length in range(1, len(parts)))


def _parameters(
    parameters: Sequence[Parameter], adapted: Mapping[str, tuple[int, int]], rank: int
) -> Iterator[Parameter]:
    """All parameters, frozen, with the trained matrices before the maps that they lie beside."""
    for parameter in parameters:
        path, _, leaf = parameter.name.rpartition(".")
        if path not in adapted:
            yield parameter.model_copy(update={"trainable": False, "uses": _frozen_uses(parameter.uses)})
            continue
        if leaf == "weight":
            num_in, num_out = adapted[path]
            for name, shape in zip(LOW_RANK_NAMES, ((rank, num_in), (num_out, rank)), strict=True):
                yield parameter.model_copy(update={"name": f"{path}.{name}", "shape": shape})
        yield parameter.model_copy(update={"name": f"{path}.{BASE}.{leaf}", "trainable": False})


def _frozen_uses(uses: Uses | None) -> Uses | None:
    """Who uses a frozen parameter outside the blocks: nothing before the blocks has a backward."""
    if uses is None:
        return None
    backward = tuple(section for section in uses.backward if section is not OuterSection.PROLOGUE)
    last = min((*uses.forward, *backward), key=in_forward_order)
    return Uses(forward=uses.forward, backward=backward, gradient=last)


def _modules(structure: ModelStructure, adapted: Collection[str]) -> Iterator[tuple[str, str]]:
    """All modules (path, class), each adapted map as a part of its adapter."""
    for path, found in structure.modules():
        if path in adapted:
            yield path, ADAPTED_CLASS
            yield f"{path}.{BASE}", found
        else:
            yield path, found
