"""What share of a machine's data-sheet figures each class of operations reaches, where the machine does not say.

A device's own ``efficiency`` replaces these.  They are properties of how such operations are built, or measurements of
single kernels on several devices, and none is fitted to a training run; ``docs/predictions.md`` lists them with their
sources and lays them beside published runs.
"""

from __future__ import annotations

from typing import Final

from ...shared.schema.hardware import HALVED_CLOCK_HZ, Device, DeviceKind
from ...shared.schema.workload import DType, OperationClass
from .generations import Generation, generation_of

_CUDA: Final[dict[OperationClass, float]] = {
    # Large 16-bit products reach 70 to 85 % of the tensor cores' dense peak: the last wave of tiles leaves
    # multiprocessors idle, and power limits lower the clock under which the data sheet counts.
    OperationClass.MATMUL: 0.75,
    # FlashAttention-2 (arXiv 2307.08691, section 4.1): 50 to 73 % of the A100's peak forward, up to 63 % backward;
    # the softmax between the two products runs outside the matrix units.
    OperationClass.ATTENTION: 0.55,
    # Streams reach 85 to 92 % of the DRAM's peak (BabelStream, doi 10.1504/IJCSE.2018.095847); refreshes and turning
    # the bus round take the rest.  Normalizations and reductions wait for partial sums between their passes.
    OperationClass.ELEMENTWISE: 0.85,
    OperationClass.NORMALIZATION: 0.6,
    OperationClass.REDUCTION: 0.7,
    # Rows are fetched by index, and the backward adds into them with atomics.
    OperationClass.EMBEDDING: 0.5,
}
"""Shares of the roofline on a CUDA device, by class; the comments name the sources."""
_CPU: Final[dict[OperationClass, float]] = {
    # A blocked product keeps its fused multiply-add units fed except while it packs panels.
    OperationClass.MATMUL: 0.8,
    OperationClass.ATTENTION: 0.5,
    # A store to a line outside the cache reads the line first, a third stream that bytes_moved does not count.
    OperationClass.ELEMENTWISE: 0.7,
    OperationClass.NORMALIZATION: 0.6,
    OperationClass.REDUCTION: 0.6,
    OperationClass.EMBEDDING: 0.5,
}
"""The same on a CPU, measured where nothing else is named: products by ``protwin hardware probe`` on an AMD EPYC."""
CPU_ADAM_FRAC: Final = 0.7
"""Share of the host's memory bandwidth that fused CPU Adam reaches: a stream that reads before it writes, so nearly
all of its traffic is counted, less what hosts of several sockets lose between them."""
CORE_BYTES_PER_S: Final = 10e9
"""What one core draws from memory: about twelve outstanding lines of 64 bytes, some 75 ns each (Little's law)."""

