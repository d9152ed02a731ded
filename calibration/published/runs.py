"""Training runs that others measured and published, as data: what was measured, and what their pages leave open.

They are predicted from data sheets and configurations alone (``make published``).  Nothing is fitted to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pydantic import PositiveFloat

from ...shared.basics.documents import FrozenModel

FORK: Final = "github.com/thad0ctor/axolotl, pull requests 20 and 39, and the design page of their ProTrain integration"
SCRIPT: Final = "scripts/benchmark_multi_gpu.py there, and multi_gpu_benchmark_results.json beside it"
TESTS: Final = "tests/protrain/test_integration_7b.py and test_multi_gpu_7b.py there"
TORCHTITAN: Final = "github.com/pytorch/torchtitan, docs/performance.md (A100: of 2024; H100: as of arXiv 2410.06511)"
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
    """The run that it belongs to, R1 to R6."""
    case: str
    """Which of the run's configurations, in words; with ``quantity`` it names the figure."""
    quantity: Quantity
    readings: tuple[PositiveFloat, ...]
    """The figure in units of ``quantity``; several where the page can be read in several ways, the likely one first."""


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


@dataclass(frozen=True, slots=True)
class ShardedSize:
    """What one run of R6 trained, on every rank."""

    model: str
    """Its name in the catalogue."""
    batch_size: int
    sequence_length: int
    num_ranks: int
    checkpointed_frac: float | None
    """Share of the blocks that are checkpointed; None where operations are chosen instead."""
    tokens_per_s: float
    """Measured, of one rank."""


class ShardedCase(StrEnum):
    """The runs of R6."""

    LLAMA_3_8B = "Llama-3-8B, every second block checkpointed"
    LLAMA_3_70B = "Llama-3-70B, every block checkpointed"
    LLAMA_2_13B_KEPT = "Llama-2-13B, nothing checkpointed"
    LLAMA_2_13B = "Llama-2-13B, every second block checkpointed"
    LLAMA_2_70B = "Llama-2-70B, every block checkpointed"
    ON_H100 = "Llama-3.1-8B on 8 H100 of 500 W, operations chosen"

    @property
    def size(self) -> ShardedSize:
        """What it trained."""
        return _SHARDED_SIZES[self]


_SHARDED_SIZES: Final = {
    ShardedCase.LLAMA_3_8B: ShardedSize("llama-3-8b", 1, 8192, 64, 0.5, 2904),
    ShardedCase.LLAMA_3_70B: ShardedSize("llama-3-70b", 1, 8192, 64, 1.0, 331),
    ShardedCase.LLAMA_2_13B_KEPT: ShardedSize("llama-2-13b", 2, 4096, 64, 0.0, 2162),
    ShardedCase.LLAMA_2_13B: ShardedSize("llama-2-13b", 2, 4096, 64, 0.5, 1914),
    ShardedCase.LLAMA_2_70B: ShardedSize("llama-2-70b", 2, 4096, 64, 1.0, 353),
    ShardedCase.ON_H100: ShardedSize("llama-3-8b", 2, 8192, 8, None, 5762),
}


def _iteration(row: str, case: str, seconds: float) -> Measurement:
    return Measurement(row=row, case=case, quantity=Quantity.ITERATION, readings=(seconds,))


def _sharded(case: ShardedCase) -> Measurement:
    size = case.size
    return _iteration("R6", case.value, size.batch_size * size.sequence_length / size.tokens_per_s)


def _bytes(row: str, case: str, quantity: Quantity, size_bytes: float) -> Measurement:
    return Measurement(row=row, case=case, quantity=quantity, readings=(size_bytes,))


def _adam(case: str, seconds: float) -> Measurement:
    return Measurement(row="R5", case=case, quantity=Quantity.ADAM, readings=(seconds,))


