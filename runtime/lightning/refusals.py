"""What a training by a plan cannot go along with, in Lightning's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...shared.basics.errors import PlanError
from ...shared.schema.plan import Plan

STRATEGIES: Final = ("SingleDeviceStrategy", "DDPStrategy")
"""What chooses where Lightning's modules run, and leaves the rest to a plan: by the names of their classes."""
_OTHERS: Final = {
    "deepspeed": "DeepSpeed",
    "fsdp": "FSDP",
    "modelparallel": "a device mesh of ModelParallelStrategy",
    "model_parallel": "a device mesh of ModelParallelStrategy",
    "xla": "XLA",
}
_PRECISIONS: Final = ("32-true", "bf16-mixed", "bf16-true")
_ALONE: Final = "a plan decides alone where parameters, gradients and optimizer state lie"


def refuse_given(given: Mapping[str, Any]) -> None:
    """Raise PlanError if arguments of a Trainer ask for another system, before Lightning begins with it."""
    strategy = given.get("strategy", "auto")
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    for part, system in _OTHERS.items():
        if name.lower().startswith(part):
            raise PlanError(
                f"strategy of the Trainer is {name}, so that {system} would train the model, but {_ALONE}. Leave "
                f'strategy out ("ddp" for several processes), or train without a plan.'
            )


def refuse_trainer(trainer: Any) -> None:
    """Raise PlanError if a Trainer was made for what no plan is carried out with."""
    strategy = trainer.strategy
    name, method = type(strategy).__name__, getattr(strategy, "_start_method", "popen")
    if name not in STRATEGIES:
        raise PlanError(
            f"strategy of the Trainer is {name}, but {_ALONE}. Leave strategy out, or choose "
            f"{' or '.join(STRATEGIES)}, or train without a plan."
        )
    if method != "popen":
        raise PlanError(
            f"the Trainer starts its processes by {method}, which what carries a plan out does not travel to. "
            f'Set strategy="ddp", or start the script by torchrun.'
        )
    if getattr(strategy, "_ddp_comm_hook", None) is not None:
        raise PlanError("DDPStrategy has a ddp_comm_hook, but the plan reduces gradients itself. Leave the hook out.")
    if getattr(strategy, "_layer_sync", None) is not None:
        raise PlanError(
            "sync_batchnorm is True, but a plan does not exchange statistics in the middle of a forward. Set "
            "sync_batchnorm=False."
        )
    if strategy.root_device.type not in ("cpu", "cuda"):
        raise PlanError(
            f"the Trainer trains on {strategy.root_device.type}, but a plan is carried out on cpu or cuda. Set "
            f'accelerator="cpu" or "gpu".'
        )
    precision = str(trainer.precision)
    if precision not in _PRECISIONS or _has_plugin(strategy.precision_plugin):
        raise PlanError(
            f"precision of the Trainer is {precision} ({type(strategy.precision_plugin).__name__}), which no plan is "
            f"carried out with. Choose one of {', '.join(_PRECISIONS)}."
        )
    if limit_of(trainer.gradient_clip_val) is not None and _value(trainer.gradient_clip_algorithm) == "value":
        raise PlanError(
            'gradient_clip_algorithm is "value", but a plan limits the norm of all gradients. Set it to "norm".'
        )


def _has_plugin(plugin: Any) -> bool:
    return type(plugin).__name__ not in ("Precision", "MixedPrecision", "HalfPrecision")


def _value(algorithm: Any) -> str:
    return str(getattr(algorithm, "value", algorithm))


def refuse_module(module: Any, optimizers: Sequence[Any]) -> None:
    """Raise PlanError if a LightningModule trains as no plan does."""
    if not module.automatic_optimization:
        raise PlanError(
            f"{type(module).__name__} steps its optimizers itself (automatic_optimization = False), but a plan is for "
            f"one backward and one step per batch. Let Lightning step, or write the loop and carry the plan out in it."
        )
    if getattr(module, "_compiler_ctx", None) is not None:
        raise PlanError(
            f"{type(module).__name__} was compiled by torch.compile, but a plan is not carried out on a compiled "
            f"model: its tasks begin and end with the blocks that compiled code does away with. Pass the module itself."
        )
    if len(optimizers) != 1:
        raise PlanError(
            f"configure_optimizers() gives {len(optimizers)} optimizers, but a plan is for one. Give one, with "
            f"parameter groups if options differ."
        )


def refuse_other_step(trainer: Any, plan: Plan) -> None:
    """Raise PlanError, which names both, if the step of a Trainer is another one than the plan's."""
    if plan.micro_batches != trainer.accumulate_grad_batches:
        raise PlanError(
            f"accumulate_grad_batches is {trainer.accumulate_grad_batches}, but the plan has {plan.micro_batches} "
            f"micro-batches. Set accumulate_grad_batches={plan.micro_batches}, or search a plan with "
            f"{trainer.accumulate_grad_batches} micro-batches."
        )
    limit, planned = limit_of(trainer.gradient_clip_val), plan.max_gradient_norm
    if limit != planned:
        asked, has = ("no limit" if one is None else f"{one:g}" for one in (limit, planned))
        raise PlanError(
            f"gradient_clip_val clips gradients to {asked}, but the plan limits their norm to {has} "
            f"(max_gradient_norm). Set gradient_clip_val={planned or 0:g}, or search a plan with that limit."
        )
    if plan.num_ranks != trainer.world_size:
        raise PlanError(
            f"{trainer.world_size} processes train, but the plan is for {plan.num_ranks}. Set "
            f"devices={plan.num_ranks}, or search a plan for {trainer.world_size}."
        )


def limit_of(clip_val: float | None) -> float | None:
    """The limit of the norm that Lightning clips to; it takes 0 for none."""
    return float(clip_val) if clip_val is not None and clip_val > 0 else None
