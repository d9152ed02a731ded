"""Two processes that torchrun has started: Lightning's fit by plans of two ranks.

``python -m tests.runtime.lightning.on_two_ranks FOLDER`` on each of them; what does not hold ends it by an error.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint

from protwin.shared.basics.errors import PlanError
from protwin.shared.schema.plan import ParallelMode
from tests.runtime.lightning.fits import Fit, check_offloaded, logs_of
from tests.runtime.models import differences, gpt2

_RANKS: dict[str, Any] = {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": 1, "max_epochs": 2}


def of_mode(folder: Path, mode: ParallelMode, limit: float | None) -> Callable[..., Fit]:
    """A fit on two ranks, by its name, with a checkpoint of every epoch."""

    def case(name: str, resume: Path | None = None) -> Fit:
        weights_only = mode is ParallelMode.SHARDED
        keep = ModelCheckpoint(folder / name, filename="{epoch}", save_top_k=-1, save_weights_only=weights_only)
        arguments = {**_RANKS, "gradient_clip_val": limit, "enable_checkpointing": True}
        return Fit(folder, arguments, [keep], num_rows=24, resume=resume)

    return case


def main(folder: Path) -> None:
    """One micro-batch: the bits of DDP; checkpoints of the plan go on without it, and the other way round."""
    warnings.simplefilter("ignore")
    for mode, limit in ((ParallelMode.REPLICATED, 0.5), (ParallelMode.SHARDED, None)):
        case = of_mode(folder, mode, limit)
        wishes: dict[str, Any] = {"modes": [mode], "budget_bytes": "300KiB", "probe_s": 0.05}
        plain = case(f"plain-{mode}").fitted(gpt2())
        planned = case(f"planned-{mode}").fitted(gpt2(), **wishes)
        assert planned.protwin.plan.num_ranks == 2
        assert planned.protwin.plan.parallel is mode
        assert logs_of(planned) == logs_of(plain), mode
        assert differences(planned.lightning_module, plain.lightning_module.state_dict()) == [], mode
        check_offloaded(planned)
        if mode is ParallelMode.REPLICATED:
            again = case("again", folder / f"planned-{mode}" / "epoch=0.ckpt").fitted(gpt2())
            resumed = case("resumed", folder / f"plain-{mode}" / "epoch=0.ckpt").fitted(gpt2(), **wishes)
            assert logs_of(resumed) == logs_of(again)
        else:
            with pytest.raises(PlanError, match="has no room for"):
                case("refused", folder / "plain-replicated" / "epoch=0.ckpt").fitted(gpt2(), **wishes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
