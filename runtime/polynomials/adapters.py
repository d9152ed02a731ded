"""What models do with adapters: one program for all models of an architecture, fitted to small ones of different sizes.

Models of the catalogue are then compared with it, one trace each; those that run another program are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from ...shared.basics.errors import ProtwinError
from ...shared.basics.gc_pause import gc_paused
from ...shared.families.architectures import program_of, resized, sizes_of
from ...shared.families.family import BATCH_SIZE, SEQUENCE_LENGTH, FamilyPiece, WorkloadFamily
from ...shared.families.sized import RANK, SizedFamily
from ...shared.observed.assembly import TracedShape, assemble
from ...shared.schema.training_options import LoraOptions, TrainingOptions
from ...shared.schema.workload import DType, Workload
from ...shared.workloads.adapted import adapted_by
from ..model.adapters import linear_maps
from ..model.blocks import find_blocks
from ..model.configurations import quiet
from ..model.identity import software_versions
from ..tracing.configurations import batch_of, configured_model
from ..tracing.facts import traced_model
from ..tracing.fake_subject import FakeSubject
from .family_fit import NotPolynomialError
from .sized_fit import fit_sized_piece

_QUERIES: Final = "queries_per_kv_head"
_VARIABLES: Final = (BATCH_SIZE, SEQUENCE_LENGTH)
_DRAWN: Final = {
    BATCH_SIZE: (5, 7, 11, 13, 3),
    SEQUENCE_LENGTH: (101, 211, 97, 307, 59),
    RANK: (13, 17, 19, 5, 7),
    "kv_heads": (3, 5, 7, 2, 11),
    _QUERIES: (7, 3, 5, 11, 2),
    "hidden_per_head": (8 * 23, 8 * 29, 8 * 43, 8 * 31, 8 * 37),
    "heads": (19, 11, 13, 17, 13),
    "head_dim_eighths": (11, 13, 3, 7, 5),
    "ffn": (8 * 331, 8 * 457, 8 * 709, 8 * 521, 8 * 401),
    "vocab": (1009, 2003, 1511, 3001, 1777),
    "positions": (1013, 733, 1019, 881, 937),
    "experts": (19, 23, 29, 17, 41),
    "experts_per_token": (2, 2, 2, 3, 13),
}
"""Different primes in every model; of widths that grouped products of experts have to read aligned, multiples."""
_LEAST: Final = {SEQUENCE_LENGTH: 2, _QUERIES: 2}
"""Of one token, or of one query for each key, there is another program; of all others 1 is the least."""
_TRIED: Final = {BATCH_SIZE: 2, SEQUENCE_LENGTH: 67, RANK: 3}
"""At which a model of the catalogue is compared."""
_QUERIES_AND_VALUES: Final = ("q_proj", "v_proj")


def target_sets(configuration: Mapping[str, Any], name: str) -> list[tuple[str, ...]]:
    """The sets of adapted maps that a model of the catalogue is known with, by the maps' paths within a block.

    All maps; those of attention; those of the MLP; queries and values alone, where these have maps of their own.
    """
    model = configured_model(configuration, name, None, TrainingOptions())
    block = find_blocks(model)[0].name
    maps = tuple(path.removeprefix(f"{block}.") for path in linear_maps(model) if path.startswith(f"{block}."))
    of_attention = tuple(path for path in maps if "attn" in path or "attention" in path)
    rest = tuple(path for path in maps if path not in of_attention)
    ends = tuple(path for path in maps if path.rpartition(".")[2] in _QUERIES_AND_VALUES)
    return [found for found in dict.fromkeys((maps, of_attention, rest, ends)) if found]


@gc_paused()
def sized_family(
    configuration: Mapping[str, Any], *, dtype: DType, targets: Sequence[str], name: str = "model"
) -> SizedFamily:
    """What all models of the architecture of ``configuration`` do with adapters beside ``targets`` (paths in a block).

    Raises NotPolynomialError if models of different sizes do different things, WorkloadError as a trace.
    """
    program, sizes = program_of(configuration), sizes_of(configuration)
    if program is None or sizes is None:
        raise NotPolynomialError(f"nothing is known of the sizes of {name}.")
    size_variables, is_ungrouped = (RANK, *sizes), sizes.get(_QUERIES) == 1
    traced: list[dict[tuple[int, ...], TracedShape]] = [{}, {}]
    for number in range(len(_DRAWN[RANK])):
        drawn = {variable: values[number] for variable, values in _DRAWN.items()}
        if is_ungrouped:
            drawn[_QUERIES] = 1
        own = {size: drawn[size] for size in sizes}
        subject, model = _subject(resized(configuration, own), dtype, drawn[RANK], targets, name)
        with quiet():
            for found, batch in zip(traced, (1, drawn[BATCH_SIZE]), strict=True):
                shape = {BATCH_SIZE: batch, SEQUENCE_LENGTH: drawn[SEQUENCE_LENGTH], "target_length": None}
                values = (batch, drawn[SEQUENCE_LENGTH], drawn[RANK], *own.values())
                found[values] = subject.at(batch_of(model, shape))
    lone, several = traced
    lowest = _LEAST | ({_QUERIES: 1} if is_ungrouped else {})
    least = tuple(lowest.get(variable, 1) for variable in (*_VARIABLES, *size_variables))
    pieces: list[FamilyPiece] = []
    for found, (begin, end) in ((lone, (1, 1)), (several, (2, None))):
        most = (end, *[None] * (len(least) - 1))
        pieces.append(fit_sized_piece(found, least=(begin, *least[1:]), most=most))
    return SizedFamily(
        program=program,
        targets=tuple(targets),
        compute_dtype=dtype,
        shape_variables=_VARIABLES,
        size_variables=size_variables,
        pieces=tuple(pieces),
        software=software_versions(),
    )


def traced_with_adapters(
    configuration: Mapping[str, Any], *, name: str, dtype: DType, targets: Sequence[str], shape: Mapping[str, int]
) -> Workload:
    """The workload that a trace gives, with adapters of ``shape[RANK]`` beside ``targets``."""
    subject, model = _subject(configuration, dtype, shape[RANK], targets, name)
    with quiet():
        given = {BATCH_SIZE: shape[BATCH_SIZE], SEQUENCE_LENGTH: shape[SEQUENCE_LENGTH], "target_length": None}
        traced = subject.at(batch_of(model, given))
        facts = traced_model(
            model, find_blocks(model), subject.uses, name=name, traced_with="fake", row_lookups=subject.row_lookups
        )
    return assemble(facts, traced)


def why_not(sized: SizedFamily, family: WorkloadFamily, configuration: Mapping[str, Any]) -> str | None:
    """Why a model of the catalogue, whose family of full training is ``family``, is none of ``sized``; None if it is.

    One trace is compared, figure by figure.
    """
    name = family.model_name
    sizes = sizes_of(configuration)
    if sizes is None or program_of(configuration) != sized.program:
        return "it has another program"
    shape = {variable: _TRIED[variable] for variable in (*_VARIABLES, RANK)}
    try:
        adapted = adapted_by(sized, family, sizes, LoraOptions(rank=shape[RANK], targets=sized.targets))
        if adapted is None:
            return "no shape of it is known"
        found = adapted.family.at(batch_size=shape[BATCH_SIZE], sequence_length=shape[SEQUENCE_LENGTH])
        traced = traced_with_adapters(
            configuration, name=name, dtype=sized.compute_dtype, targets=sized.targets, shape=shape
        )
    except ProtwinError as error:
        return str(error)
    return first_different(found, traced)


def first_different(found: Workload, traced: Workload, *, but: Collection[str] = ("software",)) -> str | None:
    """The first fields in which two workloads differ, in words; None if they are equal but for ``but``."""
    for field in Workload.model_fields:
        one, other = getattr(found, field), getattr(traced, field)
        if field not in but and one != other:
            return f"{field} differs: {one!r:.300} beside {other!r:.300}"
    return None


def _subject(
    configuration: Mapping[str, Any], dtype: DType, rank: int, targets: Sequence[str], name: str
) -> tuple[FakeSubject, Any]:
    options = TrainingOptions(lora=LoraOptions(rank=rank, targets=tuple(targets)))
    with quiet():
        model = configured_model(configuration, name, dtype, options)
        return FakeSubject(model), model
