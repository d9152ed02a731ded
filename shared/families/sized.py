"""Families of models that differ in their sizes alone: one program with adapters, for every model that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm, prod
from typing import Any, ClassVar, Self

from pydantic import model_validator

from ..basics.documents import Document
from ..schema.workload import DType
from .family import FamilyPiece

Polynomial = dict[tuple[int, ...], Fraction]
"""Coefficients by exponents of the variables."""
RANK = "rank"
"""The variable that adapters add to a shape."""


class SizedFamily(Document):
    """What models of one architecture do with adapters beside some of their linear maps, at every shape and size."""

    KIND: ClassVar[str] = "sized_family"

    program: str
    """``program_of`` the models' configurations."""
    targets: tuple[str, ...]
    """The adapted maps, by their paths within a block."""
    compute_dtype: DType
    shape_variables: tuple[str, ...]
    """What a shape of the batch is made of."""
    size_variables: tuple[str, ...]
    """The rank of adapters, then the models' sizes (``sizes_of``)."""
    pieces: tuple[FamilyPiece, ...]
    """With all variables, those of the shape first."""
    models: tuple[str, ...] = ()
    """Models of the catalogue of which a trace was met, figure by figure."""
    software: dict[str, str] = {}

    @model_validator(mode="after")
    def _has_all_variables(self) -> Self:
        num_variables = len(self.shape_variables) + len(self.size_variables)
        if any(len(piece.least) != num_variables for piece in self.pieces):
            raise ValueError(f"every piece needs a range for each of {num_variables} variables")
        if self.size_variables[:1] != (RANK,):
            raise ValueError("the first of the sizes is the rank")
        return self

    def values_of(self, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
        """The values of ``size_variables``; None if ``sizes`` names others, or if nothing was proven of one."""
        if sizes.keys() != set(self.size_variables):
            return None
        values = tuple(sizes[name] for name in self.size_variables)
        first = len(self.shape_variables)
        ranges = [(piece.least[first:], piece.most[first:]) for piece in self.pieces]
        if any(value < low for least, _ in ranges for value, low in zip(values, least, strict=True)):
            return None
        return values

    def pieces_beside(self, values: tuple[int, ...], dense: Sequence[FamilyPiece]) -> tuple[FamilyPiece, ...]:
        """The pieces of a model of these sizes, with the ranges of ``dense``, those of its family of full training.

        Where a range has no counterpart here, as beyond a sliding window, there is no piece.
        """
        found = []
        for piece in dense:
            own = next((p for p in self.pieces if _is_piece_of(piece, p)), None)
            if own is not None:
                found.append(_at_sizes(own, values, piece))
        return tuple(found)


def _is_piece_of(dense: FamilyPiece, sized: FamilyPiece) -> bool:
    """Whether shapes of ``dense`` are those that ``sized`` was fitted for: these begin with the shortest sequences."""
    num_free = len(dense.least)
    return dense.least == sized.least[:num_free] and dense.most[0] == sized.most[0]


def _at_sizes(sized: FamilyPiece, values: tuple[int, ...], dense: FamilyPiece) -> FamilyPiece:
    """``sized`` with values for the variables behind the shape's, within the range of ``dense``.

    What stays on the device is that of ``dense``: adapters add neither buffers nor tensors of a batch.
    """
    num_free = len(dense.least)
    polynomials = [fixed(polynomial, values, num_free) for polynomial in polynomials_of(sized)]
    polynomials.append(polynomials_of(dense)[dense.resident])
    return sized.model_copy(
        update={
            **coefficients_of(polynomials, num_free),
            "least": dense.least,
            "most": dense.most,
            "resident": len(polynomials) - 1,
            "fitted_at": dense.fitted_at,
            "proven_at": dense.proven_at,
        }
    )


def polynomials_of(piece: FamilyPiece) -> list[Polynomial]:
    """The polynomials of a piece, by number."""
    return [
        {m: Fraction(c, piece.denominator) for m, c in zip(piece.monomials, row, strict=True) if c}
        for row in piece.polynomials
    ]


def fixed(polynomial: Polynomial, values: tuple[int, ...], num_free: int) -> Polynomial:
    """``polynomial`` in its first ``num_free`` variables alone, the others having ``values``."""
    found: Polynomial = {}
    for exponents, coefficient in polynomial.items():
        rest = prod(value**exponent for value, exponent in zip(values, exponents[num_free:], strict=True))
        key = exponents[:num_free]
        found[key] = found.get(key, Fraction(0)) + coefficient * rest
    return {exponents: coefficient for exponents, coefficient in found.items() if coefficient}


def coefficients_of(polynomials: Sequence[Polynomial], num_variables: int) -> dict[str, Any]:
    """The fields of a piece that hold ``polynomials``."""
    monomials = sorted({exponents for polynomial in polynomials for exponents in polynomial} | {(0,) * num_variables})
    denominator = lcm(*(c.denominator for polynomial in polynomials for c in polynomial.values()))
    return {
        "monomials": tuple(monomials),
        "denominator": denominator,
        "polynomials": tuple(
            tuple(int(polynomial.get(exponents, 0) * denominator) for exponents in monomials)
            for polynomial in polynomials
        ),
    }
