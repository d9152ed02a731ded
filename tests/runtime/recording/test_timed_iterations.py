"""A record is promised exactly where training gives one, and refused with what would help where it never can."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from protwin.runtime.recording.timed_iterations import LEAST_EVERY, WARM_UP, iterations_until_record
from protwin.shared.basics.errors import ProtwinError
from tests.runtime.models import SEED, cases
from tests.runtime.resuming import kept, start, train


@pytest.mark.parametrize("done", range(7))
@pytest.mark.parametrize("pauses", [(), *product(range(1, 9)), *product(range(1, 6), range(2, 9))])
def test_as_many_as_enumeration_finds(pauses: tuple[int, ...], done: int) -> None:
    """Every number of iterations is tried, each with its pauses written out."""

    def gives_one(number: int) -> bool:
        paused = [i > 0 and any((done + i) % every == 0 for every in pauses) for i in range(number)]
        return any(not (paused[i] or paused[i + 1]) for i in range(WARM_UP, number - 1))

    found = next((number for number in range(60) if gives_one(number)), None)
    assert iterations_until_record(pauses=pauses, done=done) == found
    if len(pauses) == 1:
        assert (found is None) == (pauses[0] < LEAST_EVERY)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_training_that_meters_too_often_says_so(every: int) -> None:
    case = next(iter(cases().values()))
    model = case.build()
    with start(case, model, kept(case.workload), meter_every=every) as training:
        torch.manual_seed(SEED)
        for _ in range(2):
            train(case, model, training, 0, 4)
        if every >= LEAST_EVERY:
            assert training.record().num_iterations > 0
            return
        with pytest.raises(ProtwinError, match=rf"meter_every is {every}.* Pass meter_every=3 or more"):
            training.record()


@pytest.mark.parametrize("every", [1, 2, 3])
def test_training_that_pauses_too_often_says_so(every: int, tmp_path: Path) -> None:
    case = next(iter(cases().values()))
    model = case.build()
    with start(case, model, kept(case.workload)) as training:
        torch.manual_seed(SEED)
        need = iterations_until_record(pauses=[every])
        for step in range(need or 8):
            if need is not None and step == need - 1:
                with pytest.raises(ProtwinError, match="a Record needs"):
                    training.record()
            train(case, model, training, step % 4, step % 4 + 1)
            if training.num_steps % every == 0:
                training.synchronize()
        if need is not None:
            assert training.record().num_iterations == 1
            return
        with pytest.raises(ProtwinError, match=r"without a pause before either.* Let 3 iterations or more"):
            training.record()
