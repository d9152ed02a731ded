"""Activation modes: what becomes of what a block saves, and which blocks are in which mode."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from ..basics.errors import PlanError


class ActivationMode(StrEnum):
    """What becomes of a block's saved activations between its forward and its backward."""

    KEEP = "keep"
    """They stay on the device."""
    CHECKPOINT = "checkpoint"
    """Only the block's input stays; the rest is recomputed in backward."""
    SWAP = "swap"
    """What the block itself made and saved goes to the host and comes back; its input stays."""
    OFFLOAD_INPUT = "offload_input"
    """As CHECKPOINT, and what the block before handed on to it goes to the host and comes back for the recomputation.
    The first block's input comes from no block, nor does that of a decoder's first: they stay
    (``input_bytes`` in ``shared/layout/travelling_inputs.py``)."""
    SELECTIVE = "selective"
    """As CHECKPOINT, and results of expensive operations stay too: matrix products, attention.  The recomputation takes
    them from there and runs the others alone (``kept_results.py``)."""

    @property
    def is_recomputed(self) -> bool:
        """Whether the block's forward runs once more within backward."""
        return self in (ActivationMode.CHECKPOINT, ActivationMode.OFFLOAD_INPUT, ActivationMode.SELECTIVE)


def mode_counts(modes: Sequence[ActivationMode]) -> dict[str, int]:
    """The knobs of a plan that count these modes."""
    return {
        "n_swap": modes.count(ActivationMode.SWAP),
        "n_checkpoint": sum(mode.is_recomputed for mode in modes),
        "n_offload_input": modes.count(ActivationMode.OFFLOAD_INPUT),
        "n_selective": modes.count(ActivationMode.SELECTIVE),
    }


def place_activation_modes(
    num_blocks: int, *, n_checkpoint: int, n_swap: int = 0, n_offload_input: int = 0, n_selective: int = 0
) -> tuple[ActivationMode, ...]:
    """The first ``n_swap`` blocks swap: their way back is the longest, so that the copies have most time.

    Among the other n, checkpointed blocks are spread evenly and centred: ``((2k + 1) * n) // (2 * n_checkpoint)``.
    Source of the rules: ProTrain (arXiv 2406.08334), section on interleaved block management.
    Of these, the first ``n_offload_input`` have their input offloaded: the earlier a block, the later its backward, and
    the longer the room of its input is free and the copies have time.  The first block of all comes last: its input
    would not travel.  The last ``n_selective`` of the others keep results: the later a block, the sooner its backward.
    Raises PlanError if the first two exceed ``num_blocks``, or the other two together the second.
    """
    if n_checkpoint + n_swap > num_blocks:
        swapped = f" and n_swap is {n_swap}" if n_swap else ""
        raise PlanError(f"n_checkpoint is {n_checkpoint}{swapped} but the workload has {num_blocks} blocks. Lower it.")
    others = num_blocks - n_swap
    modes = [ActivationMode.SWAP] * n_swap + [ActivationMode.KEEP] * others
    for k in range(n_checkpoint):
        modes[n_swap + ((2 * k + 1) * others) // (2 * n_checkpoint)] = ActivationMode.CHECKPOINT
    if n_offload_input > n_checkpoint:
        raise PlanError(f"n_offload_input is {n_offload_input} but n_checkpoint is {n_checkpoint}. Lower it.")
    if n_selective > n_checkpoint - n_offload_input:
        of_these = f", of which {n_offload_input} offload their input" if n_offload_input else ""
        raise PlanError(f"n_selective is {n_selective} but n_checkpoint is {n_checkpoint}{of_these}. Lower it.")
    recomputed = [block for block, mode in enumerate(modes) if mode is ActivationMode.CHECKPOINT]
    for block in sorted(recomputed, key=lambda block: block or num_blocks)[:n_offload_input]:
        modes[block] = ActivationMode.OFFLOAD_INPUT
    others_recomputed = [block for block in recomputed if modes[block] is ActivationMode.CHECKPOINT]
    for block in others_recomputed[len(others_recomputed) - n_selective :]:
        modes[block] = ActivationMode.SELECTIVE
    return tuple(modes)
