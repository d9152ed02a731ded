"""Two processes that torchrun has started: axolotl's Trainer with its plugin, beside the same one with DDP.

``python -m tests.runtime.integrations.axolotl_on_two_ranks FOLDER`` on each; what does not hold ends it by an error.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

from protwin.runtime.integrations.axolotl_section import PLUGIN
from protwin.shared.schema.plan import ParallelMode
from tests.runtime.integrations.test_axolotl import axolotls, trained, validated
from tests.runtime.models import differences, llama, snapshot


def main(folder: Path) -> None:
    """Ten steps of one micro-batch, which DDP's bits are for, and the last five of them again from a checkpoint."""
    warnings.simplefilter("ignore")
    base = folder / os.environ["RANK"]
    base.mkdir()
    llama(num_layers=2).save_pretrained(base / "base")
    section = {"budget": "300KiB", "modes": [str(ParallelMode.REPLICATED)]}
    cfg = validated(base, gradient_accumulation_steps=1, protwin=section)
    own = axolotls("core.trainers.base").AxolotlTrainer
    plain, logs, trainer = trained(own, cfg, folder / "plain", gradient_accumulation_steps=1)
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    plugin = axolotls("integrations.base").PluginManager.get_instance().plugins[PLUGIN]
    kind = plugin.get_trainer_cls(cfg)
    model, found, trainer = trained(kind, cfg, folder / "planned", gradient_accumulation_steps=1)
    assert trainer.protwin.plan.num_ranks == 2
    assert found == logs
    assert differences(model, snapshot(plain)) == []
    assert trainer.protwin.counts.num_cpu_adam_steps > 0
    checkpoint = str(folder / "planned" / "checkpoint-5")
    again, resumed, _ = trained(kind, cfg, folder / "again", checkpoint, gradient_accumulation_steps=1)
    assert resumed == logs
    assert differences(again, snapshot(plain)) == []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
