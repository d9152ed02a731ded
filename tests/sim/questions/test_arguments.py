"""Arguments of the faces: nothing of a wrong type gets further than a message that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from protwin.shared import Hardware, Plan, load_hardware, load_workload
from protwin.shared.answers.search_result import Risk
from protwin.shared.basics.errors import ProtwinError
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ParallelMode
from protwin.shared.schema.workload import Workload
from protwin.sim import Effort, GlobalBatch, SearchRequest, SearchSpace, Step, search, simulate
from protwin.sim.questions.by_name import SearchOptions, Shape

SPACE = SearchSpace(chunk_bytes=(64 * 2**20,), prefetch_depth=(1,), n_checkpoint=(0,))
WRONG: tuple[Any, ...] = (object(), "no such thing", 2.5, float("nan"), b"2", [object()], {"a": 1}, {3.5}, 1j, True)
"""Values that hardly any argument can have."""
MEANT: dict[str, tuple[type, ...]] = {"max_gradient_norm": (float,)}
"""Types that are no mistake."""


@pytest.fixture(scope="module")
def machine() -> Hardware:
    return load_hardware("rtx-3090")


@pytest.fixture(scope="module")
def workload() -> Workload:
    return load_workload("gpt2", batch_size=1, sequence_length=64)


def wrong_for(name: str) -> Iterator[Any]:
    yield from (value for value in WRONG if not isinstance(value, MEANT.get(name, ())))


def check_refused(name: str, value: object, call: Callable[[], object]) -> None:
    """``call`` ends in one message that names the argument."""
    with pytest.raises((ProtwinError, TypeError, ValidationError)) as caught:
        pytest.fail(f"{name}={value!r} was taken: {call()!r:.80}")
    assert name in str(caught.value), f"{name}={value!r}: {caught.value!r}"


@pytest.mark.parametrize("made", [Step, Effort, SearchSpace], ids=lambda made: made.__name__)
def test_parts_of_a_request_refuse_what_they_cannot_be(made: Any) -> None:
    names = SearchSpace.model_fields if made is SearchSpace else [field.name for field in fields(made)]
    for name in names:
        for value in wrong_for(name):
            if (name, value) != ("looks_up_rows", True):
                check_refused(name, value, lambda name=name, value=value: made(**{name: value}))  # type: ignore[misc]


def test_a_request_refuses_what_it_cannot_be(machine: Hardware, workload: Workload) -> None:
    good: dict[str, Any] = {"workload": workload, "hardware": machine}
    for field in fields(SearchRequest):
        for value in wrong_for(field.name):
            if not (field.name.endswith("_bytes") and value == "no such thing"):
                check_refused(field.name, value, lambda n=field.name, v=value: SearchRequest(**good | {n: v}))  # type: ignore[misc]
    batch: dict[str, Any] = {"num_samples": 4, "workload_at": lambda size: workload}
    for field in fields(GlobalBatch):
        for value in wrong_for(field.name):
            check_refused(field.name, value, lambda n=field.name, v=value: GlobalBatch(**batch | {n: v}))  # type: ignore[misc]


def test_every_option_of_a_search_is_checked_before_the_search(machine: Hardware) -> None:
    ask: Any = search
    for name in SearchOptions.__annotations__:
        for value in wrong_for(name):
            if not (name.endswith("_bytes") and value == "no such thing") and name != "calibration":
                check_refused(name, value, lambda n=name, v=value: ask("gpt2", machine, **{n: v}))  # type: ignore[misc]
    for value in wrong_for("calibration"):
        if not isinstance(value, str):
            check_refused("calibration", value, lambda v=value: ask("gpt2", machine, calibration=v))  # type: ignore[misc]
            check_refused("hardware", value, lambda v=value: ask("gpt2", v))  # type: ignore[misc]
            check_refused("on_progress", value, lambda v=value: ask("gpt2", machine, on_progress=v))  # type: ignore[misc]
            check_refused("model", value, lambda v=value: ask(v, machine))  # type: ignore[misc]


def test_every_argument_of_a_simulation_is_checked(machine: Hardware, workload: Workload) -> None:
    ask: Any = simulate
    plan = Plan(workload_id=workload.identity, chunk_bytes=2**26, n_persist=0, n_buffer=2)
    for value in WRONG:
        for name in (*Shape.__annotations__, "schedule", "on_progress"):
            check_refused(name, value, lambda n=name, v=value: ask(plan, "gpt2", machine, **{n: v}))  # type: ignore[misc]
        if not isinstance(value, str):
            check_refused("plan", value, lambda v=value: ask(v, "gpt2", machine))  # type: ignore[misc]
            check_refused("calibration", value, lambda v=value: ask(plan, "gpt2", machine, v))  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"simulate\(\) has no argument batchsize\. Did you mean batch_size\?"):
        ask(plan, "gpt2", machine, batchsize=2)


def test_names_of_other_parts_say_where_they_belong(machine: Hardware) -> None:
    ask: Any = search
    with pytest.raises(
        TypeError, match=r"search\(\) has no argument n_swap\. .* space=SearchSpace\(n_swap=\(\.\.\.,\)\)"
    ):
        ask("gpt2", machine, n_swap=2)
    with pytest.raises(TypeError, match=r"effort=Effort\(tolerance_frac=\.\.\.\)"):
        ask("gpt2", machine, tolerance_frac=0.1)
    with pytest.raises(ProtwinError, match=r"step is the whole step, but micro_batches is given besides"):
        ask("gpt2", machine, step=Step(), micro_batches=2)
    with pytest.raises(ProtwinError, match=r"global_batch_size and micro_batches exclude each other"):
        ask("gpt2", machine, global_batch_size=4, micro_batches=2)
    with pytest.raises(ProtwinError, match=r"optimizer is 'lion-9'\. Did you mean"):
        ask("gpt2", machine, optimizer="lion-9")


def test_what_is_meant_is_taken(machine: Hardware, workload: Workload) -> None:
    """Fields of a step beside it, names in the place of members, one in the place of a tuple, NumPy's numbers."""
    step = Step(micro_batches=2, optimizer=Optimizer.LION, max_gradient_norm=1.0)
    expected = search(workload, machine, space=SPACE, step=step)
    loose: Any = {"micro_batches": np.int64(2), "optimizer": "lion", "max_gradient_norm": np.float32(1.0)}
    assert search(workload, machine, space=SPACE, **loose) == expected
    assert expected.plan.micro_batches == 2
    said: Any = {"modes": "sharded", "shard_ranks": 4, "num_ranks": 8}
    assert Step(**said) == Step(modes=(ParallelMode.SHARDED,), shard_ranks=(4,), num_ranks=8)
    risk: Any = {"risk": "high", "device_budget_bytes": 3e9}
    asked = SearchRequest(workload=workload, hardware=machine, **risk)
    assert (asked.risk, asked.device_budget_bytes) == (Risk.HIGH, 3 * 10**9)
    chunks: Any = {"chunk_bytes": "64MiB", "n_persist": np.int64(3)}
    assert SearchSpace(**chunks) == SearchSpace(chunk_bytes=(2**26,), n_persist=(3,))
    sizes: Any = {"micro_batch_sizes": 2}
    assert GlobalBatch(num_samples=4, workload_at=lambda size: workload, **sizes).micro_batch_sizes == (2,)
