"""Training runs that others measured and published, as data: what was measured, and what their pages leave open.

They are predicted from data sheets and configurations alone (``make published``).  Nothing is fitted to them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from pydantic import PositiveFloat

from ..shared.files import FrozenModel

FORK: Final = "github.com/thad0ctor/axolotl, pull requests 20 and 39, and the design page of their ProTrain integration"
PAPER: Final = "ProTrain (arXiv 2406.08334)"


class Quantity(StrEnum):
    """What was measured; the unit follows from it."""

    ITERATION = "iteration_s"
    DEVICE_PEAK = "peak_device_bytes"
    PINNED = "pinned_host_bytes"
    LARGEST = "num_parameters"
    ADAM = "update_s"


class Measurement(FrozenModel):
    """One published figure."""

    row: str
    """The run that it belongs to, R1 to R5."""
    case: str
    """Which of the run's configurations, in words; with ``quantity`` it names the figure."""
    quantity: Quantity
    readings: tuple[PositiveFloat, ...]
    """The figure in units of ``quantity``; two where "GB" may mean 1e9 bytes or GiB, the former first."""


class PublishedRun(FrozenModel):
    """One run: what it was, what is unknown, and what was measured."""

    row: str
    title: str
    source: str
    unknown: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    remark: str | None = None
    """What the figures themselves say of one another, and where predictions miss and why."""
    not_predicted: str | None = None
    """Why nothing is predicted; None where something is."""


ON_DEVICE: Final = "everything on the device"
DATA_PARALLEL: Final = "on the device, data parallel on 4"
REPLICATED: Final = "offloaded, replicated on 4"
SHARDED: Final = "offloaded, sharded over 4"
PLAN_OF_130_CHUNKS: Final = "113 of 130 chunks persistent"
LARGEST_ON_24_GB: Final = "one RTX 3090 (24 GB)"
LARGEST_ON_80_GB: Final = "one A100 (80 GB)"
ADAM_128_THREADS: Final = "Llama-2-7B, 128 threads"
ADAM_32_THREADS: Final = "Llama-2-7B, 32 threads"
ADAM_4210R: Final = "1.35 B parameters, Xeon 4210R"


def _gb(value: float) -> tuple[float, float]:
    """Bytes of a figure in "GB", which may be 1e9 bytes or GiB."""
    return value * 1e9, value * 2**30


def _iteration(row: str, case: str, seconds: float) -> Measurement:
    return Measurement(row=row, case=case, quantity=Quantity.ITERATION, readings=(seconds,))


def _bytes(row: str, case: str, quantity: Quantity, gigabytes: float) -> Measurement:
    return Measurement(row=row, case=case, quantity=quantity, readings=_gb(gigabytes))


def _adam(case: str, seconds: float) -> Measurement:
    return Measurement(row="R5", case=case, quantity=Quantity.ADAM, readings=(seconds,))


