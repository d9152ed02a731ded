"""Machines, their parts, and the calibrations of them."""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.schema.calibration import Calibration, Contention, Factor, MeanSeconds
from protwin.shared.schema.hardware import Device, DeviceKind, Disk, Hardware, Host, Link, LinkPoint
from protwin.shared.schema.schedule import Lane, TaskKind
from protwin.shared.schema.workload import DType, OperationClass

_RATES: Final = st.floats(1e6, 1e12)
TIMES_S: Final = st.floats(0, 1e-2)
ARRIVALS_S_PER_BYTE: Final = st.floats(0, 1e-5)
"""Of random models, whose chunks have hundreds or thousands of bytes."""
READING: Final = (TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD, TaskKind.TEACHER_FORWARD)
"""Kinds that begin steps, and so are the first to read what has come for these."""
_MEMORY: Final = st.integers(2**20, 2**40)


@st.composite
def links(draw: DrawFn, name: str = "link") -> Link:
    """A link; some with a measured table of one to three copies."""
    sizes = sorted(draw(st.sets(st.integers(1, 2**24), max_size=3)))
    return Link(
        name=name,
        latency_s=draw(TIMES_S),
        bandwidth_bytes_per_s=draw(_RATES),
        table=tuple(LinkPoint(size_bytes=size, seconds=draw(st.floats(1e-7, 1))) for size in sizes),
    )


@st.composite
def hardware(draw: DrawFn) -> Hardware:
    """A small machine."""
    memory_bytes = draw(_MEMORY)
    return Hardware(
        name="random machine",
        device=Device(
            name="random device",
            kind=draw(st.sampled_from(DeviceKind)),
            memory_bytes=memory_bytes,
            reserved_bytes=draw(st.integers(0, memory_bytes // 2)),
            memory_bandwidth_bytes_per_s=draw(_RATES),
            peak_flop_per_s=draw(
                st.dictionaries(
                    st.sampled_from((DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)),
                    st.floats(1e9, 1e15),
                    min_size=1,
                )
            ),
            vector_flop_per_s=draw(st.floats(1e9, 1e14)),
            launch_overhead_s=draw(TIMES_S),
            num_multiprocessors=draw(st.none() | st.integers(1, 400)),
            efficiency=draw(st.dictionaries(st.sampled_from(OperationClass), st.floats(0.01, 1), max_size=3)),
        ),
        host=Host(
            name="random host",
            num_cores=draw(st.integers(1, 256)),
            memory_bytes=draw(_MEMORY),
            memory_bandwidth_bytes_per_s=draw(_RATES),
            adam_bytes_per_s=draw(st.none() | _RATES),
        ),
        host_to_device=draw(links("host to device")),
        device_to_host=draw(links("device to host")),
        full_duplex=draw(st.booleans()),
    )


@st.composite
def disks(draw: DrawFn) -> Disk:
    """A disk with room for everything, slower or faster than other parts."""
    return Disk(
        name="random disk",
        capacity_bytes=2**50,
        read_bytes_per_s=draw(_RATES),
        write_bytes_per_s=draw(_RATES),
        latency_s=draw(TIMES_S),
    )


@st.composite
def contentions(draw: DrawFn) -> Contention:
    """Slowdowns of two or more lanes side by side."""
    lanes = tuple(draw(st.lists(st.sampled_from(Lane), min_size=2, unique=True)))
    slowdowns = st.lists(st.floats(1, 4), min_size=len(lanes), max_size=len(lanes))
    return Contention(lanes=lanes, slowdowns=tuple(draw(slowdowns)))


@st.composite
def calibrations(draw: DrawFn) -> Calibration:
    """Factors, overheads, prices of arrivals and contention, any of them absent."""
    factors = st.builds(Factor, value=st.floats(0.1, 10), relative_std=st.floats(0, 1), num_pairs=st.integers(0, 100))
    return Calibration(
        hardware_name="random machine",
        machine="random machine, 2 cores",
        software=draw(st.dictionaries(st.sampled_from(("python", "torch")), st.just("1.0"))),
        factors=draw(st.dictionaries(st.sampled_from(TaskKind), factors)),
        overhead_s=draw(st.dictionaries(st.sampled_from(TaskKind), TIMES_S)),
        overhead_std_s=draw(st.dictionaries(st.sampled_from(TaskKind), TIMES_S)),
        arrival_s_per_byte=draw(st.dictionaries(st.sampled_from(READING), ARRIVALS_S_PER_BYTE)),
        swapping=draw(
            st.dictionaries(
                st.sampled_from((TaskKind.FORWARD, TaskKind.BACKWARD)), st.builds(MeanSeconds, seconds=TIMES_S)
            )
        ),
        contention=tuple(draw(st.lists(contentions(), max_size=4, unique_by=lambda entry: frozenset(entry.lanes)))),
        iteration_noise_frac=draw(st.floats(0, 0.5)),
        iteration_error_frac=draw(st.none() | st.floats(0, 0.5)),
        fitted_to=tuple(draw(st.lists(st.sampled_from(("gpt2", "llama")), unique=True))),
        num_runs=draw(st.integers(1, 9)),
    )
