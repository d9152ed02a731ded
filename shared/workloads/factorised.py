"""Workloads of models of the catalogue with factorised linear maps, from their shipped families and without a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..factors.maps import LinearMap, Place, backward_places, forward_places
from ..factors.sections import Freed, freed_behind, has_own_input, in_factors
from ..factors.sizes import factor_shapes, num_frozen
from ..factors.structure import ModelStructure
from ..factors.targets import is_default, is_named, no_such_map
from ..families.family import BATCH_SIZE, SEQUENCE_LENGTH, TARGET_LENGTH, FamilyPiece, WorkloadFamily
from ..observed.assembly import TracedModel, TracedShape
from ..observed.observation import Observation
from ..observed.observed_inputs import ObservedInput, PhaseKey
from ..phases.subspaces import Subspace, SubspaceAxis
from ..schema.plan import ActivationMode
from ..schema.schedule import TaskKind
from ..schema.training_options import OsftOptions
from ..schema.workload import BlockId, Parameter, Workload

_LINEAR: Final = {"Linear": False, "Conv1D": True}
"""Classes of linear maps, and whether their weight is transposed."""
_CALLED_AS_THEY_STAND: Final = (
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ("c_attn", "c_proj", "c_fc", "c_proj"),
    ("query", "key", "value", "dense", "dense", "dense"),
)
"""Blocks whose maps are called in the order in which they stand in the block."""
_Observed = Mapping[ActivationMode, Mapping[PhaseKey, Observation]]


class _UnclearError(Exception):
    """What a factorised map does cannot be told from the dense family."""


def factorised_workload(
    family: WorkloadFamily, osft: OsftOptions, *, batch_size: int, sequence_length: int | None
) -> Workload | None:
    """The workload with factorised maps: what a trace gives, figure by figure; None where that takes one.

    That is where the family does not say what the model is made of, where maps outside the blocks are named, or where
    it is not clear which calls are whose.  Raises WorkloadError if a target names nothing that there is, or as
    ``WorkloadFamily.at``.
    """
    if family.structure is None:
        return None
    values = family.values_of({BATCH_SIZE: batch_size, SEQUENCE_LENGTH: sequence_length, TARGET_LENGTH: None})
    piece = family.piece_at(values)
    try:
        blocks = _blocks(family, family.structure)
        chosen = _chosen(family.structure, blocks, osft.targets)
        frozen = [_frozen(maps, chosen, osft.unfreeze_rank_ratio) for maps in blocks]
        model = _model(family, family.structure, blocks, frozen)
        return family.assembled(lambda: _in_factors(model, piece, values, blocks, frozen), values)
    except _UnclearError:
        return None


def _blocks(family: WorkloadFamily, structure: ModelStructure) -> list[tuple[LinearMap, ...]]:
    """The linear maps of every block, in the order in which they stand there."""
    parameters = {parameter.name: parameter for parameter in family.parameters}
    modules = [(path, found) for path, found in structure.modules() if found in _LINEAR]
    return [
        tuple(_map(path, _LINEAR[found], parameters) for path, found in modules if path.startswith(f"{block}."))
        for block in family.block_names
    ]


def _map(path: str, is_transposed: bool, parameters: Mapping[str, Parameter]) -> LinearMap:
    weight, bias = parameters.get(f"{path}.weight"), parameters.get(f"{path}.bias")
    if weight is None or len(weight.shape) != 2 or weight.aliases or weight.uses is not None:
        raise _UnclearError
    num_out, num_in = reversed(weight.shape) if is_transposed else weight.shape
    return LinearMap(path, num_out, num_in, weight.dtype, bias is not None, is_transposed)


def _chosen(structure: ModelStructure, blocks: Sequence[tuple[LinearMap, ...]], targets: Sequence[str]) -> set[str]:
    """The paths of the maps that are factorised, as ``find_targets`` has them."""
    maps = {linear.path: linear for block in blocks for linear in block}
    if not targets:
        found = {path for path, linear in maps.items() if is_default(path, (linear.num_out, linear.num_in))}
        if not found:
            raise _UnclearError
        return found
    modules = dict(structure.modules())
    chosen: set[str] = set()
    for target in targets:
        named = {path for path in modules if path and is_named(path, target)}
        if not named:
            if any(is_named(f"{path}.{leaf}", target) for path in modules for leaf in ("weight", "bias")):
                raise _UnclearError
            raise no_such_map(target, (path for path, found in modules.items() if found in _LINEAR))
        linear = {path for path in named if path in maps}
        # Norms have vectors, and containers nothing; anything else with a matrix is asked for too.
        if not linear or any(modules[path] in _LINEAR or _may_have_a_matrix(modules[path]) for path in named - linear):
            raise _UnclearError
        chosen |= linear
    return chosen


def _may_have_a_matrix(module_class: str) -> bool:
    return "Embedding" in module_class or "Router" in module_class or "Conv" in module_class


def _frozen(maps: Sequence[LinearMap], chosen: set[str], ratio: float) -> dict[int, int]:
    """Frozen directions of the chosen maps of a block, by number."""
    found = {n: num_frozen(e.num_out, e.num_in, ratio) for n, e in enumerate(maps) if e.path in chosen}
    rest = {each.looks for number, each in enumerate(maps) if number not in found}
    if any(maps[number].looks in rest for number in found):
        names = tuple(each.path.rpartition(".")[2] for each in maps)
        if names not in _CALLED_AS_THEY_STAND:
            raise _UnclearError
    return found


def _model(
    family: WorkloadFamily,
    structure: ModelStructure,
    blocks: Sequence[tuple[LinearMap, ...]],
    frozen: Sequence[Mapping[int, int]],
) -> TracedModel:
    """What is said of the factorised model at every shape, but for which block stands for which."""
    weights = {
        f"{maps[number].path}.weight": (maps[number], k)
        for maps, of_block in zip(blocks, frozen, strict=True)
        for number, k in of_block.items()
    }
    parameters: list[Parameter] = []
    subspaces: list[Subspace] = []
    for parameter in family.parameters:
        if parameter.name not in weights:
            parameters.append(parameter)
            continue
        linear, k = weights[parameter.name]
        place = {}
        for name, shape in factor_shapes(linear.num_out, linear.num_in, k).items():
            if 0 in shape:
                continue
            place[name] = len(parameters)
            changed = {"name": f"{linear.path}.{name}", "shape": shape, "trainable": name.endswith("_low")}
            parameters.append(parameter.model_copy(update=changed))
        for side, axis in (("u", SubspaceAxis.COLUMNS), ("v", SubspaceAxis.ROWS)):
            if k:
                subspaces.append(Subspace(frozen=place[f"{side}_high"], trained=place[f"{side}_low"], axis=axis))
    paths = {linear.path for linear, _ in weights.values()}
    return replace(
        family.traced_model(),
        parameters=tuple(parameters),
        subspaces=tuple(subspaces),
        model_hash=structure.hash_with(parameters, paths),
    )


def _in_factors(
    model: TracedModel,
    piece: FamilyPiece,
    values: tuple[int, ...],
    blocks: Sequence[tuple[LinearMap, ...]],
    frozen: Sequence[Mapping[int, int]],
) -> tuple[TracedModel, TracedShape]:
    """The model and what it does at a shape, with blocks that differ in what of them is factorised told apart."""
    dense, elsewhere = piece.shape_at(values), piece.shape_at(piece.fitted_at[-1])
    stands_for, shown = _told_apart(model.stands_for, frozen)
    observed: dict[ActivationMode, dict[PhaseKey, Observation]] = {
        mode: {key: seen for key, seen in sections.items() if not isinstance(key[1], int)}
        for mode, sections in dense.observed.items()
    }
    for number, (seen, block) in enumerate(shown):
        changed = _Block(BlockId(seen), blocks[block], frozen[block], dense.observed, elsewhere.observed)
        for mode, sections in dense.observed.items():
            for kind, section in sections:
                if section == changed.section and isinstance(section, int):
                    observed[mode][kind, BlockId(number)] = changed.observation(mode, kind)
    return replace(model, stands_for=stands_for), replace(
        dense,
        observed=observed,
        shared_inputs=_renumbered(dense.shared_inputs, shown),
        staying_inputs=tuple(number for number, (seen, _) in enumerate(shown) if seen in dense.staying_inputs),
    )


def _told_apart(
    stands_for: tuple[int, ...], frozen: Sequence[Mapping[int, int]]
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """For every block the number of the one that does the same, and of these the dense one and a block like it."""
    keys = [(seen, tuple(of_block.items())) for seen, of_block in zip(stands_for, frozen, strict=True)]
    kinds = list(dict.fromkeys(keys))
    if len(kinds) == len({seen for seen, _ in kinds}):
        # A trace may observe a block that stands for none.
        like = {seen: stands_for.index(seen) if seen in stands_for else seen for seen in range(1 + max(stands_for))}
        return stands_for, list(like.items())
    return tuple(kinds.index(key) for key in keys), [(key[0], keys.index(key)) for key in kinds]


def _renumbered(given: Sequence[ObservedInput], shown: Sequence[tuple[int, int]]) -> tuple[ObservedInput, ...]:
    """Inputs of several blocks, by the blocks' new numbers: ``shown`` has the old one of each."""
    old = [seen for seen, _ in shown]

    def key(place: PhaseKey) -> PhaseKey:
        kind, section = place
        return (kind, BlockId(old.index(section))) if isinstance(section, int) else place

    return tuple(
        replace(
            each,
            blocks=tuple(number for number, seen in enumerate(old) if seen in each.blocks),
            kept=key(each.kept),
            checkpointed=key(each.checkpointed),
            made_by=None if each.made_by is None else BlockId(old.index(each.made_by)),
        )
        for each in given
    )


