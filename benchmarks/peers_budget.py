"""Contestants of the bench of orthogonal subspace fine-tuning: dense and factorised, resident and under one budget."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from peers_others import Plain
from peers_ours import MAKE_OPTIMIZER, CarriedOut, fixed_plan, guaranteed_bytes
from peers_subject import BATCH_SIZE, LEARNING_RATE, MODEL_NAME, SEQUENCE_LENGTH, WEIGHT_DECAY, make_batches, make_model

from protwin.runtime.devices.cpu_device import CpuDevice
from protwin.runtime.devices.probe import probe_hardware
from protwin.runtime.osft.cache import FactorCache
from protwin.runtime.osft.orthogonal_model import make_orthogonal
from protwin.runtime.osft.projection import project_gradients, project_parameters
from protwin.runtime.tracing.tracing import trace
from protwin.runtime.training.carry_out import carry_out
from protwin.shared.answers.search_result import SearchResult
from protwin.shared.basics.units import format_bytes
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.sim.searching.request import SearchRequest
from protwin.sim.searching.search import search

RATIO: Final = 0.25
TOKENS: Final = BATCH_SIZE * SEQUENCE_LENGTH
_WAYS: Final = {"dense": False, "osft": True}
_WITHIN: Final = {"resident": False, "within": True}


def model_of(way: str, folder: Path) -> Any:
    """Dense, or with a quarter of every block's directions trained; embedding, norms and head are trained in both.

    ``folder`` keeps factors.
    """
    model = make_model()
    if _WAYS[way]:
        make_orthogonal(model, unfreeze_rank_ratio=RATIO, cache=FactorCache(folder / "factors"))
    return model


def make_plans(folder: Path) -> None:
    """A workload per way, and its searched plans: without a limit, and within the budget.

    That is what dense training with all chunks on the host may need.  Costs are those of the probed machine and of the
    traced model, without a calibration.
    """
    hardware = probe_hardware(seconds=2.0, device=CpuDevice())
    batch = next(make_batches())
    folder.mkdir()
    budget_bytes: int | None = None
    for way in _WAYS:
        model = model_of(way, folder)
        workload = trace(model, batch, name=f"{MODEL_NAME}, {way}", repeats=3)
        workload.save(folder / f"{way}.json")
        asked = partial(SearchRequest, workload=workload, hardware=hardware)
        budget_bytes = budget_bytes or guaranteed_bytes(fixed_plan(workload), workload)
        plans: dict[str, SearchResult] = {
            "resident": search(asked(device_budget_bytes=hardware.device.memory_bytes)),
            "within": search(asked(device_budget_bytes=budget_bytes)),
        }
        for name, found in plans.items():
            found.plan.save(folder / f"{way}-{name}.json")
    (folder / "budget").write_text(str(budget_bytes))


class Budgeted(CarriedOut):
    """A model, dense or factorised, whose plan is carried out, on a device that has the budget or no limit."""

    def __init__(self, name: str, folder: Path) -> None:
        """``name`` is ``osft-within`` and the like; ``folder`` has the plans."""
        way, place = name.split("-")
        workload, plan = Workload.load(folder / f"{way}.json"), Plan.load(folder / f"{name}.json")
        budget_bytes = int((folder / "budget").read_text()) if _WITHIN[place] else None
        training = carry_out(
            model_of(way, folder), plan, workload, optimizer=MAKE_OPTIMIZER, device=CpuDevice(budget_bytes)
        )
        layout = layout_of(workload, plan.chunk_bytes)
        away = sum(chunk.size_bytes for chunk in layout.chunks if chunk.id not in layout.persistent(plan.n_persist))
        limit = "without a limit" if budget_bytes is None else f"of {format_bytes(budget_bytes)} that the device has"
        about = (
            f"searched plan, needs at most {format_bytes(guaranteed_bytes(plan, workload))} {limit}; "
            f"{format_bytes(away)} of parameters on the host, n_checkpoint {plan.n_checkpoint}"
        )
        super().__init__(training, about)


class PlainOsft(Plain):
    """The plain loop with our factorised maps and projections."""

    about = "everything stays where it is; our maps, projections in a loop of one's own"

    def __init__(self, folder: Path) -> None:
        self.model = model_of("osft", folder)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One training step; gives its loss."""
        loss = self.model(**batch).loss
        loss.backward()
        project_gradients(self.model)
        self._optimizer.step()
        project_parameters(self.model)
        self._optimizer.zero_grad()
        return float(loss.item())


class MiniTrainer(Plain):
    """The public system's model class and its wrapper of the optimizer (``mini_trainer.osft_utils``), on one rank."""

    def __init__(self) -> None:
        import mini_trainer
        from mini_trainer import osft_utils

        dense = make_model()
        # Its ratio is of what is frozen.
        targets = osft_utils.auto_generate_target_osft_config(dense, rank_ratio=1 - RATIO)
        made = osft_utils.create_osft_model_class(type(dense))(dense.config, osft_config=targets, initialize_osft=False)
        made.load_state_dict(dense.state_dict())
        made.reinitialize_osft(decompose_existing_weights=True)
        self.model = made
        trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
        self._optimizer = osft_utils.optim_wrapper(optimizer, made)
        version = getattr(mini_trainer, "__version__", "")
        self.about = f"mini_trainer {version}: its model class and optimizer wrapper, {len(targets)} maps"
