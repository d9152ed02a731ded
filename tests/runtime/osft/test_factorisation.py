"""Factors of a weight: they give it back, are orthonormal, and are the same whoever decomposes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.runtime.osft.cache import FactorCache
from protwin.runtime.osft.factorisation import Factors, factorise, reconstruct
from protwin.shared.basics.errors import ProtwinError
from protwin.shared.factors.sizes import check_ratio, num_frozen

RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)


def weight(num_out: int, num_in: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_out, num_in, generator=generator).to(dtype)


def by_parts(factors: Factors) -> torch.Tensor:
    """The weight as a sum of outer products in float64: another way than the code's."""
    f = {name: factor.double() for name, factor in factors.named().items()}
    total = torch.zeros(factors.u_low.shape[0], factors.v_low.shape[1], dtype=torch.float64)
    for part in ("high", "low"):
        for u, s, v in zip(f[f"u_{part}"].unbind(1), f[f"s_{part}"], f[f"v_{part}"].unbind(0), strict=True):
            total += s * torch.outer(u, v)
    return total


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("size", [(7, 12), (9, 9), (13, 6), (1, 5), (5, 1)])
def test_factors_give_the_weight_back(size: tuple[int, int], ratio: float) -> None:
    dense = weight(*size)
    factors = factorise(dense, num_frozen(*size, ratio))
    frozen, least = factors.s_high.numel(), min(size)
    assert frozen + factors.s_low.numel() == least
    assert factors.s_low.numel() >= 1
    assert frozen == {0.0: least - 1, 1.0: 0}.get(ratio, frozen)
    error = (by_parts(factors) - dense.double()).norm() / dense.double().norm()
    assert error <= 1e-5
    assert ((reconstruct(factors) - dense).norm() / dense.norm()) <= 1e-5
    # What is frozen leads: every frozen value is at least every trained one.
    assert frozen == 0 or factors.s_high.min() >= factors.s_low.max()


def test_the_number_of_frozen_directions_is_of_the_decimal_ratio() -> None:
    """In binary floats 10 (1 - 0.9) is less than 1."""
    assert num_frozen(10, 12, 0.9) == 1
    assert int(10 * (1 - 0.9)) == 0
    assert [num_frozen(8, 5, ratio) for ratio in RATIOS] == [4, 3, 2, 1, 0]
    assert num_frozen(64, 64, 0.25) == 48


@given(st.integers(1, 9), st.integers(1, 9), st.floats(0, 1), st.integers(0, 5))
@settings(max_examples=40)
def test_factors_are_orthonormal_with_positive_peaks(num_out: int, num_in: int, ratio: float, seed: int) -> None:
    factors = factorise(weight(num_out, num_in, seed), num_frozen(num_out, num_in, ratio))
    u, v = torch.cat([factors.u_high, factors.u_low], 1), torch.cat([factors.v_high, factors.v_low])
    least = min(num_out, num_in)
    torch.testing.assert_close(u.T @ u, torch.eye(least), atol=1e-5, rtol=0)
    torch.testing.assert_close(v @ v.T, torch.eye(least), atol=1e-5, rtol=0)
    assert all(column[column.abs().argmax()] > 0 for column in u.unbind(1))


