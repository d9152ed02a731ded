"""Models with packed bases and PEFT's adapters beside them, made by bitsandbytes and PEFT alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import bitsandbytes as bnb
import peft
import torch
from torch import nn

from tests.runtime.models import STEPS, Case, llama, three_groups, token_batches

ADAPTED = ("q_proj", "v_proj", "down_proj")


def packed(linear: nn.Linear, kind: str, *, double: bool, blocksize: int, compute: torch.dtype | None) -> nn.Module:
    """A linear map of bitsandbytes with the same weight."""
    sizes, has_bias = (linear.in_features, linear.out_features), linear.bias is not None
    made: Any
    if kind == "int8":
        made = bnb.nn.Linear8bitLt(*sizes, bias=has_bias, has_fp16_weights=False)  # type: ignore[attr-defined]
        made.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)  # type: ignore[attr-defined]
    else:
        made = bnb.nn.Linear4bit(  # type: ignore[attr-defined]
            *sizes, bias=has_bias, compute_dtype=compute, compress_statistics=double, quant_type=kind
        )
        made.weight = bnb.nn.Params4bit(  # type: ignore[attr-defined]
            linear.weight.data,
            requires_grad=False,
            compress_statistics=double,
            quant_type=kind,
            blocksize=blocksize,
            module=made,
        )
    made.bias = linear.bias
    return made.to("cpu")


def packed_blocks(model: Any, kind: str, **how: Any) -> nn.Module:
    """``model`` with every linear map of its blocks packed, in place, and frozen."""
    how = {"double": False, "blocksize": 64, "compute": None} | how
    for block in model.model.layers:
        for path, module in list(block.named_modules()):
            if type(module) is nn.Linear:
                parent, _, name = path.rpartition(".")
                setattr(block.get_submodule(parent), name, packed(module, kind, **how))
    return model.requires_grad_(False)


@contextmanager
def quiet_peft() -> Iterator[None]:
    """PEFT asks transformers for an attribute that has a newer name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def adapted(model: nn.Module, *, targets: Sequence[str] = ADAPTED, seed: int = 3, **settings: Any) -> nn.Module:
    """PEFT's LoRA beside ``model``, with both factors random."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False, **settings)
    with quiet_peft():
        return peft.get_peft_model(model, config).train()


def qlora(
    kind: str, *, dtype: torch.dtype = torch.float32, shape: dict[str, Any] | None = None, **how: Any
) -> nn.Module:
    """A Llama with a packed base and LoRA."""
    return adapted(packed_blocks(llama(num_layers=3, **(shape or {})).to(dtype), kind, **how))


def head_too() -> nn.Module:
    """The same with a packed head."""
    model: Any = packed_blocks(llama(num_layers=3), "nf4")
    model.lm_head = packed(model.lm_head, "nf4", double=False, blocksize=64, compute=None).requires_grad_(False)
    return adapted(model)


@lru_cache
def quantized_cases(steps: int = STEPS) -> dict[str, Case]:
    """Bases of every type, by name, with batches for so many steps."""
    tokens, biased = token_batches(steps), {"attention_bias": True}
    bf16 = torch.bfloat16
    return {
        "nf4": Case(partial(qlora, "nf4"), tokens, groups=three_groups),
        "nf4, double": Case(partial(qlora, "nf4", double=True), tokens),
        "fp4 in blocks of 128": Case(partial(qlora, "fp4", blocksize=128), tokens),
        "nf4, double, in bfloat16": Case(partial(qlora, "nf4", double=True, dtype=bf16), tokens),
        "nf4, with biases": Case(partial(qlora, "nf4", shape=biased), tokens),
        "nf4, the head too": Case(head_too, tokens),
        "int8": Case(partial(qlora, "int8"), tokens),
    }
