"""What students begin with, against sums over indices written out, and against functions that must not change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from protwin.runtime.students.activation_statistics import ActivationStatistics, activation_statistics
from protwin.runtime.students.student_model import make_student
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.students.families import FAMILIES

from .teachers import DENSE, batches, logits, make_teacher, student_of, teacher_of

Array = np.ndarray[Any, np.dtype[np.float64]]
EXACT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}


def array(tensor: torch.Tensor) -> Array:
    return tensor.detach().numpy()


def ffns(model: Any) -> list[nn.Module]:
    family = FAMILIES[model.config.model_type]
    return [getattr(block, family.ffn) for block in model.get_submodule(family.blocks)]


@contextmanager
def inputs_of(modules: list[nn.Module]) -> Iterator[dict[nn.Module, list[torch.Tensor]]]:
    """Tokens (n, hidden) that each was given."""
    found: dict[nn.Module, list[torch.Tensor]] = {module: [] for module in modules}
    handles = [
        one.register_forward_hook(lambda part, given, _: found[part].append(given[0].flatten(0, -2))) for one in modules
    ]
    yield found
    for handle in handles:
        handle.remove()


def seen(model: Any, given: list[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
    """What each FFN of the model is given."""
    parts = ffns(model)
    with inputs_of(parts) as found:
        for batch in given:
            logits(model, dict(batch))
    return [torch.cat(found[part]) for part in parts]


def activations(ffn: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The input of the down projection, by the formula."""
    if hasattr(ffn, "c_fc"):
        return ffn.act(tokens @ ffn.c_fc.weight + ffn.c_fc.bias)
    return ffn.act_fn(ffn.gate_proj(tokens)) * ffn.up_proj(tokens)


# -- channels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DENSE)
@torch.no_grad()
def test_statistics_are_mean_absolute_activations(name: str) -> None:
    teacher = teacher_of(name)
    found = activation_statistics(teacher, batches())
    assert found.num_tokens == 36
    assert not found.experts
    for number, (ffn, tokens) in enumerate(zip(ffns(teacher), seen(teacher, [*batches()]), strict=True)):
        expected = activations(ffn, tokens).abs().mean(dim=0)
        torch.testing.assert_close(found.channels[number], expected, **EXACT)


def test_padding_does_not_count() -> None:
    teacher = teacher_of("llama")
    (batch,) = batches(1)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 4:] = 0
    found = activation_statistics(teacher, [batch | {"attention_mask": mask, "labels": batch["input_ids"]}])
    assert found.num_tokens == 13
    short = [{"input_ids": batch["input_ids"][:1]}, {"input_ids": batch["input_ids"][1:, :4]}]
    expected = activation_statistics(teacher, short)
    for number in range(3):
        torch.testing.assert_close(found.channels[number], expected.channels[number], rtol=1e-9, atol=0)


def test_statistics_leave_the_teacher_as_it_was() -> None:
    teacher = make_teacher("gpt2", resid_pdrop=0.5).train()
    teacher.transformer.h[1].eval()
    first, second = (activation_statistics(teacher, batches()) for _ in range(2))
    assert all(torch.equal(first.channels[number], second.channels[number]) for number in range(3)), "no dropout"
    assert [block.training for block in teacher.transformer.h] == [True, False, True]
    assert teacher.config.use_cache is True
    assert not any(module._forward_pre_hooks for module in teacher.modules())
    with pytest.raises(WorkloadError, match="no batch holds any"):
        activation_statistics(teacher, [])


