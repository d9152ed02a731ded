"""Families of workloads: polynomials through traces, and what is derived from them at a shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.runtime.polynomials.family_fit import NotPolynomialError, fit_piece
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.families.family import FamilyPiece, Limit, OutsideFamilyError, WorkloadFamily
from protwin.shared.families.shipped import write_family
from protwin.shared.observed.assembly import TracedModel, TracedShape, assemble
from protwin.shared.observed.observation import Observation, OperatorCall, moved_bytes
from protwin.shared.observed.observed_inputs import PhaseKey
from protwin.shared.schema.plan import ActivationMode
from protwin.shared.schema.schedule import OuterSection, TaskKind
from protwin.shared.schema.workload import BlockId, DType, OperationClass, Parameter, Workload

WIDTH, VOCABULARY = 8, 100
MONOMIALS = [(b, s) for b in (0, 1) for s in (0, 1, 2)]
FITTED = [(b, s) for b in (2, 3) for s in (5, 7, 11)]
PROVEN = [(5, 2), (1, 300), (29, 64)]
PLACES: list[tuple[ActivationMode, list[PhaseKey]]] = [
    (
        mode,
        [
            (TaskKind.FORWARD, OuterSection.PROLOGUE),
            (TaskKind.FORWARD, BlockId(0)),
            (TaskKind.FORWARD, BlockId(1)),
            (TaskKind.FORWARD, OuterSection.EPILOGUE),
            (TaskKind.BACKWARD, OuterSection.EPILOGUE),
            *((TaskKind.RECOMPUTE, BlockId(i)) for i in (1, 0) if mode is ActivationMode.CHECKPOINT),
            (TaskKind.BACKWARD, BlockId(1)),
            (TaskKind.BACKWARD, BlockId(0)),
            (TaskKind.BACKWARD, OuterSection.PROLOGUE),
        ],
    )
    for mode in (ActivationMode.KEEP, ActivationMode.CHECKPOINT)
]
Trace = Callable[[int, int], TracedShape]


def lookup(batch: int, length: int) -> OperatorCall:
    rows = batch * length * WIDTH * 2
    reads = ((0, VOCABULARY * WIDTH * 2), (1, batch * length * 8))
    return OperatorCall("embedding", OperationClass.EMBEDDING, DType.BFLOAT16, rows // 2, reads, (rows,))


def product(batch: int, length: int) -> OperatorCall:
    rows = batch * length * WIDTH * 2
    reads = ((0, rows), (1, WIDTH * WIDTH * 2))
    flops = 2 * batch * length * WIDTH * WIDTH
    shape = (1, batch * length, WIDTH, WIDTH)
    return OperatorCall("mm", OperationClass.MATMUL, DType.BFLOAT16, flops, reads, (rows,), shape)


def attention(batch: int, length: int) -> OperatorCall:
    """As many FLOPs as ``product`` where the sequence is as long as the width: there they are counted apart still."""
    scores = batch * length * length * 4
    return OperatorCall(
        "softmax", OperationClass.REDUCTION, DType.FLOAT32, scores // 4, ((0, scores), (0, scores // 2)), (scores,)
    )


def trace(batch: int, length: int, *, odd: Callable[[int, int], int] = lambda b, s: 0) -> TracedShape:
    """What a trace of a made-up model sees, with ``odd`` bytes more behind the first call of every section."""
    rows = batch * length * WIDTH * 2
    observed: dict[ActivationMode, dict[PhaseKey, Observation]] = {}
    for mode, keys in PLACES:
        for kind, section in keys:
            calls = [
                product(batch, length),
                attention(batch, length),
                product(batch, length),
            ]
            if section is OuterSection.PROLOGUE:
                calls.insert(0, lookup(batch, length))
            seen = Observation(1000, end_bytes=1000 + (rows if kind is TaskKind.FORWARD else -rows))
            seen.calls, seen.operations = calls, [call.operation() for call in calls]
            scores = batch * length * length * 4
            levels = [rows + odd(batch, length), rows + scores, rows, rows]
            seen.levels = levels[: len(calls)]
            seen.square_peak_bytes = scores if length > 256 else 0
            seen.adding_levels = [level - 16 for level in seen.levels]
            seen.gradient_bytes = WIDTH * WIDTH * 2 if kind is TaskKind.BACKWARD else 0
            seen.output_bytes = rows
            seen.saved_bytes = [rows, scores, batch * 4]
            observed.setdefault(mode, {})[kind, section] = seen
    shapes: dict[str, tuple[int, ...]] = {"input_ids": (batch, length), "labels": (batch, length)}
    return TracedShape(shapes, batch, batch * length, 16 * batch * length, observed)


MODEL = TracedModel(
    model_name="made up",
    model_hash="abc",
    compute_dtype=DType.BFLOAT16,
    parameters=tuple(Parameter(name=f"p{i}", shape=(WIDTH, WIDTH), dtype=DType.BFLOAT16, block=i) for i in range(2)),
    block_names=("a.0", "a.1"),
    stands_for=(0, 1),
    traced_with="fake",
    software={"torch": "0"},
)


def fitted(of: Trace = trace, proven: list[tuple[int, int]] = PROVEN) -> FamilyPiece:
    return fit_piece(
        {shape: of(*shape) for shape in FITTED},
        {shape: of(*shape) for shape in proven},
        monomials=MONOMIALS,
        least=(1, 2),
        most=(None, 4096),
    )


def family(**changes: object) -> WorkloadFamily:
    fields: dict[str, object] = {
        "model_name": MODEL.model_name,
        "model_hash": MODEL.model_hash,
        "compute_dtype": MODEL.compute_dtype,
        "variables": ("batch_size", "sequence_length"),
        "parameters": MODEL.parameters,
        "block_names": MODEL.block_names,
        "stands_for": MODEL.stands_for,
        "pieces": (fitted(),),
        "software": MODEL.software,
    }
    return WorkloadFamily.model_validate(fields | changes)


FAMILY = family()


def traced(batch: int, length: int) -> Workload:
    return assemble(MODEL, trace(batch, length))


# -- equal to the trace ----------------------------------------------------------------------------------------------


@given(batch=st.integers(1, 400), length=st.integers(2, 4096))
def test_a_family_is_equal_to_the_trace_at_every_shape(batch: int, length: int) -> None:
    assert FAMILY.at(batch_size=batch, sequence_length=length) == traced(batch, length)


def test_what_is_derived_is_no_polynomial() -> None:
    """A family of finished workloads, figure by figure, would be wrong at the same shapes."""
    short, long = traced(3, 7).prologue_forward, traced(29, 300).prologue_forward
    lookups = [next(op for op in phase.operations if op.name == "embedding") for phase in (short, long)]
    assert lookups[0].bytes_moved == 2 * 21 * WIDTH * 2 + 21 * 8
    assert lookups[1].bytes_moved == 8700 * WIDTH * 2 + VOCABULARY * WIDTH * 2 + 8700 * 8
    assert [end for end, _ in short.curve] != [end for end, _ in long.curve]
    assert traced(1, 8).profiles[0].swappable_bytes == 0
    assert traced(1, 12).profiles[0].swappable_bytes == 12 * 12 * 4


def test_a_figure_that_is_no_polynomial_is_refused() -> None:
    def bent(batch: int, length: int) -> TracedShape:
        return trace(batch, length, odd=lambda b, s: 64 * max(0, s - 20))

    with pytest.raises(NotPolynomialError, match=r"level after .*, forward of .* is .* at \[1, 300\]"):
        fitted(bent)
    wrong = fitted(bent, proven=[(5, 2)])
    seen = wrong.shape_at((1, 300)).observed[ActivationMode.KEEP][TaskKind.FORWARD, BlockId(0)]
    assert seen.levels != bent(1, 300).observed[ActivationMode.KEEP][TaskKind.FORWARD, BlockId(0)].levels


def test_a_figure_of_higher_degree_is_refused() -> None:
    with pytest.raises(NotPolynomialError, match="where the polynomial through the other shapes gives"):
        fitted(lambda b, s: trace(b, s, odd=lambda batch, length: length**3))


def test_another_program_is_refused() -> None:
    def other(batch: int, length: int) -> TracedShape:
        found = trace(batch, length)
        if batch == 1:
            seen = found.observed[ActivationMode.KEEP][TaskKind.BACKWARD, BlockId(1)]
            seen.calls = [product(batch, length), product(batch, length), product(batch, length)]
        return found

    with pytest.raises(NotPolynomialError, match=r"backward.*operator 1 is softmax at one and mm at the other"):
        fitted(other)


def test_halves_are_exact() -> None:
    """Polynomials of whole numbers may have fractions for coefficients."""

    def halved(batch: int, length: int) -> TracedShape:
        return trace(batch, length, odd=lambda b, s: b * s * (s + 1) // 2)

    piece = fitted(halved)
    assert piece.denominator == 2
    expected = halved(3, 77).observed[ActivationMode.CHECKPOINT]
    found = piece.shape_at((3, 77)).observed[ActivationMode.CHECKPOINT]
    assert {key: seen.levels for key, seen in found.items()} == {key: seen.levels for key, seen in expected.items()}


FEW = [(2, 5), (3, 7), (2, 11), (29, 2), (7, 300)]


def of_few_terms(of: Trace, shapes: list[tuple[int, int]] = FEW, most_terms: int = 3) -> FamilyPiece:
    traces = {shape: of(*shape) for shape in shapes}
    bounds: dict[str, tuple[int | None, ...]] = {"least": (1, 2), "most": (None, 4096)}
    return fit_piece(traces, {}, monomials=MONOMIALS, most_terms=most_terms, **bounds)  # type: ignore[arg-type]


def test_figures_of_few_terms_need_fewer_shapes_than_there_are_monomials() -> None:
    def summed(batch: int, length: int) -> TracedShape:
        return trace(batch, length, odd=lambda b, s: 3 + 5 * s * s)  # a third term beside those of the rows

    assert len(FEW) < len(MONOMIALS)
    piece = of_few_terms(summed)
    for shape in ((1, 2), (13, 1000)):
        for mode, sections in summed(*shape).observed.items():
            found = piece.shape_at(shape).observed[mode]
            assert {key: seen.levels for key, seen in found.items()} == {k: s.levels for k, s in sections.items()}


def test_figures_of_more_terms_are_refused() -> None:
    with pytest.raises(NotPolynomialError, match="which no polynomial of 3 terms gives"):
        of_few_terms(lambda b, s: trace(b, s, odd=lambda batch, length: 3 + 5 * length**2 + batch + batch * length**2))


def test_a_second_polynomial_is_refused() -> None:
    """Where (B - 2)(S - 7) is zero, B S is 7 B + 2 S - 14 as well."""
    with pytest.raises(NotPolynomialError, match="more than one polynomial of 3 terms gives"):
        of_few_terms(trace, [(2, 5), (3, 7), (2, 11), (2, 300)])


def test_shapes_that_determine_nothing_are_refused() -> None:
    same = [(2, s) for s in (5, 7, 11, 13, 17, 19)]
    with pytest.raises(NotPolynomialError, match="do not determine"):
        fit_piece({s: trace(*s) for s in same}, {}, monomials=MONOMIALS, least=(1, 1), most=(None, None))


@pytest.mark.parametrize(
    ("operation_class", "name", "moved"),
    [
        (OperationClass.EMBEDDING, "embedding", 7 + 5 + 7),  # rows read and written, places
        (OperationClass.ELEMENTWISE, "add", 7 + 20 + 5),  # two views of one storage count as the larger
        (OperationClass.ELEMENTWISE, "zero_", 7),
    ],
)
def test_bytes_of_a_call(operation_class: OperationClass, name: str, moved: int) -> None:
    reads = ((0, 20), (1, 5)) if operation_class is OperationClass.EMBEDDING else ((0, 20), (0, 15), (1, 5))
    assert moved_bytes(name, operation_class, reads, (7,)) == moved


# -- shapes that are refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 2**62, 2.0, True, None, "4"])
@pytest.mark.parametrize("field", ["batch_size", "sequence_length"])
def test_impossible_shapes_name_their_field(field: str, value: object) -> None:
    shape: dict[str, object] = {"batch_size": 2, "sequence_length": 16} | {field: value}
    with pytest.raises(WorkloadError, match=rf"^{field} is .*whole number from 1 to"):
        FAMILY.at(**shape)  # type: ignore[arg-type]


def test_shapes_beyond_what_was_proven_are_refused() -> None:
    with pytest.raises(OutsideFamilyError, match=r"sequence_length 4097 is outside.*sequence_length 2 to 4096"):
        FAMILY.at(batch_size=1, sequence_length=4097)
    with pytest.raises(OutsideFamilyError, match="sequence_length 1 is outside"):
        FAMILY.at(batch_size=3, sequence_length=1)


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(WorkloadError, match="batch_size 1099511627776 and sequence_length 4096 makes"):
        FAMILY.at(batch_size=2**40, sequence_length=4096)


def test_figures_that_no_workload_holds_are_refused() -> None:
    unbounded = FAMILY.pieces[0].model_copy(update={"most": (None, None)})
    with pytest.raises(WorkloadError, match=r"too large for made up.*2\*\*60 bytes"):
        family(pieces=(unbounded,)).at(batch_size=1, sequence_length=2**35)


def test_a_limit_of_the_model_is_told_with_its_reason() -> None:
    limit = Limit(variable="sequence_length", most=1024, reason="has learned positions for 1024 tokens")
    with pytest.raises(WorkloadError, match="from 1 to 1024: made up has learned positions for 1024 tokens"):
        family(limits=(limit,)).at(batch_size=1, sequence_length=1025)


def test_a_variable_that_a_family_lacks_is_refused() -> None:
    with pytest.raises(WorkloadError, match="target_length is 8, but made up has none"):
        FAMILY.at(batch_size=1, sequence_length=8, target_length=8)


# -- other element types ---------------------------------------------------------------------------------------------


def test_a_twin_differs_in_its_element_type_alone() -> None:
    known = family(twins={DType.FLOAT16: "def"})
    twin = known.in_dtype(DType.FLOAT16)
    found, own = (f.at(batch_size=2, sequence_length=9) for f in (twin, known))
    assert (found.model_hash, found.compute_dtype) == ("def", DType.FLOAT16)
    assert {p.dtype for p in found.parameters} == {DType.FLOAT16}
    text = own.to_json().replace('"bfloat16"', '"float16"').replace('"abc"', '"def"')
    assert found.to_json() == text
    assert twin.in_dtype(DType.BFLOAT16) == known
    with pytest.raises(WorkloadError, match="is known in bfloat16, float16, not in float32"):
        known.in_dtype(DType.FLOAT32)


# -- files -----------------------------------------------------------------------------------------------------------


def test_families_read_back_equal(tmp_path: Path) -> None:
    known = family(twins={DType.FLOAT16: "def"}, limits=(Limit(variable="sequence_length", most=9, reason="ends"),))
    known.save(tmp_path / "family.json")
    assert WorkloadFamily.load(tmp_path / "family.json") == known
    for name in ("one", "other"):
        write_family(known, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_tokens": 10_000}, "names a polynomial beyond"),
        ({"calls": ()}, "names a call beyond"),
        ({"sections": ()}, "names a section beyond"),
        ({"polynomials": ((1, 2),)}, "polynomial"),
        ({"least": (1,)}, "one exponent for each variable"),
    ],
)
def test_damaged_pieces_are_refused(change: dict[str, object], reason: str) -> None:
    piece = FAMILY.pieces[0]
    fields = {name: getattr(piece, name) for name in FamilyPiece.model_fields}
    with pytest.raises(ValueError, match=reason):
        FamilyPiece.model_validate(fields | change)
