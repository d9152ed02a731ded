"""What holds after every mistake: nothing is harmed."""

from __future__ import annotations

from torch import nn

from protwin.runtime import Training
from tests.runtime.models import Case, differences


def check_goes_on(case: Case, model: nn.Module, training: Training) -> None:
    """The mistake has harmed nothing: the remaining steps are those of the plain loop."""
    for batch in case.batches[1:]:
        case.loss(model, batch).backward()
        training.step()
    training.close()
    assert differences(model, case.plain.weights[-1]) == []
