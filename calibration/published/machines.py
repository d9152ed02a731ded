"""The machines of published runs, each as the range that is left open: favourable, likely and unfavourable.

[Note: Ranks on one host]
Four ranks of one machine copy at the same time, and all copies pass the host's memory: a rank's link carries its share
of the host's memory bandwidth at most.  GeForce boards have no access to each other's memory over PCIe, so a hop of a
ring goes through the host's memory too: the sender writes it there, the receiver reads it.  A ring's all-gather of S
bytes over N ranks brings (N - 1) / N of S to each rank in N - 1 hops, its all-reduce twice that
(``sim/costs/collectives.py``).  A sharded rank fetches its own Nth from the host before.

Plans of several ranks are simulated as such.  The search knows one rank alone: it is asked about a rank whose links are
as slow as those of one of four, and the plan that it finds is then simulated on four.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ...shared.catalogue.machines import machine
from ...shared.catalogue.parts import host_part, link_part, node_part
from ...shared.schema.hardware import Device, Hardware, Link
from ...sim.costs.collectives import Algorithm, Collective, Fabric, Shape, collective_time
from ...sim.costs.copies import copy_time_s
from ...sim.costs.fabrics import CALL_OVERHEAD_S

HOP_LATENCY_S: Final = 10e-6
"""A hop's copies by either side and the flag between them: two copies of 5 to 7 µs (catalogue, links)."""
_NEWER_CORE: Final = 1.15 * 1.19
"""Work per clock of a desktop's core of the generation that launches were measured on (Zen 3) over that of a server's
core of the generation of PCIe 3.0 (Zen, or Broadwell, which does as much): AMD states 15 % for Zen 2 and 19 % for Zen
3, each over the one before."""
OLDER_DISPATCH: Final = 4.9 / 3.6 * _NEWER_CORE
"""Seconds that a server of PCIe 3.0 takes to dispatch an operation over those of a desktop, each at its highest clock:
3.6 GHz (Xeon E5-2698 v4, Intel ARK) against 4.9 GHz (Ryzen 9 5950X, AMD product page).  Dispatch is one thread's work.
"""
SLOW_DISPATCH: Final = 4.9 / 2.2 * _NEWER_CORE
"""The same at that server's base clock."""
BASE_CLOCK_FRAC: Final = {"rtx-3090": 1.395 / 1.695, "rtx-3090-ti": 1.56 / 1.86}
"""Base over boost clock (NVIDIA's product pages): where a board runs that its power limit holds back."""


@dataclass(frozen=True, slots=True)
class Range:
    """Three readings of what a run leaves open; times ascend from the first to the last."""

    favourable: Hardware
    likely: Hardware
    unfavourable: Hardware

    @property
    def all(self) -> tuple[Hardware, Hardware, Hardware]:
        """The three, favourable first."""
        return (self.favourable, self.likely, self.unfavourable)


def four_rank_machine() -> Range:
    """R1 and the data-parallel part of R2: RTX 3090 on PCIe 3.0 x16.

    The host is unknown.  Four slots of 16 lanes of PCIe 3.0 are those of a server of that generation, of which the
    catalogue has one, with four channels of memory; that its cores are slower than a desktop's belongs to it.
    Favourable: the same author's later workstation (Threadripper PRO on WRX90), eight channels of DDR5.  Unfavourable:
    two channels of DDR4, cores and boards at their base clocks.
    """
    return Range(
        favourable=_with_four(_machine("rtx-3090", "workstation-96", "pcie3-x16")),
        likely=_with_four(_machine("rtx-3090", "xeon-20", "pcie3-x16", dispatch=OLDER_DISPATCH)),
        unfavourable=_with_four(
            _machine("rtx-3090", "desktop-16", "pcie3-x16", at_base_clock=True, dispatch=SLOW_DISPATCH)
        ),
    )


def _with_four(hardware: Hardware) -> Hardware:
    """Four boards in slots of their own that reach each other through the host's memory."""
    return hardware.model_copy(update={"node": node_part("pcie4-4")})


def one_rank_machine() -> Range:
    """The first part of R2: an RTX 3090 or 3090 Ti, in a slot of PCIe 3 or 4; its time rules out the former."""
    return Range(
        favourable=_machine("rtx-3090-ti", "epyc-64", "pcie4-x16"),
        likely=_machine("rtx-3090", "desktop-16", "pcie4-x16"),
        unfavourable=_machine("rtx-3090", "xeon-20", "pcie3-x16", at_base_clock=True, dispatch=SLOW_DISPATCH),
    )


