"""bitsandbytes' eight-bit base under a plan: on an H100 its products failed with an illegal memory access.

After such an error every later call of CUDA fails in that process.
"""

from __future__ import annotations

import pytest

from tests.gpu.test_kernels_of_others import PLANS, check_packed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("plan_name", PLANS)
def test_an_eight_bit_base_that_is_offloaded_trains_adapters_to_the_bits_of_the_resident_one(plan_name: str) -> None:
    check_packed(plan_name, kind="int8")
