"""Two ranks that share each sequence: DeepSpeed's ``UlyssesSPAttentionHF`` in a plain loop with DDP, and ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from peers_long_models import BATCH_SIZE, SEQUENCE_LENGTH, OurTiles, PlainLong, long_batches


def make_rank(name: str, num_ranks: int) -> DeepSpeedUlysses | OurTiles:
    """The contestant ``name``: long-WHO-ranks.  The default group is there."""
    if name.endswith("ours-ranks"):
        return OurTiles("whole", is_checkpointed=False, num_ranks=num_ranks)
    return DeepSpeedUlysses(num_ranks)


class DeepSpeedUlysses(PlainLong):
    """Every rank has the whole model and its part of the sequence; gradients are those of the whole sequence."""

    def __init__(self, num_ranks: int) -> None:
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        from torch.nn.parallel import DistributedDataParallel

        deepspeed.init_distributed("gloo")
        super().__init__("whole", is_checkpointed=False)
        UlyssesSPAttentionHF.register_with_transformers(
            self.model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=num_ranks,
            micro_batch_size=BATCH_SIZE,
            seq_length=SEQUENCE_LENGTH,
            seq_length_is_variable=False,
        )
        self._num_ranks = num_ranks
        self._wrapped = DistributedDataParallel(self.model)
        self.about = f"UlyssesSPAttentionHF of DeepSpeed {deepspeed.__version__}, sdpa, DistributedDataParallel, gloo"

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """This rank's part of each sequence, with the word that follows each."""
        length = SEQUENCE_LENGTH // self._num_ranks
        part = slice(dist.get_rank() * length, (dist.get_rank() + 1) * length)
        positions = torch.arange(SEQUENCE_LENGTH).expand(BATCH_SIZE, -1)
        for batch in long_batches():
            following = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
            whole = {"input_ids": batch["input_ids"], "position_ids": positions, "shift_labels": following}
            yield {name: tensor[:, part].contiguous() for name, tensor in whole.items()}

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One training step; gives this rank's part of the loss, times the number of ranks: DDP takes means."""
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        logits: Any = self._wrapped(**inputs, use_cache=False).logits
        wanted = batch["shift_labels"].view(-1)
        num_counted = (wanted != -100).sum()
        summed = torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), wanted, reduction="sum")
        dist.all_reduce(num_counted)
        loss = summed * self._num_ranks / num_counted
        del logits, summed
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.item())
