"""Stretches of parameters that end with a rank's shard are stepped to the bits of whole parameters."""

from __future__ import annotations

from itertools import product
from unittest import mock

import pytest
import torch

from protwin.shared.layout import shards
from protwin.shared.layout.layout import aligned
from protwin.shared.layout.shards import Region
from protwin.shared.schema.workload import DType

SIZES = (1, 15, 64, 77, 1_000, 4_099)
STEPS = 4
DTYPES = {torch.float32: DType.FLOAT32, torch.float64: DType.FLOAT64, torch.bfloat16: DType.BFLOAT16}


def pieces(dtype: DType, num_ranks: int) -> list[list[slice]]:
    """Of each parameter of ``SIZES``, side by side in one region, its stretches by rank."""
    spans, begin = [], 0
    for size in SIZES:
        spans.append((begin, begin + size))
        begin += aligned(size * dtype.item_bytes) // dtype.item_bytes
    count = Region(dtype, True, begin * dtype.item_bytes).shard_elements(num_ranks)
    cuts = range(0, num_ranks * count + 1, count)
    return [
        [
            slice(max(first, low) - first, min(last, low + count) - first)
            for low in cuts
            if max(first, low) < min(last, low + count)
        ]
        for first, last in spans
    ]


def stepped(dtype: torch.dtype, stretches: list[list[slice]]) -> list[torch.Tensor]:
    """Parameters after some steps of AdamW on each stretch by itself."""
    torch.manual_seed(0)
    weights = [torch.randn(size).to(dtype) for size in SIZES]
    cut = [weight[stretch] for weight, of in zip(weights, stretches, strict=True) for stretch in of]
    parameters = [torch.nn.Parameter(stretch.clone()) for stretch in cut]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    for _ in range(STEPS):
        gradients = [torch.randn(size).to(dtype) for size in SIZES]
        found = [gradient[stretch] for gradient, of in zip(gradients, stretches, strict=True) for stretch in of]
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    for stretch, parameter in zip(cut, parameters, strict=True):
        stretch.copy_(parameter.detach())
    return weights


@pytest.mark.parametrize(("dtype", "num_ranks"), [*product(DTYPES, [2, 3, 5, 8, 101])])
def test_pieces_have_the_bits_of_whole_parameters(dtype: torch.dtype, num_ranks: int) -> None:
    whole = stepped(dtype, [[slice(0, size)] for size in SIZES])
    parts = pieces(DTYPES[dtype], num_ranks)
    assert sum(map(len, parts)) > len(SIZES)
    assert all(map(torch.equal, stepped(dtype, parts), whole))


def test_shards_that_cut_a_line_give_other_bits() -> None:
    whole = stepped(torch.float32, [[slice(0, size)] for size in SIZES])
    with mock.patch.object(shards, "_LINE_BYTES", 4):
        parts = pieces(DType.FLOAT32, 101)
    assert not all(map(torch.equal, stepped(torch.float32, parts), whole))
