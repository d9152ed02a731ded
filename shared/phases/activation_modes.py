"""Activation modes: what becomes of what a block saves, which blocks are in which mode, what SELECTIVE keeps.

[Note: Kept results]
Products with a weight (``mm``, ``addmm``), attention, and reductions among ranks are kept; norms, activations, casts,
rotary positions and sums run again.  Products of two activations (``bmm``) are no part of it: where attention falls
apart into them, their results grow with the square of the sequence.  Nor is a result that the model changes in place
later: it could not be handed over as it was, and is computed again.
Source: the list that torchtitan keeps (``_op_sac_save_list`` in ``models/llama3/infra/parallelize.py``), and
``addmm``, a product whose weight has a bias.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Final

from ..basics.errors import PlanError

PRODUCT_STRIDES: Final = (1, 2)
"""Of the products of a forward, the first of every so many is kept: all, or every second one, as torchtitan does."""
ATTENTION: Final = ("scaled_dot_product", "_flash_attention", "_efficient_attention", "flash_attn", "_varlen_attn")
"""What names of attention's kernels contain."""
MEMORY_EFFICIENT: Final = "_scaled_dot_product_efficient_attention"
"""What attention is called in traces of fake tensors where CUDA runs the memory-efficient kernel and the CPU none."""
FUSED_DROPOUT: Final = frozenset({"_scaled_dot_product_flash_attention", MEMORY_EFFICIENT})
"""What attention is called in families where it may draw dropout (``runtime/fakes/kernels.py``)."""
_PRODUCTS: Final = frozenset({"mm", "addmm"})
_REDUCTIONS: Final = frozenset({"reduce_scatter_tensor"})


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
    them from there and runs the others alone ([Note: Kept results])."""

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


class KeptResults:
    """Says of the operations of one forward, one after the other, whether their results are kept."""

    def __init__(self, product_stride: int, changed: Collection[int] = ()) -> None:
        """``changed``: of the results that would be kept, the numbers of those that are changed in place later."""
        self._stride = product_stride
        self._changed = changed
        self._num_products = 0
        self.num_chosen = 0
        """Results so far that would be kept, were none changed."""

    def keeps(self, name: str, *, draws: bool = False) -> bool:
        """Of the next operation, by its name without overload.

        One that ``draws`` random numbers is never kept: did it not run again, all later ones of the recomputation would
        draw the numbers that it drew.
        """
        if not self._chooses(name, draws=draws):
            return False
        self.num_chosen += 1
        return self.num_chosen - 1 not in self._changed

    def _chooses(self, name: str, *, draws: bool) -> bool:
        if name in _PRODUCTS:
            self._num_products += 1
            return (self._num_products - 1) % self._stride == 0
        is_attention = any(mark in name for mark in ATTENTION)
        return (is_attention and not draws) or name in _REDUCTIONS


def why_no_product_stride(product_stride: int, known: tuple[int, ...], model_name: str) -> str | None:
    """Why blocks of ``model_name`` cannot be in mode SELECTIVE with that stride, with what to do; None if they can."""
    if product_stride in known:
        return None
    if not known:
        return (
            f"n_selective: nobody knows which operations blocks of {model_name} may keep: they do other things when "
            f"they are recomputed, or their memory depends on values, or the workload is one of before that was kept. "
            f"Trace the model anew, or set it to 0"
        )
    strides = " and ".join(map(str, known))
    return f"product_stride: {product_stride}, but it is known for {strides}. Set it to one of these"
