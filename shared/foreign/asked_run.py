"""What a configuration file of another tool asks of a training, in words that belong to no tool."""

from __future__ import annotations

from enum import StrEnum

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from ..basics.documents import FrozenModel
from ..methods.runtime_profile import Runtime
from ..phases.tiling import LossHead
from ..schema.hardware import AttentionKernel
from ..schema.optimizer import Optimizer
from ..schema.training_options import LoraOptions, QuantizationOptions
from ..schema.workload import Compiled, DType, Float8, Float8Gather


class Tool(StrEnum):
    """Whose file it is."""

    AXOLOTL = "axolotl"
    DEEPSPEED = "deepspeed"
    TORCHTITAN = "torchtitan"
    TRAINING_ARGUMENTS = "training-arguments"
    TRL = "trl"

    @property
    def words(self) -> str:
        """What a file of it is called in prose."""
        return _WORDS[self]


_WORDS = {
    Tool.AXOLOTL: "an axolotl configuration",
    Tool.DEEPSPEED: "a DeepSpeed configuration",
    Tool.TORCHTITAN: "a torchtitan configuration",
    Tool.TRAINING_ARGUMENTS: "TrainingArguments of transformers",
    Tool.TRL: "a file of TRL's script for fine-tuning (SFT)",
}


class Precision(StrEnum):
    """Element types of a training."""

    FLOAT32 = "float32"
    """Weights and products."""
    MIXED_BFLOAT16 = "mixed bfloat16"
    """Products read bfloat16 weights; masters, which are stepped, are float32."""
    MIXED_FLOAT16 = "mixed float16"
    AUTOCAST_BFLOAT16 = "autocast bfloat16"
    """Weights are float32, of which ``torch.autocast`` makes bfloat16 copies where products read them."""
    AUTOCAST_FLOAT16 = "autocast float16"
    PURE_BFLOAT16 = "bfloat16 alone"
    """Weights, gradients and moments."""


class Checkpointing(StrEnum):
    """Which blocks are recomputed in backward."""

    NONE = "none"
    FULL = "full"
    """All of them."""
    EVERY_NTH = "every nth block"
    SELECTIVE = "by operation"
    """All of them, but for attention and every second product, whose results are kept."""
    BY_COMPILATION = "by compilation"
    """What is recomputed is chosen operation by operation, within each block, by a compiler."""


class Split(StrEnum):
    """What ranks have in parts between them; each kind includes those above it."""

    NOTHING = "nothing"
    """Every rank has all: DDP."""
    OPTIMIZER = "optimizer state"
    """ZeRO-1."""
    GRADIENTS = "gradients"
    """ZeRO-2; FSDP that keeps gathered parameters from forward to backward."""
    PARAMETERS = "parameters"
    """ZeRO-3; FSDP."""


