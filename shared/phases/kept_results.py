"""Which results a block in mode SELECTIVE keeps: those of its expensive operations.

Products with a weight (``mm``, ``addmm``), attention, and reductions among ranks are kept; norms, activations, casts,
rotary positions and sums run again.  Products of two activations (``bmm``) are no part of it: where attention falls
apart into them, their results grow with the square of the sequence.
Source: the list that torchtitan keeps (``_op_sac_save_list`` in ``models/llama3/infra/parallelize.py``), and
``addmm``, a product whose weight has a bias.
"""

from __future__ import annotations

from typing import Final

PRODUCT_STRIDES: Final = (1, 2)
"""Of the products of a forward, the first of every so many is kept: all, or every second one, as torchtitan does."""
ATTENTION: Final = ("scaled_dot_product", "_flash_attention", "_efficient_attention", "flash_attn", "_varlen_attn")
"""What names of attention's kernels contain."""
FUSED_DROPOUT: Final = "_scaled_dot_product_flash_attention"
"""What attention is called in traces of fake tensors where it draws dropout (``runtime/tracing/fake_kernels.py``)."""
_PRODUCTS: Final = frozenset({"mm", "addmm"})
_REDUCTIONS: Final = frozenset({"reduce_scatter_tensor"})


class KeptResults:
    """Says of the operations of one forward, one after the other, whether their results are kept."""

    def __init__(self, product_stride: int) -> None:
        self._stride = product_stride
        self._num_products = 0

    def keeps(self, name: str, *, draws: bool = False) -> bool:
        """Of the next operation, by its name without overload.

        One that ``draws`` random numbers is never kept: did it not run again, all later ones of the recomputation would
        draw the numbers that it drew.
        """
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
            f"n_selective: nobody knows which operations blocks of {model_name} may keep: their recomputation is not "
            f"their forward once more, or depends on values. Set it to 0"
        )
    return f"product_stride: {product_stride}, but it is known for {' and '.join(map(str, known))}"
