"""What the options of commands say of how a model is trained: one message where they contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from pydantic import ValidationError

from ..basics.errors import ProtwinError
from ..phases.quantization import UNPACKED_TO, PackedProducts, Quantization, QuantizedType
from ..phases.tiling import LossHead
from ..schema.plan import Plan, TrainingMethod
from ..schema.training_options import (
    ADAPTER_DTYPES,
    ImageOptions,
    LoraOptions,
    OsftOptions,
    QuantizationOptions,
    TrainingOptions,
)
from ..schema.workload import DType, Workload

_AUTOCAST: Final = (DType.BFLOAT16, DType.FLOAT16)
USUAL_CHUNKS: Final = 8
"""Chunks of a chunked loss where nobody says: those of torchtune's recipes (``num_output_chunks``)."""


def osft_of(
    method: TrainingMethod | None, unfreeze_rank_ratio: float | None, targets: list[str] | None
) -> OsftOptions | None:
    """What the options say of orthogonal subspace fine-tuning; None if they do not ask for it.

    The ratio asks for it, with or without the method's name.  Raises ProtwinError if the options make no sense
    together.
    """
    if unfreeze_rank_ratio is None:
        if method is TrainingMethod.OSFT:
            raise ProtwinError(
                f"--method {method} trains a part of each weight's directions, and nobody says how many. Add "
                f"--unfreeze-rank-ratio 0.25."
            )
        if targets:
            raise ProtwinError(
                f"--osft-target is {targets[0]!r}, but --unfreeze-rank-ratio is missing. Write --unfreeze-rank-ratio "
                f"0.25 --osft-target {targets[0]}."
            )
        return None
    if method not in (None, TrainingMethod.OSFT):
        raise ProtwinError(
            f"--method {method} factorises nothing. Leave out --unfreeze-rank-ratio, or write --method osft."
        )
    if not 0 <= unfreeze_rank_ratio <= 1:
        raise ProtwinError(
            f"--unfreeze-rank-ratio is {unfreeze_rank_ratio}; it is the part of the directions that is trained, from 0 "
            f"to 1."
        )
    return OsftOptions(unfreeze_rank_ratio=unfreeze_rank_ratio, targets=tuple(targets or ()))


def options_of(
    lora_rank: int | None,
    lora_targets: str | None,
    frozen: list[str] | None,
    autocast: str | None,
    osft: OsftOptions | None = None,
    quantized: QuantizationOptions | None = None,
    *,
    lora_alpha: float | None = None,
    use_rslora: bool = False,
    lora_dropout: float | None = None,
    use_dora: bool = False,
    lora_dtype: str | None = None,
    images: ImageOptions | None = None,
    loss: LossHead | None = None,
) -> TrainingOptions:
    """What the options say of how a model is trained, on which ``images``, and how its loss is made.

    Chunks of the loss are no part of it (``loss_tiles_of``).

    Raises ProtwinError if they make no sense together.
    """
    given = {
        f"--lora-alpha {lora_alpha}": lora_alpha is not None,
        f"--lora-dropout {lora_dropout}": lora_dropout is not None,
        f"--lora-dtype {lora_dtype}": lora_dtype is not None,
        "--use-rslora": use_rslora,
        "--use-dora": use_dora,
    }
    if lora_rank is None and any(given.values()):
        first = next(option for option, is_given in given.items() if is_given)
        raise ProtwinError(f"{first} is given, but --lora-rank is missing. Write --lora-rank 16 beside it.")
    if lora_dropout is not None and not 0 <= lora_dropout < 1:
        raise ProtwinError(
            f"--lora-dropout is {lora_dropout:g}; it is the part that is dropped, from 0 to below 1. Write "
            f"--lora-dropout 0.05."
        )
    if lora_alpha is not None and not 0 < lora_alpha < float("inf"):
        raise ProtwinError(f"--lora-alpha is {lora_alpha:g}; it must be above 0 and finite. Write --lora-alpha 16.")
    computed = None if autocast is None else _autocast(autocast)
    targets = tuple(name.strip() for name in (lora_targets or "").split(",") if name.strip())
    if lora_targets is not None and (lora_rank is None or not targets):
        missing = "--lora-rank is missing" if lora_rank is None else "it names nothing"
        raise ProtwinError(
            f"--lora-targets is {lora_targets!r}, but {missing}. Write --lora-rank 16 --lora-targets q_proj."
        )
    lora = None
    if lora_rank is not None:
        lora = LoraOptions(
            rank=lora_rank,
            targets=targets,
            alpha=lora_alpha,
            use_rslora=use_rslora,
            dropout=lora_dropout or 0.0,
            use_dora=use_dora,
            dtype=None if lora_dtype is None else _adapter_dtype(lora_dtype),
        )
    if quantized is not None and use_dora:
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
    left_out = tuple(frozen or ())
    head = LossHead.EAGER if loss is LossHead.CHUNKED else loss
    return TrainingOptions(
        lora=lora,
        quantized=quantized,
        osft=osft,
        frozen=left_out,
        autocast=computed,
        images=images,
        loss_head=head,
    )


