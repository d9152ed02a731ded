"""How near this machine's singular value decompositions come to its products: ``python benchmarks/factorisation.py``.

Prints, for weights of several shapes, seconds, FLOPs by Golub and Van Loan's count, and their rate as a part of that of
large float32 products in the same run (``protwin.sim.costs.factorisation.HOST_FRAC``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from protwin.sim.costs.factorisation import HOST_FRAC, decomposition_flops

SHAPES = ((256, 256), (512, 512), (1024, 1024), (1536, 576), (2048, 512), (512, 2048))


def fastest_s(work: Callable[[], object], repeats: int) -> float:
    """The least of several times."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    """Print the table."""
    square = torch.randn(1024, 1024)
    rate = 2 * 1024**3 / fastest_s(lambda: square @ square, 10)
    lines = [f"products: {rate / 1e9:.1f} GFLOP/s with {torch.get_num_threads()} threads; predicted with {HOST_FRAC:g}"]
    for shape in SHAPES:
        weight = torch.randn(shape)
        seconds = fastest_s(lambda weight=weight: torch.linalg.svd(weight, full_matrices=False), 3)  # type: ignore[misc]
        flops = decomposition_flops(*shape)
        lines.append(f"{shape[0]:5} x {shape[1]:5}: {seconds:7.3f} s, {flops:.2e} FLOPs, {flops / seconds / rate:.2f}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
