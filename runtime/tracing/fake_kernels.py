"""Kernels that fake tensors lack: dropout, by itself and in attention, as a GPU runs it, grouped products, and CTC.

[Note: Dropout]
On the CPU dropout falls apart: noise is drawn, divided and multiplied by, and autograd keeps it, in the type of what is
dropped.  On CUDA one kernel does it all (``native_dropout``), and autograd keeps its mask, one byte for each element.
Kept there as pieces: dropout in place, of whole features and of SELU's, and of a rate of 1; a rate of 0 is none at all.
Source: ``is_fused_kernel_acceptable`` in aten/src/ATen/native/Dropout.cpp, derivatives.yaml of torchgen.  Before torch
1.12 the kernel was ``_fused_dropout``, with the same mask.

[Note: Dropout in attention]
torch's fused attention on the CPU knows no dropout: there scaled_dot_product_attention falls apart into products, a
softmax and a dropout, and autograd saves the probabilities, the mask and what is left of them, for every head a number
of elements that grows with the square of the sequence.  On CUDA the fused kernels draw the dropout themselves, form it
again in backward from the state of the generator, and save none of it.  Fake tensors lie on the CPU, so a model that
is to train on a GPU would be traced as it never runs.  Meanwhile such calls become FlashAttention-2.  CUDA takes the
memory-efficient kernel for float32 and for heads wider than 256; it saves the same, but for sums of rows that it pads
to a multiple of 32, which is no polynomial of the length.  Groups of heads that share keys are unknown to it, and fall
apart on CUDA too.  With a mask (T5's bias of positions is one) calls are left as the CPU has them, in pieces.
Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.

[Note: Grouped products]
Mixtures of experts run all experts at once as one grouped matrix product.  torch knows its result for fake tensors in
bfloat16 alone, though it computes it in every type.

[Note: Transcripts]
The size of what the CTC loss keeps for backward follows from the lengths of the targets, so torch refuses it for fake
tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ..devices.time_limit import check_time_before

_ATTENTION: Final = "scaled_dot_product_attention"
_DROPOUT: Final = "dropout"
_FLASH_DTYPES: Final = (torch.float16, torch.bfloat16)
_FLASH_MAX_WIDTH: Final = 256
_WIDTH_STEP: Final = 8
"""FlashAttention-2 takes heads whose width is a multiple of this; others are padded."""


@contextmanager
def fused_dropout() -> Iterator[None]:
    """Let dropout be what it is on CUDA; see [Note: Dropout] and [Note: Dropout in attention].

    Attention without dropout is left to the CPU's fused kernel, which saves the same.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    # Below autocast, and above what autograd sees.  Recomputation within backward meets it as the first forward does.
    library.impl(_ATTENTION, _attention, "AutogradCPU")  # type: ignore[no-untyped-call]
    library.impl(_DROPOUT, _dropout, "AutogradCPU")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    is_fused = isinstance(input, FakeTensor) and train and 0 < p < 1 and input.numel() > 0
    if is_fused:
        dropped: torch.Tensor = torch.ops.aten.native_dropout(input, p, train)[0]
        return dropped
    # Not ``decompose()``: the decomposition in Python fuses a rate of 1, and clones where nothing is dropped.
    in_pieces: torch.Tensor = torch.ops.aten.dropout.default._op_dk(
        torch._C.DispatchKey.CompositeImplicitAutograd, input, p, train
    )
    return in_pieces


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    width = query.shape[-1]
    is_flash = query.dtype in _FLASH_DTYPES and width <= _FLASH_MAX_WIDTH
    has_groups = enable_gqa and query.shape[-3] != key.shape[-3]
    is_other = not isinstance(query, FakeTensor) or query.dim() != 4  # another thread's, or of no kernel's form
    if dropout_p == 0 or attn_mask is not None or is_other or (has_groups and not is_flash):
        plain: torch.Tensor = torch.ops.aten.scaled_dot_product_attention.default.decompose(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return plain
    if is_flash:
        query, key, value = (_padded(tensor) for tensor in (query, key, value))
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, scale=scale if scale is not None else float(width) ** -0.5
    )[0]
    return result if result.shape[-1] == width else result[..., :width]


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[-1] % _WIDTH_STEP
    return functional.pad(tensor, (0, missing)) if missing else tensor


class FakeGroupedProducts(TorchDispatchMode):
    """Gives grouped products of any type a result of the right shape; enter it within the fake mode.

    See [Note: Grouped products].
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer grouped products and CTC; hand everything else on, as long as there is time (``time_limit.py``)."""
        check_time_before(func)
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and not args[0].fake_mode.in_kernel_invocation:
            # Most of what is asked while fake tensors run: the answer of their own mode, without the way there.
            return args[0].fake_device
        if func in _TRANSCRIPT_LOSSES and isinstance(args[0], FakeTensor):
            return _transcript_loss(*args[:4])
        if func in _TRANSCRIPT_GRADIENTS and isinstance(args[0], FakeTensor):
            return torch.empty_like(args[1])
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype is torch.bfloat16:
            return func(*args, **kwargs)
        first, second = args[0], args[1]
        offsets = args[2] if len(args) > 2 else kwargs.get("offs")
        return first.new_empty(_grouped_shape(first, second, offsets), dtype=kwargs.get("out_dtype") or first.dtype)


_TRANSCRIPT_LOSSES: Final = (torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor)
_TRANSCRIPT_GRADIENTS: Final = (torch.ops.aten._ctc_loss_backward.default, torch.ops.aten._ctc_loss_backward.Tensor)


def _transcript_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses, and the probabilities of all prefixes that backward reads, (samples, frames, 2 * longest + 1).

    Targets of all samples in one row are taken to be equally long where their lengths are not known.
    """
    num_frames, num_samples = log_probs.shape[0], log_probs.shape[1]
    lengths = getattr(target_lengths, "constant", None)
    with unset_fake_temporarily():
        lengths = lengths.tolist() if lengths is not None else None
    if isinstance(target_lengths, list | tuple) or lengths is not None:
        longest = max((int(n) for n in (target_lengths if lengths is None else lengths)), default=0)
    else:
        longest = targets.shape[-1] if targets.dim() > 1 else -(-targets.numel() // num_samples)
    return log_probs.new_empty(num_samples), log_probs.new_empty(num_samples, num_frames, 2 * longest + 1)


def _grouped_shape(first: torch.Tensor, second: torch.Tensor, offsets: torch.Tensor | None) -> tuple[int, ...]:
    """Groups are the leading dim of three-dim factors; with two two-dim ones, stretches of the dim they share."""
    rows, columns = first.shape[-2], second.shape[-1]
    if first.dim() == second.dim() == 3:
        return (first.shape[0], rows, columns)
    if first.dim() == second.dim() == 2:
        assert offsets is not None
        return (offsets.shape[0], rows, columns)
    return (rows, columns)
