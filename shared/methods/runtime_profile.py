"""Who carries a plan out, where it is not protwin ([Note: Copies around collectives] in ``sim/costs/runtimes.py``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from ..basics.errors import PlanError
from ..compile.residency import GatheredBehind, Residency
from ..compile.updates import Updates
from ..layout.keeping import AS_PLANNED, OVER_LISTS, Buckets, BucketStay, Keeping
from ..layout.layout import layout_of
from ..layout.residencies import ChunkResidency, residencies
from ..schema.plan import ParallelMode, Plan, TrainingMethod
from ..schema.workload import DType, Workload
from .method import Method
from .other_policies import (
    GatheredAtOnce,
    MomentsVisit,
    OffloadUpdates,
    RenewedAtOnce,
    SteppedAlone,
    WidenedTogether,
    Zero3Updates,
    ZeroUpdates,
    gathering_at_once,
    stepping_alone,
)


class Runtime(StrEnum):
    """Who carries a plan out."""

    OURS = "ours"
    FSDP = "fsdp"
    """FullyShardedDataParallel, with flat parameters."""
    FSDP_BACKWARD_POST = "fsdp-backward-post"
    """The same with BackwardPrefetch.BACKWARD_POST."""
    COMPOSER = "composer"
    """Composer's trainer of llm-foundry's models: that, with DecoupledAdamW and two metrics of all logits."""
    FSDP2 = "fsdp2"
    """fully_shard."""
    DDP = "ddp"
    """DistributedDataParallel."""
    DEEPSPEED_ZERO1 = "deepspeed-zero1"
    """Optimizer state in parts; gradients whole until the step."""
    DEEPSPEED_ZERO2 = "deepspeed-zero2"
    """Optimizer state and gradients in parts."""
    DEEPSPEED_ZERO3 = "deepspeed-zero3"
    """Parameters in parts too."""
    DEEPSPEED_OFFLOAD = "deepspeed-offload"
    """DeepSpeed's offload_optimizer: the host steps what the devices keep, whole or, with ZeRO-3, in parts."""
    HOST_STEP = "host-step"
    """A step of the host by torch's fused AdamW that nothing overlaps with; parameters stay on the device."""
    OFFLOADED_STATES = "offloaded-states"
    """The device steps; moments lie on the host between two steps, and nothing overlaps with their copies."""

    @property
    def is_deepspeed(self) -> bool:
        """Whether it is one of DeepSpeed's."""
        return self.value.startswith("deepspeed")


