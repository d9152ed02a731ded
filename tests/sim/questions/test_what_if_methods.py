"""What-if questions about the method: the search that each asks for, its tokens, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protwin.shared.basics.errors import PlanError, ProtwinError, WorkloadError
from protwin.shared.catalogue.machines import machine
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.workload import DType, Workload
from protwin.sim.questions.what_if import what_if
from protwin.sim.questions.what_if_machines import changed_machines, part_questions
from protwin.sim.questions.what_if_methods import MethodChange, method_change, tokens_per_step
from protwin.sim.searching.request import GlobalBatch, Step
from protwin.sim.searching.search import search
from protwin.sim.space.space import SearchSpace
from tests.cli.saved import decoder
from tests.sim.fastest import fastest_request

HERE = machine("rtx-3090")
SPACE = SearchSpace(prefetch_depth=(1,), chunk_bytes=(2**26,))
REQUEST = fastest_request(
    workload=decoder(), hardware=HERE, device_budget_bytes=600 * 2**20, space=SPACE, step=Step(max_gradient_norm=1.0)
)


def shaped(change: MethodChange) -> Workload:
    """Any other model, with twice the samples and tokens for a batch of 2."""
    batch = change.batch_size or 1
    model = decoder(3)
    return model.model_copy(update={"num_samples": batch * model.num_samples, "num_tokens": batch * model.num_tokens})


def test_each_answer_is_a_search_with_that_method() -> None:
    wanted = ["optimizer=adamw-8bit", "max-gradient-norm=none", "optimizer=SGD device.memory_bytes=48GiB", "lora=16"]
    asked = part_questions(REQUEST, changed_machines(wanted, HERE), shaped)
    steps = [
        Step(max_gradient_norm=1.0, optimizer=Optimizer.ADAMW_8BIT),
        Step(),
        Step(max_gradient_norm=1.0, optimizer=Optimizer.SGD),
        Step(max_gradient_norm=1.0),
    ]
    now_s = search(REQUEST).prediction.iteration_s
    for answer, question, step in zip(what_if(REQUEST, now_s, asked), asked, steps, strict=True):
        assert question.request.step == step
        model = shaped(MethodChange()) if "lora" in question.change else REQUEST.workload
        expected = search(replace(question.request, step=step, workload=model))
        assert answer.iteration_s == expected.prediction.iteration_s
        assert expected.plan.optimizer is step.optimizer
    assert asked[2].request.hardware.device.memory_bytes == 48 * 2**30


def test_other_shapes_are_compared_by_their_tokens() -> None:
    asked = part_questions(REQUEST, changed_machines(["batch-size=2"], HERE), shaped)
    now_s = search(REQUEST).prediction.iteration_s
    (answer,) = what_if(REQUEST, now_s, asked)
    assert answer.iteration_s is not None
    # By iterations alone, twice the tokens in less than twice the time would look like a loss.
    assert answer.speedup == now_s / answer.iteration_s * 2
    assert tokens_per_step(asked[0].request) == 2 * tokens_per_step(REQUEST)


def test_a_global_batch_counts_once_however_it_is_cut() -> None:
    batch = GlobalBatch(num_samples=12, workload_at=lambda size: shaped(MethodChange(batch_size=size)))
    request = replace(REQUEST, workload=batch)
    of_sample = shaped(MethodChange()).num_tokens / shaped(MethodChange()).num_samples
    assert tokens_per_step(request) == 12 * of_sample
    with pytest.raises(PlanError, match="global batch has the size of its micro-batches searched"):
        part_questions(request, changed_machines(["batch-size=2"], HERE), shaped)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("optimizer=adamw-9bit", "no optimizer 'adamw-9bit'. Did you mean"),
        ("lora=0", "gives lora '0'"),
        ("lora=x", "the rank, or none"),
        ("sequence-length=none", "tokens per sample"),
        ("batch-size=-1", "samples per micro-batch"),
        ("max-gradient-norm=0", "limit above 0"),
        ("max-gradient-norm=nan", "limit above 0"),
        ("optimizer=sgd optimizer=lion", "gives optimizer twice"),
    ],
)
def test_what_is_refused_says_why(question: str, words: str) -> None:
    with pytest.raises(ProtwinError, match=words):
        changed_machines([question], HERE)


def test_a_saved_workload_cannot_be_shaped_and_an_optimizer_must_fit_it() -> None:
    with pytest.raises(WorkloadError, match="a saved workload has its shape and method, so that --what-if lora"):
        part_questions(REQUEST, changed_machines(["lora=8"], HERE))
    wide = decoder()
    parameters = tuple(p.model_copy(update={"dtype": DType.FLOAT64}) for p in wide.parameters)
    request = replace(REQUEST, workload=wide.model_copy(update={"parameters": parameters}))
    with pytest.raises(PlanError, match="lion steps float32 at most"):
        part_questions(request, changed_machines(["optimizer=lion"], HERE))


def test_none_takes_lora_away() -> None:
    assert method_change("lora=none", {"lora": "none"}) == MethodChange(("lora",))
    assert MethodChange(("lora",)).changes_workload