PUBLISHED_RUNS: Final = (
    PublishedRun(
        row="R1",
        title="Llama of 2.2 B parameters, LoRA r = 8 on q, k, v, o, float16, 2 sequences of 256 tokens per rank, "
        "4 x RTX 3090 on PCIe 3.0 x16 without NVLink",
        source=FORK,
        unknown=(
            "the host (cores, memory bandwidth)",
            "the boards' power limits",
            "chunk size and knobs of the offloaded runs",
            "the adapters' element type",
            "whether peaks are allocated or reserved",
            "GB or GiB",
        ),
        remark="5.36 GB on the device are 0.6 GB more than parameters, optimizer state and activations come to, and "
        "0.3 GB more than the allocator reserves for them. On one board and on four without copies the times "
        "are those of the unfavourable reading, a host so slow that it and not the board sets the pace, to 2 "
        "and 9 %; with copies they are 1.3 times that, as if the host's memory carried less than two channels "
        "do. Under 4 GiB the best plan here offloads a fifth of what that run did.",
        measurements=(
            # Published as samples/s over all ranks: 8.48, 30.90, 11.06, 5.93.
            _iteration("R1", ON_DEVICE, 2 / 8.48),
            _bytes("R1", ON_DEVICE, Quantity.DEVICE_PEAK, 5.36),
            _iteration("R1", DATA_PARALLEL, 8 / 30.90),
            _bytes("R1", DATA_PARALLEL, Quantity.DEVICE_PEAK, 5.38),
            _iteration("R1", REPLICATED, 8 / 11.06),
            _bytes("R1", REPLICATED, Quantity.DEVICE_PEAK, 3.09),
            _bytes("R1", REPLICATED, Quantity.PINNED, 3.82),
            _iteration("R1", SHARDED, 8 / 5.93),
            _bytes("R1", SHARDED, Quantity.DEVICE_PEAK, 3.09),
            _bytes("R1", SHARDED, Quantity.PINNED, 0.96),
        ),
    ),
    PublishedRun(
        row="R2",
        title="Llama-7B, LoRA r = 8 on q, k, v, o, float16, 256 tokens per sequence, RTX 3090 (Ti)",
        source=FORK,
        unknown=(
            "which of the two boards",
            "the generation of its PCIe slot",
            "the host",
            "the adapters' element type",
            "whether peaks are allocated or reserved",
            "GB or GiB",
        ),
        remark="The two times contradict each other: 0.231 s for one sequence with 18 chunks offloaded, 0.559 s for "
        "two with everything on the device, 1.2 times as long for each sequence although nothing is copied. "
        "Without any copy the prediction for one sequence is 0.20 to 0.23 s, so that the first run must have "
        "hidden nearly all of them.",
        measurements=(
            _iteration("R2", PLAN_OF_130_CHUNKS, 0.231),
            _bytes("R2", PLAN_OF_130_CHUNKS, Quantity.DEVICE_PEAK, 13.16),
            _iteration("R2", ON_DEVICE, 0.559),
            _iteration("R2", DATA_PARALLEL, 0.593),
        ),
    ),
    PublishedRun(
        row="R3",
        title="Qwen3.5-27B, 4-bit base with LoRA, 1 024 tokens, 2 x RTX 3090 Ti with NVLink: 6.28 s by hand, 6.05 s "
        "with a fused MLP kernel, 5.05 s with searched offload",
        source=FORK,
        unknown=("the batch", "how the work is split over the two boards", "the vision tower's share"),
        measurements=(),
        not_predicted="weights in 4 bit are unpacked block by block before every product, by kernels whose cost and "
        "whose temporary memory the simulator has no model of, and a workload has no element type of 4 bit.",
    ),
    PublishedRun(
        row="R4",
        title="largest trainable model with Adam in mixed precision",
        source=PAPER,
        unknown=("the host's memory", "the shapes of the largest models", "batch and sequence length"),
        remark="Memory on the host decides, at 16 bytes a parameter; the device takes what it has room for. The "
        "likely hosts are a guess: one socket with eight modules of 64 GiB, and a DGX A100 with 1 TB. The "
        "paper's 2 090 tokens/s on four RTX 3090 are not predicted: they are a mean over models and batches "
        "that the page does not name.",
        measurements=(
            Measurement(row="R4", case=LARGEST_ON_24_GB, quantity=Quantity.LARGEST, readings=(34e9,)),
            Measurement(row="R4", case=LARGEST_ON_80_GB, quantity=Quantity.LARGEST, readings=(75e9,)),
        ),
    ),
    PublishedRun(
        row="R5",
        title="CPU Adam on hosts, the full update of a model",
        source=FORK,
        unknown=("processors and memory of the first two hosts", "which implementation of Adam ran"),
        remark="A 25-fold range of update rates, of which cores and bandwidth account for a fraction: 41 and 30 GB/s "
        "on the first two hosts, 1.7 GB/s on the third, which is less than one of its cores draws. The rest is "
        "the implementation (unfused, one thread, not bound to the memory that it works on: 3.084 s became "
        "2.383 s by binding cores), so that a machine's own rate has to be measured: protwin hardware probe "
        "does.",
        measurements=(_adam(ADAM_128_THREADS, 4.6), _adam(ADAM_32_THREADS, 6.2), _adam(ADAM_4210R, 21.8)),
    ),
)
