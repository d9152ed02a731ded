"""The rules of full training, policy by policy: the list that a method starts from."""

from __future__ import annotations

from typing import Final

from ..schema.schedule import TaskKind
from .claim import Claim
from .collectives import check_all_reduces, check_axes, check_reduce_scatters, check_reduction_order, reductions
from .data_flow import check_data_flow
from .disk import check_disk_reads, check_disk_writes, check_shared_places, check_turns
from .residency import (
    all_gathers,
    check_all_gather_order,
    check_all_gathers,
    check_gather_window,
    check_gathers,
    check_homes,
    check_places,
    check_renewals,
    check_slots,
    check_swap_window,
    check_swaps,
)
from .rules import Rule, Rules, Stage, compare_meetings
from .sections import check_exchange_order, check_exchanges, check_program
from .updates import (
    check_accumulations,
    check_cpu_adam,
    check_device_adam,
    check_gradient_offloads,
    check_gradient_window,
    check_norm,
    check_norm_order,
)


def check_meetings(claim: Claim) -> None:
    """Ranks gather what they have in parts and add up all gradients, each once."""
    kinds = (TaskKind.ALL_GATHER, TaskKind.REDUCE_SCATTER, TaskKind.ALL_REDUCE)
    compare_meetings(claim, kinds, (*reductions(claim), *all_gathers(claim)))


FULL_TRAINING: Final = Rules(
    sections=(
        Rule(Stage.PROGRAM, check_program, (TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD)),
        Rule(Stage.RANKS, check_exchanges, (TaskKind.SEQUENCE_EXCHANGE,)),
        Rule(Stage.RANK_ORDER, check_exchange_order),
    ),
    residency=(
        Rule(Stage.CHUNKS, check_homes),
        Rule(Stage.CHUNKS, check_places),
        Rule(Stage.CHUNKS, check_shared_places),
        Rule(Stage.CHUNKS, check_gathers, (TaskKind.GATHER,)),
        Rule(Stage.CHUNKS, check_renewals),
        Rule(Stage.CHUNKS, check_disk_reads, (TaskKind.DISK_READ,)),
        Rule(Stage.ACTIVATIONS, check_swaps, (TaskKind.ACTIVATION_OFFLOAD, TaskKind.ACTIVATION_FETCH)),
        Rule(Stage.RANKS, check_meetings),
        Rule(Stage.RANKS, check_all_gathers, (TaskKind.ALL_GATHER,)),
        Rule(Stage.DATA_FLOW, check_data_flow),
        Rule(Stage.CHUNK_ORDER, check_slots),
        Rule(Stage.CHUNK_ORDER, check_turns),
        Rule(Stage.CHUNK_ORDER, check_gather_window),
        Rule(Stage.ACTIVATION_ORDER, check_swap_window),
        Rule(Stage.RANK_ORDER, check_all_gather_order),
    ),
    updates=(
        Rule(Stage.PROGRAM, check_device_adam, (TaskKind.DEVICE_ADAM,)),
        Rule(Stage.CHUNKS, check_gradient_offloads, (TaskKind.GRADIENT_OFFLOAD,)),
        Rule(Stage.CHUNKS, check_accumulations, (TaskKind.GRADIENT_ACCUMULATE,)),
        Rule(Stage.CHUNKS, check_cpu_adam, (TaskKind.CPU_ADAM,)),
        Rule(Stage.CHUNKS, check_disk_writes, (TaskKind.DISK_WRITE,)),
        Rule(Stage.CHUNKS, check_norm, (TaskKind.GRADIENT_NORM,)),
        Rule(Stage.RANKS, check_reduce_scatters, (TaskKind.REDUCE_SCATTER,)),
        Rule(Stage.RANKS, check_all_reduces, (TaskKind.ALL_REDUCE,)),
        Rule(Stage.RANKS, check_axes),
        Rule(Stage.CHUNK_ORDER, check_gradient_window),
        Rule(Stage.RANK_ORDER, check_reduction_order),
        Rule(Stage.RANK_ORDER, check_norm_order),
    ),
)
"""What every schedule of full training must be.  Each rule states itself in its docstring."""
