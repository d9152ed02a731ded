"""Machines of the catalogue with other numbers of nodes."""

from __future__ import annotations

from protwin.shared.catalogue.machines import machine, override_hardware
from protwin.shared.schema.hardware import Hardware


def with_nodes(name: str, num_nodes: int, **changes: str) -> Hardware:
    wanted = {"network.num_nodes": str(num_nodes)} | {key.replace("__", "."): value for key, value in changes.items()}
    return override_hardware(machine(name), wanted)