KERNEL_FIXED_S: Final = 2e-6
"""What a kernel takes on a CUDA device besides its work: 0.9 µs until it follows the one before (3.8 µs from start to
start of kernels of 2.9 µs; NVIDIA technical blog, Getting Started with CUDA Graphs), and about 1 µs in which its first
loads are under way and its last blocks drain (400 to 600 cycles to DRAM: Jia et al., arXiv 1804.06826)."""
DISPATCHES_PER_LAUNCH: Final = 4.0
"""Host seconds for an operation of a model over those of an operation that does nothing (``launch_overhead_s``).

A model's operation passes through modules, autograd's bookkeeping and the allocator as well, and brings views along
that launch nothing.  On one desktop (RTX 3090 Ti, github.com/mli/transformers-benchmarks, micro_bench) a multiplication
by a constant took the host 4.3 µs, and a BERT layer's forward 433 µs for its 22 kernels, 19.7 µs each, whether it had
256 tokens or 512.
"""
COMPILED_DISPATCHES_PER_LAUNCH: Final = 2.0
"""The same for a kernel of a compiled graph: its generated wrapper takes 6.8 µs without arguments and 9.1 µs with 19
where the driver's own launch takes 3.0 to 3.3 µs (github.com/meta-pytorch/tritonbench/pull/1017)."""
DISPATCHES_PER_GRAPH: Final = 8.0
"""The same for the call of a compiled graph, guards and autograd's wrapper included: 39.0 µs with gradients where the
operation itself takes 5.6 µs (github.com/pytorch/pytorch/issues/122029), some 33 µs less its kernel
(github.com/meta-pytorch/tritonbench/pull/1017)."""
POWER_LIMITED_FRAC: Final = 0.8
"""Share of the matrix units' peak that power allows boards whose units run at the full rate.

Largest products in 16 bit, measured: A100 79 to 85 %, H100 and H200 80 %, RTX A6000 80 %, L40S 74 %, B200 75 %, V100
68 to 76 % (github.com/zzc0721/torch-performance-test-data; github.com/mli/transformers-benchmarks).
"""
WARPGROUP_RATE: Final = 10.0
"""Matrix over vector FLOP/s above which a device with 8-bit matrix types multiplies by warpgroups: Hopper has 14 to 15
times, Blackwell's data-centre boards 30, NVIDIA's boards before them 4 at most and AMD's 8 (data sheets, as in the
catalogue)."""
FLOAT32_FRAC: Final = 0.65
"""Share of the float32 peak that products reach where half of a multiprocessor's 128 units also do integers: RTX 3090
70 %, 4090 66 %, 5090 65 %, A6000 and PRO 6000 62 %, L40S 51 % (the measurements of POWER_LIMITED_FRAC)."""
FLOAT32_OF_HOPPER_FRAC: Final = 0.79
"""The same on Hopper and its successors for data centres, whose integers have units of their own: H100 78 %, H200 77 %,
B200 83 % (the same measurements); 80 % in a float32 training on an H100 (``make bench-sheets``)."""
FLOAT32_OF_HALF_FRAC: Final = 0.9
"""The same with 64 units of their own: A100 93 to 98 %, V100S 83 % (the same measurements)."""
UNALIGNED_FLOP_PER_CLOCK: Final = {1: 400.0, 2: 950.0}
"""FLOP of a multiprocessor and clock in 16-bit products whose rows begin at multiples of so many elements: kernels that
load 2 or 4 bytes at a time do not keep the matrix units fed.  Odd rows: 440 on an H100 (GPT-2's vocabulary of 50,257
words, ``make bench-sheets``), 358 on an RTX 4090 (115.6 TFLOP/s, github.com/pytorch/pytorch issue 181718); even ones:
950 on the H100 (BERT's 30,522)."""
PRODUCTS_ALONE_FRAC: Final = 0.69
"""The same share on Hopper and later where nothing but products runs: an H100 sustained 682 of 989 TFLOP/s for 20
seconds, of random numbers, at 698 of 700 W and 1,360 MHz (``make bench-sheets``)."""
MIXED_SHARE: Final = 0.6
"""Share of the time up to which products leave the board power for ``POWER_LIMITED_FRAC`` of its peak: of six trainings
on this H100, in which products and attention took 36 to 63 % of the time, all products came within 5 % of it, at 1,755
to 1,980 MHz."""
LIMITED_EXPONENT: Final = 1 / 3
"""Power of limit over power that clocks go with under a limit: the voltage follows the clock, so that power grows with
the third power of it (Mudge, "Power: a first-class architectural design constraint", doi 10.1109/2.917539).  Measured:
0.40 for prompts on an RTX 3090 from 309 to 175 W (github.com/noonghunna/club-3090/issues/104), 0.36 for images on a
V100 from 250 to 175 W (github.com/bradrlaw/ai-server/pull/32)."""
LIMITED_WARPGROUPS_EXPONENT: Final = 0.63
"""The same on Hopper and later, whose products reach the limit at clocks where the voltage hardly falls any further.

Of the readings of an H100's board (``benchmarks/sheet_predictions.py`` prints them): in two trainings at its full clock
it drew 575 and 665 W where products and attention took 34 and 43 % of the time, so that products alone would draw 1,260
W; under its limit of 698 W they run at 1,365 of 1,980 MHz.  A GB300 from 1,400 to 500 W: 0.92 to 1.22
(github.com/facebookexperimental/triton/pull/2023).
"""
TENSOR_FLOAT_RATE: Final = 0.5
"""TF32 over bfloat16, in FLOP/s of matrix units from Ampere on (NVIDIA's data sheets and white papers)."""
UNLIMITED_MATRIX_RATE: Final = 2.0
"""Matrix FLOP/s over vector FLOP/s up to which power is no limit.

GeForce boards accumulate in float32 at half the rate of their chip, twice that of the vector units.  They reach their
data sheet's figure or more, since they clock above their stated boost: RTX 3090 107 %, 3090 Ti 102 %, 4090 96 to 104 %,
5090 107 to 115 % (the same measurements).
"""


