"""A machine that leaves no field at its default, and the names of all fields."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import protwin.shared.schema.hardware
from protwin.shared.schema.hardware import (
    AttentionKernel,
    Collective,
    Device,
    DeviceKind,
    Disk,
    Hardware,
    Host,
    Link,
    LinkPoint,
    MeasuredCollective,
    Network,
    Node,
    Topology,
)
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.workload import DType, OperationClass


def full_hardware() -> Hardware:
    """A machine that leaves no field at its default."""
    table = (LinkPoint(size_bytes=1024, seconds=1e-5), LinkPoint(size_bytes=2**20, seconds=1e-4))
    return Hardware(
        name='my "machine" \\ µ\n[device]',
        device=Device(
            name="d",
            kind=DeviceKind.CPU,
            memory_bytes=2**61 + 1,
            reserved_bytes=12345,
            memory_bandwidth_bytes_per_s=0.1 + 0.2,
            peak_flop_per_s={DType.FLOAT32: 1e12, DType.FLOAT8_E5M2: 1 / 3},
            vector_flop_per_s=1e300,
            launch_overhead_s=5e-324,
            power_w=312.5,
            power_limit_w=250.0,
            num_multiprocessors=7,
            attention_kernel=AttentionKernel.TRITON,
            clock_hz=1.41e9,
            sustained_frac=0.7,
            efficiency={OperationClass.MATMUL: 0.7, OperationClass.EMBEDDING: 1.0},
            optimizer_s_per_scalar={Optimizer.ADAMW_8BIT: 3e-12},
            source="a = 1 # no comment",
        ),
        host=Host(
            name="h",
            num_cores=3,
            num_memory_channels=5,
            memory_bytes=2**40,
            memory_bandwidth_bytes_per_s=2.0,
            adam_bytes_per_s=7e9,
            optimizer_s_per_scalar={Optimizer.LION: 2e-9, Optimizer.ADAMW_8BIT: 1 / 3},
            matrix_flop_per_s=3e11,
            source="'''\"\"\"",
        ),
        host_to_device=Link(name="x", latency_s=1e-6, bandwidth_bytes_per_s=1e9, table=table, source="s"),
        device_to_host=Link(name="y", latency_s=2e-6, bandwidth_bytes_per_s=2e9, table=table[:1], source="t"),
        full_duplex=False,
        disk=Disk(
            name="k",
            capacity_bytes=2**42 + 1,
            read_bytes_per_s=7e9,
            write_bytes_per_s=5e9,
            latency_s=7e-6,
            source="q",
        ),
        node=Node(
            name="n",
            num_devices=4,
            sockets=(3, 1),
            pcie_roots=(1, 2, 1),
            root_bandwidth_bytes_per_s=1e9,
            topology=Topology.SWITCH,
            device_link=Link(name="z", latency_s=3e-6, bandwidth_bytes_per_s=3e9, table=table, source="u"),
            host_path=Link(name="p", latency_s=4e-6, bandwidth_bytes_per_s=4e9, table=table, source="v"),
            through_host_memory=True,
            reduces_in_switch=True,
            source="w",
        ),
        network=Network(
            name="net",
            num_nodes=3,
            adapters_per_node=2,
            link=Link(name="a", latency_s=5e-6, bandwidth_bytes_per_s=5e9, table=table, source="x"),
            source="y",
        ),
        collectives=(
            MeasuredCollective(
                collective=Collective.ALL_REDUCE,
                num_ranks=12,
                table=table,
                beside_compute=tuple(point.model_copy(update={"seconds": 0.1 + 0.2}) for point in table),
                compute_slowdown=4 / 3,
                source="c",
            ),
            MeasuredCollective(collective=Collective.ALL_GATHER, num_ranks=2, table=table[:1]),
        ),
        price_usd_per_hour=1 / 3,
        overrides=("device.memory_bytes=40GiB", 'a"b=c'),
    )


def field_paths(model: BaseModel, path: str = "") -> Iterator[str]:
    """The dotted name of every field, and of the fields within it."""
    for field in type(model).model_fields:
        yield f"{path}{field}"
        value = getattr(model, field)
        if isinstance(value, BaseModel):
            yield from field_paths(value, f"{path}{field}.")


FIELDS = tuple(field_paths(full_hardware()))


def read_back(text: str, folder: Path) -> Hardware:
    path = folder / "machine.toml"
    path.write_text(text, encoding="utf-8")
    return Hardware.load(path)


def whole_file(name: str) -> dict[str, Any]:
    """A file in the folder of machines, parsed in one go."""
    folder = Path(protwin.shared.schema.hardware.__file__).parents[1] / "catalogue" / "data" / "machines"
    return tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
