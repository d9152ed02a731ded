"""From what a file asks for, and what the command line adds, to a model on a machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ...shared.basics.errors import PlanError
from ...shared.basics.suggestions import listed
from ...shared.catalogue.models import known_model, load_model_configuration, published_dtype
from ...shared.catalogue.same_model import same_model
from ...shared.foreign.asked_run import AskedRun, Checkpointing, Place, Precision, Reading, Split
from ...shared.foreign.keys import words_of
from ...shared.foreign.model_config import as_loaded
from ...shared.foreign.targets import usual_targets
from ...shared.phases.tiling import LossHead
from ...shared.schema.hardware import Hardware
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.training_options import LoraOptions, QuantizationOptions, TrainingOptions
from ...shared.schema.workload import DType, Float8Gather, KernelPackage, Workload
from ...shared.workloads.dtypes import choose_dtype, computes_in
from ...shared.workloads.source import (
    WorkloadRequest,
    is_saved_workload,
    resolve_workload,
    untraced_workload,
    usual_shape,
)
from ..questions.in_tiles import AskedTiles, Tiles

_DTYPES: Final = {
    Precision.FLOAT32: DType.FLOAT32,
    Precision.MIXED_BFLOAT16: DType.BFLOAT16,
    Precision.MIXED_FLOAT16: DType.FLOAT16,
    Precision.AUTOCAST_BFLOAT16: DType.BFLOAT16,
    Precision.AUTOCAST_FLOAT16: DType.FLOAT16,
    Precision.PURE_BFLOAT16: DType.BFLOAT16,
}
_WITHOUT_BFLOAT16: Final = {
    Precision.MIXED_BFLOAT16: Precision.MIXED_FLOAT16,
    Precision.AUTOCAST_BFLOAT16: Precision.AUTOCAST_FLOAT16,
    Precision.PURE_BFLOAT16: Precision.AUTOCAST_FLOAT16,
}
"""Element types on devices that lack it; no optimizer steps float16 weights."""
_AUTOCAST: Final = (Precision.AUTOCAST_BFLOAT16, Precision.AUTOCAST_FLOAT16)


@dataclass(frozen=True, kw_only=True)
class Said:
    """What the command line adds to a file; None: nothing."""

    model: str | None = None
    batch_size: int | None = None
    micro_batches: int | None = None
    sequence_length: int | None = None
    packed_lengths: str | None = None
    num_ranks: int | None = None
    dtype: str | None = None
    optimizer: Optimizer | None = None
    checkpointing: Checkpointing | None = None
    lora: LoraOptions | None = None
    quantized: QuantizationOptions | None = None
    kernels: tuple[KernelPackage, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Settled:
    """A run with everything that a prediction needs."""

    run: AskedRun
    """As the file has it, with what the command line says."""
    model: str
    batch_size: int
    micro_batches: int
    sequence_length: int | None
    """None for models without sequences."""
    num_ranks: int
    optimizer: Optimizer
    dtype: DType
    machine: Hardware
    packed_lengths: str | None
    notes: tuple[str, ...]
    """What was taken in the place of what nobody says."""
    differences: tuple[str, ...]
    options: TrainingOptions
    loss_tiles: int = 1
    mlp_tiles: int = 1
    steps_own: bool = False
    """Whether 16-bit weights are stepped themselves, by an optimizer that steps float32 masters of them here."""


def settle(reading: Reading, said: Said, machine: Hardware | None, *, file: str) -> Settled:
    """The run of ``reading`` with what ``said`` adds, on ``machine``.

    Raises PlanError, one message, of everything that is missing, or if numbers of the file do not go together on so
    many ranks.
    """
    open_question = _whose(reading, file)
    notes = [] if open_question is None else [open_question]
    run = _merged(reading.run, said, notes)
    run = _found_by_content(run if said.model is not None else _found_by_name(run, notes), notes)
    _check_known(run, said, machine, file, open_question)
    assert machine is not None
    assert run.model is not None
    num_ranks, machine = _ranks(run, machine, notes)
    if run.checkpointing is None:
        notes.append("no block is recomputed in backward, as far as the file says (--checkpointing: every block is).")
    batch_size, micro_batches = _batch(run, num_ranks, notes, file)
    precision, differences = _as_published(run, _precision(run, machine, notes), notes)
    optimizer, of_optimizer = _optimizer(run, precision, notes)
    differences += of_optimizer
    if run.lora is not None and run.lora.dropout and not _has_torch():
        differences.append(
            f"dropout {run.lora.dropout:g} before the adapters saves masks and copies of what they read; it is left "
            f"out, since tracing it needs torch, which is not installed."
        )
    quantized = run.quantized
    if quantized is not None and quantized.products is not None and not _has_torch():
        quantized = quantized.model_copy(update={"products": None})
        differences.append(
            "inputs that maps of 8 bits keep until backward are left out, since tracing them needs torch, which is not "
            "installed."
        )
    if run.is_packed and said.packed_lengths is None:
        differences.append(
            "rows are several samples end to end, but attention is counted over whole rows: it takes less time. Say "
            "how they lie: --packed-lengths uniform:64:1024."
        )
    lora = _adapters(run, said, reading, notes)
    if lora is not None and lora.dropout and not _has_torch():
        lora = lora.model_copy(update={"dropout": 0.0})
    options = _options(run, num_ranks, differences)
    options = options.model_copy(update={"lora": lora, "quantized": quantized, "kernels": said.kernels})
    return Settled(
        run=run,
        model=run.model,
        batch_size=batch_size,
        micro_batches=micro_batches,
        sequence_length=run.sequence_length,
        num_ranks=num_ranks,
        optimizer=optimizer,
        dtype=_DTYPES[precision],
        machine=machine,
        packed_lengths=said.packed_lengths,
        notes=tuple(notes),
        differences=tuple(differences),
        options=options,
        steps_own=precision is Precision.PURE_BFLOAT16 and run.lora is None and optimizer is not Optimizer.ADAMW_BF16,
        loss_tiles=run.loss_tiles if run.loss_head is LossHead.CHUNKED else 1,
        mlp_tiles=run.mlp_tiles,
    )


def _whose(reading: Reading, file: str) -> str | None:
    """What to do where the file may be another tool's as well; None where it may not."""
    other = reading.could_be
    if other is None:
        return None
    return (
        f"{file} is read as {reading.tool.words}. If it is {other.words}, which has other values where the file is "
        f"silent, ask with --tool {other}."
    )


