"""What kernels of packages keep and hold: as the packages' own Python does, whose kernels do nothing meanwhile.

``python -m benchmarks.kernels_of_packages --record`` made what is compared with.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.runtime.packaged.substitution import KERNELS
from tests.runtime.packaged.calls import Held, cases, held

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
_MORE_FRAC = 0.002
"""Of backward: a sum of gates more than the package has at once."""


def test_every_kernel_was_recorded() -> None:
    assert RECORDED.keys() == cases().keys()
    assert {function for function, _ in cases().values()} == KERNELS.keys()


@pytest.mark.parametrize("function", sorted(KERNELS))
def test_as_much_is_kept_and_held_as_by_the_package(function: str) -> None:
    for name, (called, given) in cases().items():
        if called != function:
            continue
        package, ours = Held(**RECORDED[name]), held(KERNELS[function], given)
        assert ours[:2] == package[:2], name
        assert package.backward_bytes <= ours.backward_bytes <= package.backward_bytes * (1 + _MORE_FRAC), name
        assert ours.gradients == package.gradients, name
