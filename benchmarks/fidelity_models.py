"""Models of different families by which predictions are judged, with the batch and the device of each.

Small enough for two cores, large enough that work in kernels outweighs the interpreter.  Half of them have links
throttled to 2 GB/s and 1 GB/s, so that transfers matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from protwin.calibration.demos.demo import CONFIGURATION
from protwin.runtime import make_orthogonal
from protwin.runtime.data.byte_text import head_batches, python_reference
from protwin.runtime.devices.cpu_device import CpuDevice
from protwin.runtime.model.batches import Batch, Loss
from protwin.runtime.model.configurations import build_model

SLOW_LINKS: Final = {"host_to_device_bytes_per_s": 2e9, "device_to_host_bytes_per_s": 1e9}
DISK: Final = {"disk_read_bytes_per_s": 1e9, "disk_write_bytes_per_s": 0.5e9}
_ENDS: Final[dict[str, Any]] = {"vocab_size": 384, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_DECODER: Final[dict[str, Any]] = _ENDS | {"max_position_embeddings": 256}

_CONFIGURATIONS: Final[dict[str, dict[str, Any]]] = {
    "llama": CONFIGURATION,
    "llama-wide-ends": CONFIGURATION | {"num_hidden_layers": 4, "vocab_size": 12_000},
    "gpt2-tied-dropout": _ENDS
    | {"model_type": "gpt2", "n_embd": 224, "n_layer": 7, "n_head": 4, "n_positions": 192, "resid_pdrop": 0.1},
    "t5": {
        "model_type": "t5",
        "vocab_size": 384,
        "d_model": 160,
        "d_kv": 40,
        "d_ff": 512,
        "num_layers": 3,
        "num_decoder_layers": 5,
        "num_heads": 4,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    },
    "qwen2-grouped": _DECODER
    | {
        "model_type": "qwen2",
        "hidden_size": 224,
        "num_hidden_layers": 7,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "intermediate_size": 608,
    },
    "mixtral": _DECODER
    | {
        "model_type": "mixtral",
        "hidden_size": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    "gemma2": _DECODER
    | {
        "model_type": "gemma2",
        "hidden_size": 176,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "intermediate_size": 448,
        "sliding_window": 64,
    },
    "bert": _ENDS
    | {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 192,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "intermediate_size": 640,
        "max_position_embeddings": 192,
    },
}
_OSFT: Final[dict[str, tuple[str, float]]] = {"llama-osft": ("llama", 0.25), "gpt2-osft": ("gpt2-tied-dropout", 0.5)}
"""Models that orthogonal subspace fine-tuning trains: the configuration, and the part of directions that is trained."""
_LONG: Final[dict[str, dict[str, Any]]] = {
    "llama-long": {
        "model_type": "llama",
        "vocab_size": 2000,
        "hidden_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "gpt2-long": _ENDS
    | {"model_type": "gpt2", "vocab_size": 2000, "n_embd": 112, "n_layer": 4, "n_head": 4, "n_positions": 1024},
}
"""Models of one long sequence, traced in tiles too: many words and wide MLPs, so that these take the memory."""
_BATCHES: Final[dict[str, tuple[int, int]]] = {
    "llama-wide-ends": (1, 128),
    "t5": (4, 64),
    "bert": (3, 96),
    **dict.fromkeys(_LONG, (1, 512)),
}
"""Samples, and tokens of each, where it is not (2, 128)."""
_SLOW: Final = frozenset(
    {"gpt2-osft", "gpt2-long", "gpt2-tied-dropout", "llama-wide-ends", "mixtral", "widths", "gemma2"}
)
MODELS: Final = (*_CONFIGURATIONS, "widths")
ORTHOGONAL: Final = tuple(_OSFT)
LONG: Final = tuple(_LONG)
_TILES: Final = (8,)
"""Numbers of tiles of MLPs and of the loss that long sequences may run in."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A model, ready to be traced."""

    model: nn.Module
    batch: Batch
    loss: Loss | None
    make_device: Callable[[], CpuDevice]
    tiles: tuple[int, ...] = ()
    """Numbers of tiles that MLPs and the loss may run in, beside one."""


def judged_model(name: str, *, has_emulated_disk: bool) -> Judged:
    """The model ``name`` of ``MODELS``, ``ORTHOGONAL`` or ``LONG`` with random weights, and one batch.

    Beside them are what gives devices for it, and the numbers of tiles that it may run in.
    """
    torch.manual_seed(0)
    rates = (SLOW_LINKS if name in _SLOW else {}) | (DISK if has_emulated_disk else {})
    make_device = partial(CpuDevice, **rates)
    if name == "widths":
        return Judged(
            model=Widths(), batch=torch.randn(96, Widths.WIDTHS[0]), loss=mean_square, make_device=make_device
        )
    configuration, ratio = _OSFT.get(name, (name, None))
    model = build_model((_CONFIGURATIONS | _LONG)[configuration], name, torch.float32, device="cpu")
    if ratio is not None:
        make_orthogonal(model, unfreeze_rank_ratio=ratio)
    batch_size, sequence_length = _BATCHES.get(name, (2, 128))
    batches = head_batches(
        model,
        python_reference(),
        batch_size=batch_size,
        sequence_length=sequence_length,
        num_batches=1,
        seed=0,
    )
    tiles = _TILES if name in LONG else ()
    return Judged(model=model, batch=next(batches), loss=None, make_device=make_device, tiles=tiles)


class _Part(nn.Module):
    """A block from one width to the next."""

    def __init__(self, width: int, following: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, following)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(nn.functional.silu(self.up(self.norm(hidden))))
        return down


class Widths(nn.Module):
    """A plain module whose blocks are of five widths."""

    WIDTHS: Final = (192, 320, 512, 256, 384, 192, 512, 192)

    def __init__(self) -> None:
        super().__init__()
        pairs = zip(self.WIDTHS, self.WIDTHS[1:], strict=False)
        self.parts = nn.ModuleList(_Part(width, following) for width, following in pairs)
        self.head = nn.Linear(self.WIDTHS[-1], 64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(N, 192) to (N, 64)."""
        for part in self.parts:
            hidden = part(hidden)
        out: torch.Tensor = self.head(hidden)
        return out


def mean_square(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Mean of the squares of ``output``."""
    return output.square().mean()
