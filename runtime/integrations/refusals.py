"""What decides over a model's memory itself, and what a training by a plan cannot go along with."""

from __future__ import annotations

import os
from typing import Any, Final

from ...shared.basics.errors import PlanError
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from ..planning.request import PlanRequest

_LAUNCHED: Final = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
"""What ``accelerate launch`` was told to use, by the variable that says so."""
_ALONE: Final = "a plan decides alone where parameters, gradients and optimizer state lie"


def refuse_other_systems(arguments: Any = None) -> None:
    """Raise PlanError if another system is to place the model's memory in the same run.

    ``arguments`` are the TrainingArguments, if there are some; variables say what ``accelerate launch`` set.
    """
    for field, system in (("deepspeed", "DeepSpeed"), ("fsdp", "FSDP"), ("parallelism_config", "a parallelism_config")):
        if getattr(arguments, field, None):
            raise PlanError(
                f"{field} is set, so that {system} would train the model, but {_ALONE}. Leave {field} out of the "
                f"training arguments, or train without a plan."
            )
    for variable, system in _LAUNCHED.items():
        if os.environ.get(variable, "false").lower() in ("true", "1", "yes"):
            raise PlanError(
                f"accelerate launch was told to use {system} ({variable}), but {_ALONE}. Launch without it "
                f"(accelerate launch --cpu, --num_processes N or torchrun), or train without a plan."
            )


def refuse_shared_sequences(request: PlanRequest, whose: str) -> None:
    """Raise PlanError if ranks are to share sequences in a loop that gives every process batches of its own."""
    if request.sequence_ranks > 1:
        raise PlanError(
            f"{request.sequence_ranks} ranks are to share each sequence (sequence_ranks), but the loop of {whose} "
            f"gives every process batches of its own. Train by protwin.train, or in a loop of your own (carry_out) "
            f"that gives them the same, or by a plan with sequence_ranks 1."
        )


def refuse_arguments(arguments: Any) -> None:
    """Raise PlanError if TrainingArguments ask for what no plan is carried out with."""
    refuse_other_systems(arguments)
    # transformers 5 has both names for one argument, and each says what the other one does.
    named = [name for name in ("activation_checkpointing", "gradient_checkpointing") if getattr(arguments, name, None)]
    if named:
        former = f" ({named[1]}=False by its former name)" if len(named) > 1 else ""
        raise PlanError(
            f"{named[0]} is True, but the plan decides which blocks are checkpointed (n_checkpoint). Set "
            f"{named[0]}=False{former}."
        )
    if getattr(arguments, "activation_offloading", None):
        raise PlanError(
            "activation_offloading is True, but the plan decides which activations go to the host (n_swap, "
            "n_offload_input). Set activation_offloading=False."
        )
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if getattr(arguments, "torch_compile", None) or backend != "no":
        raise PlanError(
            "torch_compile is set, but a plan is not carried out on a compiled model: its tasks begin and end with "
            "the blocks that compiled code does away with. Set torch_compile=False."
        )
    if getattr(arguments, "auto_find_batch_size", None):
        raise PlanError(
            "auto_find_batch_size is True, but a plan is for one batch size. Set it to False: the search says whether "
            "per_device_train_batch_size fits, and protwin search --goal largest-batch finds the largest."
        )
    if getattr(arguments, "fp16", None) or os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower() in _SCALED:
        raise PlanError(
            "fp16 is set: Accelerate scales losses and gradients for it, but gradients of offloaded chunks have left "
            "the device by then. Set bf16=True, or train in float32."
        )
    if getattr(arguments, "n_gpu", 1) > 1:
        raise PlanError(
            f"this process sees {arguments.n_gpu} GPUs, over which the Trainer would copy the model (DataParallel); "
            f"a plan is carried out by one process for each. Start torchrun --nproc-per-node {arguments.n_gpu}, or let "
            f"CUDA_VISIBLE_DEVICES show one."
        )


def refuse_launched() -> None:
    """Raise PlanError if ``accelerate launch`` was told of what no plan is carried out with."""
    refuse_other_systems()
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise PlanError(
            "accelerate launch was told to compile (ACCELERATE_DYNAMO_BACKEND), but a plan is not carried out on a "
            "compiled model. Launch with --dynamo_backend no."
        )


def refuse_accelerator(accelerator: Any) -> None:
    """Raise PlanError if an Accelerator was made for what no plan is carried out with."""
    state = accelerator.state
    for field, system in (("deepspeed_plugin", "DeepSpeed"), ("fsdp_plugin", "FSDP")):
        if getattr(state, field, None) is not None:
            raise PlanError(
                f"the Accelerator has a {field}, so that {system} would train the model, but {_ALONE}. Leave it out, "
                f"and launch without {system}, or train without a plan."
            )
    if getattr(accelerator, "parallelism_config", None) is not None:
        raise PlanError(f"the Accelerator has a parallelism_config, but {_ALONE}. Leave it out.")
    if str(accelerator.mixed_precision) in _SCALED:
        raise PlanError(
            f"mixed_precision of the Accelerator is {accelerator.mixed_precision}, for which it scales losses and "
            f"gradients, but gradients of offloaded chunks have left the device by then. Set mixed_precision to bf16."
        )
    if str(getattr(state.dynamo_plugin.backend, "value", "no")).lower() != "no":
        raise PlanError("the Accelerator has a dynamo_backend, but a plan is not carried out on a compiled model.")


_SCALED: Final = ("fp16", "fp8")


def refuse_other_step(arguments: Any, plan: Plan | None, workload: Workload | None) -> None:
    """Raise PlanError, which names both, if the step of TrainingArguments is another one than the plan's."""
    if plan is not None:
        if plan.micro_batches != arguments.gradient_accumulation_steps:
            raise PlanError(
                f"gradient_accumulation_steps is {arguments.gradient_accumulation_steps}, but the plan has "
                f"{plan.micro_batches} micro-batches. Set gradient_accumulation_steps={plan.micro_batches}, or search "
                f"a plan with {arguments.gradient_accumulation_steps} micro-batches."
            )
        limit, planned = limit_of(arguments.max_grad_norm), plan.max_gradient_norm
        if limit != planned:
            asked, has = ("no limit" if one is None else f"{one:g}" for one in (limit, planned))
            raise PlanError(
                f"max_grad_norm is {arguments.max_grad_norm or 0:g}, which clips gradients to {asked}, but the plan "
                f"limits their norm to {has} (max_gradient_norm). Set max_grad_norm={planned or 0:g}, or search a plan "
                f"with that limit."
            )
        if plan.num_ranks != arguments.world_size:
            raise PlanError(
                f"{arguments.world_size} processes train, but the plan is for {plan.num_ranks}. Start as many "
                f"(torchrun --nproc-per-node {plan.num_ranks}), or search a plan for {arguments.world_size}."
            )
    if workload is not None and workload.num_samples != arguments.per_device_train_batch_size:
        raise PlanError(
            f"per_device_train_batch_size is {arguments.per_device_train_batch_size}, but the workload was traced with "
            f"{workload.num_samples} samples. Set per_device_train_batch_size={workload.num_samples}, or leave the "
            f"workload out and let the Trainer trace."
        )


def limit_of(max_grad_norm: float | None) -> float | None:
    """The limit of the norm that the Trainer clips to; it takes 0 for none."""
    return max_grad_norm if max_grad_norm is not None and max_grad_norm > 0 else None
