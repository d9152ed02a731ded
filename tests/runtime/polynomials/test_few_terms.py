"""Polynomials of few terms are found where figures determine them, and refused where they do not."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product

import pytest

from protwin.runtime.polynomials.few_terms import Solver

MONOMIALS = [(*exponents, 0) for exponents in product(range(2), range(3))] + [(0, 1, 1), (1, 1, 1)]
SHAPES = [(2, 37, 2), (3, 53, 8), (7, 65550, 2), (2, 16, 4), (7, 16387, 8), (5, 26, 2), (2, 74, 4), (3, 9, 8)]
"""Batch, own tokens, ranks."""


@pytest.mark.parametrize("num_terms", range(1, 6))
def test_the_polynomial_that_was_drawn_is_the_only_one(num_terms: int) -> None:
    rng = random.Random(num_terms)
    solver = Solver(MONOMIALS, SHAPES, 5)
    for _ in range(5):
        drawn = {i: rng.choice((-8, 2, 8192)) for i in sorted(rng.sample(range(len(MONOMIALS)), num_terms))}
        figures = tuple(
            sum(c * b ** MONOMIALS[i][0] * n ** MONOMIALS[i][1] * r ** MONOMIALS[i][2] for i, c in drawn.items())
            for b, n, r in SHAPES
        )
        assert solver.polynomials(figures) == {tuple((i, Fraction(c)) for i, c in drawn.items())}
        changed = (*figures[:-1], figures[-1] + 8)
        assert not solver.polynomials(changed)


def test_what_a_returning_model_lets_go_needs_more_terms_than_three() -> None:
    """Labels of all ranks with padding, a rank's own, positions of all, and one number."""
    held = [8 * (b * (n * r + 1) + b * n + n * r + 1) for b, n, r in SHAPES]
    assert held[:4] == [2392, 14872, 12061264, 1816]
    assert not Solver(MONOMIALS, SHAPES[:4]).polynomials(tuple(held[:4]))
    (terms,) = Solver(MONOMIALS, SHAPES, 5).polynomials(tuple(held))
    assert {MONOMIALS[i]: c for i, c in terms} == {
        (0, 0, 0): 8,
        (0, 1, 1): 8,
        (1, 0, 0): 8,
        (1, 1, 0): 8,
        (1, 1, 1): 8,
    }


def test_two_polynomials_are_told() -> None:
    """Where all lengths are twice the batch, a product of them and a square cannot be told apart."""
    shapes = [(b, 2 * b, 2) for b in (2, 3, 5, 7)]
    assert len(Solver([(1, 1, 0), (0, 2, 0)], shapes).polynomials(tuple(b * n for b, n, _ in shapes))) == 2
