"""The question that a plan for a workload on a machine answers, read off these three."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod
from typing import Final

from ..optimizers.state import master_bytes, state_tensors, stepped_dtype, summed_dtype
from ..schema.calibration import Calibration
from ..schema.hardware import PROBED, Hardware
from ..schema.optimizer import Optimizer
from ..schema.plan import Plan
from ..schema.question import Question
from ..schema.workload import DType, LossHead, OperationClass, Parameter, Workload

_LORA: Final = re.compile(r"(?:^|\.)lora_(?:embedding_)?[abAB](?:\.|$)")
"""What protwin and PEFT call low-rank matrices."""
_FIRST_LORA: Final = re.compile(r"(?:^|\.)lora_(?:embedding_)?[aA](?:\.|$)")
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")
_MATRIX_CLASSES: Final = frozenset({OperationClass.MATMUL, OperationClass.ATTENTION})


def question_of(
    workload: Workload,
    plan: Plan,
    hardware: Hardware | None = None,
    calibration: Calibration | None = None,
) -> Question:
    """What ``plan`` was asked for: its model, element types, batch and machine.

    Args:
        workload: One rank's micro-batch.
        plan: Its micro-batches and ranks count; the rest is the answer.
        hardware: The machine; None where it is not known.
        calibration: Factors measured on it; None for its own figures.
    """
    trained = [parameter for parameter in workload.parameters if parameter.trainable]
    lora = [parameter for parameter in trained if _LORA.search(parameter.name)]
    trained_dtype, compute_dtype = _most_common(trained), matrix_dtype(workload)
    return Question(
        model_name=workload.model_name,
        num_parameters=workload.num_parameters,
        num_trained=sum(parameter.num_elements for parameter in trained),
        lora_rank=max((p.shape[0] for p in lora if _FIRST_LORA.search(p.name) and p.shape), default=None),
        lora_targets=tuple(dict.fromkeys(_target(parameter.name) for parameter in lora)),
        quantized=tuple(dict.fromkeys(p.quantized.words for p in workload.parameters if p.quantized is not None)),
        frozen=() if lora else frozen_modules(workload.parameters),
        weight_dtype=weight_dtype(workload),
        published_dtype=workload.published_dtype,
        dtype_origin=workload.dtype_origin,
        compute_dtype=compute_dtype,
        rate_dtype=None if hardware is None else hardware.device.rate_dtype(compute_dtype),
        gradient_dtype=trained_dtype,
        host_gradient_dtype=_host_gradient_dtype(plan, trained_dtype),
        optimizer=plan.optimizer.words,
        state_dtype=_state_dtype(trained, trained_dtype, plan.optimizer),
        master_dtype=_master_dtype(trained_dtype, plan.optimizer),
        samples_per_micro_batch=workload.num_samples,
        sequence_length=sequence_length_of(workload),
        rotary_tokens=exceeded_tokens(workload),
        packing=workload.packing,
        micro_batches=plan.micro_batches,
        num_ranks=plan.num_ranks,
        loss_head=None if workload.loss_head is LossHead.EAGER else workload.loss_head,
        keeps_outputs=workload.keeps_outputs,
        sequence_ranks=plan.sequence_ranks,
        hardware_name="" if hardware is None else hardware.name,
        overrides=() if hardware is None else hardware.overrides,
        calibrated_on=None if calibration is None else calibration.machine or calibration.hardware_name,
        is_probed=hardware is not None and hardware.device.source.startswith(PROBED),
    )


def _master_dtype(trained_dtype: DType, optimizer: Optimizer) -> DType | None:
    """Of the weights' masters; None: the weights are their own."""
    return stepped_dtype(trained_dtype, optimizer) if master_bytes(trained_dtype, optimizer) else None


def exceeded_tokens(workload: Workload, sequence_length: int | None = None) -> int | None:
    """What rotary positions were made for, if samples are longer; packed ones begin anew at each sample.

    ``sequence_length``: of rows, in the place of the workload's.
    """
    longest = sequence_length or sequence_length_of(workload)
    if workload.packing is not None:
        longest = workload.packing.longest
    made_for = workload.rotary_tokens
    return None if longest is None or made_for is None or longest <= made_for else made_for


