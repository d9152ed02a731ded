"""Validation and reading of weights between two steps: right values, within the budget, no trace in what follows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from protwin.runtime import CpuDevice, CpuOutOfMemoryError, Training, carry_out
from protwin.runtime.chunks.chunk import DeviceChunk
from protwin.runtime.training.evaluation import Evaluation
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.schema.plan import Plan
from tests.runtime.equality import offloaded_chunks, random_plans
from tests.runtime.life_cycle import check_ordinary, ordinary_facts, plan_for
from tests.runtime.models import SEED, Case, cases, differences, gpt2, token_batches
from tests.runtime.training.test_cuda_ordering import POINTS, STREAMS, backward, cuda_device, plan_of, stand_in
from tests.runtime.training.test_memory import guaranteed_bytes
from tests.runtime.watchdog import ends_in_time, lanes_alive


@pytest.fixture
def case() -> Case:
    return cases()["llama"]


def start(case: Case, model: nn.Module, plan: Plan | None = None, **settings: Any) -> Training:
    chosen: dict[str, Any] = {"optimizer": case.make_optimizer, "parameter_groups": case.groups(model)} | settings
    return carry_out(model, plan or plan_for(case.workload), case.workload, **chosen)


def output_of(case: Case, model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).logits if case.has_loss else model(batch["points"])


def expected_outputs(case: Case, step: int, batches: Any) -> list[torch.Tensor]:
    """Of a model of its own with the weights that the plain loop has after ``step`` steps."""
    with torch.random.fork_rng():
        weights = case.plain.weights[step]
        model = case.build().eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return [output_of(case, model, batch) for batch in batches]


def check(case: Case, plan: Plan) -> None:
    """Evaluate before every step and after the last, on batches of two shapes; read the weights too."""
    longer: Any = token_batches(1, batch=3, length=17) if case.has_loss else []
    model = case.build()
    with ends_in_time(), start(case, model, plan) as training:
        torch.manual_seed(SEED)
        for step, batch in enumerate([*case.batches, None]):
            with training.evaluation():
                model.eval()
                found = [output_of(case, model, other) for other in (*case.batches[:1], *longer)]
                model.train()
            expected = expected_outputs(case, step, (*case.batches[:1], *longer))
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
            state = training.state_dict()
            assert state.keys() == case.plain.weights[step].keys()
            assert [n for n, value in case.plain.weights[step].items() if not torch.equal(value, state[n])] == []
            if batch is not None:
                case.loss(model, batch).backward()
                training.step()
    assert differences(model, case.plain.weights[-1]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gpt2 with dropout, tied",
        "hand-written, batch statistics",
        "llama in bfloat16",
        "hand-written, blocks run twice",
    ],
)
def test_random_plans_evaluate_and_train_as_the_plain_loop(name: str) -> None:
    case = cases()[name]
    chosen = [plan for plan in random_plans(case.workload, 12, seed=3) if offloaded_chunks(case.workload, plan)]
    for plan in [plan for plan in chosen if plan.micro_batches == 1 and plan.max_gradient_norm is None][:2]:
        check(case, plan)


def test_chunks_that_blocks_share(case: Case) -> None:
    plan = plan_for(case.workload).model_copy(update={"chunk_bytes": 80_000, "n_persist": 0, "n_buffer": 2})
    shared = [chunk for chunk in offloaded_chunks(case.workload, plan) if len(chunk.forward) > 1]
    assert shared
    check(case, plan)


@pytest.mark.parametrize(
    "variant",
    [
        (Evaluation, "_gather", lambda self, chunk: chunk.make_room()),
        (DeviceChunk, "leave", lambda self: None),
    ],
    ids=["nothing is copied", "nothing leaves"],
)
def test_wrong_variants_show(case: Case, variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*variant)
    with pytest.raises(AssertionError):
        within_what_it_takes(case, case.batches[0])


def within_what_it_takes(case: Case, batch: Any) -> None:
    """No more is on the device than persistent chunks and one block's, and the output is right."""
    plan = plan_for(case.workload)
    model, device = case.build(), CpuDevice(guaranteed_bytes(case, plan))
    with ends_in_time(), start(case, model, plan, device=device) as training:
        persistent_bytes = sum(c.chunk.size_bytes for c in training._placed.chunks if c.is_persistent)
        of_blocks = [
            sum(c.size_bytes for c in offloaded_chunks(case.workload, plan) if 1 + block in c.forward)
            for block in range(case.workload.num_blocks)
        ]
        highest: list[int] = []
        for block in model.model.layers:
            block.register_forward_hook(lambda *_: highest.append(device.ledger.named_bytes))
        with training.evaluation():
            assert lanes_alive() == ["protwin-looks_0"]
            assert device.ledger.named_bytes == persistent_bytes
            found = output_of(case, model, batch)
            assert device.ledger.named_bytes == persistent_bytes
        assert torch.equal(found, expected_outputs(case, 0, [batch])[0])
        assert [level - persistent_bytes for level in highest] == of_blocks
        assert max(of_blocks) < sum(of_blocks) / 2
        case.loss(model, case.batches[0]).backward()
        training.step()
    gc.collect()
    assert device.ledger.named_bytes == 0


def test_one_block_after_the_other_is_on_the_device(case: Case) -> None:
    within_what_it_takes(case, case.batches[0])


