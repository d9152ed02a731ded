"""Device memory that no schedule allocates: what drivers and libraries take, as constants with their sources.

[Note: What is counted where]
``Device.reserved_bytes`` of a machine keeps memory from training: what the driver keeps, the context of the process,
and ``ROUNDING_ALLOWANCE_BYTES`` for workspaces and the allocator's rounding (header of the catalogue of devices).
Workspaces and rounding are also what the model of the allocator computes.  So that nothing counts twice, only
``outside_allocator_bytes`` is what the allocator cannot have, and workspaces are part of what it reserves.
"""

from __future__ import annotations

from typing import Final

from ...shared.catalogue.rank_share import machine_of_rank
from ...shared.schema.hardware import Device, DeviceKind, Hardware
from ..operations.generations import Generation, generation_of

_KIB: Final = 2**10
_MIB: Final = 2**20

ROUNDING_ALLOWANCE_BYTES: Final = 256 * _MIB
"""Part of every ``reserved_bytes`` of the catalogue, for workspaces and rounding: see its header."""


CONTEXT_BYTES: Final[dict[Generation | None, int]] = {
    Generation.AMPERE: 256 * _MIB,
    Generation.ADA: 426 * _MIB,
    None: 616 * _MIB,
}
"""Device memory of a process that has only created its CUDA context, kernels loaded as they are needed.

256 MiB on an RTX 3090 with torch 2.7 (github.com/invoke-ai/InvokeAI issue 9413); 426 MiB on an RTX 6000 Ada with torch
2.10 (github.com/unslothai/unsloth-zoo pull request 1053); for every other generation the largest figure found, 616 MiB
(github.com/LMCache/LMCache issue 4019).  Before CUDA 11.7 it was more than 1 GiB (github.com/pytorch/pytorch issue
107667).
"""


def context_bytes(device: Device) -> int:
    """What a CUDA context takes of the device, where no ``reserved_bytes`` says it.  Bytes."""
    return CONTEXT_BYTES.get(generation_of(device), CONTEXT_BYTES[None])


def outside_allocator_bytes(device: Device) -> int:
    """Device memory that PyTorch's allocator cannot have; see [Note: What is counted where].

    ``reserved_bytes`` less the allowance for what the allocator's model computes; the context alone if the machine says
    nothing.  Never the whole device.
    """
    if device.reserved_bytes == 0:
        return min(context_bytes(device), device.memory_bytes - 1)
    return max(0, device.reserved_bytes - ROUNDING_ALLOWANCE_BYTES)


# -- matrix products -------------------------------------------------------------------------------------------------

NUM_HANDLES: Final = 2
"""A thread has a cuBLAS handle of its own: the thread that runs forward, and autograd's, which runs backward."""
CUBLAS_BYTES: Final = 2 * 4096 * _KIB + 8 * 16 * _KIB
"""PyTorch's default ``CUBLAS_WORKSPACE_CONFIG``, :4096:2:16:8."""
CUBLAS_HOPPER_BYTES: Final = 8 * 4096 * _KIB
"""Its default for compute capability 9.0."""
CUBLASLT_BYTES: Final = 1024 * _KIB
"""Its default ``CUBLASLT_WORKSPACE_SIZE``, beside the former unless they are unified."""
ROCBLAS_BYTES: Final = 32 * 1024 * _KIB
ROCBLAS_CDNA3_BYTES: Final = 128 * 1024 * _KIB
HIPBLASLT_BYTES: Final = 76 * 1024 * _KIB


def matrix_workspaces(device: Device) -> tuple[int, ...]:
    """The workspaces of matrix products that PyTorch allocates on the stream of compute, one after another.  Bytes.

    One per handle and library: cuBLAS for every product, cuBLASLt for those with a bias.  They come from the caching
    allocator and stay.  Attention and normalization in transformers use kernels that need none that stays; cuDNN has
    no part in them.  A device of unknown generation gets those of NVIDIA devices other than Hopper.

    Source: PyTorch, ``aten/src/ATen/cuda/CublasHandlePool.cpp`` (parseChosenWorkspaceSize,
    parseCUDABlasLtWorkspaceSize).
    """
    generation = generation_of(device)
    if generation is Generation.CDNA3:
        one = (ROCBLAS_CDNA3_BYTES, HIPBLASLT_BYTES)
    elif generation is Generation.CDNA2:
        one = (ROCBLAS_BYTES, HIPBLASLT_BYTES)
    elif generation is Generation.HOPPER:
        one = (CUBLAS_HOPPER_BYTES, CUBLASLT_BYTES)
    else:
        one = (CUBLAS_BYTES, CUBLASLT_BYTES)
    return one * NUM_HANDLES


