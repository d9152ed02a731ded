"""How a model is trained, as the options of a command say it: groups that commands take, and what they mean together.

One message tells where options contradict each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Final

import typer
from pydantic import ValidationError

from ..basics.errors import ProtwinError
from ..phases.quantization import UNPACKED_TO, PackedProducts, Quantization, QuantizedType
from ..phases.tiling import LossHead
from ..schema.plan import TrainingMethod
from ..schema.training_options import (
    ADAPTER_DTYPES,
    ImageOptions,
    LoraOptions,
    OsftOptions,
    QuantizationOptions,
    TrainingOptions,
)
from ..schema.workload import DType, KernelPackage
from .options import FrozenParts, KernelPackages, LossName

_AUTOCAST: Final = (DType.BFLOAT16, DType.FLOAT16)


@dataclass(frozen=True, kw_only=True)
class LoraMaps:
    """Which low-rank maps are trained; see [Note: Groups of options] in ``option_groups.py``."""

    lora_rank: Annotated[
        int | None,
        typer.Option(
            "--lora-rank", min=1, metavar="RANK", help="Train low-rank matrices beside linear maps, not the model."
        ),
    ] = None
    lora_targets: Annotated[
        str | None,
        typer.Option(
            "--lora-targets",
            metavar="NAMES",
            help="Linear maps that get them (q_proj,v_proj), instead of all of a block.",
        ),
    ] = None
    lora_alpha: float | None = None
    use_rslora: bool = False
    lora_dropout: float | None = None
    lora_dtype: str | None = None
    use_dora: bool = False

    def options(self) -> LoraOptions | None:
        """None: there are none.  Raises ProtwinError if the options make no sense together."""
        given = {
            f"--lora-alpha {self.lora_alpha}": self.lora_alpha is not None,
            f"--lora-dropout {self.lora_dropout}": self.lora_dropout is not None,
            f"--lora-dtype {self.lora_dtype}": self.lora_dtype is not None,
            "--use-rslora": self.use_rslora,
            "--use-dora": self.use_dora,
        }
        if self.lora_rank is None and any(given.values()):
            first = next(option for option, is_given in given.items() if is_given)
            raise ProtwinError(f"{first} is given, but --lora-rank is missing. Write --lora-rank 16 beside it.")
        if self.lora_dropout is not None and not 0 <= self.lora_dropout < 1:
            raise ProtwinError(
                f"--lora-dropout is {self.lora_dropout:g}; it is the part that is dropped, from 0 to below 1. Write "
                f"--lora-dropout 0.05."
            )
        if self.lora_alpha is not None and not 0 < self.lora_alpha < float("inf"):
            raise ProtwinError(
                f"--lora-alpha is {self.lora_alpha:g}; it must be above 0 and finite. Write --lora-alpha 16."
            )
        targets = tuple(name.strip() for name in (self.lora_targets or "").split(",") if name.strip())
        if self.lora_targets is not None and (self.lora_rank is None or not targets):
            missing = "--lora-rank is missing" if self.lora_rank is None else "it names nothing"
            raise ProtwinError(
                f"--lora-targets is {self.lora_targets!r}, but {missing}. Write --lora-rank 16 --lora-targets q_proj."
            )
        if self.lora_rank is None:
            return None
        return LoraOptions(
            rank=self.lora_rank,
            targets=targets,
            alpha=self.lora_alpha,
            use_rslora=self.use_rslora,
            dropout=self.lora_dropout or 0.0,
            use_dora=self.use_dora,
            dtype=None if self.lora_dtype is None else _adapter_dtype(self.lora_dtype),
        )


@dataclass(frozen=True, kw_only=True)
class LoraChoice(LoraMaps):
    """With what costs time or memory."""

    lora_dropout: Annotated[
        float | None,
        typer.Option(
            "--lora-dropout",
            metavar="FRACTION",
            help="Drop this part of what the low-rank maps read, from 0 to below 1.",
        ),
    ] = None
    lora_dtype: Annotated[
        str | None,
        typer.Option(
            "--lora-dtype",
            metavar="NAME",
            help="Element type of the low-rank maps (float32, bfloat16, float16), which what they read is cast to, as "
            "PEFT has float32 beside a base in 16 bits. Unless given: that of the maps beside them.",
        ),
    ] = None
    use_dora: Annotated[
        bool, typer.Option("--use-dora", help="Train a magnitude for each output of an adapted map too (DoRA).")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ScaledLora(LoraChoice):
    """With what only a training can tell apart."""

    lora_alpha: Annotated[
        float | None,
        typer.Option(
            "--lora-alpha", metavar="ALPHA", help="Scale the low-rank maps by alpha / rank; without it, by 1."
        ),
    ] = None
    use_rslora: Annotated[
        bool, typer.Option("--use-rslora", help="Scale them by alpha / sqrt(rank) (rank-stabilized).")
    ] = False


@dataclass(frozen=True, kw_only=True)
class PackedTo:
    """The type that frozen weights are packed to."""

    quantized_to: Annotated[
        QuantizedType | None,
        typer.Option(
            "--quantize",
            metavar="TYPE",
            help="Pack the weights beside which LoRA trains into few bits: nf4, fp4 or int8 by bitsandbytes; gptq or "
            "gptq-8bit in GPTQ's layout, unpacked by torch's operations.",
        ),
    ] = None
    double_quantize: Annotated[
        bool,
        typer.Option("--double-quantize", help="Quantize the scales of 4-bit blocks themselves."),
    ] = False
    quantization_blocksize: int | None = None
    quantize_head: bool = False

    def options(self, release: str | None = None, packed_from: str | None = None) -> QuantizationOptions | None:
        """How weights are packed, and whose products they have.  Raises ProtwinError if nothing is, or not so."""
        to, double, blocksize = self.quantized_to, self.double_quantize, self.quantization_blocksize
        products = _products(to, release, packed_from)
        if to is None:
            if double or self.quantize_head or blocksize is not None:
                given = "--double-quantize" if double else "--quantize-head"
                given = f"--quantization-blocksize {blocksize}" if blocksize is not None else given
                raise ProtwinError(f"{given} is given, but --quantize is not. Add --quantize nf4.")
            return None
        if to is QuantizedType.INT8:
            if double or blocksize is not None:
                raise ProtwinError(
                    "--quantize int8 has one scale for each output: it takes neither --double-quantize nor "
                    "--quantization-blocksize. Leave them out, or take nf4."
                )
            return QuantizationOptions(how=Quantization(type=to), head=self.quantize_head, products=products)
        if to.is_grouped and double:
            raise ProtwinError(
                f"--quantize {to} has scales in 16 bits, which are not quantized themselves. Leave --double-quantize "
                f"out, or take nf4."
            )
        if blocksize is not None and blocksize not in to.blocksizes:
            which = "inputs of a group" if to.is_grouped else "for which bitsandbytes has kernels"
            raise ProtwinError(
                f"--quantization-blocksize is {blocksize}; with --quantize {to} it must be one of "
                f"{', '.join(map(str, to.blocksizes))}, {which}."
            )
        how = Quantization(type=to, double=double, blocksize=blocksize or to.usual_blocksize)
        return QuantizationOptions(how=how, head=self.quantize_head, products=products)


@dataclass(frozen=True, kw_only=True)
class PackingChoice(PackedTo):
    """With the blocks that share a scale, and whether the head is packed."""

    quantization_blocksize: Annotated[
        int | None,
        typer.Option(
            "--quantization-blocksize",
            metavar="N",
            help="Scalars that share a scale, instead of 64; with gptq inputs, instead of 128.",
        ),
    ] = None
    quantize_head: Annotated[
        bool,
        typer.Option(
            "--quantize-head",
            help="Pack the map that gives the model's outputs too, as Lightning's BitsandbytesPrecision.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class SubspaceChoice:
    """Orthogonal subspace fine-tuning."""

    unfreeze_rank_ratio: Annotated[
        float | None,
        typer.Option(
            "--unfreeze-rank-ratio",
            metavar="RATIO",
            help="Orthogonal subspace fine-tuning: the part of each weight's directions that is trained, from 0 to 1.",
        ),
    ] = None
    osft_targets: Annotated[
        list[str] | None,
        typer.Option(
            "--osft-target",
            metavar="PATTERN",
            help="Linear maps that are factorised for it (q_proj, 'model.layers.[0-9].*'), instead of all of a block.",
        ),
    ] = None

    def options(self, method: TrainingMethod | None) -> OsftOptions | None:
        """None: it is not asked for.  The ratio asks for it, with or without the method's name.

        Raises ProtwinError if the options make no sense together.
        """
        ratio, targets = self.unfreeze_rank_ratio, self.osft_targets
        if ratio is None:
            if method is TrainingMethod.OSFT:
                raise ProtwinError(
                    f"--method {method} trains a part of each weight's directions, and nobody says how many. Add "
                    f"--unfreeze-rank-ratio 0.25."
                )
            if targets:
                raise ProtwinError(
                    f"--osft-target is {targets[0]!r}, but --unfreeze-rank-ratio is missing. Write "
                    f"--unfreeze-rank-ratio 0.25 --osft-target {targets[0]}."
                )
            return None
        if method not in (None, TrainingMethod.OSFT):
            raise ProtwinError(
                f"--method {method} factorises nothing. Leave out --unfreeze-rank-ratio, or write --method osft."
            )
        if not 0 <= ratio <= 1:
            raise ProtwinError(
                f"--unfreeze-rank-ratio is {ratio}; it is the part of the directions that is trained, from 0 to 1."
            )
        return OsftOptions(unfreeze_rank_ratio=ratio, targets=tuple(targets or ()))


@dataclass(frozen=True, kw_only=True)
class ImageChoice:
    """What is made up beside text."""

    image_size: Annotated[
        str | None,
        typer.Option(
            "--image-size",
            metavar="HEIGHTxWIDTH",
            help="Pixels of each image of a model that reads some (448x672, or 448), instead of the configuration's.",
        ),
    ] = None
    images: Annotated[
        int | None,
        typer.Option(
            "--images", metavar="N", min=1, help="Images in the text of each sample, where a model reads both."
        ),
    ] = None

    def options(self) -> ImageOptions | None:
        """None: nothing.  Raises ProtwinError if the size is none."""
        if self.image_size is None and self.images is None:
            return None
        size, pixels = self.image_size, None
        if size is not None:
            sides = size.lower().split("x")
            if len(sides) > 2 or not all(side.strip().isdecimal() and int(side) for side in sides):
                raise ProtwinError(
                    f"--image-size {size} is no size in pixels. Write height and width (448x672), or one side."
                )
            pixels = (int(sides[0]), int(sides[-1]))
        return ImageOptions(size=pixels, per_sample=self.images or 1)


@dataclass(frozen=True, kw_only=True)
class KnownTraining:
    """What families of the catalogue know of any model; see [Note: Groups of options] in ``option_groups.py``."""

    lora: LoraMaps = LoraMaps()
    packed: PackingChoice = PackingChoice()
    subspaces: SubspaceChoice = SubspaceChoice()
    frozen: list[str] | None = None
    autocast: str | None = None
    no_autocast_cache: bool = False
    loss: LossName = None
    kernels: list[KernelPackage] | None = None
    keeps_outputs: bool = False

    @property
    def quantized(self) -> QuantizationOptions | None:
        """How weights are packed.  Raises what ``PackedTo.options`` raises."""
        return self.packed.options()

    @property
    def images(self) -> ImageOptions | None:
        """What is made up beside text; None: the model's own."""
        return None

    def options(self, method: TrainingMethod | None) -> TrainingOptions:
        """How the model is trained, by ``method`` where one is named.  Raises what the groups' options raise."""
        osft, quantized, images = self.subspaces.options(method), self.quantized, self.images
        return trained(
            self.lora.options(),
            quantized,
            osft,
            images,
            frozen=self.frozen,
            loss=self.loss,
            autocast=self.autocast,
            kernels=self.kernels,
        ).model_copy(update={"keeps_outputs": self.keeps_outputs, "autocast_cache": self._has_autocast_cache})

    @property
    def _has_autocast_cache(self) -> bool:
        """Whether casts of weights are kept.  Raises ProtwinError if there are to be none, and nothing is cast."""
        if self.no_autocast_cache and self.autocast is None:
            raise ProtwinError("--no-autocast-cache is given, but --autocast is not: nothing is cast. Leave it out.")
        return not self.no_autocast_cache


