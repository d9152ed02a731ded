"""Files of students: what they say, and one message for everything that no student can be."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from protwin.shared.basics.errors import FileError, ProtwinError, WorkloadError
from protwin.shared.catalogue.models import model_configuration
from protwin.shared.phases.distillation import KeyToLearn
from protwin.shared.students.block_shape import BlockShape, has_learnt_part, is_learnt
from protwin.shared.students.families import FAMILIES
from protwin.shared.students.shapes import student_shapes, teacher_shapes
from protwin.shared.students.student import Student, Subblock

HEAD = 'kind = "student"\nschema_version = 1\n'
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}
BAMBA = LLAMA | {"model_type": "bamba", "attn_layer_indices": [1, 3]}
JAMBA = LLAMA | {"model_type": "jamba", "num_experts": 4, "attn_layer_period": 4, "attn_layer_offset": 2}


def student(text: str = "") -> Student:
    return Student.from_mapping(tomllib.loads(HEAD + text), origin="student.toml")


def shapes(text: str, configuration: dict[str, Any] | None = None) -> tuple[BlockShape, ...]:
    return student_shapes(student(text), configuration or LLAMA)


def test_a_file_is_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "student.toml"
    path.write_text(
        HEAD
        + """
        keys_to_learn = ["subblock_ffn", "subblock_attention", "subblock_ffn"]
        loss = "cosine"
        [initialization]
        ffn = "prune"
        [all]
        num_key_value_heads = 2
        [block.1]
        ffn = "absent"
        [block.2-3]
        intermediate_size = 16
        """
    )
    found = Student.load(path)
    assert found.keys_to_learn == (KeyToLearn.SUBBLOCK_ATTENTION, KeyToLearn.SUBBLOCK_FFN)
    blocks = student_shapes(found, LLAMA)
    assert [one.num_key_value_heads for one in blocks] == [2, 2, 2, 2]
    assert [one.ffn for one in blocks] == [Subblock.FULL, Subblock.ABSENT, Subblock.FULL, Subblock.FULL]
    assert [one.intermediate_size for one in blocks] == [48, 48, 16, 16]
    found.save(tmp_path / "student.json")
    assert Student.load(tmp_path / "student.json") == found


@pytest.mark.parametrize("configuration", [LLAMA, MIXTRAL, GPT2, BAMBA, JAMBA], ids=lambda one: one["model_type"])
def test_a_student_without_differences_has_the_shapes_of_its_teacher(configuration: dict[str, Any]) -> None:
    assert student_shapes(student(), configuration) == teacher_shapes(configuration)


def test_families_say_what_their_blocks_are() -> None:
    assert [one.is_attention for one in teacher_shapes(BAMBA)] == [False, True, False, True]
    jamba = teacher_shapes(JAMBA)
    assert [one.is_attention for one in jamba] == [False, False, True, False]
    assert [one.num_local_experts for one in jamba] == [None, 4, None, 4]
    assert [one.intermediate_size for one in teacher_shapes(GPT2)] == [128, 128]
    assert {one.num_key_value_heads for one in teacher_shapes(GPT2)} == {4}
    assert len(teacher_shapes(model_configuration("llama-3-70b").config)) == 80


def test_what_holds_for_all_blocks_passes_those_that_do_not_have_it() -> None:
    blocks = shapes("[all]\nnum_key_value_heads = 2\nnum_local_experts = 2", JAMBA)
    assert [one.num_key_value_heads for one in blocks] == [4, 4, 2, 4]
    assert [one.num_local_experts for one in blocks] == [None, 2, None, 2]


def test_a_block_comes_before_all_blocks_and_equal_blocks_are_equal_shapes() -> None:
    blocks = shapes("[all]\nintermediate_size = 16\n[block.0]\nffn = 'absent'\n[block.3]\nintermediate_size = 8")
    assert [one.intermediate_size for one in blocks] == [48, 16, 16, 8]
    assert blocks[0] == shapes("[block.0]\nffn = 'absent'")[0]


def test_a_norm_is_learnt_with_the_part_that_it_is_before() -> None:
    mamba, attention = teacher_shapes(BAMBA)[:2]
    parts = {
        "self_attn.q_proj.weight": (attention, KeyToLearn.SUBBLOCK_ATTENTION),
        "mamba.in_proj.weight": (mamba, KeyToLearn.SUBBLOCK_MAMBA),
        "feed_forward.up_proj.weight": (mamba, KeyToLearn.SUBBLOCK_FFN),
        "pre_ff_layernorm.weight": (attention, KeyToLearn.SUBBLOCK_FFN),
    }
    cases = [*parts.items(), *(("input_layernorm.weight", case) for case in parts.values())][:6]
    for name, (shape, expected) in cases:
        for key in KeyToLearn:
            is_expected = key in (expected, KeyToLearn.ENTIRE_BLOCK)
            assert is_learnt((key,), FAMILIES["bamba"], shape, name) is is_expected, (name, key)


def test_a_block_learns_what_it_has() -> None:
    whole, without, neither = shapes(
        "[block.1]\nffn = 'absent'\n[block.2]\nffn = 'absent'\nattention = 'absent'", LLAMA
    )[:3]
    for key, expected in {
        KeyToLearn.ENTIRE_BLOCK: (True, True, False),
        KeyToLearn.SUBBLOCK_ATTENTION: (True, True, False),
        KeyToLearn.SUBBLOCK_FFN: (True, False, False),
        KeyToLearn.SUBBLOCK_MAMBA: (False, False, False),
    }.items():
        assert tuple(has_learnt_part((key,), shape) for shape in (whole, without, neither)) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[all]\nintermediat_size = 3", "Did you mean intermediate_size?"),
        ("[block.1]\nnum_key_value_head = 3", "block.1.num_key_value_head: .*Did you mean num_key_value_heads?"),
        ("[blocks.1]\nffn = 'absent'", "blocks: .*Did you mean block?"),
        ("[all]\nnum_hidden_layers = 3", "num_hidden_layers cannot differ: .* as many blocks as its teacher"),
        ("[all]\nffn = 'gone'", "all.ffn: .*'full', 'linear' or 'absent'"),
        ("[all]\nintermediate_size = 0", "intermediate_size: .*greater than 0"),
        ("[all]\nffn = 'absent'\nintermediate_size = 3", "intermediate_size is stated beside ffn = 'absent'"),
        ("[initialization]\nffn = 'prun'", "initialization.ffn: .*'copy', 'truncate' or 'prune'"),
        ("loss = 'normalised_mse'", "no loss 'normalised_mse'. Did you mean normalized_mse"),
        ("keys_to_learn = 'subblock_fnn'", "no key to learn 'subblock_fnn'. Did you mean subblock_ffn"),
        ("keys_to_learn = []", "nothing is to be learnt"),
        ("keys_to_learn = [3]", "a list of them, in quotes"),
        ("keys_to_learn = ['subblock_ffn', 'entire_block']", "entire_block holds subblock_ffn already"),
        ("[block.first]\nffn = 'absent'", "'first' names no blocks"),
        ("[block.3-1]\nffn = 'absent'", "ends before it begins"),
        ("[block.1-3]\nffn = 'absent'\n[block.2]\nffn = 'full'", r"block 2 is in \[block.1-3\] and in \[block.2\]"),
    ],
)
def test_what_no_student_can_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(FileError, match=words) as refused:
        student(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("configuration", "text", "words"),
    [
        (LLAMA, "[all]\nffn='absent'\n[block.1]\nintermediate_size=8", r"block 1 .* but \[all\] has ffn = 'absent'"),
        (LLAMA, "[block.4]\nffn = 'absent'", "names block 4, but the teacher has 4 blocks, from 0 to 3"),
        (LLAMA, "[all]\nnum_key_value_heads = 3", "block 0 .*3, which does not divide its teacher's 4.*1, 2, 4"),
        (LLAMA, "[all]\nnum_key_value_heads = 8", "8, which does not divide its teacher's 4"),
        (LLAMA, "[block.2]\nintermediate_size = 49", "block 2 .*intermediate_size = 49, but its teacher only 48"),
        (LLAMA, "[initialization]\nffn='copy'\n[all]\nintermediate_size = 9", "'copy' cannot bring together"),
        (LLAMA, "[all]\nnum_local_experts = 2", r"\[all\] states num_local_experts, but no block .* has experts"),
        (JAMBA, "[block.0]\nnum_local_experts = 2", "block 0 .* its teacher has no experts there"),
        (BAMBA, "[block.0]\nattention = 'absent'", "block 0 .* its teacher has no attention there"),
        (MIXTRAL, "[all]\nnum_local_experts = 1", "num_experts_per_tok = 2 experts but has num_local_experts = 1"),
        (MIXTRAL, "[all]\nffn = 'linear'", "no one linear map follows from its teacher's experts"),
        (JAMBA, "[all]\nnum_local_experts = 1\nnum_experts_per_tok = 1", "takes for an FFN without experts"),
        (MIXTRAL, "[all]\nnum_local_experts = 5", "num_local_experts = 5, but its teacher only 4"),
        (GPT2, "[all]\nnum_key_value_heads = 2", "every head of the teacher has a key and a value of its own"),
        (LLAMA, "keys_to_learn = 'subblock_mamba'", "nothing of the student is learnt.*subblock_mamba"),
        (LLAMA, "keys_to_learn = 'subblock_ffn'\n[all]\nffn = 'absent'", "nothing of the student is learnt"),
        (LLAMA | {"model_type": "lama"}, "", "family 'lama', which protwin makes no students of. Did you mean llama"),
        ({"model_type": "llama"}, "", "the configuration of the teacher has no num_hidden_layers"),
    ],
)
def test_what_is_no_student_of_this_teacher_is_refused(configuration: dict[str, Any], text: str, words: str) -> None:
    with pytest.raises(WorkloadError, match=words) as refused:
        shapes(text, configuration)
    assert isinstance(refused.value, ProtwinError)
    assert "\n" not in str(refused.value)