@dataclass(frozen=True, slots=True)
class RuntimeProfile:
    """Who carries a plan out, and how."""

    runtime: Runtime = Runtime.OURS
    reduce_dtype: DType | None = None
    """What gradients are reduced in; None: their own type."""
    loops_over_tensors: bool = False
    """Whether AdamW is a loop over tensors, with an operation for every step of the update (``foreach=False``, and all
    of PyTorch before 1.13)."""
    keeps_parts: bool = False
    """Whether every device keeps its part of what the hosts step, so that it is copied once per step."""

    recomputes_whole: bool = False
    """Whether checkpointed blocks are recomputed to their end, not just up to what backward reads: reentrant
    checkpointing, and all of it in PyTorch before 2.1 (github.com/pytorch/pytorch pull request 96866)."""
    expandable_segments: bool = False
    """Whether the process asks PyTorch's allocator for expandable segments (PYTORCH_CUDA_ALLOC_CONF)."""
    loss_metrics: int | None = None
    """Metrics that are taken from all logits of every micro-batch, each by a cross-entropy in float32, as Composer does
    ([Note: Metrics of losses] in ``sim/operations/streams.py``); None: as many as the runtime takes.  Their memory is
    not counted."""
    bucket_scalars: int | None = None
    """Gradients that are reduced together pass through a flat buffer of so many scalars (``reduce_bucket_size``); 0:
    through none (without ``contiguous_gradients``); None: of as many as the runtime takes by itself."""
    has_two_buckets: bool = False
    """Whether there is a second one, to be filled meanwhile (``overlap_comm`` under ZeRO-1 and ZeRO-2)."""
    temporary_lists: int = 0
    """Where AdamW goes over lists of tensors (``foreach=True``, PyTorch's choice on a GPU unless it is told otherwise):
    the lists that one step makes, each as large as all weights that the device steps.  1, and 2 in PyTorch 1.13 and
    2.0; 0: it is fused, or a loop."""
    keeps_gradients: bool = False
    """Whether gradients of what the device steps whole are zeroed behind a step, not dropped
    (``zero_grad(set_to_none=False)``, which PyTorch before 2.0 and accelerate before 0.28 take by themselves)."""
    holds_inputs: bool = False
    """Whether hooks of FSDP hold the inputs of recomputed blocks, and their gradients, until backward has ended:
    reentrant checkpointing around units whose flat parameter is frozen, as transformers checkpoints under adapters
    (``use_orig_params=False``; [Note: Held inputs] in ``shared/compile/homes.py``)."""

    caches_keys: bool = False
    """Whether the model gives the keys and values of all blocks with its output (``use_cache``), and checkpointing that
    is around its blocks does not turn that off, as of models whose cache is a tuple ([Note: Cached keys] there)."""

    @property
    def is_ours(self) -> bool:
        """Whether nothing is copied, waits or is computed otherwise than here, and AdamW is fused."""
        return self.other is None

    @property
    def other(self) -> str | None:
        """What is another than here, in words; None where there is nothing."""
        words = [] if self.runtime is Runtime.OURS else [_WORDS.get(self.runtime, f"copies of {self.runtime}")]
        words += ["AdamW as a loop over tensors"] if self.loops_over_tensors else []
        words += ["devices keep parts of what hosts step"] if self.keeps_parts else []
        words += ["blocks recomputed whole"] if self.recomputes_whole else []
        if self.loss_metrics is not None and self.num_loss_metrics != _METRICS.get(self.runtime, 0):
            words.append(
                f"{self.loss_metrics} metric{'' if self.loss_metrics == 1 else 's'} of all logits, without memory"
            )
        if self._asks_for_buckets:
            number = "two buckets" if self.has_two_buckets else "a bucket"
            words.append("no bucket of gradients" if self.bucket_scalars == 0 else f"{number} of gradients{self._size}")
        words += ["gradients that stay"] if self.keeps_gradients else []
        words += ["inputs of blocks that hooks hold"] if self.holds_inputs else []
        words += ["cached keys and values"] if self.caches_keys else []
        words += ["AdamW over lists of tensors"] if self.temporary_lists else []
        return ", ".join(words) or None

    @property
    def words(self) -> str | None:
        """``other``, and what the process asks of its allocator; None where there is nothing."""
        asked = "expandable segments" if self.expandable_segments else None
        return ", ".join(filter(None, (self.other, asked))) or None

    @property
    def _asks_for_buckets(self) -> bool:
        """Whether buckets are others than the runtime's own."""
        return self.bucket_scalars is not None or self.has_two_buckets

    @property
    def _size(self) -> str:
        return "" if self.bucket_scalars is None else f" of {self.bucket_scalars:,} scalars"

    @property
    def num_widened(self) -> int:
        """Scalars that the device steps together, at most, by flat copies of their gradients; 0 where it has none."""
        updates = _UPDATES.get(self.runtime)
        return updates.num_widened if updates is not None and issubclass(updates, WidenedTogether) else 0

    @property
    def buckets(self) -> Buckets | None:
        """What gradients pass through; None where the runtime has none."""
        own = _BUCKETS.get(self.runtime)
        if own is None:
            return None
        scalars = own.num_scalars if self.bucket_scalars is None else self.bucket_scalars
        return replace(own, num_scalars=scalars, number=2 if self.has_two_buckets else 1) if scalars else None

    @property
    def steps_in_loops(self) -> bool:
        """Whether AdamW is a loop over tensors, by itself or because the runtime's is."""
        return self.loops_over_tensors or self.runtime is Runtime.COMPOSER

    @property
    def num_loss_metrics(self) -> int:
        """Metrics that are taken from all logits of every micro-batch."""
        return _METRICS.get(self.runtime, 0) if self.loss_metrics is None else self.loss_metrics

    @property
    def parts_stay(self) -> bool:
        """Whether every device keeps its part of what the hosts step."""
        return self.keeps_parts or self.runtime is Runtime.DEEPSPEED_OFFLOAD

    @property
    def parts_go(self) -> bool:
        """Whether parts of gradients that devices keep go with the step (``Keeping.parts_go``)."""
        return _KEEPING.get(self.runtime, AS_PLANNED).parts_go and not self.keeps_gradients

    @property
    def steps_alone(self) -> bool:
        """Whether nothing overlaps with a step of the host, and the way back of what it stepped."""
        return issubclass(_UPDATES.get(self.runtime, Updates), SteppedAlone)

    def check(self, plan: Plan) -> None:
        """Raise PlanError if the runtime carries out no plans like ``plan``."""
        is_here = self.runtime is Runtime.OURS and not self.keeps_parts
        if not is_here and plan.method is not TrainingMethod.FULL:
            raise PlanError(f"{self.runtime} carries out no plans of method {plan.method}. Leave the runtime out.")
        if self.recomputes_whole and plan.n_selective:
            raise PlanError(
                f"reentrant checkpointing recomputes blocks whole, but {plan.n_selective} blocks of the plan keep "
                f"results (n_selective). Ask about a plan with n_selective 0, or leave reentrant checkpointing out."
            )
        if not 0 <= self.num_loss_metrics <= MOST_METRICS:
            raise PlanError(f"loss_metrics must be 0 to {MOST_METRICS} (got {self.loss_metrics}).")
        if self.num_loss_metrics and plan.loss_tiles > 1:
            raise PlanError(
                f"metrics are taken from all logits of a micro-batch, but with loss_tiles {plan.loss_tiles} they never "
                f"lie there at once. Ask about a plan with loss_tiles 1, or set loss_metrics to 0 (--loss-metrics 0)."
            )
        self._check_buckets()
        if not 0 <= self.temporary_lists <= MOST_LISTS:
            raise PlanError(f"temporary_lists must be 0 to {MOST_LISTS} (got {self.temporary_lists}).")
        if self.temporary_lists and (reason := self._why_no_lists(plan)) is not None:
            raise PlanError(
                f"AdamW over lists of tensors is asked for (temporary_lists, --foreach), but {reason}. Leave it out."
            )
        if self.keeps_gradients and plan.method is not TrainingMethod.FULL:
            raise PlanError(
                f"gradients that stay are those of full training, but the plan is of method {plan.method}. Leave "
                f"keeps_gradients out."
            )
        if self.holds_inputs and not (self.recomputes_whole and self.runtime in OF_FLAT_PARAMETERS):
            raise PlanError(
                f"inputs of blocks are to stay as hooks of FSDP hold them (holds_inputs, --holds-inputs), but that is "
                f"so under reentrant checkpointing by {' or '.join(OF_FLAT_PARAMETERS)} alone. Add --reentrant and "
                f"--as {Runtime.FSDP}, or leave it out."
            )
        if self.caches_keys and plan.method is not TrainingMethod.FULL:
            raise PlanError(
                f"cached keys and values are those of full training, but the plan is of method {plan.method}. Leave "
                f"caches_keys out."
            )
        modes = _MODES.get(self.runtime)
        if modes is not None and plan.parallel not in modes:
            reason = "one rank, which has no collectives" if plan.num_ranks == 1 else f"parallel {plan.parallel}"
            raise PlanError(
                f"{self.runtime} carries out plans with parallel {' or '.join(modes)}, but this one has {reason}. Ask "
                f"about such a plan, or leave the runtime out."
            )
        if self.keeps_parts and plan.parallel is not ParallelMode.SHARDED:
            raise PlanError(
                f"devices keep parts of what hosts step in plans with parallel sharded, but this one has parallel "
                f"{plan.parallel}. Set n_host_stepped there."
            )
        if self.steps_alone and plan.max_gradient_norm is None and _hosts_may_step(plan):
            raise PlanError(
                f"{self.runtime} steps on the host behind all gradients, as under a limit of their norm, but the plan "
                f"has no max_gradient_norm. Set it, to 1e9 where nothing is to be limited."
            )

    def check_gathers(self, plan: Plan, workload: Workload) -> None:
        """Raise PlanError if ``workload`` gathers weights in float8, and neither ``plan`` nor the runtime does."""
        if workload.float8_gather is None:
            return
        if self.runtime is not Runtime.FSDP2:
            raise PlanError(
                f"weights are to be gathered in float8 ({workload.float8_gather} scales), which torchao does for FSDP2 "
                f"alone, but the plan is carried out by {self.runtime}. Ask about {Runtime.FSDP2} (--as), or "
                f"leave --float8-gather out."
            )
        layout = layout_of(workload, plan.chunk_bytes)
        for chunk, residency in zip(layout.chunks, residencies(plan, layout), strict=True):
            is_narrow = any(workload.parameters[placed.index].gathered_dtype is not None for placed in chunk.parameters)
            if is_narrow and residency is not ChunkResidency.SHARDED:
                raise PlanError(
                    f"chunk {chunk.id} has weights that are to be gathered in float8, but is {residency.name.lower()}: "
                    f"it is not known what casts those but parts on devices. Set n_shard to {len(layout.chunks)} and "
                    f"n_persist to 0, or leave --float8-gather out."
                )

    def _why_no_lists(self, plan: Plan) -> str | None:
        """Why no step of ``plan`` goes over lists of tensors; None if one may."""
        if self.steps_in_loops:
            return f"{self.runtime} steps by a loop over tensors"
        if plan.method is not TrainingMethod.FULL:
            return f"the plan is of method {plan.method}"
        return None if plan.optimizer in OVER_LISTS else f"the plan steps by {plan.optimizer}"

    def _check_buckets(self) -> None:
        """Raise PlanError if the runtime has no such buckets."""
        if not self._asks_for_buckets:
            return
        own = _BUCKETS.get(self.runtime)
        if own is None:
            raise PlanError(
                f"a size or a number of buckets is asked for, but {self.runtime} has none to choose: DeepSpeed's "
                f"runtimes have ({', '.join(_BUCKETS)}). Choose one of these (--as), or leave buckets out."
            )
        if self.has_two_buckets and own.stay is BucketStay.GOOD:
            raise PlanError(
                f"two buckets are asked for, but {self.runtime} has one whatever overlaps. Leave the second one out."
            )
        if self.bucket_scalars is not None and not 0 <= self.bucket_scalars <= MOST_BUCKET_SCALARS:
            raise PlanError(f"bucket_scalars must be 0 to {MOST_BUCKET_SCALARS:,} (got {self.bucket_scalars:,}).")
        if self.has_two_buckets and self.bucket_scalars == 0:
            raise PlanError(
                "two buckets are asked for, but of 0 scalars there is none (bucket_scalars, --bucket-scalars). Leave "
                "one of the two out."
            )

    def method(self, method: Method) -> Method:
        """``method``, with the runtime's answers to the compiler's questions."""
        policies, rules = method.policies, method.rules
        keeping = replace(_KEEPING.get(self.runtime, AS_PLANNED), parts_stay=self.parts_stay, buckets=self.buckets)
        keeping = replace(keeping, keeps_gradients=self.keeps_gradients or keeping.keeps_gradients)
        keeping = replace(keeping, parts_go=self.parts_go)
        keeping = replace(keeping, temporary_lists=self.temporary_lists, holds_inputs=self.holds_inputs)
        keeping = replace(keeping, caches_keys=self.caches_keys)
        residency = _RESIDENCY.get(self.runtime)
        if residency is not None:
            policies = replace(policies, residency=residency)
        if residency is GatheredAtOnce:
            rules = replace(rules, residency=gathering_at_once(rules))
        updates = _UPDATES.get(self.runtime)
        if updates is not None:
            policies = replace(policies, updates=updates)
        keeping = replace(keeping, num_widened=self.num_widened)
        if self.steps_alone:
            rules = replace(rules, updates=stepping_alone(rules))
        if keeping != AS_PLANNED:
            policies, rules = replace(policies, keeping=keeping), replace(rules, keeping=keeping)
        if (policies, rules) == (method.policies, method.rules):
            return method
        return replace(method, policies=policies, rules=rules)


