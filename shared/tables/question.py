"""What was asked, as the table at the head of every answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..basics.units import counted, format_bytes, format_count
from ..schema.question import Question
from ..schema.workload import DType, DTypeOrigin, Packing
from .labels import format_share
from .table import Table

_MOST_NAMES: Final = 8
"""A transformer's layer has seven linear maps."""
_DEVICE_CHOICE: Final = {
    DType.BFLOAT16: "since the device computes in it",
    DType.FLOAT16: "since the device computes in it and not in bfloat16",
    DType.FLOAT32: "since the device computes in neither bfloat16 nor float16",
}
"""Why a device chose an element type (``choose_dtype``)."""


def question_table(question: Question) -> Table:
    """Model, element types, step, machine and budgets, one line each."""
    rows = [
        ("model", _model(question)),
        ("weights", _weights(question)),
        ("training", _training(question)),
        ("step", _step(question)),
        *_positions(question),
    ]
    if question.hardware_name:
        rows.append(("machine", _machine(question)))
    if budgets := _budgets(question):
        rows.append(("budgets", budgets))
    return Table(title="Asked", columns=("", ""), rows=rows)


def asked_of_all_table(question: Question, global_batch_size: int, *, is_longest: bool = False) -> Table:
    """What was asked of every machine of a ranking, read off one answer: it has element types by its device.

    ``is_longest``: the longest sequences, which differ from machine to machine.
    """
    samples = counted(global_batch_size, "sample")
    if is_longest:
        samples += " of the longest sequences that train"
    elif question.sequence_length is not None:
        samples += f" of {question.sequence_length:,} tokens: {global_batch_size * question.sequence_length:,} tokens"
    rows = [
        ("model", _model(question)),
        ("weights", _weights(question)),
        ("training", _training(question)),
        ("step", samples),
        *_positions(question),
    ]
    if question.overrides:
        rows.append(("machines", f"with {', '.join(question.overrides)}"))
    return Table(title=f"Asked (element types as on {question.hardware_name})", columns=("", ""), rows=rows)


def _positions(question: Question) -> list[tuple[str, str]]:
    """A warning where samples are longer than what rotary positions were made for."""
    return [] if question.rotary_tokens is None else [("warning", positions_words(question.rotary_tokens))]


def positions_words(rotary_tokens: int) -> str:
    """A warning of samples that are longer than what rotary positions were made for."""
    return f"rotary positions were made for samples of {rotary_tokens:,} tokens; longer ones need scaled positions"


def _model(question: Question) -> str:
    size = f"{question.model_name}, {format_count(question.num_parameters)} parameters"
    if question.lora_rank is None and question.num_trained == question.num_parameters:
        return f"{size}, all trained"
    trained = f"{format_count(question.num_trained)} trained"
    if question.num_parameters:
        trained += f" ({format_share(question.num_trained / question.num_parameters)})"
    if question.lora_rank is not None:
        return f"{size}, {trained}: LoRA of rank {question.lora_rank} on {_first(question.lora_targets)}"
    return f"{size}, {trained}; frozen: {_first(question.frozen)}"


def _weights(question: Question) -> str:
    """Element types, and how weights are packed."""
    words = weights_words(question.weight_dtype, question.published_dtype, question.dtype_origin)
    return f"{' and '.join(question.quantized)}; others {words}" if question.quantized else words


def _first(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}"


def weights_words(chosen: DType, published: DType | None, origin: DTypeOrigin | None) -> str:
    """The element type of the weights, who chose it, and the one that they were published in if that is another."""
    as_published = "" if published in (None, chosen) else f"; published as {published}"
    match origin:
        case None:
            return f"{chosen}{as_published}"
        case DTypeOrigin.PUBLISHED:
            return f"{chosen}, as published"
        case DTypeOrigin.ASKED:
            return f"{chosen}, as asked{as_published}"
        case DTypeOrigin.DEVICE:
            return f"{chosen}, {_DEVICE_CHOICE[chosen]}{as_published}"


def _training(question: Question) -> str:
    compute = str(question.compute_dtype)
    by_autocast = ", by autocast" if question.is_autocast else ""
    if question.hardware_name and question.rate_dtype is not question.compute_dtype:
        rate = "its vector units" if question.rate_dtype is None else question.rate_dtype
        by_autocast += f", which the device has no matrix units for and runs at the rate of {rate}"
    if not question.num_trained:
        return f"computes in {compute}{by_autocast}; nothing is trained"
    state = f"{question.optimizer} with {question.state_dtype} moments"
    if question.master_dtype is not None:
        masters = "masters" if question.master_dtype is question.state_dtype else f"{question.master_dtype} masters"
        state = f"{question.optimizer} with {masters} and moments in {question.state_dtype}"
    gradients = str(question.gradient_dtype)
    if question.host_gradient_dtype is not None:
        gradients += f", added up in {question.host_gradient_dtype} on the host"
    outputs = "; the loop holds the model's outputs" if question.keeps_outputs else ""
    loss = "" if question.loss_head is None else f"; loss {question.loss_head}"
    return f"computes in {compute}{by_autocast}; gradients in {gradients}; {state}{loss}{outputs}"


def _step(question: Question) -> str:
    samples = counted(question.samples_per_micro_batch, "sample" if question.packing is None else "row")
    if question.sequence_length is not None:
        samples += f" of {question.sequence_length:,} tokens"
    if question.packing is not None:
        samples += f" with {packing_words(question.packing)}"
    if question.micro_batches > 1:
        samples += f", {question.micro_batches:,} micro-batches"
    if question.num_ranks > 1:
        samples += f", {question.num_ranks:,} ranks"
    if question.sequence_ranks > 1:
        samples += f" of which {question.sequence_ranks:,} share each sequence"
    if question.num_tokens is not None:
        return f"{samples}: {question.num_tokens:,} tokens"
    return f"{samples}: {question.num_samples:,} in all" if question.num_samples > 1 else samples


def packing_words(packing: Packing) -> str:
    """How many samples each row has, and how long ones it attends as."""
    number = f"{packing.samples_per_row:,.1f}".removesuffix(".0")
    if packing.is_masked:
        return f"{number} samples each behind a mask of the whole row"
    return f"{number} samples each, which attend as samples of {packing.equal_length:,} tokens"


def _machine(question: Question) -> str:
    changed = f" with {', '.join(question.overrides)}" if question.overrides else ""
    figures = "what a probe measured" if question.is_probed else "data sheets"
    if question.calibrated_on is not None:
        figures = f"a calibration on {question.calibrated_on}"
    return f"{question.hardware_name}{changed}, by {figures}"


def _budgets(question: Question) -> str:
    parts = []
    if question.device_budget_bytes is not None:
        parts.append(f"device {format_bytes(question.device_budget_bytes)}")
    if question.margin_frac:
        parts.append(f"{format_share(question.margin_frac)} of the device left free by segments")
    if question.host_budget_bytes is not None:
        parts.append(f"host {format_bytes(question.host_budget_bytes)}")
    return ", ".join(parts) + (" per rank" if parts and question.num_ranks > 1 else "")
