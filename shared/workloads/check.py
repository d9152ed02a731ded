"""Whether a workload can be asked about at all: figures of this world, kernels that the device has, what it knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ..basics.errors import WorkloadError
from ..basics.suggestions import listed
from ..basics.units import format_bytes, format_count
from ..catalogue.models import has_flash_attention, known_model, model_configuration
from ..phases.activation_modes import FUSED_DROPOUT
from ..phases.operations import OperationClass, lowering_words
from ..phases.quadratic import attention_words
from ..phases.tiling import LossHead
from ..schema.hardware import DeviceKind, Hardware
from ..schema.plan import TrainingMethod
from ..schema.training_options import TrainingOptions
from ..schema.workload import DType, Phase, Workload
from ..students.student import Student

_MOST_BYTES: Final = 2**56
"""64 PiB in one iteration of one device, some thousand times what the largest models have."""
_MOST_FLOPS: Final = 2**100
_PASSES: Final = 2**10
"""Operations read and write the same data many times over."""
_MATRIX_DIMENSIONS: Final = 2
_OF_GPUS: Final = FUSED_DROPOUT | {"native_dropout", "_fused_rms_norm"}
"""Operations, in traces without a machine, of which torch has no kernel on the CPU or runs another."""


def check_magnitude(workload: Workload) -> None:
    """Raise WorkloadError if parameters and activations together, or the arithmetic, exceed what any machine does.

    Sums of larger figures would overflow what numpy computes with.
    """
    total_bytes = workload.resident_bytes + sum(parameter.size_bytes for parameter in workload.parameters)
    total_bytes += sum(workload.profile_of(block).output_bytes for block in range(workload.num_blocks))
    total_bytes += sum(shared.size_bytes for shared in workload.shared_inputs)
    flops = 0
    for phase in _phases(workload):
        moved_bytes = sum(operation.bytes_moved * operation.count for operation in phase.operations)
        levels_bytes = abs(phase.net_bytes) + phase.stated_gradient_bytes + max(0, phase.peak_bytes)
        total_bytes += levels_bytes + moved_bytes // _PASSES
        flops += phase.flops
    if total_bytes > _MOST_BYTES or flops > _MOST_FLOPS:
        raise WorkloadError(
            f"{workload.model_name} has {format_bytes(min(total_bytes, 2**90))} of data and {min(flops, 2**110):.3g} "
            f"FLOP in one iteration, more than any machine; at most {format_bytes(_MOST_BYTES)} and "
            f"{_MOST_FLOPS:.3g} are searched. The workload is damaged or its batch too large: trace the model again."
        )


def _phases(workload: Workload) -> Iterator[Phase]:
    """Every phase of every block, as often as it runs."""
    yield from (
        workload.prologue_forward,
        workload.epilogue_forward,
        workload.epilogue_backward,
        workload.prologue_backward,
    )
    for tiling in workload.loss_tilings:
        yield from (tiling.epilogue_forward, tiling.epilogue_backward)
    for block in range(workload.num_blocks):
        yield from workload.profile_of(block).phases


def has_kernels_of_gpus(workload: Workload) -> bool:
    """Whether dropout, attention or norms were traced as CUDA runs them and a CPU does not, without a machine at hand.

    The CPU's fused attention knows neither dropout, nor gradients of masks, nor values of another width: it saves noise
    and probabilities, and its rms_norm copies in float32 (``runtime/fakes/kernels.py``).
    """
    forwards = (workload.prologue_forward, workload.epilogue_forward, *(one.forward for one in workload.profiles))
    return workload.traced_with == "fake" and any(
        operation.name in _OF_GPUS for phase in forwards for operation in phase.operations
    )


def check_kernels(workload: Workload, hardware: Hardware) -> None:
    """Raise WorkloadError if ``workload`` was traced with kernels that ``hardware`` does not have."""
    if hardware.device.kind is DeviceKind.CPU and has_kernels_of_gpus(workload):
        raise WorkloadError(
            f"{workload.model_name} holds dropout, attention or norms as GPUs run them, in kernels that save one byte "
            f"for each element that may drop out, and neither probabilities nor copies. On a CPU such as that of "
            f"{hardware.name} torch saves more. Name the model in place of its workload, or trace it there (protwin "
            f"trace --real, protwin calibrate)."
        )


def quadratic_words(workload: Workload) -> str | None:
    """What is to be said of attention that takes memory with the square of the sequence; else None."""
    name, num_tokens = workload.model_name, workload.num_tokens // workload.num_samples
    known = known_model(name)
    has_flash = None if known is None else has_flash_attention(model_configuration(known).config)
    return attention_words(workload.quadratic, name, num_tokens, has_flash=has_flash)


def option_words(workload: Workload) -> tuple[str, ...]:
    """What is to be said of options that do less than they say."""
    return tuple(words for words in (narrow_words(workload), unpacked_words(workload)) if words is not None)


def narrow_words(workload: Workload) -> str | None:
    """What is to be said of a narrow loss that is an eager one's equal: its logits are float32 at once; else None."""
    if workload.loss_head is not LossHead.NARROW:
        return None
    is_narrow = any(
        operation.operation_class is OperationClass.MATMUL and operation.dtype in (DType.BFLOAT16, DType.FLOAT16)
        for operation in workload.epilogue_forward.operations
    )
    if is_narrow:
        return None
    return (
        f"--loss narrow leaves logits in 16 bits, but {workload.model_name} computes them in float32 here: nothing is "
        f"spared, and the answer is that of --loss eager. A type of 16 bits (--dtype bfloat16) has them."
    )


