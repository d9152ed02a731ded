"""What the simulator says of ``MEASURED_RUNS``, from data sheets and configurations alone.

Every block is a chunk, as it is a unit of FSDP.  Of runs whose parameters lie on the device all chunks are persistent
or sharded; of offloaded runs none is, and the next one is gathered while one runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from ...shared.basics.documents import FrozenModel
from ...shared.basics.interval import Interval
from ...shared.catalogue.machines import machine, override_hardware
from ...shared.catalogue.parts import network_part
from ...shared.layout.layout import Layout, largest_block_elements, layout_of
from ...shared.methods.runtime_profile import OF_FLAT_PARAMETERS, Runtime, RuntimeProfile
from ...shared.phases.tiling import LossHead
from ...shared.schema.hardware import Hardware
from ...shared.schema.optimizer import HostGradients
from ...shared.schema.plan import ParallelMode, Plan
from ...shared.schema.record import Record
from ...shared.schema.training_options import LoraOptions, QuantizationOptions, TrainingOptions
from ...shared.schema.workload import DType, Workload
from ...shared.workloads.source import load_workload
from ...sim.engine.simulator import simulate
from ...sim.searching.baselines import MAX_LIVE_PARAMETERS, NORM_LIMIT
from .measured_runs import MEASURED_RUNS, SOURCES, MeasuredRun, configuration_of
from .sharded import block_chunk_bytes

_POSITIONS: Final = "max_position_embeddings"
_GATHERING_ONCE: Final = (Runtime.DEEPSPEED_ZERO1, Runtime.DEEPSPEED_ZERO2)
"""They gather all chunks once per step, each to a place of its own."""
_WITH_LIVE_PARAMETERS: Final = (Runtime.DEEPSPEED_ZERO3, Runtime.DEEPSPEED_OFFLOAD)

OnStep = Callable[[int, int], None]


class PredictedRun(FrozenModel):
    """What is predicted of one run."""

    id: str
    """Of the run."""
    iteration_s: PositiveFloat
    iteration_interval_s: Interval | None = None
    """Where the measured time is expected; None in outcomes that do not say."""
    tokens_per_s_per_device: PositiveFloat
    samples_per_s: PositiveFloat
    """Of all devices together."""
    mfu_frac: PositiveFloat | None
    """Model FLOPs utilisation ([Note: Model FLOPs] in ``shared/records/flops.py``); None where it is not known."""
    guaranteed_peak_bytes: PositiveInt
    """The most that is allocated; on CUDA also what is expected."""
    reserved_bytes: PositiveInt
    """Segments that the allocator is expected to hold."""
    outside_bytes: NonNegativeInt
    """Device memory that is never the allocator's."""
    device_bytes: PositiveInt
    """Memory of the device."""

    @property
    def needed_bytes(self) -> int:
        """Of the device, in all."""
        return self.reserved_bytes + self.outside_bytes


def predict_runs(on_step: OnStep = lambda done, total: None) -> tuple[PredictedRun, ...]:
    """All of ``MEASURED_RUNS``.  ``on_step`` is told how much is done."""
    found = []
    for done, run in enumerate(MEASURED_RUNS):
        on_step(done, len(MEASURED_RUNS))
        found.append(predict_run(run))
    on_step(len(MEASURED_RUNS), len(MEASURED_RUNS))
    return tuple(found)


def predict_run(run: MeasuredRun) -> PredictedRun:
    """One step of ``run``."""
    workload = workload_of(run)
    profile = profile_of(run)
    return figures_of(run, simulate(plan_of(run, workload), workload, hardware_of(run), runtime=profile))


def figures_of(run: MeasuredRun, record: Record) -> PredictedRun:
    """The figures of ``record`` in the units in which runs are published."""
    reserved = record.device_reserved
    assert reserved is not None
    return PredictedRun(
        id=run.id,
        iteration_s=record.iteration_s,
        iteration_interval_s=record.iteration_interval_s,
        tokens_per_s_per_device=record.tokens_per_s_per_device,
        samples_per_s=record.samples_per_s,
        mfu_frac=record.mfu_frac,
        guaranteed_peak_bytes=record.guaranteed_peak_device_bytes,
        reserved_bytes=reserved.expected_bytes,
        outside_bytes=reserved.outside_bytes,
        device_bytes=hardware_of(run).device.memory_bytes,
    )


def profile_of(run: MeasuredRun) -> RuntimeProfile:
    """Who carried ``run`` out."""
    keeps_parts = run.host_stepped and run.num_ranks > 1
    source = SOURCES.get(run.source)  # runs that others ask about have none
    return RuntimeProfile(
        run.runtime,
        run.reduce_dtype,
        run.loops_over_tensors,
        keeps_parts=keeps_parts,
        recomputes_whole=run.recomputes_whole,
        loss_metrics=run.loss_metrics,
        temporary_lists=run.temporary_lists,
        bucket_scalars=run.bucket_scalars,
        has_two_buckets=run.has_two_buckets,
        keeps_gradients=run.keeps_gradients,
        holds_inputs=run.holds_inputs,
        caches_keys=run.caches_keys,
        expandable_segments=source is not None and source.expandable_segments,
    )


