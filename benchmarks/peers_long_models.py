"""Contestants of the bench of long sequences: the plain loop, DeepSpeed's tiles and ours, on one model and one text.

DeepSpeed's ``TiledMLP`` and ``TiledFusedLogitsLoss`` are autograd functions; they stand in the plain loop as its
documentation shows, and no engine is needed.  All of ours are on the device, so that tiles alone make the difference.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any, Final

import torch
import torch.distributed as dist
from peers_others import Plain
from peers_subject import LEARNING_RATE, LONG, WEIGHT_DECAY

from protwin.runtime.data.byte_text import byte_batches, python_reference
from protwin.runtime.devices.cpu_device import CpuDevice
from protwin.runtime.devices.ledger import MemoryLedger
from protwin.runtime.model.configurations import build_model
from protwin.runtime.tracing.tracing import trace
from protwin.runtime.training.carry_out import carry_out
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import ParallelMode, Plan

CONFIGURATION: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODEL_NAME: Final = "llama of 4 blocks, 128 wide, MLPs of 1,024, 8,192 words"
BATCH_SIZE: Final = 1
SEQUENCE_LENGTH: Final = 1024
NUM_TILES: Final = 8
_CHUNK_BYTES: Final = 2**26
_SEED: Final = 0
_MAKE_OPTIMIZER: Final = partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def make_contestant(name: str) -> PlainLong | OurTiles:
    """The contestant ``name``: long-WHO-VARIANT, or long-WHO-VARIANT-checkpointed."""
    who, variant, *more = name.removeprefix(LONG).split("-")
    makers: dict[str, type[PlainLong | OurTiles]] = {
        "plain": PlainLong,
        "deepspeed": DeepSpeedTiles,
        "ours": OurTiles,
    }
    return makers[who](variant, is_checkpointed=more == ["checkpointed"])


def make_model() -> Any:
    """The model with the same random weights in every process."""
    torch.manual_seed(_SEED)
    model = build_model(CONFIGURATION, MODEL_NAME, torch.float32, device="cpu")
    model.config.use_cache = False
    return model


def long_batches() -> Iterator[dict[str, torch.Tensor]]:
    """Batches without end."""
    text = python_reference()
    for seed in count(_SEED):
        yield from byte_batches(text, batch_size=BATCH_SIZE, sequence_length=SEQUENCE_LENGTH, num_batches=16, seed=seed)


class PlainLong(Plain):
    """The plain loop, which may recompute its blocks."""

    def __init__(self, variant: str, *, is_checkpointed: bool) -> None:
        self.model = make_model()
        self._tile(variant)
        if is_checkpointed:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._optimizer = _MAKE_OPTIMIZER(self.model.parameters())
        self.about = "the plain loop" + (", blocks recomputed" if is_checkpointed else "")

    def _tile(self, variant: str) -> None:
        assert variant == "whole"

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """What it is trained on."""
        return long_batches()

    def watched(self, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        """One step that does not count, and the highest level of memory in it: every operation is watched."""
        ledger = MemoryLedger()
        ledger.adopt([*self.model.parameters(), *self.model.buffers()])
        ledger.adopt(t for s in self._optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
        ledger.adopt_inputs(batch.values())
        with ledger.metering():
            losses = [self.step(batch)]
        return {"losses": losses, "copied_bytes": 0, "peak_bytes": ledger.peak_bytes}


class DeepSpeedTiles(PlainLong):
    """The plain loop with DeepSpeed's autograd functions in place of MLPs, of head and loss, or of both."""

    def __init__(self, variant: str, *, is_checkpointed: bool) -> None:
        import deepspeed

        super().__init__(variant, is_checkpointed=is_checkpointed)
        self.about = f"DeepSpeed {deepspeed.__version__} in {self.about}"

    def _tile(self, variant: str) -> None:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP

        if variant in ("mlp", "all"):
            for layer in self.model.model.layers:
                whole = type(layer.mlp).forward
                layer.mlp.forward = types.MethodType(
                    lambda mlp, hidden, whole=whole: TiledMLP.apply(
                        whole, mlp, hidden, NUM_TILES, list(mlp.parameters())
                    ),
                    layer.mlp,
                )
        self._tiled_loss = TiledFusedLogitsLoss if variant in ("loss", "all") else None

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One training step; gives its loss."""
        if self._tiled_loss is None:
            return super().step(batch)
        labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[..., 1:].contiguous()
        num_counted = (labels != -100).sum()
        hidden = self.model.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state

        def summed(head: torch.nn.Module, part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(head(part), wanted, reduction="sum") / num_counted

        head = self.model.lm_head
        loss = self._tiled_loss.apply(summed, head, hidden, labels, None, NUM_TILES, [head.weight], "sum")
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.item())


class OurTiles:
    """Everything on the device, in tiles as the plan says; several ranks share each sequence."""

    def __init__(self, variant: str, *, is_checkpointed: bool, num_ranks: int = 1) -> None:
        model = make_model()
        tiled = {
            "mlp_tiles": NUM_TILES if variant in ("mlp", "all") else 1,
            "loss_tiles": NUM_TILES if variant in ("loss", "all") else 1,
        }
        traced = {name: [number] for name, number in tiled.items() if number > 1}
        shared = (num_ranks,) if num_ranks > 1 else ()
        workload = trace(model, next(long_batches()), name=MODEL_NAME, repeats=0, sequence_ranks=shared, **traced)
        plan = Plan(
            workload_id=workload.identity,
            chunk_bytes=_CHUNK_BYTES,
            n_persist=len(layout_of(workload, _CHUNK_BYTES).chunks),
            n_buffer=0,
            n_checkpoint=len(workload.blocks) if is_checkpointed else 0,
            parallel=ParallelMode.DDP if num_ranks > 1 else ParallelMode.SINGLE,
            num_ranks=num_ranks,
            sequence_ranks=num_ranks,
            **tiled,
        )
        self._training = carry_out(model, plan, workload, optimizer=_MAKE_OPTIMIZER, device=CpuDevice())
        self.about = ", ".join(
            f"{name} {value}" for name, value in ({"n_checkpoint": plan.n_checkpoint} | tiled).items()
        )

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """What it is trained on."""
        return long_batches()

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One training step; gives its loss."""
        loss: Any = self._training.model(**batch).loss
        loss.backward()
        self._training.step()
        return float(loss.item())

    def watched(self, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        """One step that does not count, and the highest level of memory so far: our first steps are watched."""
        losses = [self.step(batch)]
        self.synchronize()
        return {"losses": losses, "copied_bytes": 0, "peak_bytes": self._training.peak_device_bytes}

    def synchronize(self) -> None:
        """Wait for the lanes."""
        self._training.synchronize()

    def close(self) -> None:
        """End the lanes."""
        self._training.close()
        if dist.is_initialized():
            dist.destroy_process_group()