def as_here(settled: Settled) -> Settled:
    """The run with its operations one by one, and products that keep no input, as every plan here has them."""
    changed: dict[str, Any] = {"compiled": None, "float8": None, "float8_gather": None}
    if settled.options.quantized is not None:
        changed["quantized"] = settled.options.quantized.model_copy(update={"products": None})
    return replace(settled, options=settled.options.model_copy(update=changed))


def is_reachable(model: str) -> bool:
    """Whether ``model`` is of the catalogue or a file or folder here."""
    return known_model(model) is not None or Path(model).exists()


def workload_of(settled: Settled, *, cache: Path | None, warn: Callable[[str], None]) -> tuple[Workload, Settled]:
    """The workload of one micro-batch; the run again, without the tiles that only a trace would know.

    Raises ProtwinError if the model has none of this shape.
    """
    settled = _untiled(settled)
    asked = _request(settled, (settled.mlp_tiles,), (settled.loss_tiles,))
    return resolve_workload(asked, cache=cache, warn=warn), settled


def workload_in_tiles(
    settled: Settled, tiles: AskedTiles, *, cache: Path | None, warn: Callable[[str], None]
) -> Workload:
    """The workload of one micro-batch with all tiles that plans may have, as a search that is asked for it has it.

    Raises ProtwinError if the model has none of this shape.
    """
    return tiles.workload(
        settled.batch_size,
        settled.sequence_length,
        lambda mlp, loss: resolve_workload(_request(settled, mlp, loss), cache=cache, warn=warn),
        lambda mlp, loss: _untraced(settled, mlp, loss),
    )