def efficiency_frac(device: Device, operation_class: OperationClass) -> float:
    """Share of the roofline that operations of a class reach on ``device``, in (0, 1]."""
    stated = device.efficiency.get(operation_class)
    if stated is not None:
        return stated
    return (_CUDA if device.kind is DeviceKind.CUDA else _CPU)[operation_class]


def sustained_flop_per_s(device: Device, peak_flop_per_s: float, dtype: DType) -> float:
    """What a CUDA device sustains of ``peak_flop_per_s`` in products of ``dtype``, tiles and waves apart.

    The device's stated efficiency of matrix products, else what power and libraries allow; never less for a higher
    peak.  Products of float32 run on the vector units.
    """
    stated = device.efficiency.get(OperationClass.MATMUL)
    if stated is not None:
        return stated * peak_flop_per_s
    if dtype is DType.FLOAT32:
        return _float32_frac(device) * peak_flop_per_s
    limited = clock_frac(device)
    if device.sustained_frac is not None:
        return limited * device.sustained_frac * peak_flop_per_s
    unlimited = min(peak_flop_per_s, UNLIMITED_MATRIX_RATE * device.vector_flop_per_s)
    return limited * max(POWER_LIMITED_FRAC * peak_flop_per_s, unlimited)


def tensor_float_flop_per_s(device: Device) -> float | None:
    """Peak of float32 convolutions and recurrent layers in TF32; None where a device has none.

    PyTorch lets cuDNN round float32 to TF32 by itself (``torch.backends.cudnn.allow_tf32``), unlike matrix products.
    Its rate is half that of 16 bit (data sheets: A100 156 of 312, H100 494 of 989, RTX 4090 82.6 of 165.2 TFLOP/s).
    """
    generation = generation_of(device)
    if device.kind is not DeviceKind.CUDA or generation in (Generation.CDNA2, Generation.CDNA3):
        return None
    peak = device.peak_flop_per_s.get(DType.BFLOAT16)
    return None if peak is None else TENSOR_FLOAT_RATE * peak


def clock_frac(device: Device) -> float:
    """Clocks under a power limit over those without, where products or attention keep the board at its limit."""
    if device.power_limit_w is None or device.power_w is None:
        return 1.0
    exponent = LIMITED_WARPGROUPS_EXPONENT if multiplies_by_warpgroups(device) else LIMITED_EXPONENT
    return float((device.power_limit_w / device.power_w) ** exponent)


def _float32_frac(device: Device) -> float:
    """Share of the float32 peak that products reach."""
    if has_half_the_lanes(device):
        return FLOAT32_OF_HALF_FRAC
    return FLOAT32_OF_HOPPER_FRAC if multiplies_by_warpgroups(device) else FLOAT32_FRAC


def has_half_the_lanes(device: Device) -> bool:
    """Whether a multiprocessor has 64 float32 units in place of 128: NVIDIA's Volta, Turing and GA100.

    With 128 they would clock no faster than ``HALVED_CLOCK_HZ / 2``, where no clock is stated.
    """
    if device.num_multiprocessors is None:
        return False
    if device.clock_hz is not None:
        return device.lanes_clock_hz <= 0.51 * device.clock_hz  # data sheets round both
    return device.lanes_clock_hz <= HALVED_CLOCK_HZ / 2


def power_slowdown(device: Device, products_frac: float) -> float:
    """How much longer products take on ``device`` where they make up ``products_frac`` of what it works on.

    Between the two measured shares, the rate falls in proportion.  1 where the device states an efficiency of its own.
    """
    is_stated = OperationClass.MATMUL in device.efficiency or device.sustained_frac is not None
    if is_stated or not multiplies_by_warpgroups(device):
        return 1.0
    beyond = max(0.0, products_frac - MIXED_SHARE) / (1 - MIXED_SHARE)
    return POWER_LIMITED_FRAC / (POWER_LIMITED_FRAC + beyond * (PRODUCTS_ALONE_FRAC - POWER_LIMITED_FRAC))


def multiplies_by_warpgroups(device: Device) -> bool:
    """Whether ``device`` is of Hopper's generation or later, whose matrix units outrun the instructions before."""
    peak = device.peak_flop_per_s.get(DType.BFLOAT16, 0.0)
    return DType.FLOAT8_E4M3FN in device.peak_flop_per_s and peak > WARPGROUP_RATE * device.vector_flop_per_s
