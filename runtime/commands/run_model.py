"""The model of ``protwin run``: with random weights, or with those of a folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ...shared.basics.errors import PlanError
from ...shared.catalogue.models import ModelConfiguration
from ...shared.schema.plan import Plan
from ...shared.schema.training_options import TrainingOptions
from ...shared.schema.workload import Parameter, Workload
from ..devices.machine import host_memory_bytes
from ..devices.process_settings import leave_a_core_for_lanes
from ..model.configurations import training_dtype
from ..model.parameters import describe_parameters
from ..osft.cache import FactorCache
from ..quantized.states import described, states_as_parameters
from ..tracing.configurations import apply_options, configured_model
from .random_model import check_host_memory, random_model
from .run_budget import check_host
from .run_ranks import ALONE, RunRank
from .run_weights import BuiltModel, FolderModel, sharing_decompositions


@dataclass(frozen=True, slots=True)
class RunModel:
    """What is trained."""

    described: ModelConfiguration
    named: str
    """What its configuration is found by: a name of the catalogue, or a file."""
    weights: Path | None
    """The folder of its weights; None: random ones."""
    dtype: str | None
    """The element type that weights are converted to; None: they have the plan's."""
    options: TrainingOptions
    seed: int
    """Of random weights, low-rank matrices among them."""
    rank: RunRank = ALONE
    """Ranks on one machine share it."""
    cache: FactorCache | None = None
    """Of factorised weights; None: they are decomposed anew."""

    def twin(self, workload: Workload) -> nn.Module:
        """The model without memory, as it will be trained.

        Raises WorkloadError if transformers refuses it, PlanError if it is another one than ``workload``'s.
        """
        name = self.described.name
        twin = configured_model(self.described.config, name, str(workload.compute_dtype), self.options)
        with states_as_parameters(twin):
            own = described(twin, describe_parameters(twin, ()))
        if (difference := _difference(own, workload.parameters)) is not None:
            raise PlanError(
                f"{self.weights or name} is another model than the plan's workload ({workload.model_name}): "
                f"{difference}. Name the model, and the options, that the plan was searched with."
            )
        return twin

    def build(self, twin: nn.Module, workload: Workload, plan: Plan) -> BuiltModel:
        """The model on the host, its weights perhaps still in their files.

        Raises ProtwinError if its weights do not fit it, or it does not fit this machine.
        """
        built = self._built(twin, workload, plan)
        if self.rank.rank:
            # Rank 0 goes on as one rank alone does; every other one drops out activations of its own.
            torch.manual_seed(_seed_of(self.seed, self.rank.rank))
        return built

    def _built(self, twin: nn.Module, workload: Workload, plan: Plan) -> BuiltModel:
        name, num_local = self.described.name, self.rank.num_local
        configuration, dtype = self.described.config, str(workload.compute_dtype)
        if self.weights is None:
            with sharing_decompositions(self.options, self.rank.num_ranks) as group:
                return BuiltModel(
                    random_model(
                        configuration,
                        name,
                        dtype,
                        self.seed,
                        self.options,
                        plan.optimizer,
                        num_processes=num_local,
                        adapt=partial(apply_options, cache=self.cache, group=group),
                    )
                )
        leave_a_core_for_lanes(num_local)
        folder = FolderModel(
            folder=self.weights,
            configuration=configuration,
            name=name,
            dtype=training_dtype(configuration, dtype),
            options=self.options,
            seed=self.seed,
            is_converting=self.dtype is not None,
            cache=self.cache,
            num_ranks=self.rank.num_ranks,
        )
        built = folder.build(
            lambda whole: check_host_memory(
                whole or twin, name, "Use a machine with more memory.", plan.optimizer, num_processes=num_local
            )
        )
        if built.weights is not None:
            is_cpu = not torch.cuda.is_available()
            check_host(plan, workload, host_memory_bytes(), num_processes=num_local, is_cpu=is_cpu)
        return built


def _seed_of(seed: int, rank: int) -> int:
    """Of a rank, far from those of other ranks and of other seeds."""
    return int(np.random.SeedSequence((seed, rank)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _difference(own: tuple[Parameter, ...], planned: tuple[Parameter, ...]) -> str | None:
    """The first parameter that the two do not share, in words."""
    found, expected = ({parameter.name: parameter for parameter in some} for some in (own, planned))
    for name in expected:
        if name not in found:
            return f"it has no {name}"
    for name, parameter in found.items():
        if name not in expected:
            return f"it has {name} besides"
        wanted = expected[name]
        for words, is_own, is_wanted in (
            ("has the shape", list(parameter.shape), list(wanted.shape)),
            ("is in", str(parameter.dtype), str(wanted.dtype)),
            ("is", _deed(parameter), _deed(wanted)),
            ("is quantized", _packed_as(parameter), _packed_as(wanted)),
        ):
            if is_own != is_wanted:
                return f"{name} {words} {is_own} and not {is_wanted}"
    return None


def _packed_as(parameter: Parameter) -> str:
    return "in no way" if parameter.quantized is None else f"to {parameter.quantized.words}"


def _deed(parameter: Parameter) -> str:
    return "trained" if parameter.trainable else "frozen"