@pytest.mark.parametrize("name", DENSE)
@torch.no_grad()
def test_pruning_channels_that_do_nothing_leaves_the_function(name: str) -> None:
    """Two thirds of each block's channels are made to give zeros; which ones differs from block to block."""
    teacher = make_teacher(name)
    width = teacher.config.intermediate_size if name != "gpt2" else 64
    kept = []
    for ffn in ffns(teacher):
        order = torch.randperm(width)
        kept.append(order[: width // 3].sort().values)
        for part in ("gate_proj", "up_proj", "c_fc"):
            module = getattr(ffn, part, None)
            for parameter in module.parameters() if module is not None else ():
                is_transposed = part == "c_fc" and parameter.dim() == 2
                (parameter.T if is_transposed else parameter)[order[width // 3 :]] = 0
    text = f"[initialization]\nffn = 'prune'\n[all]\nintermediate_size = {width // 3}"
    student = make_student(teacher, student_of(text), statistics=activation_statistics(teacher, batches()))
    for number, (ffn, own) in enumerate(zip(ffns(student), ffns(teacher), strict=True)):
        tokens = torch.randn(4, 16, dtype=torch.float64)
        torch.testing.assert_close(activations(ffn, tokens), activations(own, tokens)[:, kept[number]], **EXACT)
    torch.testing.assert_close(logits(student, batches()[0]), logits(teacher, batches()[0]), **EXACT)
    narrower = make_student(teacher, student_of(text.replace("prune", "truncate")))
    assert not torch.allclose(logits(narrower, batches()[0]), logits(teacher, batches()[0])), "the oracle tells"


@torch.no_grad()
def test_pruning_to_the_same_width_is_a_permutation_that_gives_the_same_function() -> None:
    """One channel less and back: all but the least stay, in the teacher's order."""
    teacher = teacher_of("llama")
    statistics = activation_statistics(teacher, batches())
    text = "[initialization]\nffn = 'prune'\n[all]\nintermediate_size = "
    same = make_student(teacher, student_of(f"{text}24"), statistics=statistics)
    assert torch.equal(logits(same, batches()[0]), logits(teacher, batches()[0]))
    less = make_student(teacher, student_of(f"{text}23"), statistics=statistics)
    for number, (ffn, own) in enumerate(zip(ffns(less), ffns(teacher), strict=True)):
        left_out = int(statistics.channels[number].argmin())
        for part, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            expected = np.delete(array(getattr(own, part).weight), left_out, axis)
            assert np.array_equal(array(getattr(ffn, part).weight), expected)
        assert np.array_equal(array(ffn.up_proj.bias), np.delete(array(own.up_proj.bias), left_out))
        assert torch.equal(ffn.down_proj.bias, own.down_proj.bias)


# -- key-value heads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["average", "first"])
@pytest.mark.parametrize(("name", "num_kept"), [("llama", 2), ("llama", 1), ("qwen2", 1), ("qwen3", 1)])
def test_key_value_heads_stand_for_their_groups(name: str, num_kept: int, mode: str) -> None:
    teacher = teacher_of(name)
    text = f"[initialization]\nkey_value_heads = '{mode}'\n[all]\nnum_key_value_heads = {num_kept}"
    student = make_student(teacher, student_of(text))
    for block, own in zip(student.model.layers, teacher.model.layers, strict=True):
        for part in ("k_proj", "v_proj"):
            for kind, parameter in getattr(own.self_attn, part).named_parameters():
                whole = array(parameter.reshape(num_kept, -1, own.self_attn.head_dim, parameter[0].numel()))
                weights = np.zeros(whole.shape[1])
                weights[:] = 1 / len(weights) if mode == "average" else np.eye(len(weights))[0]
                expected = np.einsum("kgdh,g->kdh", whole, weights)
                made = array(getattr(getattr(block.self_attn, part), kind))
                # Means are taken in float32.
                np.testing.assert_allclose(made, expected.reshape(made.shape), rtol=1e-6, atol=1e-7)
        assert torch.equal(block.self_attn.q_proj.weight, own.self_attn.q_proj.weight)
        assert block.self_attn.num_key_value_groups == 4 // num_kept


@pytest.mark.parametrize("mode", ["average", "first"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "bamba"])
@torch.no_grad()
def test_equal_heads_of_a_group_are_one_head(name: str, mode: str) -> None:
    """Then fewer heads give the teacher's function, which they would not if groups were not of neighbours."""
    teacher = make_teacher(name, num_key_value_heads=4)
    for block in teacher.model.layers:
        for part in ("k_proj", "v_proj"):
            module = getattr(getattr(block, "self_attn", None), part, None)
            for parameter in module.parameters() if module is not None else ():
                heads = parameter.unflatten(0, (2, 2, -1))
                heads[:, 1] = heads[:, 0]
                parameter.copy_(parameter.float())  # so that means in float32 are exact
    text = f"[initialization]\nkey_value_heads = '{mode}'\n[all]\nnum_key_value_heads = 2"
    student = make_student(teacher, student_of(text))
    torch.testing.assert_close(logits(student, batches()[0]), logits(teacher, batches()[0]), **EXACT)


# -- experts ---------------------------------------------------------------------------------------------------------


def routed(ffn: Any, tokens: torch.Tensor, name: str) -> tuple[Array, Array]:
    """Weights of experts for every token, (n, experts), zero for those that are not chosen; absolute activations."""
    scores = torch.softmax(tokens.double() @ getattr(ffn, FAMILIES[name].router).weight.T.double(), dim=-1)
    weights = torch.zeros_like(scores)
    for row, score in enumerate(scores):
        chosen = sorted(range(len(score)), key=lambda one: -score[one])[:2]
        total = score[chosen].sum() if name == "mixtral" else 1.0  # Jamba does not make them add up to 1
        weights[row, chosen] = score[chosen] / total
    gate, up = torch.einsum("nh,ewh->enw", tokens, ffn.experts.gate_up_proj).chunk(2, dim=-1)
    return array(weights), array((nn.functional.silu(gate) * up).abs())


@pytest.mark.parametrize("name", ["mixtral", "jamba"])
@torch.no_grad()
def test_experts_stay_by_the_weight_that_the_router_gives_them_then_channels_then_heads(name: str) -> None:
    teacher = teacher_of(name)
    statistics = activation_statistics(teacher, batches())
    text = (
        "[initialization]\nffn = 'prune'\n[all]\nnum_local_experts = 3\nintermediate_size = 10\n"
        "num_key_value_heads = 1\n[block.1]\nintermediate_size = 24"
    )
    student = make_student(teacher, student_of(text), statistics=statistics)
    stayed = []
    for number, (own, tokens) in enumerate(zip(ffns(teacher), seen(teacher, [*batches()]), strict=True)):
        if not hasattr(own, "experts"):
            assert number not in statistics.experts
            continue
        weights, levels = routed(own, tokens, name)
        np.testing.assert_allclose(array(statistics.experts[number]), weights.mean(axis=0), rtol=1e-6)
        kept = np.sort(np.argsort(-weights.sum(axis=0))[:3])
        stayed.append(kept.tolist())
        ffn: Any = ffns(student)[number]
        width = 24 if number == 1 else 10
        for place, expert in enumerate(kept):
            mean = levels[expert][weights[:, expert] > 0].mean(axis=0)
            np.testing.assert_allclose(array(statistics.channels[number][expert]), mean, rtol=1e-6)
            channels = np.sort(np.argsort(-mean)[:width])
            gate, up = np.split(array(own.experts.gate_up_proj[expert]), 2)
            expected = np.concatenate((gate[channels], up[channels]))
            assert np.array_equal(array(ffn.experts.gate_up_proj[place]), expected)
            down = array(own.experts.down_proj[expert])[:, channels]
            assert np.array_equal(array(ffn.experts.down_proj[place]), down)
        router = FAMILIES[name].router
        assert np.array_equal(array(getattr(ffn, router).weight), array(getattr(own, router).weight)[kept])
    assert any(kept != [0, 1, 2] for kept in stayed), "the first ones would be right by chance"
    assert logits(student, batches()[0]).isfinite().all()


@torch.no_grad()
def test_leaving_out_experts_that_no_token_goes_to_leaves_the_function() -> None:
    """Routers with a positive sum of inputs: every token of a positive stream is sent to the same experts."""
    teacher = make_teacher("mixtral")
    tokens = torch.rand(7, 16, dtype=torch.float64)
    for ffn in ffns(teacher):
        rows: Any = ffn
        rows.gate.weight[:] = torch.rand(5, 16)
        rows.gate.weight[[0, 2]] -= 100.0
    statistics = ActivationStatistics(7, {}, {number: torch.tensor([0.0, 3, 0, 1, 2]) for number in range(3)})
    student = make_student(teacher, student_of("[all]\nnum_local_experts = 3"), statistics=statistics)
    for ffn, own in zip(ffns(student), ffns(teacher), strict=True):
        torch.testing.assert_close(ffn(tokens[None]), own(tokens[None]), **EXACT)


# -- linear maps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2", "bamba"])
@torch.no_grad()
def test_a_linear_map_in_the_place_of_attention_is_attention_of_one_token(name: str) -> None:
    """A token that is alone attends to itself with weight 1."""
    teacher = teacher_of(name)
    student = make_student(teacher, student_of("[block.1]\nattention = 'linear'"))
    family = FAMILIES[name]
    tokens = torch.randn(6, 1, 16, dtype=torch.float64)
    own, made = (getattr(one.get_submodule(family.blocks)[1], family.attention) for one in (teacher, student))
    extra = {}
    if name != "gpt2":
        head_dim = own.head_dim
        extra = {"position_embeddings": (torch.ones(6, 1, head_dim).double(), torch.zeros(6, 1, head_dim).double())}
    expected = own(hidden_states=tokens, attention_mask=None, **extra)[0]
    torch.testing.assert_close(made(hidden_states=tokens)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", DENSE)
@torch.no_grad()
def test_a_linear_map_in_the_place_of_an_ffn_is_the_ffn_without_what_is_not_linear(name: str) -> None:
    teacher = make_teacher(name)
    student = make_student(teacher, student_of("[all]\nffn = 'linear'"))
    tokens = torch.randn(6, 16, dtype=torch.float64)
    for own, made in zip(ffns(teacher), ffns(student), strict=True):
        for part, linear in (("act", nn.Identity()), ("act_fn", torch.ones_like)):
            if hasattr(own, part):
                delattr(own, part)
                setattr(own, part, linear)
        torch.testing.assert_close(made(tokens), own(tokens), rtol=1e-5, atol=1e-6)


# -- refusals --------------------------------------------------------------------------------------------------------


def test_missing_and_foreign_statistics_are_refused() -> None:
    prune = "[initialization]\nffn = 'prune'\n[block.2]\nintermediate_size = 8"
    with pytest.raises(WorkloadError, match=r"'prune' needs statistics .* for block 2.*choose 'truncate'"):
        make_student(teacher_of("llama"), student_of(prune))
    with pytest.raises(WorkloadError, match=r"'router' needs statistics .* for block 0.*choose 'first'"):
        make_student(teacher_of("mixtral"), student_of("[all]\nnum_local_experts = 3"))
    others = activation_statistics(teacher_of("gpt2"), batches())
    with pytest.raises(WorkloadError, match=r"of another model: block 2 .* channels of shape \[24\]"):
        make_student(teacher_of("llama"), student_of(prune), statistics=others)
    make_student(teacher_of("llama"), student_of("[initialization]\nffn = 'prune'"))
