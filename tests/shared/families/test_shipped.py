"""The families that come with the package: complete, small, and of the models that they are called after."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from itertools import pairwise
from typing import Any

import pytest

from protwin.shared.basics.errors import WorkloadError
from protwin.shared.catalogue.models import model_configuration, model_names
from protwin.shared.families.shipped import SHIPPED_DTYPES, shipped_family, shipped_path
from protwin.shared.schema.workload import DType, OperationClass

FOLDER = files("protwin.shared") / "catalogue" / "data" / "workloads"
MAX_BYTES = 2 * 2**20
"""Of all shipped families together."""


def published_dtype(name: str) -> DType:
    return model_configuration(name).dtype or DType.FLOAT32


@pytest.mark.parametrize("name", model_names())
def test_every_model_is_shipped_as_it_was_published(name: str) -> None:
    """With as many scalars as its architecture's formulas count, which know nothing of any trace."""
    model = model_configuration(name)
    family = shipped_family(name, published_dtype(name))
    assert family is not None
    assert family.model_name == name
    assert sum(parameter.num_elements for parameter in family.parameters) == model.num_parameters
    assert all(parameter.trainable for parameter in family.parameters)
    blocks = model.config.get("num_hidden_layers") or model.config.get("n_layer") or 2 * model.config["num_layers"]
    assert len(family.block_names) == blocks
    workload = family.at(batch_size=3, sequence_length=97 if family.has_sequence else None)
    assert workload.num_samples == 3
    assert workload.num_parameters == model.num_parameters
    assert workload.compute_dtype is published_dtype(name)


@pytest.mark.parametrize(
    ("name", "num_products"),
    [
        ("llama-3-8b", 7 / 2),
        ("mistral-7b", 7 / 2),
        ("qwen2.5-7b", 7 / 2),
        ("phi-4", 7 / 2),
        ("gpt2", 7 / 2),  # drops probabilities out, within the fused kernel
    ],
)
def test_arithmetic_is_that_of_the_published_formula(name: str, num_products: float) -> None:
    """Six FLOPs for every parameter of a matrix and token, and two per product of attention, width and token pair.

    Source: Kaplan et al. (arXiv 2001.08361), section 2.1.  Attention has six products; fused it forms the probabilities
    again in backward, which makes seven, and halves all of them by the causal mask.
    """
    model = model_configuration(name).config
    family = shipped_family(name, published_dtype(name))
    assert family is not None
    batch, length = 2, 768
    workload = family.at(batch_size=batch, sequence_length=length)
    tables = [p for p in workload.parameters if len(p.shape) == 2 and p.block is None]
    tied = any(p.aliases for p in tables)
    heads = [p for p in tables if tied or "lm_head" in p.name or "embed_out" in p.name]
    head = max(p.num_elements for p in heads)
    matrices = head + sum(p.num_elements for p in workload.parameters if len(p.shape) == 2 and p.block is not None)
    num_heads = model.get("num_attention_heads") or model["n_head"]
    hidden = model.get("hidden_size") or model["n_embd"]
    width = num_heads * (model.get("head_dim") or hidden // num_heads)
    attention = len(workload.blocks) * batch * length**2 * width * 2 * num_products
    expected = 6 * matrices * batch * length + attention
    blocks = [workload.profile_of(block) for block in range(workload.num_blocks)]
    phases = [
        workload.prologue_forward,
        workload.epilogue_forward,
        workload.epilogue_backward,
        workload.prologue_backward,
        *(phase for block in blocks for phase in (block.forward, block.backward)),
    ]
    products = (OperationClass.MATMUL, OperationClass.ATTENTION)
    found = sum(op.flops * op.count for phase in phases for op in phase.operations if op.operation_class in products)
    # Rotary positions are a product too: of frequencies and places, once for all blocks.
    assert 0 <= found - expected <= 2 * batch * length * width


def test_larger_shapes_never_compute_less_or_hold_less() -> None:
    family = shipped_family("llama-3-8b", DType.BFLOAT16)
    assert family is not None
    shapes = [(1, 128), (1, 2048), (2, 2048), (3, 2048), (3, 8191)]
    found = [family.at(batch_size=b, sequence_length=s) for b, s in shapes]
    for smaller, larger in pairwise(found):
        one, other = smaller.profile_of(1), larger.profile_of(1)
        assert one.forward.flops < other.forward.flops
        assert one.forward.net_bytes < other.forward.net_bytes
        assert smaller.epilogue_forward.peak_bytes < larger.epilogue_forward.peak_bytes


def test_other_types_of_16_bits_differ_in_name_alone() -> None:
    families = {dtype: shipped_family("gpt2", dtype) for dtype in (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)}
    found = {d: f.at(batch_size=2, sequence_length=64) for d, f in families.items() if f is not None}
    assert len(found) == 3
    assert len({workload.identity for workload in found.values()}) == 3
    half, other, full = (found[d] for d in (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32))
    assert half.profiles[0].forward.flops == other.profiles[0].forward.flops
    assert half.profiles[0].forward.net_bytes == other.profiles[0].forward.net_bytes
    assert half.profiles[0].forward.net_bytes < full.profiles[0].forward.net_bytes < 2 * half.resident_bytes + 10**9


def test_a_model_that_does_more_in_float16_is_not_shipped_in_it() -> None:
    """T5 looks for overflows there, which bfloat16 does not have: its family of bfloat16 would be wrong."""
    family = shipped_family("t5-small", DType.BFLOAT16)
    assert family is not None
    assert family.twins == {}
    assert shipped_family("t5-small", DType.FLOAT16) is None


def test_what_is_not_shipped_is_none() -> None:
    assert shipped_family("no-such-model", DType.BFLOAT16) is None
    assert shipped_family("gpt2", DType.FLOAT64) is None


def test_impossible_shapes_of_a_shipped_family() -> None:
    family = shipped_family("llama-3-8b", DType.FLOAT16)
    assert family is not None
    for field in ("batch_size", "sequence_length"):
        for value in (0, -3, 2**62):
            shape: dict[str, Any] = {"batch_size": 1, "sequence_length": 128} | {field: value}
            with pytest.raises(WorkloadError, match=f"^{field} is {value}"):
                family.at(**shape)


def test_the_families_are_small_and_belong_to_models() -> None:
    entries = [entry for entry in FOLDER.iterdir() if entry.name.endswith(".json.gz")]
    known = {shipped_path(name, dtype) for name in model_names() for dtype in SHIPPED_DTYPES}
    assert {entry.name for entry in entries} <= known
    assert sum(len(entry.read_bytes()) for entry in entries) < MAX_BYTES


def test_no_torch_is_needed() -> None:
    program = (
        "import sys; sys.modules.update(torch=None, transformers=None)\n"
        "from protwin.shared.workloads.source import load_workload\n"
        "found = load_workload('llama-3-8b', batch_size=5, sequence_length=333)\n"
        "sys.exit(found.num_tokens != 5 * 333)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=600).returncode == 0
