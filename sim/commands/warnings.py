"""What commands warn of, of a prediction and the machine that it is for."""

from __future__ import annotations

from ...shared.cli.options import MethodName as MethodName
from ...shared.cli.options import warn
from ...shared.methods.runtime_profile import RuntimeProfile
from ...shared.phases.operations import left_out_words
from ...shared.schema.hardware import Hardware
from ...shared.schema.record import Record
from ...shared.schema.schedule import Content, Schedule
from ...shared.schema.workload import Workload
from ...shared.workloads.check import option_words, quadratic_words
from ...shared.workloads.dtypes import TRAINABLE


def warn_of_dtype(record: Record, hardware: Hardware) -> None:
    """Warn of an element type that the device has no matrix units for."""
    assert record.question is not None, "a prediction says what was asked"
    device, dtype = hardware.device, record.question.compute_dtype
    rate = device.matrix_flop_per_s(dtype)
    if dtype in device.peak_flop_per_s or rate is None:
        return
    faster = [known for known in TRAINABLE if device.peak_flop_per_s.get(known, 0) > rate]
    remedy = (
        f"; use --dtype {faster[0]}, which reaches {device.peak_flop_per_s[faster[0]] / 1e12:.4g} TFLOP/s"
        if faster
        else ""
    )
    warn(
        f"{device.name} has no matrix units for {dtype}: its products are predicted at {rate / 1e12:.4g} TFLOP/s, the "
        f"rate of {device.rate_dtype(dtype) or 'its vector units'}, at most{remedy}."
    )


def warn_of_attention(workload: Workload) -> None:
    """Warn of attention that takes memory with the square of the sequence."""
    if (words := quadratic_words(workload)) is not None:
        warn(words)


def warn_of_kernels(workload: Workload) -> None:
    """Warn of kernels whose reference implementation was traced in their place."""
    if (words := left_out_words(workload.kernels_left_out, workload.model_name)) is not None:
        warn(words)


def warn_of_options(workload: Workload) -> None:
    """Warn of options that do less than they say: a narrow loss without logits, packing that leaves most weights."""
    for words in option_words(workload):
        warn(words)


def warn_of_held_inputs(profile: RuntimeProfile, schedule: Schedule) -> None:
    """Warn where hooks are to hold inputs of blocks, and no block is one whose input they would hold."""
    if profile.holds_inputs and not any(buffer.content is Content.HELD_INPUT for buffer in schedule.buffers):
        warn("--holds-inputs changes nothing: no block behind the first is recomputed and has frozen parameters.")


def warn_of_cached_keys(profile: RuntimeProfile, schedule: Schedule) -> None:
    """Warn where keys and values are to be cached, and nothing is alive for it beside what blocks keep."""
    if profile.caches_keys and not any(buffer.content is Content.CACHED_KEYS for buffer in schedule.buffers):
        warn(
            "--caches-keys changes nothing: no kernel of attention is known, or all blocks keep what attention saves "
            "and the loop holds no outputs."
        )


def warn_of_memory(record: Record, host_bytes: int) -> None:
    """Warn of segments or host memory that do not fit although all that the plan allocates does."""
    from ...shared.tables.memory import allocator_warning, host_warning

    for message in (allocator_warning(record), host_warning(record, host_bytes)):
        if message is not None:
            warn(message)