def test_signs_are_those_of_any_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may give u and v with both signs turned: the factors stay the same.  Without the rule they do not."""
    dense, decompose = weight(6, 8), torch.linalg.svd
    before = factorise(dense, 3)
    turned = torch.tensor([1.0, -1, -1, 1, -1, 1])

    def otherwise(matrix: torch.Tensor, *, full_matrices: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        u, s, v = decompose(matrix, full_matrices=full_matrices)
        return u * turned, s, v * turned.unsqueeze(1)

    monkeypatch.setattr(torch.linalg, "svd", otherwise)
    after = factorise(dense, 3)
    assert all(torch.equal(one, after.named()[name]) for name, one in before.named().items())
    assert not torch.equal(otherwise(dense, full_matrices=False)[0], decompose(dense, full_matrices=False)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_factors_have_the_weights_type_and_are_computed_wider(dtype: torch.dtype) -> None:
    dense = weight(12, 10, dtype=dtype)
    factors = factorise(dense, 4)
    assert {factor.dtype for factor in factors.named().values()} == {dtype}
    assert factors.v_low.is_contiguous()
    wide = factorise(dense.to(torch.promote_types(dtype, torch.float32)), 4)
    assert all(torch.equal(one.to(dtype), factors.named()[name]) for name, one in wide.named().items())
    error = (by_parts(factors) - dense.double()).norm() / dense.double().norm()
    assert error <= (1e-12 if dtype is torch.float64 else 8 * torch.finfo(dtype).eps)


def test_singular_values_beyond_the_type_become_its_largest() -> None:
    dense = torch.full((40, 40), 60_000.0, dtype=torch.float16)
    factors = factorise(dense, 2)
    assert factors.s_high[0] == torch.finfo(torch.float16).max
    assert all(torch.isfinite(factor).all() for factor in factors.named().values())
    # Without the limit it would be infinite.
    assert torch.linalg.svdvals(dense.float())[0].half().isinf()


def test_entries_that_are_not_finite_are_refused_by_name() -> None:
    dense = weight(4, 4)
    dense[1, 2] = torch.inf
    with pytest.raises(ProtwinError, match=r"layers\.0\.q_proj has entries that are not finite"):
        factorise(dense, 2, name="layers.0.q_proj")


@pytest.mark.parametrize("ratio", [-0.1, 1.01, float("nan"), float("inf"), True, "0.5", None])
def test_ratios_that_make_no_sense_are_refused(ratio: object) -> None:
    with pytest.raises(ProtwinError, match="from 0 to 1"):
        check_ratio(ratio)  # type: ignore[arg-type]


# -- cache -------------------------------------------------------------------------------------------------------------


def test_a_cached_factorisation_is_read_and_equal(tmp_path: Path) -> None:
    dense = weight(6, 9, dtype=torch.bfloat16)
    first = FactorCache(tmp_path).factors(dense, 3, lambda: factorise(dense, 3))
    cache = FactorCache(tmp_path)
    again = cache.factors(dense.clone(), 3, lambda: pytest.fail("it was to be read"))
    assert cache.num_hits == 1
    assert all(torch.equal(factor, again.named()[name]) for name, factor in first.named().items())


def test_another_weight_ratio_or_type_is_no_hit(tmp_path: Path) -> None:
    dense = weight(6, 9)
    other = dense.clone()
    other[5, 8] = torch.nextafter(other[5, 8], torch.tensor(9.0))
    cache = FactorCache(tmp_path)
    for one, frozen in ((dense, 3), (other, 3), (dense, 2), (dense.T, 3), (dense.double(), 3)):
        cache.factors(one, frozen, lambda one=one, frozen=frozen: factorise(one, frozen))
    assert cache.num_hits == 0
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "folder"])
def test_a_damaged_file_is_a_miss(tmp_path: Path, damage: str) -> None:
    """A flipped bit within a tensor leaves a file that the format itself calls whole."""
    dense = weight(6, 9)
    cache = FactorCache(tmp_path)
    made = cache.factors(dense, 3, lambda: factorise(dense, 3))
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "folder":
        path.unlink()
        path.mkdir()
        with pytest.raises(ProtwinError):
            cache.factors(dense, 3, lambda: factorise(dense, 3))
        return
    content[-3] ^= 1
    path.write_bytes({"cut": content[:-9], "flipped": content, "empty": b""}[damage])
    again = cache.factors(dense, 3, lambda: factorise(dense, 3))
    assert cache.num_hits == 0
    assert all(torch.equal(factor, again.named()[name]) for name, factor in made.named().items())
    cache.factors(dense, 3, lambda: pytest.fail("it was written anew"))
