"""The answer alone, from a name, a file, a configuration or a module, is that of the search that it stands for."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig

import protwin
from protwin.calibration.one_call.searching import search_request
from protwin.runtime import trace, workload_of_configuration
from protwin.runtime.planning.request import PlanRequest
from protwin.shared import InfeasibleError, PlanError, WorkloadError, load_workload
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.schema.hardware import DeviceKind
from protwin.sim import SearchSpace, search
from tests.calibration.fitting.test_budgeted import HERE
from tests.runtime.models import differences, hand_written, llama, point_batches, snapshot, token_batches

FEW = SearchSpace(chunk_bytes=(20_000,), n_checkpoint=(1,))


def test_a_name_needs_no_torch_and_importing_needs_nothing() -> None:
    code = (
        "import sys, protwin\n"
        "assert [name for name in sys.modules if name.startswith('protwin.')] == [], 'importing is free'\n"
        "for name in ('torch', 'transformers', 'psutil', 'safetensors'): sys.modules[name] = None\n"
        "space = protwin.sim.SearchSpace(chunk_bytes=2**28, n_checkpoint=32)\n"
        "result = protwin.plan('llama-3-8b', 'rtx-3090', batch_size=1, sequence_length=2048, space=space)\n"
        "assert result.plan.n_checkpoint == 32\n"
        "assert 'train' in dir(protwin) and 'sim' in dir(protwin)\n"
        "print(result.hardware_name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "rtx-3090\n"), done.stderr


def test_a_module_is_traced_without_memory_and_stays_as_it_is() -> None:
    model, batch = llama(num_layers=2), token_batches(1)[0]
    before = snapshot(model)
    found = protwin.plan(model, HERE, batch=batch, budget="300KiB", space=FEW)
    assert differences(model, before) == []
    workload = trace(model.to("meta"), batch, device_kind=DeviceKind.CPU)
    expected = search(workload, HERE, device_budget_bytes="300KiB", space=FEW)
    assert (found.plan, found.prediction) == (expected.plan, expected.prediction)


def test_a_module_with_a_loss_beside_it() -> None:
    batch = point_batches(1)[0]

    def loss(output: Any, points: Any) -> Any:
        return (output - points[:, :3]).square().mean()

    found = protwin.plan(hand_written(), HERE, batch=batch["points"], loss=loss, space=FEW)
    assert found.plan.n_checkpoint == 1

    def loss_of_its_own(output: Any, _: Any) -> Any:
        return nn.functional.cross_entropy(output, batch["classes"])

    assert protwin.plan(hand_written(), HERE, batch=batch["points"], loss=loss_of_its_own, space=FEW).plan.n_checkpoint

    def loss_that_looks(output: Any, _: Any) -> Any:
        return output.square().mean() * output.detach().tolist()[0][0]

    with pytest.raises(WorkloadError, match="by values that only a run with weights has"):
        protwin.plan(hand_written(), HERE, batch=batch["points"], loss=loss_that_looks, space=FEW)


@pytest.mark.parametrize("is_object", [True, False])
def test_a_configuration(is_object: bool) -> None:
    config = llama(num_layers=2).config
    assert isinstance(config, LlamaConfig)
    given = config if is_object else config.to_dict()
    found = protwin.plan(given, HERE, batch_size=2, sequence_length=12, budget="300KiB", space=FEW)
    workload = workload_of_configuration(
        config.to_dict(), name="llama", batch_size=2, sequence_length=12, device_kind=DeviceKind.CPU
    )
    assert found.plan == search(workload, HERE, device_budget_bytes="300KiB", space=FEW).plan


def test_what_lacks_something_is_refused_with_what_it_lacks() -> None:
    ask = partial(protwin.plan, machine=HERE)
    with pytest.raises(WorkloadError, match="Pass batch="):
        ask(llama())
    with pytest.raises(WorkloadError, match="Leave batch_size out"):
        ask(llama(), batch=token_batches(1)[0], batch_size=2)
    with pytest.raises(WorkloadError, match="Give batch_size"):
        ask(llama().config)
    with pytest.raises(WorkloadError, match=r"those of an nn\.Module"):
        ask("gpt2", batch=token_batches(1)[0])
    with pytest.raises(WorkloadError, match="a int is no model"):
        ask(3)
    with pytest.raises(InfeasibleError):
        ask(llama(num_layers=2), batch=token_batches(1)[0], budget=1000)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        protwin.trian  # type: ignore[attr-defined] # noqa: B018


def test_ranks_share_sequences_where_that_is_asked_for() -> None:
    """Of a workload that knows how: they need the same batches, and steps have the micro-batches that are asked for."""
    shared = load_workload("llama-3-8b", batch_size=1, sequence_length=1024, sequence_ranks=[2])
    machine = load_hardware("h100-80gb-x8")
    cases: list[tuple[dict[str, Any], int]] = [({}, 1), ({"sequence_ranks": 2}, 2), ({"sequence_ranks": [2]}, 2)]
    for knobs, number in cases:
        request = PlanRequest(knobs=knobs, micro_batches=3)
        asked = search_request(shared, machine, request, 2)
        assert asked.space.sequence_ranks == (number,)
        assert asked.micro_batches_of(number, asked.step.micro_batches) == 3
    for several in ([1, 2], "2"):
        with pytest.raises(PlanError, match="Name one number"):
            search_request(shared, machine, PlanRequest(knobs={"sequence_ranks": several}), 2)
