"""Random plans with tiles train as the plain loop, in families that other tests know and in others."""

from __future__ import annotations

from typing import Any

import pytest

from protwin.runtime.tiles.loss_function import _Sums
from tests.proof_size import examples, some_quick
from tests.runtime.tiles.random_tiles import NAMED, UNNAMED, check, plans_of

QUICK = "qwen3"


@some_quick("family", [*NAMED, *UNNAMED], quick=[QUICK])
def test_random_tiles_train_as_plain(family: str) -> None:
    for plan in plans_of(family, examples(2, 1), seed=len(family)):
        check(family, plan)


def test_a_gradient_that_is_divided_by_tiles_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plans_of(QUICK, 1, seed=1)[0].model_copy(update={"loss_tiles": 3})
    own = _Sums.gradients.fget
    assert own is not None

    def divided(sums: Any) -> list[Any]:
        return [None if gradient is None else gradient.div_(3) for gradient in own(sums)]

    monkeypatch.setattr(_Sums, "gradients", property(divided))
    with pytest.raises(AssertionError):
        check(QUICK, plan)
