"""Who carries a plan out, where it is not protwin ([Note: Copies around collectives] in ``sim/engine/runtimes.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ..schema.workload import DType


class Runtime(StrEnum):
    """Who carries a plan out."""

    OURS = "ours"
    FSDP = "fsdp"
    """FullyShardedDataParallel, with flat parameters."""
    FSDP_BACKWARD_POST = "fsdp-backward-post"
    """The same with BackwardPrefetch.BACKWARD_POST."""
    FSDP2 = "fsdp2"
    """fully_shard."""
    DDP = "ddp"
    """DistributedDataParallel."""
    DEEPSPEED_ZERO3 = "deepspeed-zero3"


@dataclass(frozen=True, slots=True)
class RuntimeProfile:
    """Who carries a plan out, and how."""

    runtime: Runtime = Runtime.OURS
    reduce_dtype: DType | None = None
    """What gradients are reduced in; None: their own type."""
    loops_over_tensors: bool = False
    """Whether AdamW is a loop over tensors, with an operation for every step of the update (``foreach=False``, and all
    of PyTorch before 1.13)."""

    @property
    def is_ours(self) -> bool:
        """Whether nothing is copied around collectives, and AdamW is fused."""
        return self.other is None

    @property
    def other(self) -> str | None:
        """What is another than here, in words; None where there is nothing."""
        words = [] if self.runtime is Runtime.OURS else [f"copies of {self.runtime} around collectives"]
        words += ["AdamW as a loop over tensors"] if self.loops_over_tensors else []
        return ", ".join(words) or None


OUR_RUNTIME: Final = RuntimeProfile()
