"""One kernel of a package, launched on fake tensors: it computes nothing, and says what a device would do.

[Note: Chunks]
Linear attention and state spaces are computed in chunks of a sequence: products within each chunk, all at once, and a
state that is handed on from chunk to chunk, one after the other.  So a launch states, beside what it reads and writes,
the floating-point operations of its products and how many of its steps wait for each other.  What is no product runs on
the vector units; where a kernel does more there than move what it is given, it states that instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

_LIBRARY: Final = torch.library.Library("protwin", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "launch(str kernel, Tensor[] reads, Tensor(a!)[] writes, int flops, int vector_flops, int steps) -> ()"
)
_LIBRARY.impl("launch", lambda *_: None, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
LAUNCH: Final = torch.ops.protwin.launch.default


def launch(
    kernel: str,
    reads: Sequence[torch.Tensor | None],
    writes: Sequence[torch.Tensor],
    *,
    flops: int = 0,
    vector_flops: int = 0,
    steps: int = 0,
) -> None:
    """Launch ``kernel``, which overwrites ``writes``.

    ``flops``: of its products, a multiply-add being two; ``vector_flops``: of all else, where that takes longer than
    its memory; ``steps``: how many of its chunks wait for the one before, 0 for none.
    """
    LAUNCH(kernel, [tensor for tensor in reads if tensor is not None], list(writes), flops, vector_flops, steps)


def chunks(length: int, size: int) -> int:
    """How many chunks of ``size`` a sequence of ``length`` has, the last one filled up."""
    return -(-length // size)