def _hosts_may_step(plan: Plan) -> bool:
    """Whether ``plan`` has, or may have, chunks that hosts step."""
    if plan.parallel is ParallelMode.DDP:
        return False
    return plan.n_host_stepped > 0 or not (plan.n_shard or (plan.n_persist and not plan.n_buffer))


_ONE_OR_SHARDED: Final = (ParallelMode.SINGLE, ParallelMode.SHARDED)
OF_FLAT_PARAMETERS: Final = (Runtime.FSDP, Runtime.FSDP_BACKWARD_POST, Runtime.COMPOSER)
"""Runtimes of FullyShardedDataParallel."""
_MODES: Final = {
    Runtime.FSDP: (ParallelMode.SHARDED,),
    Runtime.FSDP_BACKWARD_POST: (ParallelMode.SHARDED,),
    Runtime.COMPOSER: (ParallelMode.SHARDED,),
    Runtime.FSDP2: (ParallelMode.SHARDED,),
    Runtime.DDP: (ParallelMode.DDP,),
    Runtime.DEEPSPEED_ZERO1: _ONE_OR_SHARDED,
    Runtime.DEEPSPEED_ZERO2: _ONE_OR_SHARDED,
    Runtime.DEEPSPEED_ZERO3: _ONE_OR_SHARDED,
    Runtime.DEEPSPEED_OFFLOAD: _ONE_OR_SHARDED,
}
_WORDS: Final = {
    Runtime.HOST_STEP: "steps of the host that nothing overlaps with",
    Runtime.OFFLOADED_STATES: "moments that are copied to the device for the step",
    **{
        runtime: f"copies of {runtime} around collectives"
        for runtime in (Runtime.FSDP, Runtime.FSDP_BACKWARD_POST, Runtime.FSDP2, Runtime.DDP, Runtime.DEEPSPEED_ZERO3)
    },
    Runtime.COMPOSER: (
        "copies of fsdp-backward-post, AdamW as a loop and two metrics of all logits without their memory, as under "
        "composer"
    ),
    Runtime.DEEPSPEED_ZERO1: "copies and waits of deepspeed-zero1",
    Runtime.DEEPSPEED_ZERO2: "copies and waits of deepspeed-zero2",
    Runtime.DEEPSPEED_OFFLOAD: "copies and waits of deepspeed-offload",
}
MOST_LISTS: Final = 2
"""That AdamW over lists has ever made in a step."""
MOST_METRICS: Final = 100
"""Of all logits; more are a mistake."""
_METRICS: Final = {Runtime.COMPOSER: 2}
"""Of all logits that a runtime takes by itself ([Note: Metrics of losses] in ``sim/operations/streams.py``)."""
_UPDATES: Final[dict[Runtime, type[Updates]]] = {
    Runtime.DEEPSPEED_ZERO1: ZeroUpdates,
    Runtime.DEEPSPEED_ZERO2: ZeroUpdates,
    Runtime.DEEPSPEED_ZERO3: Zero3Updates,
    Runtime.DEEPSPEED_OFFLOAD: OffloadUpdates,
    Runtime.HOST_STEP: SteppedAlone,
    Runtime.OFFLOADED_STATES: MomentsVisit,
}
_RESIDENCY: Final[dict[Runtime, type[Residency]]] = {
    Runtime.FSDP_BACKWARD_POST: GatheredBehind,
    Runtime.COMPOSER: GatheredBehind,
    Runtime.DEEPSPEED_ZERO1: GatheredAtOnce,
    Runtime.DEEPSPEED_ZERO2: GatheredAtOnce,
    Runtime.DEEPSPEED_OFFLOAD: RenewedAtOnce,
    Runtime.HOST_STEP: RenewedAtOnce,
}
MOST_BUCKET_SCALARS: Final = 10**12
"""In one bucket; more are a mistake."""
_BUCKET_SCALARS: Final = 5 * 10**8
"""``reduce_bucket_size`` by itself (DeepSpeed, zero/config.py)."""
_BUCKETS: Final = {
    Runtime.DEEPSPEED_ZERO1: Buckets(num_scalars=_BUCKET_SCALARS, stay=BucketStay.STEP),
    Runtime.DEEPSPEED_ZERO2: Buckets(num_scalars=_BUCKET_SCALARS, stay=BucketStay.BACKWARD),
    Runtime.DEEPSPEED_ZERO3: Buckets(num_scalars=_BUCKET_SCALARS, stay=BucketStay.GOOD),
    Runtime.DEEPSPEED_OFFLOAD: Buckets(num_scalars=_BUCKET_SCALARS, stay=BucketStay.GOOD),
}
"""See docs/decisions/0039."""
_KEEPING: Final = {
    # Of each parameter ``grad`` is the part that a reduce-scatter leaves, or that later ones are added to
    # (torch/distributed/fsdp/_runtime_utils.py and _fully_shard/_fsdp_collectives.py).
    **dict.fromkeys((*OF_FLAT_PARAMETERS, Runtime.FSDP2), Keeping(parts_go=True)),
    Runtime.DEEPSPEED_ZERO1: Keeping(parts_are_within=True, gradients_are_whole=True),
    Runtime.DEEPSPEED_ZERO2: Keeping(parts_are_within=True),
    # Of one rank too, where the plan has no parts: ``grad_partitions_flat_buffer`` in DeepSpeed's stage3.py.
    Runtime.DEEPSPEED_ZERO3: Keeping(keeps_gradients=True),
    Runtime.OFFLOADED_STATES: Keeping(moments_visit=True),
}
OUR_RUNTIME: Final = RuntimeProfile()