def unpacked_words(workload: Workload) -> str | None:
    """What is to be said where maps are packed, but more scalars are in stacks of matrices; else None."""
    stacked = [
        parameter
        for parameter in workload.parameters
        if parameter.block is not None and len(parameter.shape) > _MATRIX_DIMENSIONS and not parameter.trainable
    ]
    left = sum(parameter.scalars for parameter in stacked)
    packed = sum(parameter.scalars for parameter in workload.parameters if parameter.quantized is not None)
    if not packed or left <= packed:
        return None
    return (
        f"{workload.model_name} has {format_count(left)} weights in stacks of matrices, as {stacked[0].name}. No "
        f"quantization packs these: they stay in {stacked[0].dtype}, "
        f"{format_bytes(sum(parameter.size_bytes for parameter in stacked))}, beside {format_count(packed)} that are "
        f"packed. Releases of transformers before 5 have experts as linear maps, which bitsandbytes packs."
    )


def check_lowering(workload: Workload, hardware: Hardware) -> None:
    """Raise WorkloadError if ``workload`` multiplies in float8, and ``hardware`` has no units for it, or is a CPU."""
    device = hardware.device
    if workload.float8 is not None and DType.FLOAT8_E4M3FN not in device.peak_flop_per_s:
        raise WorkloadError(
            f"float8 {workload.float8} is asked for, but {device.name} of {hardware.name} states no peak of float8 "
            f"products (device.peak_flop_per_s has {', '.join(sorted(device.peak_flop_per_s))}). Leave --float8 out, "
            f"or name a machine of Ada's or Hopper's generation or later."
        )
    if workload.compiled is not None and device.kind is DeviceKind.CPU:
        raise WorkloadError(
            f"--compile {workload.compiled} is asked for, but {hardware.name} computes on its CPU, and how long "
            f"inductor's kernels take is known of GPUs alone. Leave --compile out."
        )


def check_method(workload: Workload, model: str, method: TrainingMethod | None) -> Workload:
    """``workload``, which ``model`` names.  Raises WorkloadError if it is of another method than ``method``."""
    if method is not None and workload.method is not method:
        raise WorkloadError(
            f"{model} is a workload of method {workload.method}, and --method says {method}. Leave it out."
        )
    return workload


def other_training(options: TrainingOptions) -> list[str]:
    """The options by which something else is asked for than the training of the whole model, as commands name them."""
    by_option = {
        "--lora-rank": options.lora,
        "--quantize": options.quantized,
        "--unfreeze-rank-ratio": options.osft,
        "--freeze": options.frozen,
        "--image-size": options.images and options.images.size,
        "--images": options.images and not options.images.size,
        "--autocast": options.autocast,
        "--no-autocast-cache": not options.autocast_cache,
        "--kernels": options.kernels,
    }
    return [name for name, value in by_option.items() if value]


def check_saved(saved: Workload, model: str, options: TrainingOptions, student: Student | None) -> None:
    """Raise WorkloadError if the user asks for another training than the saved one, or if it is of no sensible size."""
    check_magnitude(saved)
    if not options.is_full or student is not None:
        given = [*other_training(options), *(["--student"] if student is not None else [])]
        raise WorkloadError(
            f"{model} is a workload, traced as it was to be trained. Leave out {listed(given)}, or name the model that "
            f"it was traced from."
        )
    lowering = (options.compiled, options.float8, options.float8_gather)
    if lowering not in ((None, None, None), (saved.compiled, saved.float8, saved.float8_gather)):
        asked = lowering_words(options.compiled, options.float8, gather=options.float8_gather)
        raise WorkloadError(
            f"{asked}: so it is asked for, but {model} is a workload, which was traced with its operations one by one. "
            f"Leave --compile and --float8 out, or name the model that it was traced from."
        )
    if options.keeps_outputs and not saved.keeps_outputs:
        raise WorkloadError(
            f"--keeps-outputs is asked for, but {model} is a workload that was traced in a loop that holds the loss "
            f"alone. Leave it out, or name the model that it was traced from."
        )
    if options.loss_head not in (None, saved.loss_head):
        raise WorkloadError(
            f"--loss {options.loss_head} is asked for, but {model} is a workload that was traced with loss "
            f"{saved.loss_head}. Leave --loss out, or name the model that it was traced from."
        )


def check_tiles(
    saved: Workload,
    origin: str,
    mlp_tiles: Sequence[int],
    loss_tiles: Sequence[int],
    sequence_ranks: Sequence[int] = (),
) -> None:
    """Raise WorkloadError if a saved workload does not know numbers of tiles, or of ranks, that are asked for."""
    of_ranks = [sharing.sequence_ranks for sharing in saved.sequence_sharings]
    for knob, option, asked, known in (
        ("mlp_tiles", "--mlp-tiles", mlp_tiles, [tiling.mlp_tiles for tiling in saved.tilings]),
        ("loss_tiles", "--loss-tiles", loss_tiles, [tiling.loss_tiles for tiling in saved.loss_tilings]),
        ("sequence_ranks", "--sequence-ranks", sequence_ranks, of_ranks),
    ):
        unknown = sorted(set(asked) - {1, *known})
        if unknown:
            raise WorkloadError(
                f"{knob} {', '.join(map(str, unknown))} asked for, but {origin} is a workload that knows "
                f"{', '.join(map(str, [1, *known]))}. Trace the model with that number ({option} {unknown[0]}), or "
                f"name the model that it was traced from."
            )
