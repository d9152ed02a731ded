"""The question: what was asked, in one screen's words.  It stands at the head of every table, report and file."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from ..basics.documents import FrozenModel
from .workload import DType, DTypeOrigin, LossHead, Packing


class Question(FrozenModel):
    """What is trained, in which element types, on how much at a time, on which machine, within which budgets."""

    model_name: str
    num_parameters: NonNegativeInt
    """Scalars of the model, those that LoRA adds included, tied ones once."""
    num_trained: NonNegativeInt
    """Scalars that the optimizer steps."""
    lora_rank: PositiveInt | None = None
    """Rank of the low-rank matrices that are trained; None without them.  Of several ranks the largest."""
    lora_targets: tuple[str, ...] = ()
    """Names, within a block, of the linear maps that have them."""
    quantized: tuple[str, ...] = ()
    """How frozen weights are packed: ``"nf4, double quantized"``; empty where none is."""
    frozen: tuple[str, ...] = ()
    """Modules none of whose parameters is trained, outermost ones alone; equal layers as ``model.layers.0-9``.  Empty
    with LoRA, where it is the whole model."""
    weight_dtype: DType
    """Element type of most of the weights that are not packed."""
    published_dtype: DType | None = None
    """Element type that the weights were published in; None where nobody says."""
    dtype_origin: DTypeOrigin | None = None
    """Who chose ``weight_dtype``; None where nobody says."""
    compute_dtype: DType
    """Element type that most matrix products compute in; another one than the weights' under autocast."""
    rate_dtype: DType | None = None
    """Element type at whose rate the device computes them: a wider one where its matrix units do not have
    ``compute_dtype``.  None: at the rate of its vector units, or unknown."""
    gradient_dtype: DType
    """Element type of most of the gradients."""
    host_gradient_dtype: DType | None = None
    """In which the host adds them up, if it is another."""
    optimizer: str = "AdamW"
    """What steps the weights."""
    state_dtype: DType = DType.FLOAT32
    """Element type of the optimizer's moments."""
    master_dtype: DType | None = None
    """Element type of the weights' masters; None: the weights are their own."""
    samples_per_micro_batch: PositiveInt
    """Samples of one micro-batch of one rank."""
    sequence_length: PositiveInt | None = None
    """Tokens of one sample; None for models without sequences."""
    rotary_tokens: PositiveInt | None = None
    """Tokens of a sample that the model's rotary positions were made for, where the samples have more; else None."""
    packing: Packing | None = None
    """How several samples lie in each row, which then counts as a sample; None where it is one."""
    micro_batches: PositiveInt = 1
    """Micro-batches per step and rank."""
    num_ranks: PositiveInt = 1
    """Devices that train together, one for each rank."""
    loss_head: LossHead | None = None
    """How whole logits become a loss; None: eager, or nobody says."""
    keeps_outputs: bool = False
    """Whether the loop holds what the model gives until the next micro-batch's is there."""
    sequence_ranks: PositiveInt = 1
    """Of these, neighbours that share each sequence."""
    runtime: str = "ours"
    """Who carries the plan out, as ``protwin simulate --as`` names it."""
    runtime_words: str | None = None
    """What is copied, waits, is kept or computed otherwise than here, in words; None: nothing."""
    hardware_name: str = ""
    """The machine; empty where it is not known."""
    overrides: tuple[str, ...] = ()
    """What was changed of the machine, as ``--set`` takes it: ``device.memory_bytes=40GiB``."""
    device_budget_bytes: PositiveInt | None = None
    """Device memory of one rank that the plan may fill; None where none was set."""
    host_budget_bytes: NonNegativeInt | None = None
    """Host memory of one rank that the plan may fill; None where none was set."""
    margin_frac: NonNegativeFloat | None = None
    """Share of the device that segments of its allocator are to leave free; None where nobody says."""
    calibrated_on: str | None = None
    """The machine that the calibration was measured on; None: nothing was fitted to measured steps."""
    is_probed: bool = False
    """Whether the device's figures were measured on the machine (``protwin hardware probe``), and are no sheet's."""

    @property
    def num_samples(self) -> int:
        """Samples per step, of all ranks together."""
        return self.samples_per_micro_batch * self.micro_batches * (self.num_ranks // self.sequence_ranks)

    @property
    def num_tokens(self) -> int | None:
        """Tokens per step, of all ranks together; None for models without sequences."""
        return None if self.sequence_length is None else self.num_samples * self.sequence_length

    @property
    def is_autocast(self) -> bool:
        """Whether products compute in another element type than the weights have."""
        return self.compute_dtype is not self.weight_dtype
