"""Adapters that are switched, disabled, merged, added or saved while a plan is carried out, and afterwards."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from protwin.runtime import Training, carry_out, quantize, trace
from protwin.runtime.model.snapshot import without_cache
from protwin.shared.basics.errors import PlanError, ScheduleError, WorkloadError
from tests.proof_size import some_quick
from tests.runtime.accounts import plan_of
from tests.runtime.adapters.peft_kinds import KINDS, LORA, adapted, experts_adapted, two_adapters
from tests.runtime.models import SEED, Case, adamw, differences, llama, snapshot, token_batches

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # PEFT's own, of transformers
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]

CASE = Case(two_adapters, token_batches(4))


@pytest.fixture
def model() -> Any:
    return two_adapters()


@pytest.fixture
def training(model: Any) -> Iterator[Training]:
    """Two steps are done; the first chunks stay, others are offloaded or stepped on the host."""
    with carry_out(model, plan_of(CASE, "mixed", "mixed"), CASE.workload, optimizer=adamw) as training:
        torch.manual_seed(SEED)
        step(model, training, 0)
        step(model, training, 1)
        yield training


def step(model: Any, training: Training, number: int) -> float:
    loss = model(**CASE.batches[number]).loss
    loss.backward()
    training.step()
    return float(loss.item())


def goes_on_like_the_plain_loop(model: Any, training: Training) -> None:
    torch.manual_seed(SEED + 1)
    losses = [step(model, training, number) for number in (2, 3)]
    training.close()
    plain = two_adapters()
    optimizer = adamw([{"params": [p for p in plain.parameters() if p.requires_grad]}])
    expected = []
    with without_cache(plain):
        for number in range(4):
            if number in (0, 2):
                torch.manual_seed(SEED + number // 2)
            loss = plain(**CASE.batches[number]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
    assert losses == expected[2:]
    assert differences(model, snapshot(plain)) == []


@some_quick(
    ("name", "change"),
    [
        ("merge_and_unload", lambda model: model.merge_and_unload()),
        ("unload", lambda model: model.unload()),
        ("merge_adapter", lambda model: model.merge_adapter()),
        ("merge", lambda model: model.base_model.model.model.layers[0].self_attn.q_proj.merge()),
        ("add_adapter", lambda model: model.add_adapter("third", LORA())),
        ("add_adapter", lambda model: model.get_base_model().add_adapter(LORA(), "third")),
        ("delete_adapter", lambda model: model.delete_adapter("other")),
        ("load_adapter", lambda model: model.load_adapter("folder", "third")),
        ("add_weighted_adapter", lambda model: model.add_weighted_adapter(["default"], [1.0], "third")),
    ],
    quick=4,
)
def test_what_writes_or_exchanges_is_refused_with_nothing_changed(
    model: Any, training: Training, name: str, change: Callable[[Any], Any]
) -> None:
    with pytest.raises(ScheduleError, match=rf"^{name}\(\) while a plan .* Nothing was changed.*close\(\)"):
        change(model)
    goes_on_like_the_plain_loop(model, training)


def test_an_adapter_that_is_injected_behind_pefts_back_is_found(model: Any, training: Training) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(LORA(target_modules=["o_proj"]), model.get_base_model(), "third")
    with pytest.raises(ScheduleError, match=r"self_attn.* was exchanged, added or removed since the plan"):
        step(model, training, 2)


def test_switched_adapters_are_refused_until_they_are_back(model: Any, training: Training) -> None:
    model.set_adapter("other")
    with pytest.raises(ScheduleError, match="has 'other' active, and had 'default' active when the model was traced"):
        step(model, training, 2)
    model.set_adapter("default")
    goes_on_like_the_plain_loop(model, training)


def test_disabled_adapters_are_refused_in_training(model: Any, training: Training) -> None:
    with model.disable_adapter(), pytest.raises(ScheduleError, match="has 'default' disabled, and had 'default' act"):
        step(model, training, 2)
    goes_on_like_the_plain_loop(model, training)


def test_any_adapter_may_be_active_in_an_evaluation(model: Any, training: Training) -> None:
    batch = CASE.batches[0]

    def losses(of: Any) -> list[float]:
        found = []
        of.eval()
        for name in ("default", "other"):
            of.set_adapter(name)
            found.append(of(**batch).loss.item())
        with of.disable_adapter():
            found.append(of(**batch).loss.item())
        of.set_adapter("default")
        of.train()
        return found

    with training.evaluation():
        found = losses(model)
    plain = two_adapters()
    plain.load_state_dict(training.state_dict())
    with torch.no_grad(), without_cache(plain):
        assert found == losses(plain)
    assert len(set(found)) == 3
    goes_on_like_the_plain_loop(model, training)


# -- saved, merged, loaded again -------------------------------------------------------------------------------------


def same_logits(one: Any, other: Any) -> bool:
    tokens = CASE.batches[0]["input_ids"]
    with torch.no_grad():
        return torch.equal(one.eval()(input_ids=tokens).logits, other.eval()(input_ids=tokens).logits)


def test_an_adapter_saved_between_steps_is_the_one_saved_after_close(
    model: Any, training: Training, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "between", state_dict=training.state_dict())
    with pytest.raises(ScheduleError, match=r"training.state_dict\(\)"):
        model.save_pretrained(tmp_path / "refused")
    training.close()
    model.save_pretrained(tmp_path / "after")
    files = [path.relative_to(tmp_path / "after") for path in (tmp_path / "after").rglob("*.safetensors")]
    assert len(files) == 2, "one of each adapter"
    for file in files:
        assert (tmp_path / "between" / file).read_bytes() == (tmp_path / "after" / file).read_bytes()
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "between")
    assert same_logits(loaded, model)
    assert not same_logits(loaded, llama())


@some_quick(
    "kind",
    ("DoRA", "head and embedding saved", "rows of tokens", "LoHa", "adapted head and embedding"),
    quick=["DoRA"],
)
def test_every_kind_is_saved_loaded_and_continued(kind: str, tmp_path: Path) -> None:
    """A second plan goes on from what ``save_pretrained`` wrote, as the plain loop does."""
    case = Case(lambda: adapted(llama, KINDS[kind]), token_batches(2))
    model = case.build()
    with carry_out(model, plan_of(case, "mixed", "mixed"), case.workload, optimizer=adamw) as training:
        model(**case.batches[0]).loss.backward()
        training.step()
        model.save_pretrained(tmp_path, state_dict=training.state_dict())

    def loaded() -> Any:
        return peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True)

    again = Case(loaded, token_batches(2))
    assert differences(loaded(), snapshot(model)) == []
    plain = again.plain
    found = loaded()
    with carry_out(found, plan_of(again, "mixed", "offloaded"), again.workload, optimizer=adamw) as training:
        torch.manual_seed(SEED)
        losses = []
        for batch in again.batches:
            loss = found(**batch).loss
            loss.backward()
            training.step()
            losses.append(loss.item())
    assert losses == plain.losses
    assert differences(found, plain.weights[-1]) == []


@some_quick("kind", ("LoRA", "DoRA", "LoHa", "adapted head and embedding"), quick=["DoRA"])
def test_after_close_merged_weights_are_those_of_the_plain_model(kind: str) -> None:
    case = Case(lambda: adapted(llama, KINDS[kind]), token_batches(2))
    model, plain = case.build(), case.build()
    plan = plan_of(case, "mixed", "offloaded")
    with carry_out(model, plan, case.workload, optimizer=adamw) as training:
        torch.manual_seed(SEED)
        for batch in case.batches:
            model(**batch).loss.backward()
            training.step()
    plain.load_state_dict(case.plain.weights[-1])
    merged, expected = model.merge_and_unload(), plain.merge_and_unload()
    assert type(merged) is type(llama())
    assert differences(merged, snapshot(expected)) == []
    assert differences(merged, snapshot(llama())), "something was merged"


# -- what a plan cannot be made for ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        (peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "prefix tuning of PEFT, which hands"),
        (peft.ShiraConfig(r=4, target_modules=["q_proj"]), "SHiRA of PEFT, which makes sparse"),
    ],
)
def test_adapters_that_are_refused_by_name(configuration: Any, message: str) -> None:
    refused = peft.get_peft_model(llama(), copy.deepcopy(configuration))
    with pytest.raises(WorkloadError, match=message):
        _ = Case(lambda: refused, token_batches(1)).workload


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_dora_beside_packed_weights_is_refused_by_both_names(kind: str) -> None:
    """It would fail within the trace's forward, with sizes that do not match."""
    packed = llama(num_layers=2, hidden_size=64, intermediate_size=128)
    quantize(packed, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused = peft.get_peft_model(packed, LORA(target_modules=["q_proj"], use_dora=True))
    with pytest.raises(WorkloadError, match=rf"DoRA of PEFT \(use_dora\).*0\.self_attn\.q_proj .*packed as {kind}"):
        trace(refused, token_batches(1)[0], repeats=0)


def test_an_adapter_that_came_after_the_trace_is_not_the_traced_model() -> None:
    model = two_adapters()
    workload = CASE.workload
    model.add_adapter("third", LORA(target_modules=["o_proj"]))
    with pytest.raises(PlanError, match="traced from another model"):
        carry_out(model, plan_of(CASE, "mixed", "mixed"), workload, optimizer=adamw)


def test_a_write_to_an_adapted_parameter_is_still_found() -> None:
    """PEFT's own wrapping of experts' parameters counts as no write; anybody else's does."""
    case = Case(experts_adapted, token_batches(1))
    model = case.build()
    plan = plan_of(case, "kept", "offloaded")
    with carry_out(model, plan, case.workload, optimizer=adamw) as training:
        model(**case.batches[0]).loss.backward()
        training.step()
        experts = model.base_model.model.model.layers[0].mlp.experts.get_base_layer()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            torch.autograd.graph.increment_version(experts.down_proj)
        with pytest.raises(ScheduleError, match=r"experts.*down_proj was written to"):
            model(**case.batches[0])
