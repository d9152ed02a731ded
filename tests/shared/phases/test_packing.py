"""Lengths of packed samples: what is read of them, and what they make of a family's workload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared import load_workload
from protwin.shared.basics.errors import ProtwinError
from protwin.shared.phases.packing import parse_packed_lengths
from protwin.shared.schema.workload import OperationClass, Phase, Workload

PHASES = ("forward", "backward", "checkpoint_forward", "recompute", "checkpoint_backward")


def attention_flops(phase: Phase) -> int:
    return sum(op.flops * op.count for op in phase.operations if op.operation_class is OperationClass.ATTENTION)


def test_lengths_of_a_row_and_of_a_distribution(tmp_path: Path) -> None:
    found = parse_packed_lengths("512, 1024,2560", 4096)
    assert (found.squares, found.longest, found.samples_per_row) == (512**2 + 1024**2 + 2560**2, 2560, 3)
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps({"lengths": [512, 1024, 2560]}))
    assert parse_packed_lengths(str(path), 4096) == found
    twice = parse_packed_lengths(str(path), 8192)
    assert (twice.squares, twice.samples_per_row) == (2 * found.squares, 6)


@given(least=st.integers(1, 40), more=st.integers(0, 40), rows=st.integers(1, 5))
def test_a_uniform_distribution_is_all_of_its_lengths(least: int, more: int, rows: int) -> None:
    """A row of just one sample of each length has the same figures."""
    lengths = range(least, least + more + 1)
    row_tokens = rows * sum(lengths)
    found = parse_packed_lengths(f"uniform:{lengths[0]}:{lengths[-1]}", row_tokens)
    assert found.squares == rows * sum(length**2 for length in lengths)
    assert found.samples_per_row == rows * len(lengths)
    assert found.longest == lengths[-1]


BAD = ["", "512,1024", "512,-1", "512;512", "0,4096", "uniform:5", "uniform:9:5", "uniform:0:5", "uniform:1:5000"]
FILES = ["[512]", '{"lengths": 5}', '{"lengths": []}', '{"lengths": [0]}', '{"lengths": [true]}']


@pytest.mark.parametrize("lengths", BAD)
def test_what_is_no_row_is_refused(lengths: str) -> None:
    with pytest.raises(ProtwinError):
        parse_packed_lengths(lengths, 4096)


@pytest.mark.parametrize("content", FILES)
def test_a_file_that_lists_no_lengths_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(content)
    with pytest.raises(ProtwinError):
        parse_packed_lengths(str(path), 4096)


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "bert-large"])
def test_attention_of_a_row_is_the_samples_sum_and_the_rest_the_rows(model: str) -> None:
    """BERT has learned positions for 512 tokens alone: those of a packed row begin anew."""
    lengths = (100, 512, 412) if model == "bert-large" else (512, 1024, 2560)
    row = sum(lengths)
    text = ",".join(map(str, lengths))
    found = load_workload(model, batch_size=2, sequence_length=row, packed_lengths=text)
    alone = [load_workload(model, batch_size=2, sequence_length=length) for length in lengths]
    for phase in PHASES:
        of_row, *of_samples = [getattr(workload.profiles[0], phase) for workload in (found, *alone)]
        assert attention_flops(of_row) == sum(map(attention_flops, of_samples))
        assert attention_flops(of_row) > 0 or phase == "checkpoint_forward"
        linear = [flops_of_products(of) for of in (of_row, *of_samples)]
        assert linear[0] == sum(linear[1:])
    assert found.batch_shapes["position_ids"] == (2, row)
    assert found.profiles[0].output_bytes == sum(workload.profiles[0].output_bytes for workload in alone)
    assert found.packing is not None
    assert Workload.from_mapping(json.loads(found.to_json()), origin="itself") == found


def flops_of_products(phase: Phase) -> int:
    return sum(op.flops * op.count for op in phase.operations if op.operation_class is OperationClass.MATMUL)


def test_one_sample_attends_as_it_does_unpacked() -> None:
    found = load_workload("qwen2.5-0.5b", batch_size=1, sequence_length=4096, packed_lengths="4096")
    plain = load_workload("qwen2.5-0.5b", batch_size=1, sequence_length=4096)
    assert found.profiles == plain.profiles


def test_no_mask_exists_beyond_a_sliding_window() -> None:
    """Mistral's mask of 8,192 x 8,192 is there without packing alone."""
    long: dict[str, Any] = {"batch_size": 1, "sequence_length": 8192}
    found = load_workload("mistral-7b", packed_lengths="4096,2048,2048", **long)
    plain = load_workload("mistral-7b", **long)
    assert plain.prologue_forward.net_bytes - found.prologue_forward.net_bytes == 8192**2


@pytest.mark.parametrize("model", ["t5-base", "vit-huge"])
def test_models_without_such_rows_refuse_packing(model: str) -> None:
    with pytest.raises(ProtwinError, match="packed lengths"):
        load_workload(model, batch_size=1, sequence_length=64 if model == "t5-base" else None, packed_lengths="32,32")


def test_a_saved_workload_keeps_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    load_workload("qwen2.5-0.5b", batch_size=1, sequence_length=512, packed_lengths="256,256").save(path)
    assert load_workload(path).packing == parse_packed_lengths("256,256", 512)
    with pytest.raises(ProtwinError, match="samples lie in rows as they were traced"):
        load_workload(path, packed_lengths="512")
