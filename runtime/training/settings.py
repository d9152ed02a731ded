"""What a user chooses of a training beside its plan, and what other methods choose for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ...shared.basics.errors import PlanError
from ...shared.schema.hardware import Disk
from ...shared.schema.plan import Plan
from ..checkpoints.saved_part import SavedPart
from ..chunks.saved_weights import SavedWeights
from ..devices.device import TrainingDevice
from ..lanes.compute_lane import ComputeLane
from ..optimizers.chunk_optimizer import MakeOptimizer
from ..optimizers.loss_scaling import LossScaling
from ..ranks.stages import StageRanks
from ..ranks.world import World
from ..recording.replanning import Replanning
from .evaluation import EvaluatedModel


class Walker(Protocol):
    """What leads the compute lane through its program, as long as a training lives."""

    def remove(self) -> None:
        """Announce nothing any more; afterwards the model is as it was.  Idempotent."""

    def forget(self) -> None:
        """The iteration that is under way has been given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """What a user chooses beside the plan; ``carry_out`` says what each means."""

    optimizer: MakeOptimizer
    parameter_groups: Sequence[Mapping[str, Any]] | None
    device: TrainingDevice
    meter_every: int | None
    check_gradients: bool
    loss_scaling: LossScaling | None
    keep_last_step: bool
    disk_folder: str | Path | None = None
    stated_disk: Disk | None = None
    world: World | None = None
    """The ranks of a plan for several: of a pipeline those of this rank's stage."""
    stages: StageRanks | None = None
    """The ranks of a pipeline; None: there is one stage."""
    traced_hash: str | None = None
    """That of the model of which this stage's is a part; None: it is whole."""
    weights: SavedWeights | None = None
    """What fills parameters on the meta device."""
    returning: frozenset[nn.Parameter] = frozenset()
    """Those of them that are on the meta device again in the end."""
    follow: Callable[[ComputeLane], Walker] | None = None
    """Who tells the compute lane where the model is; None: hooks on its blocks, in forward and backward."""
    evaluated: Sequence[EvaluatedModel] | None = None
    """The models that an evaluation calls; None: the whole."""
    saved: SavedPart | None = None
    """What a checkpoint holds; None: everything."""
    replanning: Replanning | None = None
    """Who looks for a better plan after the first steps."""

    @property
    def everybody(self) -> World | None:
        """All ranks, of all stages; None if there is one."""
        return self.world if self.stages is None else self.stages.world

    def check(self, plan: Plan) -> None:
        """Raise PlanError if a setting makes no sense, or not with ``plan``."""
        if self.keep_last_step and plan.n_disk_state:
            raise PlanError(
                f"keep_last_step keeps what CPU Adam overwrites in host memory, but the plan has n_disk_state = "
                f"{plan.n_disk_state} chunks on the disk because they do not fit there. Leave keep_last_step out, or "
                f"carry out a plan with n_disk_state = 0."
            )
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise PlanError(
                f"optimizer is made already; each chunk needs its own. Pass optimizer={type(self.optimizer).__name__}, "
                "parameter_groups=optimizer.param_groups, which have its options, and schedulers training.optimizer."
            )
        if self.meter_every is not None and self.meter_every < 1:
            raise PlanError(f"meter_every is {self.meter_every}; it must be positive.")