# -- collectives -----------------------------------------------------------------------------------------------------

_NCCL_STEPS: Final = 8
NCCL_SIMPLE_BYTES: Final = 4 * _MIB
"""Buffer of the protocol Simple (DEFAULT_BUFFSIZE)."""
NCCL_LL_BYTES: Final = 8 * 512 * _NCCL_STEPS * 16
"""Of LL: lines of a thread, threads, steps, bytes of a line (DEFAULT_LL_BUFFSIZE)."""
NCCL_LL128_BYTES: Final = 120 * 640 * _NCCL_STEPS * 8
"""Of LL128: elements of a thread, threads, steps, bytes of an element (DEFAULT_LL128_BUFFSIZE)."""
_NCCL_PAGE_BYTES: Final = 2 * _MIB


NCCL_CHANNELS: Final = {"own links": 32, "peers": 4, "host": 2}
"""Channels of a communicator over links of the devices' own (the most that NCCL takes for them), over PCIe between
devices that write into each other (4 on eight RTX 5090, github.com/tinygrad/open-gpu-kernel-modules issue 29), and
through the host's memory (2 on eight RTX 4090, github.com/NVIDIA/nccl-tests issue 307)."""


def collective_bytes(hardware: Hardware, num_ranks: int, shard_ranks: int | None = None) -> int:
    """Device memory of what carries collectives between ``num_ranks`` devices of a machine, on each.  Bytes.

    One communicator, outside PyTorch's allocator; nothing for one rank, or where the CPU is the device.  Ranks in shard
    groups have two more, one for each axis, which count alike: nobody has published what one over a network alone
    takes.
    """
    if num_ranks == 1 or hardware.device.kind is DeviceKind.CPU:
        return 0
    node, num_communicators = hardware.node, 1 if shard_ranks is None else 3
    if node is None or node.device_link is not None:
        return num_communicators * nccl_bytes(num_channels=NCCL_CHANNELS["own links"])
    channels = NCCL_CHANNELS["host" if node.through_host_memory else "peers"]
    return num_communicators * nccl_bytes(num_channels=channels)


def nccl_bytes(*, num_channels: int, num_connections: int = 2) -> int:
    """Device memory of one NCCL communicator's buffers, outside PyTorch's allocator.  Bytes.

    Per channel and connection (a ring has two, to send and to receive) one buffer of every protocol, together rounded
    up to a page of 2 MiB.  32 channels of a ring: 640 MiB.

    Source: NCCL, ``src/init.cc`` (computeBuffSizes) and ``src/include/device.h``; buffers of 10 485 760 bytes were seen
    on 8 H100 (github.com/NVIDIA/nccl issue 1685).
    """
    one = NCCL_SIMPLE_BYTES + NCCL_LL_BYTES + NCCL_LL128_BYTES
    return num_channels * num_connections * (-(-one // _NCCL_PAGE_BYTES) * _NCCL_PAGE_BYTES)


def more_collective_bytes(hardware: Hardware, num_ranks: int, shard_ranks: int | None) -> int:
    """Device memory that collectives of shard groups take beyond those of all ranks.  Bytes."""
    return collective_bytes(hardware, num_ranks, shard_ranks) - collective_bytes(hardware, num_ranks)


def rank_device_bytes(hardware: Hardware, num_ranks: int, shard_ranks: int | None = None) -> int:
    """Device memory that each rank has for training, less what carries collectives."""
    return max(1, hardware.device.usable_bytes - collective_bytes(hardware, num_ranks, shard_ranks))


def rank_host_bytes(hardware: Hardware, num_ranks: int) -> int:
    """Host memory that each rank has: its share of a socket's.  Raises HardwareError as ``machine_of_rank`` does."""
    return hardware.host.memory_bytes if num_ranks == 1 else machine_of_rank(hardware, num_ranks).host.memory_bytes