PUBLISHED_RUNS: Final = (
    PublishedRun(
        row="R1",
        title="Llama of 2.2 B parameters, LoRA r = 8 on q, k, v, o, float16, 2 sequences of 256 tokens per rank, "
        "4 x RTX 3090 on PCIe 3.0 x16 without NVLink",
        source=f"{FORK}; {SCRIPT}: peaks are torch.cuda.max_memory_allocated, bytes are exact, the adapters are PEFT's "
        "with its defaults (float32), and every iteration ends with a synchronization",
        unknown=(
            "the host (cores, memory bandwidth, how fast one core is)",
            "the boards' power limits",
            "chunk size and knobs of the offloaded runs",
        ),
        remark="With everything on the device the run still holds the buffers that gathers would go to, two for every "
        "chunk of a block (api/model_wrapper.py there), 0.54 GB for each chunk size that it chooses among; they are "
        "counted. Under 4 GiB the best plan here offloads a fifth of what that run did.",
        measurements=(
            # Samples/s over all ranks as published: 8.48, 30.90, 11.06, 5.93.
            _iteration("R1", ON_DEVICE, 0.23577753052813932),
            _bytes("R1", ON_DEVICE, Quantity.DEVICE_PEAK, 5_364_669_440),
            _iteration("R1", DATA_PARALLEL, 0.2589183390082326),
            _bytes("R1", DATA_PARALLEL, Quantity.DEVICE_PEAK, 5_381_430_784),
            _iteration("R1", REPLICATED, 0.7236161325126886),
            _bytes("R1", REPLICATED, Quantity.DEVICE_PEAK, 3_091_387_904),
            _bytes("R1", REPLICATED, Quantity.PINNED, 3_822_305_280),
            _iteration("R1", SHARDED, 1.3499139675113838),
            _bytes("R1", SHARDED, Quantity.DEVICE_PEAK, 3_091_387_904),
            _bytes("R1", SHARDED, Quantity.PINNED, 955_576_320),
        ),
    ),
    PublishedRun(
        row="R2",
        title="Llama-7B, LoRA r = 8 on q, k, v, o, float16, 256 tokens per sequence, RTX 3090 (Ti)",
        source=f"{FORK}; {TESTS}: the peak is torch.cuda.max_memory_allocated over 1e9, the adapters are PEFT's with "
        "its defaults (float32)",
        unknown=("which of the two boards", "the generation of its PCIe slot", "the host", "the boards' power limits"),
        remark="The two times contradict each other: 0.231 s for one sequence with 18 chunks offloaded, 0.559 s for "
        "two with everything on the device, 1.2 times as long for each sequence although nothing is copied. "
        "The former copies 3.5 GB at least, which PCIe 3.0 would take 0.29 s for: its slot was a faster one.",
        measurements=(
            _iteration("R2", PLAN_OF_130_CHUNKS, 0.231),
            _bytes("R2", PLAN_OF_130_CHUNKS, Quantity.DEVICE_PEAK, 13.16e9),
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
        not_predicted="three things stand in the way. The batch is not stated, and the time of a step is proportional "
        "to it: one sequence of 1 024 tokens is 1.7e14 FLOP with recomputation, 2.1 s at the board's peak, so that any "
        "batch from 1 to 3 would do. Three of four blocks are of linear attention, whose kernels (chunked scans) are "
        "no class of operation here. And weights in 4 bit, which a workload has no element type for, are unpacked "
        "before every product, by kernels whose cost and temporary memory have no model. The parameters alone, at 4.5 "
        "bits with their scales, would be 15 GB.",
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
    PublishedRun(
        row="R6",
        title="Llamas trained in full, sharded over devices by FSDP2: 64 x A100 80 GB, 8 x H100 96 GB",
        source=f"{TORCHTITAN}: tokens per second and device; 8 192 tokens for Llama 3, 4 096 for Llama 2; of its "
        "tables the rows with one kind of parallelism and without float8, as far as they name blocks that are "
        "checkpointed, and one that chooses operations",
        unknown=("the network between the A100 nodes", "which kernels are fused", "clocks under the H100's limit"),
        measurements=tuple(map(_sharded, ShardedCase)),
    ),
)