def _untiled(settled: Settled) -> Settled:
    """The run as it is, or as near to it as is known without torch where that is missing."""
    is_special = settled.mlp_tiles > 1 or settled.loss_tiles > 1 or settled.options.is_fused
    if not is_special or _has_torch() or _own(settled) is not None:
        return settled
    fused = settled.options.model_copy(update={"loss_head": LossHead.FUSED})
    whole = replace(settled, mlp_tiles=1, loss_tiles=1, options=fused)
    has_logits = settled.loss_tiles == 1 and not settled.options.is_fused
    if has_logits or _own(whole) is None:
        whole = replace(whole, options=settled.options.model_copy(update={"loss_head": None}))
    how = "the loss is fused" if whole.options.is_fused else "the loss is eager, with all logits"
    why = f"blocks run whole in the answer, and {how}: a trace in tiles needs torch, which is not installed."
    return replace(whole, differences=(*settled.differences, why))


def _untraced(settled: Settled, mlp_tiles: Tiles, loss_tiles: Tiles) -> Workload | None:
    return untraced_workload(_request(settled, mlp_tiles, loss_tiles))


def _request(settled: Settled, mlp_tiles: Tiles, loss_tiles: Tiles) -> WorkloadRequest:
    return WorkloadRequest(
        settled.model,
        batch_size=settled.batch_size,
        sequence_length=settled.sequence_length,
        dtype=settled.dtype,
        options=settled.options,
        device=settled.machine.device,
        packed_lengths=settled.packed_lengths,
        mlp_tiles=mlp_tiles,
        loss_tiles=loss_tiles,
    )


def _own(settled: Settled) -> Workload | None:
    """In the tiles that the run has; None if that takes a trace."""
    return _untraced(settled, (settled.mlp_tiles,), (settled.loss_tiles,))


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _adapters(run: AskedRun, said: Said, reading: Reading, notes: list[str]) -> LoraOptions | None:
    """The adapters, with the maps that PEFT takes in models of this family where nobody names them."""
    is_silent = said.lora is None and any(note.key.endswith("lora_target_modules") for note in reading.assumed)
    if run.lora is None or run.model is None or not is_silent or is_saved_workload(run.model):
        return run.lora
    family = str(load_model_configuration(run.model).config.get("model_type"))
    targets = usual_targets(family)
    if targets == run.lora.targets:
        return run.lora
    notes.append(f"adapters lie beside {listed(targets)}, which PEFT takes in models of {family}.")
    return run.lora.model_copy(update={"targets": targets})


def _merged(run: AskedRun, said: Said, notes: list[str]) -> AskedRun:
    """The run of the file, overruled by the command line."""
    given: Mapping[str, tuple[str, Any]] = {
        "model": ("--model", said.model),
        "batch_size": ("--batch-size", said.batch_size),
        "micro_batches": ("--micro-batches", said.micro_batches),
        "sequence_length": ("--sequence-length", said.sequence_length),
        "num_ranks": ("--ranks", said.num_ranks),
        "optimizer": ("--optimizer", said.optimizer),
        "checkpointing": ("recomputing of blocks:", said.checkpointing),
        "lora": ("--lora-rank", said.lora),
        "quantized": ("--quantize", said.quantized),
    }
    changed = {name: value for name, (_, value) in given.items() if value is not None}
    for name, value in changed.items():
        own = getattr(run, name)
        if own is not None and own != value and name not in ("lora", "quantized"):
            notes.append(f"{given[name][0]} {value} stands in the place of the file's {own}.")
    sizes = [changed.get(name, getattr(run, name)) for name in ("batch_size", "micro_batches")]
    is_other = "batch_size" in changed or "micro_batches" in changed
    if run.global_batch_size is not None and is_other and None not in sizes:
        changed["global_batch_size"] = None
        notes.append(f"steps of {run.global_batch_size:,} samples, as the file has them, are no longer asked about.")
    if said.dtype is not None:
        halves = {DType.BFLOAT16: Precision.MIXED_BFLOAT16, DType.FLOAT16: Precision.MIXED_FLOAT16}
        changed |= {"is_as_published": False, "follows_device": False}
        changed["precision"] = halves.get(choose_dtype(None, said.dtype, None).dtype, Precision.FLOAT32)
    return run.model_copy(update=changed)


