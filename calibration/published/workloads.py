"""The models of published runs: Llamas with low-rank adapters, and Llamas of any depth, traced without weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from ...runtime.model.configurations import build_model, quiet
from ...runtime.tracing.configurations import apply_options, autocast_of
from ...runtime.tracing.tracing import trace
from ...shared.schema.training_options import LoraOptions, TrainingOptions
from ...shared.schema.workload import Block, DType, Operation, OperationClass, Workload

ADAPTED: Final = ("q_proj", "k_proj", "v_proj", "o_proj")


class WideAdapter(nn.Module):
    """A frozen linear map with a trainable one of low rank beside it: x W + (x A) B * scale (arXiv 2106.09685).

    The adapter's weights are float32, and its input and the sum are cast: PEFT makes it so beside a base in 16 bit
    unless it is told otherwise (its option ``autocast_adapter_dtype``).  ``runtime/model/adapters.py`` has adapters of
    their base's element type.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device, dtype=torch.float32)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device, dtype=torch.float32)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The adapted map of ``x``."""
        plain: torch.Tensor = self.base(x)
        adapted: torch.Tensor = plain + self.up(self.down(x.to(torch.float32))) * self.scale
        return adapted.to(plain.dtype)


def adapted_workload(
    configuration: dict[str, Any], name: str, *, batch_size: int, sequence_length: int, rank: int = 8
) -> Workload:
    """LoRA training of a Llama in float16 with adapters on the attention's four maps, everything else frozen."""
    model = build_model(configuration, name, torch.float16)
    model.requires_grad_(False)
    for module in list(model.modules()):
        for child in ADAPTED:
            base = getattr(module, child, None)
            if isinstance(base, nn.Linear):
                setattr(module, child, WideAdapter(base, rank, scale=2.0))
    return _traced(model, name, batch_size, sequence_length)


class SavedWhole(nn.Module):
    """A part that is trained whole beside adapters: a copy is, and the original stays (PEFT's ``modules_to_save``)."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original.requires_grad_(False)
        self.trained = copy.deepcopy(original).requires_grad_(True)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """What the trained copy gives."""
        found: torch.Tensor = self.trained(given)
        return found


def partly_trained_workload(
    configuration: dict[str, Any],
    name: str,
    *,
    batch_size: int,
    sequence_length: int,
    dtype: DType,
    lora: LoraOptions,
    trained_whole: Sequence[str],
    autocast: DType | None = None,
) -> Workload:
    """LoRA, with the parts at the paths ``trained_whole`` trained whole beside the adapters."""
    model = build_model(configuration, name, getattr(torch, dtype))
    apply_options(model, TrainingOptions(lora=lora))
    for path in trained_whole:
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, SavedWhole(model.get_submodule(path)))
    with autocast_of(TrainingOptions(autocast=autocast)):
        return _traced(model, name, batch_size, sequence_length)


def dense_workload(configuration: dict[str, Any], name: str, *, batch_size: int, sequence_length: int) -> Workload:
    """Full training of a Llama in bfloat16, with float32 masters and moments."""
    return _traced(build_model(configuration, name, torch.bfloat16), name, batch_size, sequence_length)


def _traced(model: Any, name: str, batch_size: int, sequence_length: int) -> Workload:
    tokens = torch.empty((batch_size, sequence_length), dtype=torch.long, device="meta")
    with quiet():
        return trace(model, {"input_ids": tokens, "labels": tokens.clone()}, name=name)


def with_divisions(workload: Workload) -> Workload:
    """The model under DistributedDataParallel: backward divides each gradient by the number of ranks, by a kernel each.

    Source: torch/csrc/distributed/c10d/reducer.cpp, mark_variable_ready_dense.
    """
    found = []
    for index, profile in enumerate(workload.profiles):
        block = next(number for number, block in enumerate(workload.blocks) if block.profile == index)
        divisions = tuple(
            Operation(
                name="div_",
                operation_class=OperationClass.ELEMENTWISE,
                dtype=parameter.dtype,
                flops=parameter.num_elements,
                bytes_moved=2 * parameter.size_bytes,
            )
            for parameter in workload.parameters
            if parameter.trainable and parameter.block == block
        )
        backward = profile.checkpoint_backward
        longer = backward.model_copy(update={"operations": (*backward.operations, *divisions)})
        found.append(profile.model_copy(update={"checkpoint_backward": longer}))
    return workload.model_copy(update={"profiles": tuple(found)})


def with_depth(workload: Workload, num_blocks: int) -> Workload:
    """The model with ``num_blocks`` equal blocks: the last but one of those traced stands for all that are added."""
    traced = workload.num_blocks
    assert traced >= 3
    owned = [index for index, parameter in enumerate(workload.parameters) if parameter.block is not None]
    before, after = workload.parameters[: owned[0]], workload.parameters[owned[-1] + 1 :]
    sources = [*range(traced - 2), *[traced - 2] * (num_blocks - traced + 1), traced - 1]
    blocks = tuple(
        Block(name=_renumbered(workload.blocks[source].name, index), profile=workload.blocks[source].profile)
        for index, source in enumerate(sources)
    )
    parameters = [
        parameter.model_copy(update={"name": _renumbered(parameter.name, index), "block": index})
        for index, source in enumerate(sources)
        for parameter in workload.parameters
        if parameter.block == source
    ]
    return workload.model_copy(update={"blocks": blocks, "parameters": (*before, *parameters, *after)})


def _renumbered(name: str, index: int) -> str:
    return re.sub(r"\.\d+(?=\.|$)", f".{index}", name, count=1)


def llama(
    hidden_size: int, num_blocks: int, num_heads: int, intermediate_size: int, vocab_size: int = 32000
) -> dict[str, Any]:
    """A Llama's configuration in the Hugging Face form, without grouped heads."""
    return {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "num_hidden_layers": num_blocks,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": 4096,
        "use_cache": False,
    }
