"""Training runs that others measured and published (``measured_runs.toml``), each with what was trained how on what."""

from __future__ import annotations

import tomllib
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any, Final, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from ...shared.basics.documents import FrozenModel
from ...shared.methods.runtime_profile import Runtime
from ...shared.phases.quantization import PackedProducts, Quantization
from ...shared.phases.tiling import LossHead
from ...shared.schema.hardware import AttentionKernel, MemorySize
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import ParallelMode
from ...shared.schema.workload import Compiled, DType, Float8, Float8Gather, KernelPackage


class Source(FrozenModel):
    """Where runs were published."""

    url: str
    about: str
    """What was run, and how the figures are to be read."""
    max_gradient_norm: PositiveFloat | None = None
    """Limit of the gradients' norm in all of its runs; None: not known, or none."""
    expandable_segments: bool = False
    """Whether its processes asked for expandable segments."""
    keeps_outputs: bool = False
    """Whether its script's loop holds what the model gives, as ``logits = model(...)`` does."""


class NetworkOfNodes(FrozenModel):
    """What joins the nodes, where it differs from the catalogue's machine."""

    name: str
    adapters_per_node: PositiveInt


class Unit(StrEnum):
    """The unit of a published speed."""

    TOKENS_PER_DEVICE = "tokens/s and device"
    SAMPLES = "samples/s"
    ITERATION = "s per step"


class MemoryKind(StrEnum):
    """What a published memory counts."""

    ALLOCATED = "allocated"
    """Tensors, at their peak: torch.cuda.max_memory_allocated."""
    RESERVED = "reserved"
    """What the caching allocator holds at most: torch.cuda.max_memory_reserved."""
    PROCESS = "process"
    """All that the device holds for the process, as NVML and nvidia-smi tell."""


class Measured(FrozenModel):
    """The figures of one run, each in its source's own unit."""

    tokens_per_s_per_device: PositiveFloat | None = None
    samples_per_s: PositiveFloat | None = None
    """Of all devices together."""
    iteration_s: PositiveFloat | None = None
    mfu_percent: PositiveFloat | None = None
    """Model FLOPs utilization by the source's own count."""
    allocated_bytes: MemorySize | None = None
    reserved_bytes: MemorySize | None = None
    process_bytes: MemorySize | None = None

    @property
    def memory(self) -> tuple[MemoryKind, int] | None:
        """The published memory, and what it counts."""
        for kind in MemoryKind:
            size_bytes = getattr(self, f"{kind}_bytes")
            if size_bytes is not None:
                return kind, size_bytes
        return None

    @property
    def speed(self) -> tuple[Unit, float] | None:
        """The published speed in its own unit; None where only memory was published."""
        figures = (
            (Unit.TOKENS_PER_DEVICE, self.tokens_per_s_per_device),
            (Unit.SAMPLES, self.samples_per_s),
            (Unit.ITERATION, self.iteration_s),
        )
        return next(((unit, value) for unit, value in figures if value is not None), None)


