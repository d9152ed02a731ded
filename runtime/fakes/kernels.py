"""Kernels that fake tensors lack: dropout, attention and norms as a GPU runs them, grouped products, CTC, checks.

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
apart on CUDA too.

[Note: Masks and widths of attention]
FlashAttention-2 knows no mask but the causal one, and one width alone.  The memory-efficient kernel takes masks whose
elements along the keys lie side by side, gives them gradients (a bias of positions has one), and takes values that are
narrower than queries (multi-head latent attention).  Its widths are multiples of 16 bytes.  What it does not take falls
apart: a bias of positions whose heads lie side by side, as T5's did before transformers put it in order.  The CPU's
fused kernel takes masks as they lie, and neither gradients nor dropout nor other widths.  So where the two choose
differently, calls become what CUDA makes of them, but for sums of rows and gradients of masks, which the kernel pads to
a multiple of 32 and of 16: here they are as long as the rows and the keys.
Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, sdp_utils_cpp.h (check_last_dim_stride_equals_1_dense).

[Note: Root mean squares]
torch's rms_norm is one kernel on CUDA since torch 2.9 (``_fused_rms_norm``), which saves its input, the weight and one
number for a row.  On the CPU it falls apart, and saves copies in float32; so it does on CUDA where the input and the
weight differ in type.  Norms that models spell out themselves (LlamaRMSNorm of transformers) are what they say.
Source: aten/src/ATen/native/layer_norm.cpp, derivatives.yaml of torchgen.

[Note: Grouped products]
Mixtures of experts run all experts at once as one grouped matrix product.  torch knows its result for fake tensors in
bfloat16 alone, though it computes it in every type.

[Note: Transcripts]
The size of what the CTC loss keeps for backward follows from the lengths of the targets, so torch refuses it for fake
tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ..devices.time_limit import check_time_before
from .known_values import known
from .recalled_results import RecalledResults
from .recurrent import CUDNN, answered, recurrent_kernels

_ATTENTION: Final = "scaled_dot_product_attention"
_DROPOUT: Final = "dropout"
_RMS_NORM: Final = "rms_norm"
_FLASH_DTYPES: Final = (torch.float16, torch.bfloat16)
_FLASH_MAX_WIDTH: Final = 256
_WIDTH_STEP: Final = 8
"""FlashAttention-2 takes heads whose width is a multiple of this; others are padded."""
_WIDTH_BYTES: Final = 16
"""Bytes of a head are a multiple of this for the memory-efficient kernel: 8 of 16 bits, 4 of 32 (from Ampere on)."""


@contextmanager
def kernels_of_cuda() -> Iterator[None]:
    """Let dropout, attention and norms be what they are on CUDA; see the notes of this module.

    Attention that both run fused, without dropout, is left to the CPU's kernel, which saves the same.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    # Below autocast, and above what autograd sees.  Recomputation within backward meets it as the first forward does.
    library.impl(_ATTENTION, _attention, "AutogradCPU")  # type: ignore[no-untyped-call]
    library.impl(_DROPOUT, _dropout, "AutogradCPU")  # type: ignore[no-untyped-call]
    if hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        library.impl(_RMS_NORM, _rms_norm, "AutogradCPU")  # type: ignore[no-untyped-call]
    recurrent_kernels(library)
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


def _rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    is_fused = isinstance(input, FakeTensor) and input.is_floating_point() and input.numel() > 0
    if is_fused and (weight is None or weight.dtype is input.dtype):
        fused: torch.Tensor = _RmsNorm.apply(input, weight, list(normalized_shape), eps)  # type: ignore[no-untyped-call]
        return fused
    in_pieces: torch.Tensor = torch.ops.aten.rms_norm.default._op_dk(
        torch._C.DispatchKey.CompositeImplicitAutograd, input, normalized_shape, weight, eps
    )
    return in_pieces