def _options(run: AskedRun, num_ranks: int, differences: list[str]) -> TrainingOptions:
    """How the loss is made, and what is computed otherwise than here."""
    return TrainingOptions(
        loss_head=LossHead.FUSED if run.loss_head is LossHead.FUSED else None,
        compiled=run.compiled,
        float8=run.float8,
        float8_gather=_float8_gather(run, num_ranks, differences),
    )


def _float8_gather(run: AskedRun, num_ranks: int, differences: list[str]) -> Float8Gather | None:
    """Who scales weights that are gathered in float8; None where nothing is gathered, or from hosts."""
    if run.float8_gather is None or num_ranks == 1 or run.split in (None, Split.NOTHING):
        return None
    if run.parameters_on is Place.DEVICE and run.optimizer_on is Place.DEVICE:
        return run.float8_gather
    differences.append("weights are gathered as they are, not in float8: they come from the hosts.")
    return None


def _found_by_name(run: AskedRun, notes: list[str]) -> AskedRun:
    """The run with a model of the catalogue where the file names a copy of one, of another owner."""
    name = run.model
    if name is None or "/" not in name or is_reachable(name):
        return run
    known = known_model(name.rpartition("/")[2])
    if known is None:
        return run
    notes.append(f"{name} is taken as {known}, by its name (--model config.json for another one).")
    return run.model_copy(update={"model": known})


def _found_by_content(run: AskedRun, notes: list[str]) -> AskedRun:
    """The run with a model of the catalogue where the configuration that is named is one's: it needs no trace."""
    name = run.model
    if name is None or known_model(name) is not None or not Path(name).exists() or is_saved_workload(name):
        return run
    known = same_model(load_model_configuration(name).config)
    if known is None:
        return run
    notes.append(f"{name} describes the model that the catalogue calls {known}.")
    return run.model_copy(update={"model": known})


def _check_known(run: AskedRun, said: Said, machine: Hardware | None, file: str, open_question: str | None) -> None:
    missing = []
    if run.model is None:
        missing.append("which model it trains (--model llama-3-8b, or a config.json)")
    if machine is None:
        missing.append("on which machine (--hardware a100-80gb-x8)")
    is_sized = run.global_batch_size is not None and (run.micro_batches is not None or run.batch_size is not None)
    if run.batch_size is None and not is_sized:
        missing.append("how many samples a micro-batch has (--batch-size 4)")
    if run.sequence_length is None and _has_sequences(run.model):
        missing.append("how many tokens a sample has (--sequence-length 2048)")
    if missing:
        remedy = f"Add {'it' if len(missing) == 1 else 'them'} to the command."
        raise PlanError(" ".join(filter(None, (f"{file} does not say {listed(missing)}.", remedy, open_question))))
    if said.model is None and run.model is not None and not is_reachable(run.model):
        raise PlanError(
            f"{file} trains {run.model}, which is neither a model of the catalogue (protwin models) nor a file or "
            f"folder here. Name its configuration: --model config.json."
        )


def _has_sequences(model: str | None) -> bool:
    """Whether samples of the model have tokens, as far as its configuration is there to say."""
    return model is None or not is_reachable(model) or is_saved_workload(model) or usual_shape(model)[1] is not None