@dataclass(frozen=True)
class _Block:
    """A block of the dense model, and what of it is in factors."""

    section: BlockId
    maps: tuple[LinearMap, ...]
    frozen: Mapping[int, int]
    observed: _Observed
    elsewhere: _Observed
    """At a shape at which no two sizes are equal by chance."""

    def observation(self, mode: ActivationMode, kind: TaskKind) -> Observation:
        """What the block does there with factors."""
        seen = self.observed[mode][kind, self.section]
        if not self.frozen:
            return seen
        called = self._called(self.observed)
        if kind is TaskKind.BACKWARD:
            places = self._backward(self.observed, mode)
            return in_factors(seen, (mode, kind), self.maps, places, self.frozen, self._freed(mode))
        places = _clear(forward_places(seen, self.maps))
        missing = [place for place in called if place.number not in {found.number for found in places}]
        unfinished = None
        if missing:
            # A recomputation ends where the last map's input is there again.
            if kind is not TaskKind.RECOMPUTE or missing != called[-1:]:
                raise _UnclearError
            place = missing[0]
            whole = self.observed[ActivationMode.KEEP][TaskKind.FORWARD, self.section]
            before = whole.levels[place.first - 1] if place.first else 0
            step = whole.levels[place.first] - before
            unfinished = place, step - sum(whole.calls[place.first].writes_bytes)
        return in_factors(seen, (mode, kind), self.maps, places, self.frozen, {}, unfinished)

    def _called(self, observed: _Observed) -> list[Place]:
        """The maps in the order in which they are called."""
        found = _clear(forward_places(observed[ActivationMode.KEEP][TaskKind.FORWARD, self.section], self.maps))
        if len(found) < len(self.maps):
            raise _UnclearError
        return found

    def _backward(self, observed: _Observed, mode: ActivationMode) -> list[Place]:
        seen = observed[mode][TaskKind.BACKWARD, self.section]
        return _clear(backward_places(seen, self.maps, self._called(observed)))

    def _freed(self, mode: ActivationMode) -> dict[int, Freed]:
        """What goes behind each map's backward, which is the same at every shape of a piece."""
        seen = self.elsewhere[mode][TaskKind.BACKWARD, self.section]
        forward = self.elsewhere[ActivationMode.KEEP][TaskKind.FORWARD, self.section]
        own = {p.number: has_own_input(forward, p, self.maps[p.number]) for p in self._called(self.elsewhere)}
        return {
            place.number: freed_behind(seen, place, self.maps[place.number], has_own_input=own[place.number])
            for place in self._backward(self.elsewhere, mode)
        }


def _clear(places: list[Place] | None) -> list[Place]:
    if places is None:
        raise _UnclearError
    return places
