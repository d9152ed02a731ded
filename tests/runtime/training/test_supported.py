"""What the runtime cannot carry out yet is refused before anything is touched; what it carries out, it explains."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from protwin.runtime import carry_out
from protwin.shared.basics.errors import PlanError
from protwin.shared.schema.plan import ParallelMode
from tests.runtime.life_cycle import plan_for
from tests.runtime.models import Case, differences


@pytest.mark.parametrize("mode", [ParallelMode.REPLICATED, ParallelMode.SHARDED])
def test_plans_of_several_ranks_are_refused_by_one_alone(case: Case, model: nn.Module, mode: ParallelMode) -> None:
    plan = plan_for(case.workload).model_copy(update={"parallel": mode, "num_ranks": 2})
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PlanError, match=r"for 2 ranks, but 1 process was started .* torchrun --nproc-per-node 2"):
        carry_out(model, plan, case.workload, optimizer=case.make_optimizer)
    assert differences(model, weights) == []


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW])
def test_what_is_explained_names_the_optimizer(case: Case, model: nn.Module, kind: type[torch.optim.Optimizer]) -> None:
    make = partial(kind, lr=1e-3)
    with carry_out(model, plan_for(case.workload), case.workload, optimizer=make) as training:
        told = training.explain()
    for place in ("CPU", "device"):
        assert f"{place} {kind.__name__}" in told
    assert ("Adam" in told) == (kind is torch.optim.AdamW)
