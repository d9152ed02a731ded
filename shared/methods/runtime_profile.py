"""Who carries a plan out, where it is not protwin ([Note: Copies around collectives] in ``sim/costs/runtimes.py``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from ..basics.errors import PlanError
from ..compile.residency import GatheredBehind
from ..schema.plan import ParallelMode, Plan, TrainingMethod
from ..schema.workload import DType
from .method import Method


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
    recomputes_whole: bool = False
    """Whether checkpointed blocks are recomputed to their end, not just up to what backward reads: reentrant
    checkpointing, and all of it in PyTorch before 2.1 (github.com/pytorch/pytorch pull request 96866)."""

    @property
    def is_ours(self) -> bool:
        """Whether it is carried out as here: nothing is copied around collectives, AdamW is fused."""
        return self.other is None

    @property
    def other(self) -> str | None:
        """What is another than here, in words; None where there is nothing."""
        words = [] if self.runtime is Runtime.OURS else [f"copies of {self.runtime} around collectives"]
        words += ["AdamW as a loop over tensors"] if self.loops_over_tensors else []
        words += ["blocks recomputed whole"] if self.recomputes_whole else []
        return ", ".join(words) or None

    def check(self, plan: Plan) -> None:
        """Raise PlanError if the runtime carries out no plans like ``plan``."""
        if self.runtime is not Runtime.OURS and plan.method is not TrainingMethod.FULL:
            raise PlanError(f"{self.runtime} carries out no plans of method {plan.method}. Leave the runtime out.")
        modes = _MODES.get(self.runtime)
        if modes is None or plan.parallel in modes:
            return
        reason = "one rank, which has no collectives" if plan.num_ranks == 1 else f"parallel {plan.parallel}"
        raise PlanError(
            f"{self.runtime} carries out plans with parallel {' or '.join(modes)}, but this one has {reason}. Ask "
            f"about such a plan, or leave the runtime out."
        )

    def method(self, method: Method) -> Method:
        """``method``, with the runtime's answers to the compiler's questions."""
        if self.runtime is not Runtime.FSDP_BACKWARD_POST:
            return method
        return replace(method, policies=replace(method.policies, residency=GatheredBehind))


_MODES: Final = {
    Runtime.FSDP: (ParallelMode.SHARDED,),
    Runtime.FSDP_BACKWARD_POST: (ParallelMode.SHARDED,),
    Runtime.FSDP2: (ParallelMode.SHARDED,),
    Runtime.DDP: (ParallelMode.DDP,),
    Runtime.DEEPSPEED_ZERO3: (ParallelMode.SHARDED,),
}
OUR_RUNTIME: Final = RuntimeProfile()
