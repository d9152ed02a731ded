"""From a model's configuration to a Workload, without weights: the model is built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ...shared.basics.errors import ProtwinError, WorkloadError
from ...shared.basics.gc_pause import gc_paused
from ...shared.catalogue.own_code import OwnCode
from ...shared.families.family import BATCH_SIZE, MAX_TOKENS, SEQUENCE_LENGTH, TARGET_LENGTH, Limit
from ...shared.phases.packing import Packing
from ...shared.phases.tiling import LossHead
from ...shared.schema.hardware import DeviceKind
from ...shared.schema.training_options import FULL_TRAINING, TrainingOptions
from ...shared.schema.workload import DType, Workload
from ..data.packed_batches import with_positions
from ..devices.time_limit import TimeChecks, time_limit
from ..fakes.values_wanted import ValuesWantedError
from ..model.adapters import add_lora, freeze
from ..model.batches import BatchRefusedError
from ..model.configurations import build_model, first_line, quiet, training_dtype
from ..osft.cache import FactorCache
from ..osft.orthogonal_model import make_orthogonal
from ..quantized.quantizing import quantize
from ..quantized.releases import mark
from .model_inputs import ModelInputs
from .tracing import trace

_LEARNED_POSITIONS: Final = ("bert", "gpt2", "gpt_neo", "opt")
"""Families whose table of positions ends."""
_AUTOCAST: Final = (DType.BFLOAT16, DType.FLOAT16)


@gc_paused()
def workload_of_configuration(
    configuration: Mapping[str, Any],
    *,
    name: str,
    batch_size: int,
    sequence_length: int | None,
    dtype: str | None = None,
    options: TrainingOptions = FULL_TRAINING,
    device_kind: DeviceKind = DeviceKind.CUDA,
    mlp_tiles: Sequence[int] = (),
    mlp_modules: Sequence[str] | None = None,
    loss_tiles: Sequence[int] = (),
    sequence_ranks: Sequence[int] = (),
    packing: Packing | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Workload:
    """The workload of training the model that a Hugging Face ``config.json`` describes.

    ``dtype`` overrides the configuration's; without either, float32.  Batches are unpadded; models of images have no
    ``sequence_length``.  ``device_kind`` is what it is to train on; ``mlp_tiles``, ``mlp_modules``, ``loss_tiles``
    and ``sequence_ranks`` as of ``trace``; ``packing``: the samples that lie end to end in each row.  Raises
    WorkloadError if transformers is missing, refuses the configuration, or the shape makes no sense for the model.
    """
    if batch_size < 1 or (sequence_length or 1) < 1 or batch_size * (sequence_length or 1) > MAX_TOKENS:
        raise WorkloadError(
            f"a batch of {batch_size} x {sequence_length} tokens cannot be traced; both must be positive and their "
            f"product at most 2**40."
        )
    given = {BATCH_SIZE: batch_size, SEQUENCE_LENGTH: sequence_length, TARGET_LENGTH: sequence_length}
    shape = f"{batch_size} x {sequence_length}" if sequence_length is not None else f"{batch_size}"
    with time_limit(f"tracing {name} with a batch of {shape}"):
        with TimeChecks():
            model = configured_model(configuration, name, dtype, options)
        check_limits(model, name, given if packing is None else given | {SEQUENCE_LENGTH: packing.longest})
        refused: WorkloadError | None = None
        for batch in ModelInputs(model, options.images).batches(given):
            try:
                with quiet(), autocast_of(options), one_message(model, name):
                    return trace(
                        model,
                        batch if packing is None else with_positions(model, batch),
                        name=name,
                        device_kind=device_kind,
                        mlp_tiles=mlp_tiles,
                        mlp_modules=mlp_modules,
                        loss_tiles=loss_tiles,
                        loss_head=options.loss_head or LossHead.EAGER,
                        sequence_ranks=sequence_ranks,
                        packing=packing,
                        keeps_outputs=options.keeps_outputs,
                        compiled=options.compiled,
                        float8=options.float8,
                        float8_gather=options.float8_gather,
                        kernels=options.kernels,
                        on_progress=on_progress,
                    )
            except (BatchRefusedError, ModelFailedError) as error:
                refused = refused or error
    assert refused is not None, "there is at least one batch"
    raise refused


def configured_model(
    configuration: Mapping[str, Any],
    name: str,
    dtype: str | None,
    options: TrainingOptions,
    *,
    code: OwnCode | None = None,
) -> nn.Module:
    """The model on the meta device, with what ``options`` add and freeze.  Raises WorkloadError as ``build_model``."""
    model: nn.Module = build_model(configuration, name, training_dtype(configuration, dtype), code=code)
    apply_options(model, options)
    return model


def apply_options(
    model: nn.Module,
    options: TrainingOptions,
    *,
    device: torch.device | None = None,
    cache: FactorCache | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Do to ``model``, in place, what ``options`` say: pack linear maps, add to them, factorise them, freeze parts.

    What is added lies beside the model's own parameters, or on ``device``; ``cache`` has factorisations that were made
    before, and the ranks of ``group`` decompose some weights each.  Raises WorkloadError.
    """
    if options.quantized is not None:
        how = options.quantized.how
        packed = options.quantized
        quantize(model, how.type, double=how.double, blocksize=how.blocksize, skip=packed.skipped, head=packed.head)
        if packed.products is not None:
            mark(model, packed.products)
    if options.lora is not None:
        lora = options.lora
        add_lora(
            model,
            rank=lora.rank,
            targets=lora.targets,
            alpha=lora.alpha,
            use_rslora=lora.use_rslora,
            dropout=lora.dropout,
            use_dora=lora.use_dora,
            dtype=None if lora.dtype is None else getattr(torch, lora.dtype),
            device=device,
        )
    if options.osft is not None:
        make_orthogonal(
            model,
            unfreeze_rank_ratio=options.osft.unfreeze_rank_ratio,
            targets=options.osft.targets,
            cache=cache,
            group=group,
        )
    freeze(model, options.frozen)


