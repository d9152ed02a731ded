"""What of a model is trained: all of it, or low-rank matrices beside it, or all but frozen parts."""

from __future__ import annotations

from typing import Annotated, Any, Final, Self

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from ..basics.documents import FrozenModel
from ..phases.quantization import PackedProducts, Quantization
from ..phases.tiling import LossHead
from .workload import Compiled, DType, Float8, Float8Gather, KernelPackage

ADAPTER_DTYPES: Final = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
"""Element types that low-rank maps may have."""


class LoraOptions(FrozenModel):
    """Low-rank adaptation (arXiv 2106.09685)."""

    rank: PositiveInt
    targets: tuple[str, ...] = ()
    """Names of the linear maps within a block; none: all of them."""
    alpha: PositiveFloat | None = None
    """Of the scale alpha / rank; None: the rank.  It costs nothing."""
    use_rslora: bool = False
    """The scale is alpha / sqrt(rank) (arXiv 2312.03732)."""
    dropout: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    """The part of what the low-rank maps read that is dropped in training."""
    use_dora: bool = False
    """Adapted weights have a trained magnitude for each output (DoRA, arXiv 2402.09353)."""
    dtype: DType | None = None
    """Element type of the low-rank maps, which what they read is cast to; None: that of the map beside them."""

    @field_validator("dtype")
    @classmethod
    def _is_trained(cls, dtype: DType | None) -> DType | None:
        if dtype not in (None, *ADAPTER_DTYPES):
            raise ValueError(f"low-rank maps are trained in {', '.join(ADAPTER_DTYPES)} (got {dtype})")
        return dtype

    @model_serializer(mode="wrap")
    def _without_usual_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Kept traces are found by it, also those of before there was a scale."""
        fields: dict[str, Any] = handler(self)
        usual = {"alpha": None, "use_rslora": False, "dropout": 0.0, "use_dora": False, "dtype": None}
        return {name: value for name, value in fields.items() if name not in usual or value != usual[name]}


class QuantizationOptions(FrozenModel):
    """Linear maps whose weights are packed, and frozen."""

    how: Quantization
    skipped: tuple[str, ...] = ()
    """Names of the linear maps that stay as they are, beside the head."""
    head: bool = False
    """Whether the map that gives the model's outputs is packed too."""
    products: PackedProducts | None = None
    """Whose products they are, in predictions; None: those of protwin's runtime."""

    @model_validator(mode="after")
    def _has_such_products(self) -> Self:
        reason = None if self.products is None else self.products.reason_against(self.how.type)
        if reason is not None:
            raise ValueError(f"products: {reason}")
        return self

    @model_serializer(mode="wrap")
    def _without_usual_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Kept traces are found by it, also those of before there were these."""
        fields: dict[str, Any] = handler(self)
        usual = {"head": False, "products": None}
        return {name: value for name, value in fields.items() if name not in usual or value != usual[name]}


class OsftOptions(FrozenModel):
    """Orthogonal subspace fine-tuning ([Note: Subspaces] in ``shared/phases/subspaces.py``)."""

    unfreeze_rank_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    """The part of each weight's directions that is trained."""
    targets: tuple[str, ...] = ()
    """Names or patterns of the linear maps that are factorised; none: those of attention and MLP in all blocks."""


class ImageOptions(FrozenModel):
    """What is seen beside text, where a batch is made up by a model's configuration."""

    size: tuple[PositiveInt, PositiveInt] | None = None
    """Height and width in pixels; None: as the configuration says, or as the sequence has room for."""
    per_sample: PositiveInt = 1
    """Images that stand in the text of one sample."""


class TrainingOptions(FrozenModel):
    """How a workload's model is trained."""

    lora: LoraOptions | None = None
    quantized: QuantizationOptions | None = None
    """Linear maps are packed before adapters are put beside them; None: none is."""
    osft: OsftOptions | None = None
    """Linear maps are factorised, behind LoRA's: these have none of the other."""
    frozen: tuple[str, ...] = ()
    """Names or patterns of parameters that are not trained."""
    autocast: DType | None = None
    """Element type that forward computes in, by ``torch.autocast``, while parameters, which are then their own masters,
    and gradients keep theirs; None: that of the parameters."""
    autocast_cache: bool = True
    """Whether autocast keeps its casts of trained weights until it ends (``torch.autocast(cache_enabled=...)``).  Of
    views it keeps none, which is what weights are within FullyShardedDataParallel."""
    images: ImageOptions | None = None
    """Of the batches that are made up; None: one of the model's own size in every sample, where it reads any."""
    loss_head: LossHead | None = None
    """``eager``, ``narrow`` or ``fused``; None: eager, and a saved workload may have any.  Chunks are the plan's to
    choose (``Plan.loss_tiles``)."""
    keeps_outputs: bool = False
    """Whether the loop holds what the model gives until the next micro-batch's is there."""

    compiled: Compiled | None = None
    """What of it torch.compile compiles, in predictions; None: nothing."""
    float8: Float8 | None = None
    """How linear maps of blocks multiply in float8, in predictions; None: in the others' element type."""
    float8_gather: Float8Gather | None = None
    """Who scales their weights where FSDP2 gathers these in float8; None: they are gathered as they are."""
    kernels: tuple[KernelPackage, ...] = ()
    """Packages that the machine that trains has, whose kernels models call in the place of PyTorch's operations."""

    @model_validator(mode="after")
    def _leaves_chunks_to_the_plan(self) -> Self:
        if self.loss_head is LossHead.CHUNKED:
            raise ValueError("loss_head: chunked is Plan.loss_tiles; a workload's is eager, narrow or fused")
        return self

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Kept traces are found by it, also those of before there were these."""
        fields: dict[str, Any] = handler(self)
        for later in ("osft", "images", "quantized", "loss_head", "compiled", "float8", "float8_gather"):
            if fields.get(later) is None:
                fields.pop(later, None)
        for name in ("kernels", "keeps_outputs"):
            if not getattr(self, name):
                fields.pop(name, None)
        if self.autocast_cache:
            fields.pop("autocast_cache", None)
        return fields

    @property
    def is_full(self) -> bool:
        """Whether every parameter is trained, none is added, and all compute in their own element type.

        However the loss is made, whatever is compiled, and whatever the loop holds: of the model all is trained with
        any.
        """
        as_computed = dict.fromkeys(("loss_head", "compiled", "float8", "float8_gather"))
        return self.model_copy(update={**as_computed, "keeps_outputs": False}) == FULL_TRAINING

    @property
    def is_lowered(self) -> bool:
        """Whether something is computed otherwise than this package's runtime does."""
        return (self.compiled, self.float8, self.float8_gather) != (None, None, None)

    @property
    def packed_products(self) -> PackedProducts | None:
        """Whose products with packed weights are asked for; None: those of this package's runtime."""
        return None if self.quantized is None else self.quantized.products

    @property
    def other_loss(self) -> LossHead | None:
        """How the loss is asked to be made, if it is otherwise than the model's code has it."""
        return None if self.loss_head is LossHead.EAGER else self.loss_head

    @property
    def is_fused(self) -> bool:
        """Whether the loss is asked to be fused."""
        return self.loss_head is LossHead.FUSED


FULL_TRAINING: Final = TrainingOptions()