class _RmsNorm(torch.autograd.Function):
    """What autograd makes of ``_fused_rms_norm`` where a device has it; see [Note: Root mean squares]."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, normalized_shape: list[int], eps: float | None
    ) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result, inverse = torch.ops.aten._fused_rms_norm(input, normalized_shape, weight, eps)
        ctx.save_for_backward(input, weight, inverse)
        ctx.normalized_shape = normalized_shape
        normalized: torch.Tensor = result
        return normalized

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight, inverse = ctx.saved_tensors
        with torch._C._AutoDispatchBelowAutograd():
            of_input, of_weight = torch.ops.aten._fused_rms_norm_backward(
                gradient, input, ctx.normalized_shape, inverse, weight, list(ctx.needs_input_grad[:2])
            )
        return of_input, of_weight, None, None


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
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    width = query.shape[-1]
    has_groups = enable_gqa and query.shape[-3] != key.shape[-3]
    is_ours = isinstance(query, FakeTensor) and query.dim() == 4  # not another thread's, nor of no kernel's form
    is_other = attn_mask is not None or value.shape[-1] != width
    if is_ours and is_other and not has_groups and not _is_as_on_the_cpu(query, value, attn_mask, dropout_p):
        added = _added(attn_mask, query.dtype)
        if _takes_memory_efficient(query, key, value, attn_mask):
            return _memory_efficient(query, key, value, added, dropout_p, is_causal, scale)
        in_pieces: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, added, dropout_p, is_causal, scale=scale
        )[0]
        return in_pieces
    is_flash = query.dtype in _FLASH_DTYPES and width <= _FLASH_MAX_WIDTH
    if dropout_p == 0 or attn_mask is not None or not is_ours or (has_groups and not is_flash):
        plain: torch.Tensor = torch.ops.aten.scaled_dot_product_attention.default.decompose(
            *given, scale=scale, enable_gqa=enable_gqa
        )
        return plain
    if is_flash:
        query, key, value = (_padded(tensor) for tensor in (query, key, value))
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, scale=scale if scale is not None else float(width) ** -0.5
    )[0]
    return result if result.shape[-1] == width else result[..., :width]


def _is_as_on_the_cpu(
    query: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, dropout_p: float
) -> bool:
    """Whether the CPU runs fused what CUDA does, and saves the same."""
    if attn_mask is None or dropout_p > 0 or attn_mask.requires_grad or value.shape[-1] != query.shape[-1]:
        return False
    return attn_mask.stride(-1) == 1


def _takes_memory_efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
) -> bool:
    """Whether CUDA's memory-efficient kernel takes them; see [Note: Masks and widths of attention]."""
    widths = (query.shape[-1], value.shape[-1])
    is_aligned = all(width > 0 and width * query.element_size() % _WIDTH_BYTES == 0 for width in widths)
    are_side_by_side = all(t.stride(-1) == 1 for t in (query, key, value, attn_mask) if t is not None)
    is_of_type = query.dtype in (*_FLASH_DTYPES, torch.float32)
    return is_of_type and is_aligned and are_side_by_side and 0 not in (query.shape[-2], key.shape[-2])


def _added(attn_mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """What is added to the scores: of a mask that says what is seen, its like in numbers."""
    if attn_mask is None or attn_mask.dtype is not torch.bool:
        return attn_mask
    return torch.zeros_like(attn_mask, dtype=dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))


def _memory_efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])
    differentiable = (t for t in (query, key, value, bias) if t is not None)
    needs_sums = torch.is_grad_enabled() and any(t.requires_grad for t in differentiable)
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_sums, dropout_p, is_causal, scale=scale
    )[0]
    return result


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[-1] % _WIDTH_STEP
    return functional.pad(tensor, (0, missing)) if missing else tensor


class FakeGroupedProducts(TorchDispatchMode):
    """Gives grouped products of any type a result of the right shape; enter it within the fake mode.

    See [Note: Grouped products].  ``recalled`` has results of everything else that was seen before.
    """

    def __init__(self, recalled: RecalledResults | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recalled = recalled

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
        if func is torch.ops.aten._is_all_true.default and isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():
                passed = torch.ones((), dtype=torch.bool)
            return known(passed, args[0].fake_mode)
        if func in CUDNN and isinstance(args[0], FakeTensor):
            return answered(func, args)
        if func in _RMS_NORMS and isinstance(args[0], FakeTensor):
            return _rms_normalized(func, args)
        if func in _MEMORY_EFFICIENT and isinstance(args[0], FakeTensor):
            return _without_padding(func, func(*args, **kwargs), args)
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype is torch.bfloat16:
            return func(*args, **kwargs) if self._recalled is None else self._recalled.run(func, args, kwargs)
        first, second = args[0], args[1]
        offsets = args[2] if len(args) > 2 else kwargs.get("offs")
        return first.new_empty(_grouped_shape(first, second, offsets), dtype=kwargs.get("out_dtype") or first.dtype)


_RMS_NORMS: Final = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("_fused_rms_norm", "_fused_rms_norm_backward")
    if hasattr(torch.ops.aten, "_fused_rms_norm_backward")
)


def _rms_normalized(func: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The result and one float32 for each row; backward the wanted gradients of the input and the weight."""
    if func is _RMS_NORMS[0]:
        input, normalized_shape, *_ = args
        rows = (*input.shape[: input.dim() - len(normalized_shape)], *(1 for _ in normalized_shape))
        return torch.empty_like(input, memory_format=torch.contiguous_format), input.new_empty(
            rows, dtype=torch.promote_types(input.dtype, torch.float32)
        )
    _, input, _, _, weight, (of_input, of_weight) = args
    return (
        torch.empty_like(input, memory_format=torch.contiguous_format) if of_input else None,
        torch.empty_like(weight) if of_weight and weight is not None else None,
    )


_MEMORY_EFFICIENT: Final = (
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
)


def _without_padding(func: Any, made: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What one of ``_MEMORY_EFFICIENT`` makes, with sums of rows or a mask's gradient as long as what they are of."""
    if func is _MEMORY_EFFICIENT[0]:
        result, sums, *generator = made
        length = min(sums.shape[-1], args[0].shape[-2])
        return (result, sums.new_empty((*sums.shape[:-1], length)), *generator)
    *gradients, of_mask = made
    return (*gradients, of_mask if of_mask is None else of_mask.new_empty(of_mask.shape))


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