class MeasuredRun(FrozenModel):
    """One run."""

    id: str
    run_class: str = Field(alias="class")
    """Runs of one class are alike in model, machine and method, and are summed up together."""
    source: str
    """Key of ``sources``."""
    model: str
    """Key of ``models``, or a name of the catalogue."""
    batch_size: PositiveInt
    """Sequences of one micro-batch on one device."""
    micro_batches: PositiveInt = 1
    sequence_length: PositiveInt
    dtype: DType = DType.BFLOAT16
    """Of parameters; float32 masters and moments besides where it has 16 bits."""
    autocast: DType | None = None
    lora_rank: PositiveInt | None = None
    lora_dropout: NonNegativeFloat = Field(default=0.0, lt=1)
    """Part of what adapters read that is dropped."""
    lora_dtype: DType | None = None
    """Of the adapters; None: the base's."""
    lora_targets: tuple[str, ...] = ()
    """Maps with adapters; none: all of a block."""
    quantized: Quantization | None = None
    """How the maps of blocks are packed; None: they are not."""
    packed_head: bool = False
    """Whether the head is packed so too."""
    packed_products: PackedProducts | None = None
    """Of which release of bitsandbytes; None: today's."""
    trained_whole: tuple[str, ...] = ()
    """Paths of parts that are trained whole beside adapters, as copies of frozen ones (PEFT's ``modules_to_save``)."""
    loss: LossHead = LossHead.EAGER
    """How hidden states become a loss."""
    loss_tiles: PositiveInt = 1
    """Chunks of tokens that head and loss run in."""
    optimizer: Optimizer = Optimizer.ADAMW
    machine: str
    """Name of the catalogue."""
    network: NetworkOfNodes | None = None
    changes: dict[str, str] = {}
    """Figures of the machine that differ from the catalogue's, as ``--set`` names them."""
    num_ranks: PositiveInt = 1
    parallel: ParallelMode = ParallelMode.SINGLE
    shard_ranks: PositiveInt | None = None
    """Devices that share chunks, where these are copies of each other (HSDP); None: all."""
    checkpointed_frac: NonNegativeFloat = Field(default=0.0, le=1)
    """Share of the blocks that are checkpointed."""
    product_stride: PositiveInt | None = None
    """Of the products of these, the first of every so many is kept, and attention too (mode SELECTIVE); None: blocks
    are recomputed whole."""
    offloaded: bool = False
    """Whether parameters, gradients and optimizer lie on the host."""
    host_stepped: bool = False
    """Whether the optimizer alone does, which steps there: parameters stay on the devices, whole or in parts."""
    runtime: Runtime = Runtime.OURS
    """Who carried it out, where its copies are known."""
    reduce_dtype: DType | None = None
    """What gradients were reduced in; None: their own type."""
    compiled: Compiled | None = None
    """What torch.compile had compiled; None: nothing."""
    float8: Float8 | None = None
    """How linear maps of blocks multiplied in float8; None: they did not."""
    float8_gather: Float8Gather | None = None
    """Who scaled their weights where these were gathered in float8; None: they were not, or nobody says."""
    kernels: tuple[KernelPackage, ...] = ()
    """Packages whose kernels the model called; without them their reference ran."""
    loops_over_tensors: bool = False
    """Whether AdamW was a loop over tensors."""
    temporary_lists: NonNegativeInt = 0
    """Lists as large as all that is stepped that AdamW made in a step, where it went over lists of tensors."""
    recomputes_whole: bool = False
    """Whether checkpointed blocks were recomputed to their end."""
    loss_metrics: NonNegativeInt | None = None
    """Metrics that are taken from all logits of every micro-batch (``RuntimeProfile.loss_metrics``); None: as many as
    the runtime takes."""
    bucket_scalars: NonNegativeInt | None = None
    """Scalars of the flat buffer that gradients are reduced in; None: as many as the runtime takes."""
    has_two_buckets: bool = False
    """Whether there was a second one, to be filled while the first was reduced."""
    keeps_gradients: bool = False
    """Whether gradients were zeroed behind a step, not dropped."""
    holds_inputs: bool = False
    """Whether checkpointing was around FSDP's units with frozen parameters (``RuntimeProfile.holds_inputs``)."""
    caches_keys: bool = False
    """Whether the model cached keys and values (``RuntimeProfile.caches_keys``)."""
    keeps_gathered: bool = False
    """Whether what forward gathered was kept for backward (FSDP's SHARD_GRAD_OP)."""
    attention_kernel: AttentionKernel | None = None
    """What computed attention; None: what PyTorch takes today."""
    measured: Measured
    approximations: tuple[str, ...] = ()
    """Where the prediction is of something else than the run."""
    other_form: str | None = None
    """A form of the run or of its model that no plan has, so that nothing is predicted of it; None: plans have it."""
    memory_differs: str | None = None
    """Why the run's memory is another one than that of the plan that is predicted; None where no reason is known."""
    is_shown: bool = False
    """Whether the table of single runs has it; statistics have all."""

    @model_validator(mode="after")
    def _is_measured(self) -> Self:
        if self.lora_dropout and self.lora_rank is None:
            raise ValueError(f"{self.id} has lora_dropout without lora_rank")
        if self.trained_whole and self.lora_rank is None:
            raise ValueError(f"{self.id} has trained_whole without lora_rank")
        if self.offloaded and self.host_stepped:
            raise ValueError(f"{self.id} is offloaded and host_stepped; parameters are on the host or not")
        if self.host_stepped and self.num_ranks > 1 and self.parallel is not ParallelMode.SHARDED:
            raise ValueError(f"{self.id} has host_stepped with parallel {self.parallel}; sharded ranks have parts")
        if (self.loss is LossHead.CHUNKED) != (self.loss_tiles > 1):
            raise ValueError(f"{self.id} has loss {self.loss} in {self.loss_tiles} tiles")
        if self.measured.speed is None and self.measured.memory is None:
            raise ValueError(f"{self.id} has neither a speed nor a memory")
        return self

    @property
    def trained(self) -> str:
        """What one device trains in one step, in words."""
        sequences = f"{self.micro_batches} x {self.batch_size}" if self.micro_batches > 1 else str(self.batch_size)
        adapters = f", LoRA {self.lora_rank}" if self.lora_rank is not None else ""
        adapters += f" on {self.quantized.words}" if self.quantized is not None else ""
        adapters += ", embedding and head whole" if self.trained_whole else ""
        computed = f", {self.float8} float8" if self.float8 is not None else ""
        computed += ", gathered so" if self.float8_gather is not None else ""
        computed += ", compiled" if self.compiled is not None else ""
        computed += f", kernels of {' and '.join(self.kernels)}" if self.kernels else ""
        return f"{self.model}{adapters}, {sequences} x {self.sequence_length}{computed}"

    @property
    def where(self) -> str:
        """On what, and how, in words."""
        how = [str(self.parallel)] if self.num_ranks > 1 else []
        how += ["offloaded"] if self.offloaded else []
        how += ["stepped by the host"] if self.host_stepped else []
        if self.checkpointed_frac:
            how.append("checkpointed" if self.checkpointed_frac == 1 else f"{self.checkpointed_frac:.0%} checkpointed")
            how[-1] = how[-1] if self.product_stride is None else f"{how[-1]} by operation"
        machine = self.machine.removesuffix("-x8")
        return ", ".join([f"{self.num_ranks} x {machine}" if self.num_ranks > 1 else machine, *how])

    @property
    def num_samples(self) -> int:
        """Of one step on all devices."""
        return self.batch_size * self.micro_batches * self.num_ranks

    @property
    def num_tokens(self) -> int:
        """Of one step on all devices."""
        return self.num_samples * self.sequence_length

    @property
    def iteration_s(self) -> float | None:
        """Measured seconds of one step, from whichever unit was published."""
        match self.measured.speed:
            case None:
                return None
            case (Unit.TOKENS_PER_DEVICE, rate):
                return self.num_tokens / self.num_ranks / rate
            case (Unit.SAMPLES, rate):
                return self.num_samples / rate
            case (_, seconds):
                return seconds


@cache
def _content() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("measured_runs.toml").read_text(encoding="utf-8"))


def configuration_of(model: str) -> dict[str, Any] | None:
    """The configuration that the file itself gives for ``model``; None for a model of the catalogue."""
    found: dict[str, Any] | None = _content()["models"].get(model)
    return found


SOURCES: Final = {name: Source.model_validate(source) for name, source in _content()["sources"].items()}
_EVERY_RUN: Final = tuple(MeasuredRun.model_validate(run) for run in _content()["runs"])
MEASURED_RUNS: Final = tuple(run for run in _EVERY_RUN if run.other_form is None)
"""Those in a form that plans have."""
RUNS_OF_OTHER_FORMS: Final = tuple(run for run in _EVERY_RUN if run.other_form is not None)