@dataclass(frozen=True, kw_only=True)
class TrainingChoice(KnownTraining):
    """With what a trace is needed for."""

    lora: LoraChoice = LoraChoice()
    frozen: FrozenParts = None
    autocast: Annotated[
        str | None,
        typer.Option(
            "--autocast", metavar="NAME", help="Compute in this element type, by autocast (bfloat16, float16)."
        ),
    ] = None
    no_autocast_cache: Annotated[
        bool,
        typer.Option(
            "--no-autocast-cache",
            help="Casts of weights are made anew wherever they are used: torch.autocast(cache_enabled=False), and "
            "weights within FullyShardedDataParallel, which are views (--as fsdp says so by itself).",
        ),
    ] = False
    kernels: KernelPackages = None
    pictures: ImageChoice = ImageChoice()

    @property
    def images(self) -> ImageOptions | None:
        """What is made up beside text.  Raises ProtwinError if the size is none."""
        return self.pictures.options()


def trained(
    lora: LoraOptions | None,
    quantized: QuantizationOptions | None,
    osft: OsftOptions | None,
    images: ImageOptions | None,
    *,
    frozen: Sequence[str] | None,
    loss: LossHead | None,
    autocast: str | None = None,
    kernels: Sequence[KernelPackage] | None = None,
) -> TrainingOptions:
    """All of it together; chunks of the loss are no part of it (``loss_tiles_of``).

    Raises ProtwinError if the parts make no sense together.
    """
    computed = None if autocast is None else _autocast(autocast)
    if quantized is not None and lora is not None and lora.use_dora:
        raise ProtwinError(
            f"--quantize is {quantized.how.type}, but --use-dora takes norms of unpacked weights in every step. Leave "
            f"out one of them."
        )
    if quantized is not None and (lora is None or osft is not None):
        reason = (
            "--unfreeze-rank-ratio factorises and trains these weights"
            if osft is not None
            else "packed weights cannot be trained, and nothing else would be"
        )
        raise ProtwinError(
            f"--quantize is {quantized.how.type}, but {reason}. Train low-rank matrices beside them (--lora-rank "
            f"16), or leave --quantize out."
        )
    return TrainingOptions(
        lora=lora,
        quantized=quantized,
        osft=osft,
        frozen=tuple(frozen or ()),
        autocast=computed,
        images=images,
        loss_head=LossHead.EAGER if loss is LossHead.CHUNKED else loss,
        kernels=tuple(sorted(set(kernels or ()))),
    )