class Place(StrEnum):
    """Where something lies while no computation needs it."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class AskedRun(FrozenModel):
    """A training that a file asks for.  None: the file does not say.

    Every tool's reader fills it, and nothing else of a file is used for an answer.
    """

    model: str | None = None
    """A name of the Hugging Face hub, or a folder."""
    batch_size: PositiveInt | None = None
    """Samples of one micro-batch on one rank."""
    micro_batches: PositiveInt | None = None
    """Forwards and backwards per step and rank."""
    global_batch_size: PositiveInt | None = None
    """Samples per step of all ranks."""
    sequence_length: PositiveInt | None = None
    """Tokens of one row."""
    is_packed: bool = False
    """Whether rows are several samples, end to end."""
    precision: Precision | None = None
    """Element types; those of weights that are loaded in float32, where ``is_as_published``."""
    follows_device: bool = False
    """Whether bfloat16 gives way to float16 on a device that has no matrix units for it."""
    is_as_published: bool = False
    """Whether weights are loaded in the type that they are published in, which no file says."""
    optimizer: Optimizer | None = None
    max_gradient_norm: NonNegativeFloat | None = None
    """Limit of the norm of all gradients together; 0 for none."""
    checkpointing: Checkpointing | None = None
    checkpointed_every: PositiveInt = 1
    """The n of ``EVERY_NTH``."""
    recomputes_whole: bool = False
    """Whether recomputed blocks are recomputed to their end: reentrant checkpointing."""
    frozen_apart: bool = False
    """Whether what FSDP shards has flat parameters of frozen ones alone (``use_orig_params`` false)."""
    offloads_inputs: bool = False
    """Whether the inputs of recomputed blocks go to the host."""
    attention_kernel: AttentionKernel | None = None
    """What computes attention; None: what PyTorch takes."""
    loss_head: LossHead | None = None
    """How the loss is made of hidden states."""
    loss_tiles: PositiveInt = 8
    """Tiles of tokens of a chunked loss."""
    mlp_tiles: PositiveInt = 1
    """Tiles of tokens that MLPs run in."""
    compiled: Compiled | None = None
    """What torch.compile compiles; None: nothing."""
    float8: Float8 | None = None
    """How linear maps of blocks multiply in float8; None: they do not."""
    float8_gather: Float8Gather | None = None
    """Who scales their weights where FSDP2 gathers these in float8; None: they are gathered as they are."""
    lora: LoraOptions | None = None
    quantized: QuantizationOptions | None = None
    """How frozen weights are packed."""
    split: Split | None = None
    shard_ranks: PositiveInt | None = None
    """Ranks that have one set of parts between them, with replicas across such groups; None: all ranks."""
    shards_within_node: bool = False
    """Whether the ranks of one node are such a group."""
    replicas: PositiveInt | None = None
    """Such groups, where a file names their number in the place of their size."""
    parameters_on: Place = Place.DEVICE
    optimizer_on: Place = Place.DEVICE
    """Optimizer state, and who steps it."""
    live_parameters: NonNegativeInt | None = None
    """Parameters that are gathered at a time, at most; None: those of two blocks."""
    prefetched_parameters: NonNegativeInt | None = None
    """Parameters that are gathered ahead; None: those of one block."""
    prefetch_follows_model: bool = False
    """Whether these are nine tenths of the square of the model's hidden size, as transformers writes for ``"auto"``."""
    num_ranks: PositiveInt | None = None
    runtime: Runtime | None = None
    """Who has what ranks have in parts; None where nothing is known of what that copies."""
    reduce_dtype: DType | None = None
    """What gradients are reduced in; None: their own type."""
    bucket_scalars: NonNegativeInt | None = None
    """Scalars of the flat buffer that gradients are reduced in; 0: none; None: as many as the runtime takes."""
    bucket_follows_model: bool = False
    """Whether these are the square of the model's hidden size, as transformers writes for ``"auto"``."""
    has_two_buckets: bool = False
    """Whether there is a second one, to be filled while the first is reduced."""


class KeyValue(FrozenModel):
    """A key of a file, by its path (``zero_optimization.stage``), and what stands there."""

    key: str
    value: str
    """As JSON."""


class KeyNote(KeyValue):
    """A key with a sentence about it."""

    about: str


class Reading(FrozenModel):
    """What was read of a file, key by key."""

    tool: Tool
    could_be: Tool | None = None
    """Whose file it may be as well, by its keys, with other values where it is silent."""
    run: AskedRun
    understood: tuple[KeyNote, ...] = ()
    """Keys that the answer goes by, and what they mean."""
    assumed: tuple[KeyNote, ...] = ()
    """Keys that the file does not have, with what the tool has in their place."""
    left_out: tuple[KeyNote, ...] = ()
    """Keys that change time or memory, and that the answer leaves out, and in which direction."""
    unknown: tuple[KeyValue, ...] = ()
    """Keys of which nobody here knows whether they change anything."""
    without_effect: tuple[str, ...] = ()
    """Keys that change neither the time nor the memory of a step."""
