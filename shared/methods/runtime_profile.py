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

    @property
    def is_ours(self) -> bool:
        """Whether nothing is copied around collectives."""
        return self.runtime is Runtime.OURS

    @property
    def other(self) -> str | None:
        """The other system's name; None where there is none."""
        return None if self.is_ours else str(self.runtime)


OUR_RUNTIME: Final = RuntimeProfile()
