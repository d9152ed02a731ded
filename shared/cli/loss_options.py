"""What ``--loss`` and ``--loss-tiles`` say of how the loss is made: one message where they contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..basics.errors import ProtwinError
from ..phases.tiling import LossHead
from ..schema.plan import Plan
from ..schema.workload import Workload

USUAL_CHUNKS: Final = 8
"""Chunks of a chunked loss where nobody says: those of torchtune's recipes (``num_output_chunks``)."""


def loss_tiles_of(loss: LossHead | None, loss_tiles: Sequence[int] | None) -> list[int] | None:
    """The numbers of tiles that a loss so made runs in, of those that options allow; None: whatever is sensible.

    Raises ProtwinError if the options contradict each other.
    """
    asked = list(loss_tiles or ())
    if loss is None:
        return asked or None
    if loss is LossHead.CHUNKED:
        if 1 in asked:
            raise ProtwinError(
                "--loss chunked never has whole logits, but --loss-tiles allows 1. Leave one of them out."
            )
        return asked or [USUAL_CHUNKS]
    if (chunks := max(asked, default=1)) > 1:
        raise ProtwinError(
            f"--loss {loss} has whole logits, but --loss-tiles {chunks} never has. Write --loss chunked, or leave one "
            f"of them out."
        )
    return [1]


def check_whole_loss(loss: LossHead | None) -> None:
    """Raise ProtwinError if there are to be no whole logits: what is measured has no chunks."""
    if loss is LossHead.CHUNKED:
        raise ProtwinError(
            "--loss chunked is for plans in chunks, and the plans that are measured here have none. Write --loss "
            "eager, narrow or fused, or leave it out."
        )


def check_loss_of_plan(loss: LossHead | None, plan: Plan, workload: Workload | None = None) -> None:
    """Raise ProtwinError if a plan, or its workload, has the loss made another way than the option says."""
    chunks = f"the plan has loss_tiles {plan.loss_tiles}"
    if loss is LossHead.CHUNKED and plan.loss_tiles == 1:
        raise ProtwinError(f"--loss chunked is asked for, but {chunks}. Leave --loss out, or search with it.")
    if loss not in (None, LossHead.CHUNKED) and plan.loss_tiles > 1:
        raise ProtwinError(f"--loss {loss} has whole logits, but {chunks}. Leave --loss out, or search with it.")
    made = None if workload is None else workload.loss_head
    if loss not in (None, LossHead.CHUNKED) and made not in (None, loss):
        raise ProtwinError(
            f"--loss {loss} is asked for, but the plan's workload was traced with loss {made}. Leave --loss out, or "
            f"search with it."
        )