def _ranks(run: AskedRun, machine: Hardware, notes: list[str]) -> tuple[int, Hardware]:
    """How many ranks train, and the machine with as many nodes as they fill."""
    num_ranks = run.num_ranks
    if num_ranks is None and run.replicas is not None and run.shard_ranks is not None:
        num_ranks = run.replicas * run.shard_ranks
    if num_ranks is None:
        num_ranks = machine.num_devices
        if num_ranks > 1:
            notes.append(f"{num_ranks} ranks: all devices of {machine.name} (--ranks for other numbers).")
    network = machine.network
    if num_ranks > machine.num_devices and network is not None:
        num_nodes = -(-num_ranks // machine.devices_per_node)
        machine = machine.model_copy(update={"network": network.model_copy(update={"num_nodes": num_nodes})})
        notes.append(f"{num_nodes} nodes of {machine.name}, joined as in the catalogue, for {num_ranks} ranks.")
    if num_ranks == 1 and run.split not in (None, Split.NOTHING):
        notes.append(f"one rank: nobody to have the {run.split} in parts with.")
    return num_ranks, machine


def _batch(run: AskedRun, num_ranks: int, notes: list[str], file: str) -> tuple[int, int]:
    """Samples of a micro-batch, and micro-batches per step and rank."""
    size, number, of_all = run.batch_size, run.micro_batches, run.global_batch_size
    if of_all is None:
        assert size is not None, "checked before"
        if number is None:
            notes.append("one micro-batch per step and rank (--micro-batches for more).")
        return size, number or 1
    if size is None:
        assert number is not None, "checked before"
        size, rest = divmod(of_all, num_ranks * number)
        parts = f"{words_of(num_ranks, 'rank')} of {words_of(number, 'micro-batch', lambda n: f'{n} micro-batches')}"
    elif number is None:
        number, rest = divmod(of_all, num_ranks * size)
        parts = f"{words_of(num_ranks, 'rank')} with micro-batches of {words_of(size, 'sample')}"
    else:
        rest = of_all - num_ranks * size * number
        parts = f"{words_of(num_ranks, 'rank')} of {number} x {words_of(size, 'sample')}"
    if rest or not size or not number:
        raise PlanError(
            f"{file} has steps of {words_of(of_all, 'sample')}, which {parts} do not share evenly. Ask with the number "
            f"of ranks that it is for (--ranks), or change one of the sizes."
        )
    return size, number


def _precision(run: AskedRun, machine: Hardware, notes: list[str]) -> Precision:
    device = machine.device
    if run.follows_device and run.precision in _WITHOUT_BFLOAT16 and not computes_in(device, DType.BFLOAT16):
        found = _WITHOUT_BFLOAT16[run.precision]
        notes.append(f"element types: {found}, since {device.name} has no matrix units for bfloat16.")
        return found
    if run.precision is not None:
        return run.precision
    if computes_in(device, DType.BFLOAT16):
        found = Precision.MIXED_BFLOAT16
    else:
        found = Precision.MIXED_FLOAT16 if computes_in(device, DType.FLOAT16) else Precision.FLOAT32
    notes.append(f"element types: {found}, which {device.name} computes in (--dtype for others).")
    return found


def _as_published(run: AskedRun, precision: Precision, notes: list[str]) -> tuple[Precision, list[str]]:
    """Element types of a run whose weights may be loaded in the type that they are published in, and what differs."""
    model = run.model
    if not run.is_as_published or model is None:
        return precision, []
    if is_saved_workload(model):
        return precision, [f"{model} does not say in which type its weights are published; here masters are float32."]
    published = published_dtype(load_model_configuration(model).config) or DType.FLOAT32
    found = as_loaded(precision, published, is_adapted=run.lora is not None)
    if found is None:
        return precision, [f"weights are loaded in {published}, as {model} is published; here masters are float32."]
    own = ", and stepped themselves" if found is Precision.PURE_BFLOAT16 else ""
    notes.append(f"weights are loaded in {published}, as {model} is published{own}.")
    return found, []


def _optimizer(run: AskedRun, precision: Precision, notes: list[str]) -> tuple[Optimizer, list[str]]:
    """The optimizer, and what differs by element types."""
    optimizer, differences = run.optimizer, []
    if optimizer is None:
        optimizer = Optimizer.ADAMW
        notes.append("stepped by AdamW (--optimizer for others).")
    if precision is Precision.PURE_BFLOAT16 and optimizer in (Optimizer.ADAMW, Optimizer.ADAM):
        optimizer = Optimizer.ADAMW_BF16
    if precision in _AUTOCAST and run.lora is None:
        half = "bfloat16" if precision is Precision.AUTOCAST_BFLOAT16 else "float16"
        differences.append(
            f"weights are float32 there, of which autocast makes {half} copies; here they are {half}, with float32 "
            f"masters: as many bytes, without the copies (2 bytes for each parameter while forward runs). With torch, "
            f"--dtype float32 --autocast {half} of protwin search asks about it as it is."
        )
    return optimizer, differences
