"""Linear maps in the layout of GPTQ, with torch's own operations alone.

[Note: What training beside GPTQ runs]
GPTQ (arXiv 2210.17323) packs weights of four or eight bits into whole numbers of 32.  A group of inputs shares a scale
and a zero, for each output.  AutoGPTQ's kernels that unpack as they multiply have no backward, so that training, and
everything else with 128 rows and more, unpacks by a chain of torch's operations and multiplies by what comes out
(``auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py``, which ``dynamically_import_QuantLinear`` takes with
``disable_exllama`` and without ``desc_act``).  This map has its tensors, by its names, and runs its chain: shift, cast
to few bits, mask, subtract zeros, multiply by scales.  Autograd saves the unpacked weight for the gradient of the
input, as it does there: where a block keeps its activations, it keeps its weights in 16 bits.
"""

from __future__ import annotations

from typing import Final, Self

import torch
from torch import nn

from ...shared.phases.quantization import WORD_BITS, Quantization

PACKED: Final = "qweight"
"""What AutoGPTQ calls the packed weight."""
STATE_NAMES: Final = ("qzeros", "scales", "g_idx", "shifts")
"""What unpacks it; the last one is no part of AutoGPTQ's files."""


class GptqLinear(nn.Linear):
    """A frozen linear map whose weight is packed in the layout of GPTQ; see [Note: What training beside GPTQ runs]."""

    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(
        self, num_in: int, num_out: int, how: Quantization, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Without values.  ``dtype``: of scales, and of what is unpacked."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.how = num_in, num_out, how
        self.bits = how.type.bits
        self.group_size = how.blocksize or num_in
        per_word, num_groups = WORD_BITS // self.bits, num_in // self.group_size

        def frozen(*shape: int, dtype: torch.dtype = torch.int32) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.qweight = frozen(num_in // per_word, num_out)
        self.qzeros = frozen(num_groups, num_out // per_word)
        self.scales = frozen(num_groups, num_out, dtype=dtype)
        self.g_idx = frozen(num_in)
        self.shifts = frozen(per_word)
        self.register_parameter("bias", None)

    @classmethod
    def of(cls, linear: nn.Linear, how: Quantization, weight: torch.Tensor) -> Self:
        """``linear`` with ``weight`` (outputs, inputs) packed, or without values if that is on the meta device."""
        made = cls(linear.in_features, linear.out_features, how, dtype=weight.dtype, device=weight.device)
        made.bias = linear.bias
        if not weight.is_meta:
            made.pack(weight)
        return made.train(linear.training)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """What is packed: models ask their maps where they are."""
        return self.qweight

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the weight is unpacked to."""
        return self.scales.dtype

    @torch.no_grad()
    def pack(self, weight: torch.Tensor) -> None:
        """Round ``weight`` (outputs, inputs) to the nearest values of each group, symmetric about zero."""
        most, middle = 2**self.bits - 1, 2 ** (self.bits - 1)
        groups = weight.float().t().reshape(-1, self.group_size, self.out_features)
        largest = groups.abs().amax(dim=1, keepdim=True)
        scales = torch.where(largest > 0, 2 * largest / most, 1.0).to(self.scales.dtype)
        codes = ((groups / scales.float()).round() + middle).clamp(0, most).to(torch.int64)
        self.scales.copy_(scales.squeeze(1))
        self.qweight.copy_(_words(codes.reshape(self.in_features, -1), self.bits))
        # The layout has zeros less one.
        zeros = torch.full((self.out_features, self.qzeros.shape[0]), middle - 1, device=weight.device)
        self.qzeros.copy_(_words(zeros, self.bits).t())
        self.g_idx.copy_(torch.arange(self.in_features, device=weight.device) // self.group_size)
        self.shifts.copy_(torch.arange(0, WORD_BITS, self.bits, device=weight.device))

    def unpacked(self) -> torch.Tensor:
        """The weight (inputs, outputs), in the element type of its scales."""
        narrow, most = (torch.int8, 15) if self.bits == 4 else (torch.int16, 255)
        per_word = WORD_BITS // self.bits
        zeros = torch.bitwise_right_shift(self.qzeros.unsqueeze(2).expand(-1, -1, per_word), self.shifts).to(narrow)
        zeros = (zeros.bitwise_and_(most) + 1).reshape(-1, 1, self.out_features)
        spread = self.qweight.unsqueeze(1).expand(-1, per_word, -1)
        codes = torch.bitwise_right_shift(spread, self.shifts.unsqueeze(-1)).to(narrow).bitwise_and_(most)
        codes = codes.reshape(-1, self.group_size, self.out_features)
        weight: torch.Tensor = self.scales.unsqueeze(1) * (codes - zeros)
        return weight.reshape(self.in_features, self.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product with the unpacked weight."""
        flat = torch.matmul(x.reshape(-1, self.in_features), self.unpacked())
        made: torch.Tensor = flat.reshape(*x.shape[:-1], self.out_features)
        return made if self.bias is None else torch.add(made, self.bias)

    def extra_repr(self) -> str:
        """Sizes and packing."""
        return f"{self.in_features}, {self.out_features}, {self.how.words}, bias={self.bias is not None}"


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """``codes`` (n, m) of so many bits, packed along the first dimension into whole numbers of 32 bits."""
    per_word = WORD_BITS // bits
    shifts: torch.Tensor = torch.arange(0, WORD_BITS, bits, device=codes.device).view(1, -1, 1)
    words: torch.Tensor = (codes.reshape(-1, per_word, codes.shape[1]) << shifts).sum(dim=1)
    # Of the lowest 32 bits, the highest one is the sign.
    return (words - ((words >> 31) << 32)).to(torch.int32)