def loss_tiles_of(loss: LossHead | None, loss_tiles: Sequence[int] | None) -> list[int] | None:
    """The numbers of tiles that a loss so made runs in, of those that options allow; None: whatever is sensible.

    Raises ProtwinError if the options contradict each other.
    """
    asked = list(loss_tiles or ())
    if loss is None:
        return asked or None
    if loss is LossHead.CHUNKED:
        if 1 in asked:
            raise ProtwinError(
                "--loss chunked never has whole logits, but --loss-tiles allows 1. Leave one of them out."
            )
        return asked or [USUAL_CHUNKS]
    if (chunks := max(asked, default=1)) > 1:
        raise ProtwinError(
            f"--loss {loss} has whole logits, but --loss-tiles {chunks} never has. Write --loss chunked, or leave one "
            f"of them out."
        )
    return [1]


def check_whole_loss(loss: LossHead | None) -> None:
    """Raise ProtwinError if there are to be no whole logits: what is measured has no chunks."""
    if loss is LossHead.CHUNKED:
        raise ProtwinError(
            "--loss chunked is for plans in chunks, and the plans that are measured here have none. Write --loss "
            "eager, narrow or fused, or leave it out."
        )


def check_loss_of_plan(loss: LossHead | None, plan: Plan, workload: Workload | None = None) -> None:
    """Raise ProtwinError if a plan, or its workload, has the loss made another way than the option says."""
    chunks = f"the plan has loss_tiles {plan.loss_tiles}"
    if loss is LossHead.CHUNKED and plan.loss_tiles == 1:
        raise ProtwinError(f"--loss chunked is asked for, but {chunks}. Leave --loss out, or search with it.")
    if loss not in (None, LossHead.CHUNKED) and plan.loss_tiles > 1:
        raise ProtwinError(f"--loss {loss} has whole logits, but {chunks}. Leave --loss out, or search with it.")
    made = None if workload is None else workload.loss_head
    if loss not in (None, LossHead.CHUNKED) and made not in (None, loss):
        raise ProtwinError(
            f"--loss {loss} is asked for, but the plan's workload was traced with loss {made}. Leave --loss out, or "
            f"search with it."
        )


def quantized_of(
    to: QuantizedType | None,
    *,
    double: bool,
    blocksize: int | None,
    head: bool = False,
    release: str | None = None,
    packed_from: str | None = None,
) -> QuantizationOptions | None:
    """How weights are packed, and whose products they have.  Raises ProtwinError if nothing is, or not so."""
    products = _products(to, release, packed_from)
    if to is None:
        if double or head or blocksize is not None:
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
        return QuantizationOptions(how=Quantization(type=to), head=head, products=products)
    if to.is_grouped and double:
        raise ProtwinError(
            f"--quantize {to} has scales in 16 bits, which are not quantized themselves. Leave --double-quantize out, "
            f"or take nf4."
        )
    if blocksize is not None and blocksize not in to.blocksizes:
        which = "inputs of a group" if to.is_grouped else "for which bitsandbytes has kernels"
        raise ProtwinError(
            f"--quantization-blocksize is {blocksize}; with --quantize {to} it must be one of "
            f"{', '.join(map(str, to.blocksizes))}, {which}."
        )
    how = Quantization(type=to, double=double, blocksize=blocksize or to.usual_blocksize)
    return QuantizationOptions(how=how, head=head, products=products)


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


def images_of(size: str | None, count: int | None) -> ImageOptions | None:
    """What ``--image-size`` and ``--images`` say; None: nothing.  Raises ProtwinError if the size is none."""
    if size is None and count is None:
        return None
    sides = [] if size is None else size.lower().split("x")
    if size is not None and (len(sides) > 2 or not all(side.strip().isdecimal() and int(side) for side in sides)):
        raise ProtwinError(f"--image-size {size} is no size in pixels. Write height and width (448x672), or one side.")
    pixels = None if size is None else (int(sides[0]), int(sides[-1]))
    return ImageOptions(size=pixels, per_sample=count or 1)


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
