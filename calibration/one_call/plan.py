"""The answer alone: the plan of a model on a machine, neither of which has to be at hand.

torch is imported where a model or a configuration of it is given alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from ...shared.answers.search_result import SearchResult
from ...shared.basics.errors import WorkloadError
from ...shared.catalogue.machines import load_hardware
from ...shared.schema.hardware import Hardware
from ...shared.schema.training_options import FULL_TRAINING
from ...shared.schema.workload import Workload
from ...sim.questions.by_name import SearchOptions, search

if TYPE_CHECKING:
    from torch import nn

    from ...runtime.model.batches import Batch, Loss

_OF_CONFIGURATION = ("batch_size", "sequence_length", "dtype", "training")


def plan(
    model: Any,
    machine: Hardware | str | Path | None = None,
    *,
    batch: Batch | None = None,
    loss: Loss | None = None,
    budget: int | str | None = None,
    **options: Unpack[SearchOptions],
) -> SearchResult:
    """The plan to train ``model`` by on ``machine``: ``plan("llama-3-8b", "rtx-3090")``.

    Args:
        model: A name of the catalogue, a ``config.json``, a saved workload or a ``Workload``, none of which needs torch
            unless the model has to be traced; or a configuration of transformers (an object or a mapping), or an
            ``nn.Module``, which is traced without memory and stays as it is.
        machine: A name of the catalogue, a file, or a ``Hardware``; None measures this one, which needs torch.
        batch: What a module is trained on, as it is called with: a mapping, a sequence, or a tensor.  Needed with a
            module alone.
        loss: The scalar loss of a module's output and a batch; None: the output has its own.
        budget: Device memory that training may fill, a number or text such as ``"10GiB"``; None for all of it.
        options: ``batch_size``, ``sequence_length``, ``dtype`` and ``training`` of a named model or a configuration,
            and what else ``protwin.sim.search`` takes.

    Raises InfeasibleError if no plan fits, and WorkloadError or HardwareError if model or machine cannot be read.
    """
    hardware = _here() if machine is None else machine if isinstance(machine, Hardware) else load_hardware(machine)
    if budget is not None:
        options["device_budget_bytes"] = budget
    if _is_module(model):
        given = [name for name in _OF_CONFIGURATION if name in options]
        if given:
            raise WorkloadError(f"a module has its shape from its batch. Leave {', '.join(given)} out.")
        return search(_of_module(model, batch, loss, hardware), hardware, **options)
    if batch is not None or loss is not None:
        raise WorkloadError(
            f"batch and loss are those of an nn.Module, and the model is a {type(model).__name__}. Give batch_size and "
            f"sequence_length."
        )
    configuration = _configuration(model)
    if configuration is not None:
        workload = _of_configuration(configuration, hardware, options)
        rest = {name: value for name, value in options.items() if name not in _OF_CONFIGURATION}
        return search(workload, hardware, **cast(SearchOptions, rest))
    return search(model, hardware, **options)


def _here() -> Hardware:
    from ...runtime.devices.probe import probe_hardware

    return probe_hardware(seconds=1.0)


def _is_module(model: Any) -> bool:
    """A module exists where torch is imported alone."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _configuration(model: Any) -> Mapping[str, Any] | None:
    """What a configuration of transformers says; None for anything else."""
    if isinstance(model, Mapping):
        return model
    if hasattr(model, "to_dict") and hasattr(model, "model_type"):
        found: Mapping[str, Any] = model.to_dict()
        return found
    return None


def _of_configuration(configuration: Mapping[str, Any], hardware: Hardware, options: SearchOptions) -> Workload:
    from ...runtime.tracing.configurations import workload_of_configuration

    if "batch_size" not in options:
        raise WorkloadError("a configuration is traced with batches of a size. Give batch_size and sequence_length.")
    return workload_of_configuration(
        configuration,
        name=str(configuration.get("_name_or_path") or configuration.get("model_type") or "model"),
        batch_size=options["batch_size"],
        sequence_length=options.get("sequence_length"),
        dtype=options.get("dtype"),
        options=options.get("training", FULL_TRAINING),
        device_kind=hardware.device.kind,
    )


def _of_module(model: nn.Module, batch: Batch | None, loss: Loss | None, hardware: Hardware) -> Workload:
    from ...runtime.timing.within_budget import meta_twin
    from ...runtime.tracing.configurations import one_message
    from ...runtime.tracing.tracing import trace

    if batch is None:
        raise WorkloadError(
            f"a {type(model).__name__} is traced on a batch as it is trained on. Pass batch=, or the name or "
            f"configuration of a model with batch_size and sequence_length."
        )
    with one_message(model, type(model).__name__):
        return trace(meta_twin(model), batch, loss=loss, device_kind=hardware.device.kind)
