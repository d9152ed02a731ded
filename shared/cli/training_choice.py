"""How a model is trained, as the options of a command say it: the group that commands take together."""

from __future__ import annotations

from dataclasses import dataclass

from ..schema.plan import TrainingMethod
from ..schema.training_options import QuantizationOptions, TrainingOptions
from .options import (
    AutocastName,
    DoubleQuantize,
    FrozenParts,
    ImageCount,
    ImageSize,
    LoraDropout,
    LoraDtype,
    LoraRank,
    LoraTargets,
    LossName,
    OsftTargets,
    QuantizationBlock,
    QuantizedTo,
    QuantizeHead,
    UnfreezeRankRatio,
    UseDora,
)
from .trained_as import images_of, options_of, osft_of, quantized_of


@dataclass(frozen=True, kw_only=True)
class TrainingChoice:
    """Options as they were given; see [Note: Groups of options] in ``option_groups.py``."""

    lora_rank: LoraRank = None
    lora_targets: LoraTargets = None
    lora_dropout: LoraDropout = None
    lora_dtype: LoraDtype = None
    use_dora: UseDora = False
    quantized_to: QuantizedTo = None
    double_quantize: DoubleQuantize = False
    quantization_blocksize: QuantizationBlock = None
    quantize_head: QuantizeHead = False
    unfreeze_rank_ratio: UnfreezeRankRatio = None
    osft_targets: OsftTargets = None
    frozen: FrozenParts = None
    image_size: ImageSize = None
    images: ImageCount = None
    autocast: AutocastName = None
    loss: LossName = None

    @property
    def quantized(self) -> QuantizationOptions | None:
        """How weights are packed.  Raises what ``quantized_of`` raises."""
        return quantized_of(
            self.quantized_to,
            double=self.double_quantize,
            blocksize=self.quantization_blocksize,
            head=self.quantize_head,
        )

    def options(self, method: TrainingMethod | None) -> TrainingOptions:
        """How the model is trained, by ``method`` where one is named.  Raises what ``options_of`` and its parts do."""
        return options_of(
            self.lora_rank,
            self.lora_targets,
            self.frozen,
            self.autocast,
            osft_of(method, self.unfreeze_rank_ratio, self.osft_targets),
            self.quantized,
            lora_dropout=self.lora_dropout,
            lora_dtype=self.lora_dtype,
            use_dora=self.use_dora,
            images=images_of(self.image_size, self.images),
            loss=self.loss,
        )
