"""Which dim of which tensor of an FFN counts its channels, its experts, and where its maps are."""

from __future__ import annotations

from typing import Final

from torch import nn

from ...shared.basics.errors import WorkloadError

_DOWN: Final = ("down_proj", "c_proj")

CHANNEL_DIMS: Final = {
    "gate_proj.weight": 0,
    "gate_proj.bias": 0,
    "up_proj.weight": 0,
    "up_proj.bias": 0,
    "down_proj.weight": 1,
    # GPT-2's maps are (inputs, outputs).
    "c_fc.weight": 1,
    "c_fc.bias": 0,
    "c_proj.weight": 0,
}
"""The dim of channels, by the parameter's path in an FFN without experts.  Other parameters have none."""
EXPERT_CHANNEL_DIMS: Final = {"experts.gate_up_proj": 1, "experts.down_proj": 2}
"""The same with experts, which dim 0 counts; the rows of gates come before as many of ups."""


def down_projection(ffn: nn.Module) -> nn.Module:
    """The last map of an FFN without experts.  Raises WorkloadError if there is none."""
    for name in _DOWN:
        found = getattr(ffn, name, None)
        if isinstance(found, nn.Module):
            return found
    raise WorkloadError(f"{type(ffn).__name__} has no {' or '.join(_DOWN)}, so that its channels cannot be told.")