def workload_of(run: MeasuredRun) -> Workload:
    """One micro-batch of ``run`` on one device."""
    lora = (
        LoraOptions(rank=run.lora_rank, targets=run.lora_targets, dropout=run.lora_dropout, dtype=run.lora_dtype)
        if run.lora_rank is not None
        else None
    )
    packed, source = None, SOURCES.get(run.source)
    if run.quantized is not None:
        packed = QuantizationOptions(how=run.quantized, head=run.packed_head, products=run.packed_products)
    if lora is not None and run.trained_whole:
        configuration = configuration_of(run.model)
        assert configuration is not None, "models of the catalogue are not trained so"
        from .workloads import partly_trained_workload

        return partly_trained_workload(
            {_POSITIONS: run.sequence_length} | configuration,
            run.model,
            batch_size=run.batch_size,
            sequence_length=run.sequence_length,
            dtype=run.dtype,
            lora=lora,
            trained_whole=run.trained_whole,
            autocast=run.autocast,
        )
    return _workload(
        run.model,
        batch_size=run.batch_size,
        sequence_length=run.sequence_length,
        dtype=run.dtype,
        options=TrainingOptions(
            lora=lora,
            quantized=packed,
            autocast=run.autocast,
            autocast_cache=run.autocast is None or run.runtime not in OF_FLAT_PARAMETERS,
            loss_head=None if run.loss in (LossHead.EAGER, LossHead.CHUNKED) else run.loss,
            compiled=run.compiled,
            float8=run.float8,
            float8_gather=run.float8_gather,
            kernels=run.kernels,
            keeps_outputs=source is not None and source.keeps_outputs,
        ),
        loss_tiles=() if run.loss_tiles == 1 else (run.loss_tiles,),
    )


@lru_cache(maxsize=4)  # runs that differ in their plan alone stand together
def _workload(
    model: str,
    *,
    batch_size: int,
    sequence_length: int,
    dtype: DType,
    options: TrainingOptions,
    loss_tiles: tuple[int, ...],
) -> Workload:
    configuration = configuration_of(model)
    if configuration is None:
        return load_workload(
            model,
            batch_size=batch_size,
            sequence_length=sequence_length,
            dtype=dtype,
            options=options,
            loss_tiles=loss_tiles,
        )
    from ...runtime.tracing.configurations import workload_of_configuration

    return workload_of_configuration(
        {_POSITIONS: sequence_length} | configuration,
        name=model,
        batch_size=batch_size,
        sequence_length=sequence_length,
        dtype=dtype,
        options=options,
        loss_tiles=loss_tiles,
    )


def hardware_of(run: MeasuredRun) -> Hardware:
    """The machine of ``run``, with as many nodes as its ranks need."""
    hardware = machine(run.machine)
    if run.changes:
        hardware = override_hardware(hardware, run.changes)
    if run.attention_kernel is not None:
        hardware = override_hardware(hardware, {"device.attention_kernel": run.attention_kernel})
    num_nodes = -(-run.num_ranks // hardware.devices_per_node)
    if num_nodes == 1:
        return hardware
    network = hardware.network
    if run.network is not None:
        network = network_part(run.network.name, run.network.adapters_per_node)
    assert network is not None
    return hardware.model_copy(update={"network": network.model_copy(update={"num_nodes": num_nodes})})


def _num_places(run: MeasuredRun, workload: Workload, layout: Layout) -> int:
    """For chunks that are gathered: for two blocks', for all, or for the parameters that ZeRO-3 has live."""
    fewest = layout.min_buffers(0)
    if run.keeps_gathered or run.runtime in _GATHERING_ONCE:
        return len(layout.chunks)
    if run.runtime not in _WITH_LIVE_PARAMETERS:
        return 2 * fewest
    return max(fewest, MAX_LIVE_PARAMETERS // largest_block_elements(workload))


def plan_of(run: MeasuredRun, workload: Workload) -> Plan:
    """What every rank of ``run`` does."""
    chunk_bytes = block_chunk_bytes(workload)
    layout = layout_of(workload, chunk_bytes)
    has_whole_host = run.host_stepped and run.num_ranks == 1
    is_offloaded = run.offloaded or (run.host_stepped and run.num_ranks > 1)
    is_sharded = run.parallel is ParallelMode.SHARDED and not is_offloaded
    is_resident = not (is_sharded or is_offloaded or has_whole_host)
    num_chunks = len(layout.chunks)
    n_checkpoint = round(workload.num_blocks * run.checkpointed_frac)
    num_places = min(_num_places(run, workload, layout), num_chunks)
    steps_alone = profile_of(run).steps_alone and (is_offloaded or has_whole_host)
    source = SOURCES.get(run.source)  # runs that others ask about have none
    return Plan(
        workload_id=workload.identity,
        optimizer=run.optimizer,
        chunk_bytes=chunk_bytes,
        n_persist=num_chunks if is_resident else 0,
        n_host_stepped=num_chunks if has_whole_host else 0,
        n_shard=num_chunks if is_sharded else 0,
        n_buffer=0 if is_resident or has_whole_host else num_places,
        max_gradient_norm=NORM_LIMIT if steps_alone else None if source is None else source.max_gradient_norm,
        host_gradients=HostGradients.FLOAT32 if run.host_stepped else HostGradients.PARAMETERS,
        n_checkpoint=n_checkpoint,
        n_selective=0 if run.product_stride is None else n_checkpoint,
        product_stride=run.product_stride or 1,
        micro_batches=run.micro_batches,
        loss_tiles=run.loss_tiles,
        parallel=run.parallel,
        num_ranks=run.num_ranks,
        shard_ranks=run.shard_ranks,
    )
