"""A training begins and ends without a trace, whatever happens in between."""

from __future__ import annotations

import copy
import threading
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from protwin.runtime import CpuDevice
from tests.proof_size import some_quick
from tests.runtime.life_cycle import blocks_between, check_ordinary, ordinary_facts, start, train
from tests.runtime.models import Case, cases, differences, snapshot, uncached
from tests.runtime.watchdog import ends_in_time, lanes_alive


@pytest.fixture
def case() -> Case:
    return cases()["llama"]


# -- an ordinary end -------------------------------------------------------------------------------------------------


def test_a_model_is_ordinary_before_and_after(case: Case, tmp_path: Path) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    threads_before = set(threading.enumerate())
    with ends_in_time():
        with start(case, model) as training:
            assert lanes_alive() == ["protwin-cpu_optim", "protwin-d2h", "protwin-h2d", "protwin-looks_0"]
            train(case, model, training)
        training.close()
        training.close()
    assert set(threading.enumerate()) == threads_before
    check_ordinary(model, facts)
    assert differences(model, case.plain.weights[-1]) == []
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert differences(again, case.plain.weights[-1]) == []
    assert differences(copy.deepcopy(model), case.plain.weights[-1]) == []
    model.load_state_dict(case.plain.weights[0])
    assert model.generate(case.batches[0]["input_ids"][:, :3], max_new_tokens=2).shape[1] == 5


def test_a_second_training_goes_on_where_the_first_ended(case: Case) -> None:
    """Only the optimizer's state starts anew, so the reference is two plain runs of one step each."""
    model, plain = case.build(), uncached(case.build())
    for batch in case.batches[:2]:
        with ends_in_time(), start(case, model) as training:
            loss = case.loss(model, batch)
            loss.backward()
            training.step()
        optimizer = case.make_optimizer(case.groups(plain))
        expected = case.loss(plain, batch)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == expected.item()
    assert differences(model, snapshot(plain)) == []


def test_a_training_that_never_ran_leaves_the_weights(case: Case) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    with ends_in_time():
        start(case, model).close()
    check_ordinary(model, facts)
    assert differences(model, case.plain.weights[0]) == []


def test_threads_that_start_later_have_as_many_cores_as_ever(case: Case) -> None:
    """Lanes use one thread per operation; torch would hand their setting on."""
    expected = torch.get_num_threads()
    found: list[int] = []
    with ends_in_time(), start(case, case.build()):
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert torch.get_num_threads() == expected
    assert found == [expected]


def test_the_forward_of_a_block_is_its_own_again(case: Case) -> None:
    model = case.build()

    def own_forward(*args: Any, **kwargs: Any) -> Any:
        return type(model.model.layers[1]).forward(model.model.layers[1], *args, **kwargs)

    model.model.layers[1].forward = own_forward
    with ends_in_time(), start(case, model, device=CpuDevice()) as training:
        assert train(case, model, training) == case.plain.losses
    assert model.model.layers[1].forward is own_forward
    assert all("forward" not in vars(model.model.layers[index]) for index in (0, 2, 3))


# -- endings in the middle -------------------------------------------------------------------------------------------


class Interruption(KeyboardInterrupt):
    """Ctrl-C, told from a real one."""


@some_quick(
    ("error", "block", "step"), product([ZeroDivisionError, Interruption, SystemExit], [0, 1, 3], [0, 1]), quick=7
)
def test_an_error_in_forward(case: Case, step: int, block: int, error: type[BaseException]) -> None:
    """Step 0 is watched; blocks 0 and 3 keep, block 1 is checkpointed."""
    model = case.build()
    model.eval()
    facts = ordinary_facts(model)
    with (  # noqa: PT012
        ends_in_time(),
        pytest.raises(error, match="in the middle"),
        start(case, model) as training,
    ):
        train(case, model, training, step)

        def fail(*_: Any) -> None:
            raise error("in the middle")

        handle = model.model.layers[block].mlp.register_forward_hook(fail)
        try:
            case.loss(model, case.batches[step])
        finally:
            handle.remove()
    check_ordinary(model, facts)
    assert differences(model, case.plain.weights[step]) == []


@some_quick(("error", "block", "step"), product([ZeroDivisionError, Interruption], [0, 1, 3], [0, 3]), quick=5)
def test_an_error_in_backward(case: Case, step: int, block: int, error: type[BaseException]) -> None:
    """Chunks that CPU Adam has stepped by then keep the step; all others are as before it."""
    model = case.build()
    facts = ordinary_facts(model)
    with (  # noqa: PT012
        ends_in_time(),
        pytest.raises(error, match="in the middle"),
        start(case, model) as training,
    ):
        train(case, model, training, step)

        def fail(_: Any) -> None:
            raise error("in the middle")

        handle = model.model.layers[block].mlp.register_forward_hook(
            lambda module, args, output: output.register_hook(fail) and None
        )
        loss = case.loss(model, case.batches[step])
        handle.remove()
        loss.backward()
    check_ordinary(model, facts)
    assert blocks_between(case, model, step) <= {step, step + 1}


def test_an_error_of_the_users_between_forward_and_backward(case: Case) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    with (  # noqa: PT012
        ends_in_time(),
        pytest.raises(ZeroDivisionError),
        start(case, model) as training,
    ):
        train(case, model, training, 1)
        case.loss(model, case.batches[1])
        raise ZeroDivisionError
    check_ordinary(model, facts)
    assert differences(model, case.plain.weights[1]) == []


@pytest.mark.parametrize("after", ["forward", "backward"])
def test_closing_in_the_middle_of_an_iteration(case: Case, after: str) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    with ends_in_time():
        training = start(case, model)
        train(case, model, training, 1)
        loss = case.loss(model, case.batches[1])
        if after == "backward":
            loss.backward()
        del loss
        training.close()
    check_ordinary(model, facts)
    assert blocks_between(case, model, 1) <= ({1} if after == "forward" else {1, 2})