def _products(to: QuantizedType | None, release: str | None, packed_from: str | None) -> PackedProducts | None:
    """What --bitsandbytes and --packed-from say.  Raises ProtwinError if it is nothing that is known."""
    if release is None:
        if packed_from is not None:
            raise ProtwinError(
                f"--packed-from {packed_from} is given, but --bitsandbytes is not. Add the release that the run has, "
                f"as pip show bitsandbytes tells it: --bitsandbytes 0.50.2."
            )
        return None
    if to is None:
        raise ProtwinError(f"--bitsandbytes {release} is given, but --quantize is not. Add --quantize nf4.")
    try:
        found = PackedProducts(release=release, packed_from=None if packed_from is None else DType(packed_from))
    except ValidationError as error:
        option = "--packed-from" if error.errors()[0]["loc"][-1] == "packed_from" else "--bitsandbytes"
        raise ProtwinError(f"{option}: {error.errors()[0]['msg'].removeprefix('Value error, ')}.") from None
    except ValueError:
        raise ProtwinError(f"--packed-from {packed_from} is not known. Use {', '.join(UNPACKED_TO)}.") from None
    if (reason := found.reason_against(to)) is not None:
        option = "--packed-from" if packed_from is not None and not to.is_grouped else "--bitsandbytes"
        raise ProtwinError(f"{option} is given beside --quantize {to}, but {reason}. Leave it out.")
    return found


def _adapter_dtype(name: str) -> DType:
    with suppress(ValueError):
        if (dtype := DType(name)) in ADAPTER_DTYPES:
            return dtype
    raise ProtwinError(f"--lora-dtype {name} is not known. Use {', '.join(ADAPTER_DTYPES)}.")


def _autocast(name: str) -> DType:
    with suppress(ValueError):
        if (dtype := DType(name)) in _AUTOCAST:
            return dtype
    raise ProtwinError(f"--autocast {name} is not known. Use {' or '.join(_AUTOCAST)}.")
