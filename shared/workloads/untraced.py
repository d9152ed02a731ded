"""Workloads of models of the catalogue from the families that come with the package, without a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..catalogue.models import ModelConfiguration, known_model, load_model_configuration
from ..schema.hardware import DeviceKind
from ..schema.workload import DType, Workload
from .cache import TraceRequest
from .check import has_kernels_of_gpus
from .dtypes import choose_dtype

if TYPE_CHECKING:
    from ..families.family import Change, WorkloadFamily


def resolve_family(model: str, *, dtype: str | None = None) -> WorkloadFamily | None:
    """The shipped family of full training of the catalogue's model ``model``, for any shape; None if there is none.

    It is in ``dtype``, or as the model was published.  Raises WorkloadError if ``dtype`` cannot be trained.
    """
    from ..families.shipped import shipped_family

    asked = choose_dtype(None, dtype, None).dtype if dtype is not None else None
    known = known_model(model)
    if known is None:
        return None
    return shipped_family(known, asked or load_model_configuration(known).dtype or DType.FLOAT32)


def shipped_workload(described: ModelConfiguration, request: TraceRequest) -> Workload | None:
    """The answer of the family that comes with the package; None if it has none, so that the model is traced.

    It has none of tiles or shared sequences in float16, with factors, with adapters or in packed rows that are shared,
    of tiles or packed rows with factors, of adapters beside other maps than those known (``adapted.py``), of frozen
    parts or autocast, of shapes beyond those proven, of some named maps in factors (``factorised.py``), of dropout on a
    CPU, where that runs otherwise, and of students that differ from their teacher.
    """
    from ..families.family import OutsideFamilyError

    if request.student is not None:
        from .catalogue_pairs import distillation_of_shipped, needs_no_trace

        if not needs_no_trace(request.student, request.configuration, name=request.name):
            return None
    if _is_beyond_families(request):
        return None
    osft = request.options.osft
    family, change = _family_and_change(described, request)
    is_tiled, is_shared = bool(request.mlp_tiles or request.loss_tiles), bool(request.sequence_ranks)
    if family is None:
        return None
    try:
        if is_tiled:
            tiled = _in_tiles(family, described.name, request, change)
            if tiled is None:
                return None
            found = tiled
        elif osft is None:
            found = family.at(
                batch_size=request.batch_size,
                sequence_length=request.sequence_length,
                packing=request.packing,
                change=change,
            )
        else:
            from .factorised import factorised_workload

            factorised = factorised_workload(
                family, osft, batch_size=request.batch_size, sequence_length=request.sequence_length
            )
            if factorised is None:
                return None
            found = factorised
        if is_shared:
            shared = _shared(found, family, described.name, request)
            if shared is None:
                return None
            found = shared
        if request.device_kind is DeviceKind.CPU and has_kernels_of_gpus(found):
            return None
        if request.student is None:
            return found
        return distillation_of_shipped(found, request.student, request.configuration, name=request.name)
    except OutsideFamilyError:
        return None


def _family_and_change(
    described: ModelConfiguration, request: TraceRequest
) -> tuple[WorkloadFamily | None, Change | None]:
    """The shipped family, with adapters if so, and what options change of what it sees; no family if unknown."""
    from ..families.fused_losses import making_loss
    from ..families.kept_outputs import keeping_outputs
    from ..families.lowerings import lowering

    options, change = request.options, None
    family = resolve_family(described.name, dtype=request.dtype)
    if family is None:
        return None, None
    if options.lora is not None:
        from .adapted import adapted_family

        adapted = adapted_family(family, options.lora, request.configuration, options.quantized)
        if adapted is None:
            return None, None
        family, change = adapted.family, adapted.change
    change = change if options.other_loss is None else making_loss(change, options.other_loss)
    change = keeping_outputs(change) if options.keeps_outputs else change
    return family, lowering(change, options)


def _is_beyond_families(request: TraceRequest) -> bool:
    """Whether what is asked for goes together in no family."""
    osft, lora, quantized = request.options.osft, request.options.lora, request.options.quantized
    keeps = request.options.keeps_outputs
    is_other = request.options.other_loss is not None or request.options.is_lowered or keeps
    rest = request.options.model_copy(update={"osft": None, "lora": None, "quantized": None})
    is_tiled, is_packed = bool(request.mlp_tiles or request.loss_tiles), request.packing is not None
    is_shared, is_learnt = bool(request.sequence_ranks), request.student is not None
    return (
        not rest.is_full
        or (osft is not None and (lora is not None or is_tiled or is_packed or is_shared or is_other))
        or (lora is not None and (is_tiled or is_shared or is_learnt))
        or (quantized is not None and lora is None)
        or (is_shared and (is_packed or is_learnt or keeps))
    )


def _in_tiles(family: WorkloadFamily, name: str, request: TraceRequest, change: Change | None) -> Workload | None:
    from ..families.shipped import shipped_tilings

    tilings = shipped_tilings(name, family.compute_dtype)
    if tilings is None or not tilings.knows(mlp_tiles=request.mlp_tiles, loss_tiles=request.loss_tiles):
        return None
    return tilings.workload(
        family,
        mlp_tiles=request.mlp_tiles,
        loss_tiles=request.loss_tiles,
        batch_size=request.batch_size,
        sequence_length=request.sequence_length,
        packing=request.packing,
        change=change,
    )


def _shared(whole: Workload, family: WorkloadFamily, name: str, request: TraceRequest) -> Workload | None:
    from ..families.shipped import shipped_sharings, shipped_tilings

    sharings = shipped_sharings(name, family.compute_dtype)
    if sharings is None:
        return None
    is_tiled = bool(request.mlp_tiles or request.loss_tiles)
    return sharings.workload(
        whole,
        family,
        shipped_tilings(name, family.compute_dtype) if is_tiled else None,
        sequence_ranks=request.sequence_ranks,
        mlp_tiles=request.mlp_tiles,
        loss_tiles=request.loss_tiles,
    )