def test_the_budget_holds_and_running_out_of_it_is_survived(case: Case) -> None:
    plan = plan_for(case.workload)
    device = CpuDevice(guaranteed_bytes(case, plan))
    model = case.build()
    with ends_in_time(), start(case, model, plan, device=device) as training:
        for batch in case.batches:
            with pytest.raises(CpuOutOfMemoryError, match="while running forward alone"), training.evaluation():
                model(**token_batches(1, batch=16, length=30)[0])
            with training.evaluation():
                model(**batch)
            case.loss(model, batch).backward()
            training.step()
    assert differences(model, case.plain.weights[-1]) == []


def test_parts_of_the_model_and_generation(case: Case) -> None:
    """Whatever runs its blocks finds their weights."""
    model, plain = case.build(), case.build()
    tokens = case.batches[0]["input_ids"]
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with ends_in_time(), start(case, model) as training:
        for trained in (model, plain):
            trained.eval()
        with training.evaluation():
            assert torch.equal(model.generate(tokens, **settings), plain.generate(tokens, **settings))
            hidden = torch.ones(1, 3, 32)
            positions = model.model.rotary_emb(hidden, torch.arange(3)[None])
            with torch.no_grad():
                expected = plain.model.layers[2](hidden, position_embeddings=positions)
            assert torch.equal(model.model.layers[2](hidden, position_embeddings=positions), expected)
            assert torch.equal(model.model(input_ids=tokens)[0], plain.model(input_ids=tokens)[0])
        model.train()
        case.loss(model, case.batches[0]).backward()
        training.step()
    assert differences(model, case.plain.weights[1]) == []


def test_states_that_are_read_load_elsewhere(case: Case, tmp_path: Path) -> None:
    tied = Case(gpt2, case.batches)
    model, other = tied.build(), tied.build()
    with ends_in_time(), start(tied, model) as training:
        torch.manual_seed(SEED)
        for batch in tied.batches[:2]:
            tied.loss(model, batch).backward()
            training.step()
        state = training.state_dict()
        assert state["lm_head.weight"] is state["transformer.wte.weight"]
        model.save_pretrained(tmp_path, state_dict=dict(state))
        for batch in tied.batches[2:]:
            tied.loss(model, batch).backward()
            training.step()
    other.load_state_dict(state)
    assert differences(other, tied.plain.weights[2]) == []
    assert differences(AutoModelForCausalLM.from_pretrained(tmp_path), tied.plain.weights[2]) == []
    assert differences(model, tied.plain.weights[-1]) == []


def in_evaluation(act: Callable[[Training, nn.Module], Any]) -> Callable[[Training, nn.Module], Any]:
    def run(training: Training, model: nn.Module) -> None:
        with training.evaluation():
            act(training, model)

    return run


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (in_evaluation(lambda training, model: training.step()), r"step\(\) without a forward"),
        (in_evaluation(in_evaluation(lambda *_: None)), "Leave the outer block first"),
        (
            in_evaluation(lambda training, model: torch.enable_grad()(model)(**token_batches(1)[0])),
            "forward with gradients within evaluation",
        ),
        (
            in_evaluation(lambda training, model: model.lm_head.weight.sum() and model.state_dict()),
            "training.state_dict",
        ),
        (in_evaluation(lambda training, model: model.model.layers[3].mlp.up_proj.weight.sum()), "training.state_dict"),
    ],
)
def test_what_evaluation_is_not_for(case: Case, attempt: Callable[[Training, nn.Module], Any], message: str) -> None:
    model = case.build()
    with ends_in_time(), start(case, model) as training:
        for batch in case.batches:
            with pytest.raises(ScheduleError, match=message):
                attempt(training, model)
            case.loss(model, batch).backward()
            training.step()
    assert differences(model, case.plain.weights[-1]) == []


def test_in_the_middle_of_an_iteration(case: Case) -> None:
    model = case.build()
    with ends_in_time(), start(case, model) as training:
        for batch in case.batches:
            loss = case.loss(model, batch)
            for _ in range(2):
                with pytest.raises(ScheduleError, match=r"between step\(\) and the next forward.*skip_step"):
                    training.evaluation().__enter__()
                with pytest.raises(ScheduleError, match=r"weights can be read between step\(\) and the next forward"):
                    training.state_dict()
                if loss.grad_fn is not None:
                    loss.backward()
                    loss = loss.detach()
            training.step()
    assert differences(model, case.plain.weights[-1]) == []


def test_errors_within_and_a_close(case: Case) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    with ends_in_time(), start(case, model) as training:
        with pytest.raises(ZeroDivisionError), training.evaluation():
            _ = 1 / 0
        case.loss(model, case.batches[0]).backward()
        training.step()
        with training.evaluation():
            training.close()
    check_ordinary(model, facts)
    assert differences(model, case.plain.weights[1]) == []


@pytest.mark.parametrize("starved", STREAMS)
def test_on_a_device_that_runs_behind(starved: str) -> None:
    model, cuda = POINTS.build(), stand_in(starved)
    with cuda.installed():
        with start(POINTS, model, plan_of(POINTS), device=cuda_device()) as training:
            found = []
            for step, batch in enumerate(POINTS.batches):
                with training.evaluation():
                    found.append((step, model(batch["points"])))
                backward(POINTS.loss(model, batch), cuda)
                training.step()
        cuda.synchronize()
    for step, output in found:
        assert torch.equal(output, expected_outputs(POINTS, step, POINTS.batches[step : step + 1])[0])
    assert differences(model, POINTS.plain.weights[-1]) == []