def _machine(device: str, host: str, link: str, *, at_base_clock: bool = False, dispatch: float = 1.0) -> Hardware:
    found, links = machine(device), link_part(link)
    frac = BASE_CLOCK_FRAC[device] if at_base_clock else 1.0
    return found.model_copy(
        update={
            "device": slowed(found.device, frac, dispatch),
            "host": host_part(host),
            "host_to_device": links.host_to_device,
            "device_to_host": links.device_to_host,
            "full_duplex": links.full_duplex,
        }
    )


def slowed(device: Device, clock_frac: float, dispatch: float) -> Device:
    """``device`` at this share of its clocks, on a host that takes ``dispatch`` times as long for every operation."""
    return device.model_copy(
        update={
            "peak_flop_per_s": {dtype: peak * clock_frac for dtype, peak in device.peak_flop_per_s.items()},
            "vector_flop_per_s": device.vector_flop_per_s * clock_frac,
            "launch_overhead_s": device.launch_overhead_s * dispatch,
        }
    )


def replicated_rank(hardware: Hardware, num_ranks: int) -> Hardware:
    """One of ``num_ranks`` ranks that copy at the same time; see [Note: Ranks on one host]."""
    share = hardware.host.memory_bandwidth_bytes_per_s / num_ranks
    return _with_links(
        hardware,
        _limited(hardware.host_to_device, share),
        _limited(hardware.device_to_host, share),
    )


def sharded_rank(hardware: Hardware, num_ranks: int) -> Hardware:
    """One of ``num_ranks`` ranks that each fetch their share of a chunk and gather the rest from each other.

    The two follow each other on the same link, and are modelled as one slower link from the host.
    """
    rank = replicated_rank(hardware, num_ranks)
    hop = hop_bytes_per_s(hardware, num_ranks)
    seconds_per_byte = 1 / (num_ranks * rank.host_to_device.bandwidth_bytes_per_s) + (num_ranks - 1) / num_ranks / hop
    gather = rank.host_to_device.model_copy(
        update={
            "bandwidth_bytes_per_s": 1 / seconds_per_byte,
            "latency_s": rank.host_to_device.latency_s + (num_ranks - 1) * HOP_LATENCY_S,
        }
    )
    return _with_links(rank, gather, rank.device_to_host)


def all_reduce_s(size_bytes: int, hardware: Hardware, num_ranks: int) -> float:
    """Seconds of a ring's all-reduce over ``num_ranks`` ranks on one host; see [Note: Ranks on one host]."""
    fabric = Fabric(num_ranks, HOP_LATENCY_S, hop_bytes_per_s(hardware, num_ranks), shape=Shape.RING)
    return collective_time(Collective.ALL_REDUCE, size_bytes, fabric, [Algorithm.RING]).seconds


def small_all_reduces_s(sizes_bytes: Iterable[int], hardware: Hardware, num_ranks: int) -> float:
    """Seconds of as many all-reduces, one after another."""
    return sum(CALL_OVERHEAD_S + all_reduce_s(size_bytes, hardware, num_ranks) for size_bytes in sizes_bytes)


def sharded_reduction_s(size_bytes: int, hardware: Hardware, num_ranks: int) -> float:
    """Seconds until each of ``num_ranks`` ranks has its share of a chunk's reduced gradients on the host.

    A ring's reduce-scatter, then the share's copy.
    """
    fabric = Fabric(num_ranks, HOP_LATENCY_S, hop_bytes_per_s(hardware, num_ranks), shape=Shape.RING)
    scattering = collective_time(Collective.REDUCE_SCATTER, size_bytes, fabric, [Algorithm.RING])
    share = copy_time_s(size_bytes // num_ranks, replicated_rank(hardware, num_ranks).device_to_host)
    return CALL_OVERHEAD_S + scattering.seconds + share


def hop_bytes_per_s(hardware: Hardware, num_ranks: int) -> float:
    """Rate of a hop while all ranks have one under way: each byte is written to the host's memory and read again."""
    return min(
        hardware.host_to_device.bandwidth_bytes_per_s,
        hardware.device_to_host.bandwidth_bytes_per_s,
        hardware.host.memory_bandwidth_bytes_per_s / (2 * num_ranks),
    )


def _limited(link: Link, bytes_per_s: float) -> Link:
    return link.model_copy(update={"bandwidth_bytes_per_s": min(link.bandwidth_bytes_per_s, bytes_per_s)})


def _with_links(hardware: Hardware, host_to_device: Link, device_to_host: Link) -> Hardware:
    return hardware.model_copy(update={"host_to_device": host_to_device, "device_to_host": device_to_host})
