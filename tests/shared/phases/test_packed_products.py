"""What releases of bitsandbytes keep and cast, by their numbers as whole ones: 0.9 lies before 0.43, 0.100 behind."""

from __future__ import annotations

import random

import pytest
from pydantic import ValidationError

from protwin.shared.phases.quantization import PackedProducts, Quantization, QuantizedType
from protwin.shared.schema.training_options import QuantizationOptions
from protwin.shared.schema.workload import DType


@pytest.mark.parametrize(
    ("release", "keeps", "casts"),
    [
        ("0.39.0", True, True),
        ("0.41.1", True, True),
        ("0.43", True, True),
        ("0.43.1", True, True),
        ("0.43.2", False, True),
        ("0.49.2", False, True),
        ("0.50.0", False, False),
        ("0.100.0", False, False),
        ("1.0.0", False, False),
    ],
)
def test_four_bits_forget_their_input_since_0_43_2_and_are_cast_before_0_50(
    release: str, keeps: bool, casts: bool
) -> None:
    products = PackedProducts(release=release)
    assert products.keeps_inputs(QuantizedType.NF4) is keeps
    assert products.keeps_inputs(QuantizedType.FP4) is keeps
    assert products.casts_ahead is casts
    assert products.keeps_inputs(QuantizedType.INT8)


@pytest.mark.parametrize("seed", range(20))
def test_releases_are_ordered_by_their_numbers(seed: int) -> None:
    rng = random.Random(seed)
    parts = sorted((rng.randrange(2), rng.randrange(39, 120), rng.randrange(12)) for _ in range(2))
    early, late = (PackedProducts(release=".".join(map(str, part))) for part in parts)
    assert early.version <= late.version
    assert early.keeps_inputs(QuantizedType.NF4) >= late.keeps_inputs(QuantizedType.NF4)
    assert early.casts_ahead >= late.casts_ahead


@pytest.mark.parametrize("release", ["", "latest", "0.38.1", "0", "0.41.1.post2", "-1.2.3", "0.41.x"])
def test_what_is_no_release_is_refused(release: str) -> None:
    with pytest.raises(ValidationError, match=r"no release of bitsandbytes that is known; write one from 0\.39\.0 on"):
        PackedProducts(release=release)


def test_what_is_not_unpacked_by_bitsandbytes_has_no_products_of_it() -> None:
    gptq = Quantization(type=QuantizedType.GPTQ, blocksize=128)
    with pytest.raises(ValidationError, match="gptq is not bitsandbytes'"):
        QuantizationOptions(how=gptq, products=PackedProducts(release="0.41.1"))
    half = PackedProducts(release="0.41.1", packed_from=DType.FLOAT16)
    with pytest.raises(ValidationError, match="int8 is unpacked to the type of the map's input"):
        QuantizationOptions(how=Quantization(type=QuantizedType.INT8), products=half)
    with pytest.raises(ValidationError, match="unpacked to float16, bfloat16, float32"):
        PackedProducts(release="0.41.1", packed_from=DType.INT8)


def test_what_was_kept_before_there_were_products_is_found_still() -> None:
    """Kept traces go by the options as JSON."""
    nf4 = Quantization(type=QuantizedType.NF4, blocksize=64)
    assert set(QuantizationOptions(how=nf4).model_dump()) == {"how", "skipped"}
    asked = QuantizationOptions(how=nf4, head=True, products=PackedProducts(release="0.50"))
    assert set(asked.model_dump()) == {"how", "skipped", "head", "products"}
    assert QuantizationOptions.model_validate_json(asked.model_dump_json()) == asked