def sequence_length_of(workload: Workload) -> int | None:
    """Tokens of one sample; None for models without sequences.  Several choices of one sample count as one."""
    length = workload.num_tokens // workload.num_samples
    is_sequence = "input_ids" in workload.batch_shapes or workload.num_tokens != workload.num_samples
    return length if is_sequence else None


def matrix_dtype(workload: Workload) -> DType:
    """The element type of most FLOPs of the blocks' matrix products; that of the weights where none are listed.

    Of those in float8 it is not known what they would be computed in otherwise.
    """
    flops: dict[DType, int] = {}
    for index in {block.profile for block in workload.blocks}:
        for operation in workload.profiles[index].forward.operations:
            if operation.operation_class in _MATRIX_CLASSES and operation.dtype is not DType.FLOAT8_E4M3FN:
                flops[operation.dtype] = flops.get(operation.dtype, 0) + operation.flops * operation.count
    return max(flops, key=lambda dtype: flops[dtype]) if flops else workload.compute_dtype


def weight_dtype(workload: Workload) -> DType:
    """The element type of most weights but packed ones; float32 where there are none."""
    return _most_common([parameter for parameter in workload.parameters if parameter.num_scalars is None])


def frozen_modules(parameters: Sequence[Parameter]) -> tuple[str, ...]:
    """The outermost modules none of whose parameters is trained, in order; equal layers as ``layers.0-9``.

    A parameter that is frozen beside trained ones of its module is named itself.  Empty if all are trained.
    """
    trained_within = {prefix for p in parameters if p.trainable for prefix in _prefixes(p.name)}
    found = (
        next((prefix for prefix in _prefixes(p.name) if prefix not in trained_within), p.name)
        for p in parameters
        if not p.trainable
    )
    return _in_rows(dict.fromkeys(found))


def _prefixes(name: str) -> list[str]:
    """``["model", "model.norm", "model.norm.weight"]``."""
    steps = name.split(".")
    return [".".join(steps[: place + 1]) for place in range(len(steps))]


def _in_rows(names: Iterable[str]) -> tuple[str, ...]:
    """Names that differ in their first number alone, joined: ``a.0.b`` and ``a.1.b`` to ``a.0-1.b``."""
    rows: dict[tuple[str, str], list[int]] = {}
    for name in names:
        found = _NUMBER.search(name)
        before, after = (name, "") if found is None else (name[: found.start()], name[found.end() :])
        rows.setdefault((before, after), []).extend([] if found is None else [int(found[0])])
    return tuple(f"{before}{_ranges(numbers)}{after}" for (before, after), numbers in rows.items())


def _ranges(numbers: Sequence[int]) -> str:
    """``"0-3,5"``; empty for no numbers."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _target(name: str) -> str:
    """The linear map beside which the low-rank matrix ``name`` stands, without its path."""
    return _LORA.split(name)[0].rpartition(".")[2]


def _host_gradient_dtype(plan: Plan, dtype: DType) -> DType | None:
    """In which the host adds gradients of this type up, if it is another."""
    summed = summed_dtype(dtype)
    return summed if plan.widens_on_host and summed is not dtype else None


def _state_dtype(trained: Sequence[Parameter], dtype: DType, optimizer: Optimizer) -> DType:
    """The element type of the moments of the largest trained parameter."""
    largest = max((p.shape for p in trained if p.dtype is dtype), key=prod, default=(0,))
    return next(tensor.dtype for tensor in state_tensors((dtype, largest), optimizer) if tensor.is_moment)


def _most_common(parameters: Sequence[Parameter]) -> DType:
    """The element type of most scalars; float32 where there are none."""
    sizes: dict[DType, int] = {}
    for parameter in parameters:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.num_elements
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else DType.FLOAT32