def autocast_of(options: TrainingOptions) -> AbstractContextManager[Any]:
    """What forward runs within.  Raises WorkloadError if nothing computes in that element type."""
    if options.autocast is None:
        return nullcontext()
    if options.autocast not in _AUTOCAST:
        raise WorkloadError(f"autocast to {options.autocast} is not known; use {' or '.join(_AUTOCAST)}.")
    return torch.autocast("cpu", dtype=getattr(torch, options.autocast), cache_enabled=options.autocast_cache)


def variables_of(model: Any) -> tuple[str, ...]:
    """What the shape of the model's batch is made of."""
    return ModelInputs(model).variables


def limits_of(model: Any) -> tuple[Limit, ...]:
    """The longest sequence that the model has positions for."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if model.config.model_type not in _LEARNED_POSITIONS or limit is None:
        return ()
    return (Limit(variable=SEQUENCE_LENGTH, most=limit, reason=f"has learned positions for {limit} tokens"),)


def check_limits(model: Any, name: str, given: Mapping[str, int | None]) -> None:
    """Raise WorkloadError if the model cannot take a batch of this shape; the message names the field."""
    inputs = ModelInputs(model)
    wanted = inputs.variables
    for variable in (BATCH_SIZE, SEQUENCE_LENGTH):
        if variable in wanted and given[variable] is None:
            raise WorkloadError(f"{variable} is missing; {name} is trained on sequences. State it.")
        if variable not in wanted and given[variable] is not None:
            raise WorkloadError(f"{variable} is {given[variable]}, but {name} reads {inputs.reads()}. Leave it out.")
    for limit in limits_of(model):
        value = given[limit.variable]
        if value is not None and value > limit.most:
            raise WorkloadError(f"{name} {limit.reason} but {limit.variable} is {value}. Lower it.")


def batch_of(model: Any, given: Mapping[str, int | None]) -> dict[str, Any]:
    """A batch of that shape as the model is trained on, on the meta device but for integers that are few.

    Raises WorkloadError if the configuration does not say how large its inputs are.
    """
    return next(ModelInputs(model).batches(given))


class ModelFailedError(WorkloadError):
    """The model's own code fails in a trace."""


@contextmanager
def one_message(model: nn.Module, name: str) -> Iterator[None]:
    """Turn errors of a model's own code, which its trace runs, into WorkloadError; our own stay what they are."""
    try:
        yield
    except ValuesWantedError as error:
        raise ValuesWantedError(f"{type(model).__name__} of {name}", error.reason) from error
    except ProtwinError:
        raise
    except Exception as error:
        if _is_raised_here(error):
            raise
        raise ModelFailedError(
            f"{type(model).__name__} of {name} cannot be traced without its weights: {first_line(error)}. Trace it "
            f"with weights and a batch of its own in Python: protwin.runtime.trace(model, batch)."
        ) from error


def _is_raised_here(error: Exception) -> bool:
    """Whether an error's innermost frame is of this package."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__", "")).startswith("protwin.")
