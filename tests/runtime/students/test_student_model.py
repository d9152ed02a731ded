"""Students and the teachers that they are made of."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from protwin.runtime.chunks.meta_parameters import parameters_on_meta
from protwin.runtime.chunks.saved_weights import SavedWeights
from protwin.runtime.model.configurations import build_model
from protwin.runtime.students.student_model import make_student
from protwin.shared.basics.errors import FileError, WorkloadError
from tests.proof_size import some_quick

from .teachers import CONFIGURATIONS, batches, logits, make_teacher, student_of, teacher_of


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_student_of_full_size_is_its_teacher_to_the_bit(name: str) -> None:
    teacher = teacher_of(name)
    before = {key: tensor.clone() for key, tensor in teacher.state_dict().items()}
    student = make_student(teacher, student_of())
    assert type(student) is type(teacher)
    own, others = dict(student.named_parameters()), dict(teacher.named_parameters())
    assert own.keys() == others.keys(), "tied parameters are tied"
    for key, parameter in own.items():
        assert torch.equal(parameter, others[key]), key
        assert parameter.untyped_storage().data_ptr() != others[key].untyped_storage().data_ptr(), key
    for (key, buffer), (_, other) in zip(student.named_buffers(), teacher.named_buffers(), strict=True):
        assert torch.equal(buffer, other), key
        assert buffer.dtype is other.dtype, key
    for batch in batches():
        assert torch.equal(logits(student, batch), logits(teacher, batch))
    assert all(torch.equal(before[key], tensor) for key, tensor in teacher.state_dict().items())


def learnt(student: torch.nn.Module) -> set[str]:
    """Modules of blocks with parameters that are learnt."""
    return {".".join(name.split(".")[2:4]) for name, one in student.named_parameters() if one.requires_grad}


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("llama", "subblock_attention", {"0.input_layernorm", "0.self_attn"}),
        ("llama", "subblock_ffn", {"0.post_attention_layernorm", "0.mlp"}),
        ("gpt2", "subblock_ffn", {"0.ln_2", "0.mlp"}),
        ("bamba", "subblock_mamba", {"0.input_layernorm", "0.mamba"}),
        ("bamba", "subblock_attention", set()),
        ("jamba", "entire_block", {"0.input_layernorm", "0.mamba", "0.pre_ff_layernorm", "0.feed_forward"}),
    ],
)
def test_what_is_learnt_requires_gradients_and_nothing_else_does(name: str, keys: str, expected: set[str]) -> None:
    student = make_student(teacher_of(name), student_of(f"keys_to_learn = '{keys}'"))
    found = learnt(student)
    assert {one for one in found if one.startswith("0.")} == expected
    numbered = {one.split(".")[0] for one in found}
    in_hybrid = {"subblock_mamba": {"0", "2"}, "subblock_attention": {"1"}}
    assert numbered == (in_hybrid.get(keys, {"0", "1", "2"}) if name == "bamba" else {"0", "1", "2"})
    assert all(one.rpartition(".")[0] for one in found), "nothing outside of blocks"


@some_quick(("name", "kind"), product(CONFIGURATIONS, ["absent", "linear"]), quick=6)
def test_a_student_runs_and_learns_with_parts_that_are_not_as_the_teachers(name: str, kind: str) -> None:
    """Every parameter that is learnt gets a gradient, and no memory is taken for what is absent."""
    text = f"[initialization]\nlinear = 'random'\n[block.0]\nffn = '{kind}'\n[block.1]\nattention = '{kind}'"
    student = make_student(teacher_of(name), student_of(text), seed=5).train()
    losses = student(**batches()[0], labels=batches()[0]["input_ids"], use_cache=False).loss
    losses.backward()
    for key, parameter in student.named_parameters():
        # Experts that no token goes to have none either.
        assert parameter.grad is not None or not parameter.requires_grad, key
    again = make_student(teacher_of(name), student_of(text), seed=5)
    other = make_student(teacher_of(name), student_of(text), seed=6)
    pairs = zip(student.parameters(), again.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two, _ in pairs)
    differing = [
        key
        for (key, one), two in zip(student.named_parameters(), other.parameters(), strict=True)
        if not torch.equal(one, two)
    ]
    assert [key.split(".")[2] for key in differing] == ([] if kind == "absent" else ["0", "1"]), "random ones alone"


def test_an_absent_ffn_passes_the_stream_by() -> None:
    teacher = teacher_of("llama")
    student = make_student(teacher, student_of("[all]\nffn = 'absent'\nattention = 'absent'\n[block.2]\nffn = 'full'"))
    hidden = torch.randn(2, 5, 16, dtype=torch.float64)
    positions = teacher.model.rotary_emb(hidden, position_ids=torch.arange(5)[None])
    for number in (0, 1):
        block = student.model.layers[number]
        assert not list(block.parameters())
        assert torch.equal(block(hidden, position_embeddings=positions), hidden)
    block, own = student.model.layers[2], teacher.model.layers[2]
    expected = hidden + own.mlp(own.post_attention_layernorm(hidden))
    assert torch.equal(block(hidden, position_embeddings=positions), expected)


def test_sizes_of_blocks_that_are_all_alike_are_the_configurations() -> None:
    teacher = teacher_of("mixtral")
    alike = make_student(
        teacher,
        student_of(
            "[initialization]\nexperts = 'first'\n[all]\nintermediate_size = 8\nnum_key_value_heads = 1\n"
            "num_local_experts = 3\nnum_experts_per_tok = 1"
        ),
    )
    fields = ("intermediate_size", "num_key_value_heads", "num_local_experts", "num_experts_per_tok")
    assert [getattr(alike.config, field) for field in fields] == [8, 1, 3, 1]
    assert [getattr(teacher.config, field) for field in fields] == [24, 2, 5, 2]
    assert {block.mlp.gate.top_k for block in alike.model.layers} == {1}
    unlike = make_student(teacher, student_of("[block.1]\nnum_experts_per_tok = 1"))
    assert [block.mlp.gate.top_k for block in unlike.model.layers] == [2, 1, 2]
    assert unlike.config.num_experts_per_tok == 2
    logits(alike, batches()[0])
    logits(unlike, batches()[0])


def test_parameters_that_the_class_does_not_make_are_refused_unless_they_are_named() -> None:
    teacher = make_teacher("llama")
    teacher.model.layers[1].register_parameter("adapter", torch.nn.Parameter(torch.ones(3)))
    with pytest.raises(WorkloadError, match=r"has model\.layers\.1\.adapter, which its class LlamaForCausalLM"):
        make_student(teacher, student_of())
    assert make_student(teacher, student_of(), without=["model.layers.*.adapter"]) is not None
    del teacher.model.layers[0].mlp.up_proj
    with pytest.raises(WorkloadError, match=r"lacks model\.layers\.0\.mlp\.up_proj"):
        make_student(teacher, student_of(), without=["model.layers.*.adapter"])


def test_a_trunk_without_its_head_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"has no list of blocks model\.layers.*language-model head"):
        make_student(teacher_of("llama").model, student_of())


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gpt2", "bamba"])
def test_a_teacher_without_memory_is_read_from_its_files(tmp_path: Path, name: str) -> None:
    teacher = make_teacher(name, torch.float32)
    teacher.save_pretrained(tmp_path / "teacher")
    with parameters_on_meta():
        absent = build_model(CONFIGURATIONS[name], name, torch.float32, device="cpu").eval()
    text = "[all]\nintermediate_size = 8\n[block.0]\nattention = 'linear'" if name != "bamba" else ""
    expected = make_student(teacher, student_of(text))
    found = make_student(absent, student_of(text), weights=SavedWeights(tmp_path / "teacher"))
    assert all(parameter.is_meta for parameter in absent.parameters())
    states = expected.state_dict(), found.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())
    with pytest.raises(WorkloadError, match="is on the meta device and has no values"):
        make_student(absent, student_of(text))
    make_teacher(name, torch.float32, vocab_size=62).save_pretrained(tmp_path / "other")
    with pytest.raises(FileError, match="are of another model"):
        make_student(absent, student_of(text), weights=SavedWeights(tmp_path / "other"))
