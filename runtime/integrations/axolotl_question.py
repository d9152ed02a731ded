"""The command that answers ahead what plan an axolotl file would train by."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...shared.basics.errors import CatalogueError, FileError, PlanError, ProtwinError
from ...shared.basics.suggestions import did_you_mean
from ...shared.catalogue.machines import load_hardware
from ...shared.catalogue.models import known_model, load_model_configuration
from ...shared.catalogue.names import hub_name, model_called
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import ParallelMode, Plan
from ...shared.schema.workload import DType, Workload
from ...shared.workloads.dtypes import computes_in
from .axolotl_file import AskedStep
from .axolotl_section import PlanSection

_OPTIMIZERS: Final = {
    "sgd": Optimizer.SGD,
    "lion_32bit": Optimizer.LION,
}
"""What plans call the optimizers of a configuration, AdamW apart."""

_LORA: Final = ("lora", "qlora")

KNOBS: Final = {
    "chunk_bytes": 1,
    "n_persist": 0,
    "n_host_stepped": 0,
    "looks_up_rows": 0,
    "n_shard": 0,
    "n_disk_state": 0,
    "n_disk": 0,
    "n_staging": 1,
    "n_buffer": 0,
    "prefetch_depth": 1,
    "n_checkpoint": 0,
    "n_swap": 0,
    "n_offload_input": 0,
    "product_stride": 0,
    "mlp_tiles": 1,
    "loss_tiles": 1,
    "sequence_ranks": 1,
}
"""Least value of each knob that a search leaves fixed; its option is called as it is."""
_ALL: Final = ("n_host_stepped", "n_swap", "n_offload_input", "product_stride")
"""Knobs whose option takes ``all``, which the section writes as null."""
_ALWAYS: Final = ("n_disk", "n_staging", "prefetch_depth")
"""Knobs that need a value."""
_LARGEST_KNOB: Final = 10**6
_LARGEST_CHUNK_BYTES: Final = 2**62
_MACHINE: Final = "machine.toml"


@dataclass(frozen=True)
class Question:
    """How the plan can be asked about before the training."""

    commands: Sequence[str]
    """Command lines, to be run one after the other; none if it cannot be asked."""
    obstacles: Sequence[str]
    """Why it cannot."""
    notes: Sequence[str]
    """In what the training will differ from what is asked."""


@dataclass(frozen=True)
class NamedFiles:
    """What the section names, read."""

    hardware: Hardware | None
    plan: Plan | None
    workload: Workload | None


def read_named(section: PlanSection) -> NamedFiles:
    """Read what the section names, as the training will.  Raises PlanError, which names the key and what is wrong."""
    _read("calibration", section.calibration, Calibration.load)
    return NamedFiles(
        hardware=_read("hardware", section.hardware, load_hardware),
        plan=_read("plan", section.plan, Plan.load),
        workload=_read("workload", section.workload, Workload.load),
    )


def _read(key: str, given: str | None, load: Any) -> Any:
    if given is None:
        return None
    try:
        return load(given)
    except ProtwinError as error:
        raise PlanError(f"protwin.{key}: {error}") from error


def disagreements(section: PlanSection, step: AskedStep, files: NamedFiles) -> list[str]:
    """Knobs that are none, and a step that is another one than that of a given plan or workload."""
    found = list(_wrong_knobs(section))
    plan, accumulated, limit = files.plan, step.gradient_accumulation_steps or 1, step.limit
    if plan is not None and plan.micro_batches != accumulated:
        found.append(
            f"gradient_accumulation_steps is {accumulated}, but protwin.plan has {plan.micro_batches} micro-batches. "
            f"Set gradient_accumulation_steps: {plan.micro_batches}, or leave the plan out."
        )
    if plan is not None and plan.max_gradient_norm != limit:
        asked, has = ("no limit" if one is None else f"{one:g}" for one in (limit, plan.max_gradient_norm))
        found.append(
            f"max_grad_norm clips gradients to {asked}, but protwin.plan limits their norm to {has}. Set "
            f"max_grad_norm: {plan.max_gradient_norm or 0:g}, or leave the plan out."
        )
    workload, batch = files.workload, step.micro_batch_size or 1
    if workload is not None and workload.num_samples != batch:
        found.append(
            f"micro_batch_size is {batch}, but protwin.workload was traced with {workload.num_samples} samples. Set "
            f"micro_batch_size: {workload.num_samples}, or leave the workload out."
        )
    return found


def _wrong_knobs(section: PlanSection) -> Iterator[str]:
    for name, given in section.knobs.items():
        if name not in KNOBS:
            yield f"protwin.knobs.{name} is no knob that a search leaves fixed. {did_you_mean(name, KNOBS)}"
            continue
        if name == "looks_up_rows":
            if not isinstance(given, bool):
                yield f"protwin.knobs.{name} cannot be {given!r}. Write true or false."
            continue
        if given == [] or (given is None and name in _ALWAYS):
            yield f"protwin.knobs.{name} has no value. Write one, or leave it out."
        most = _LARGEST_CHUNK_BYTES if name == "chunk_bytes" else _LARGEST_KNOB
        for one in given if isinstance(given, list) else () if given is None else (given,):
            if isinstance(one, bool) or not isinstance(one, int) or not KNOBS[name] <= one <= most:
                yield f"protwin.knobs.{name} cannot be {one!r}. Write a whole number from {KNOBS[name]} to {most}."


def question_of(section: PlanSection, step: AskedStep, files: NamedFiles) -> Question:
    """How to ask ahead.  Raises FileError if ``base_model`` is a folder here that holds no model's configuration."""
    model = section.workload or _model(step)
    obstacles = [] if section.workload else list(_obstacles(step, model))
    notes = list(_notes(section, step, files))
    if obstacles or model is None:
        return Question((), obstacles, notes)
    asked = [f"--model={model}", f"--hardware={section.hardware or _MACHINE}"]
    asked += [] if section.workload else _shape(step, files.hardware)
    for option, value in (("--device-budget", section.budget), ("--calibration", section.calibration)):
        asked += [f"{option}={value}"] if value is not None else []
    if files.plan is not None:
        asked = ["simulate", f"--plan={section.plan}", *asked]
    else:
        asked = ["search", *asked, *_step(step), *_space(section, files.hardware)]
    probe = [] if section.hardware else [f"protwin hardware probe --output {_MACHINE}"]
    return Question((*probe, shlex.join(["protwin", *asked])), (), notes)


def _model(step: AskedStep) -> str | None:
    """What ``--model`` is to be; None if the model is neither known nor here."""
    name = step.base_model_config or step.base_model
    if (known := known_model(name)) is not None:
        return known
    if not os.path.exists(name):
        return _original(step)
    try:
        load_model_configuration(name)
    except (CatalogueError, FileError) as error:
        raise PlanError(f"base_model: {error}") from error
    return name


def _original(step: AskedStep) -> str | None:
    """The model of the catalogue that ``base_model``, of another owner on the hub, has the name of; None if none."""
    name = step.base_model_config or step.base_model
    is_elsewhere = known_model(name) is None and not os.path.exists(name)
    return model_called(hub_name(name)) if is_elsewhere else None


def _obstacles(step: AskedStep, model: str | None) -> Iterator[str]:
    if model is None:
        yield (
            f"base_model: {step.base_model} is neither a model of the catalogue (protwin models) nor a folder here. "
            f"Name a folder with its config.json, or run this where it lies."
        )
    if step.adapter not in (None, *_LORA):
        yield f"adapter: {step.adapter} is one that no option of search says."
    if step.adapter is None and _packed(step) is not None:
        yield "the base is quantised, so that nothing is trained without an adapter. Write adapter: qlora."
    if step.peft_use_dora and _packed(step) is not None:
        yield "peft_use_dora reads whole weights, which a quantised base has none of. Leave one of the two out."
    if step.unfrozen_parameters:
        yield "unfrozen_parameters trains a part of the model, which --freeze would have to say the other way round."
    if step.adapter in _LORA:
        if step.lora_r is None:
            yield f"adapter: {step.adapter} has no rank. Write lora_r: 16."
        if step.lora_modules_to_save:
            yield "lora_modules_to_save trains layers whole beside the adapter, which no option of search says."
        if not step.lora_target_linear and _targets(step) is None:
            yield "lora_target_modules is no list of plain names. Write such a list, or lora_target_linear: true."


def _packed(step: AskedStep) -> str | None:
    """How axolotl packs the base unless it is told otherwise, as ``--quantize`` has it; None if it does not."""
    if step.load_in_4bit or step.adapter == "qlora":
        return "nf4"
    return "int8" if step.load_in_8bit else None


def _targets(step: AskedStep) -> list[str] | None:
    """Names of linear maps; None where they are a pattern, or PEFT's own choice."""
    given = step.lora_target_modules
    names = given if isinstance(given, list) else [given] if given else []
    if not names or not all(name.isidentifier() for name in names):
        return None
    return names


def _shape(step: AskedStep, hardware: Hardware | None) -> Iterator[str]:
    yield f"--batch-size={step.micro_batch_size or 1}"
    yield f"--sequence-length={step.sequence_len}"
    dtype = _dtype(step, hardware)
    if dtype is not None:
        yield f"--dtype={dtype}"
    if step.adapter in _LORA:
        yield f"--lora-rank={step.lora_r}"
        if not step.lora_target_linear:
            yield f"--lora-targets={','.join(_targets(step) or ())}"
        if step.lora_dropout:
            yield f"--lora-dropout={step.lora_dropout:g}"
        if step.peft_use_dora:
            yield "--use-dora"
    packed = _packed(step)
    if packed is not None:
        yield f"--quantize={packed}"
        if packed == "nf4":
            yield "--double-quantize"


def _dtype(step: AskedStep, hardware: Hardware | None) -> DType | None:
    """The element type that axolotl loads the model in; None where the machine decides, and is not known."""
    if step.bf16 == "auto" and not step.bfloat16:
        # What torch says of a device without units for it depends on torch's version.
        is_sure = hardware is not None and computes_in(hardware.device, DType.BFLOAT16)
        return DType.BFLOAT16 if is_sure else None
    if step.bf16 or step.bfloat16:
        return DType.BFLOAT16
    return DType.FLOAT16 if step.float16 else DType.FLOAT32


def _step(step: AskedStep) -> Iterator[str]:
    yield f"--micro-batches={step.gradient_accumulation_steps or 1}"
    if step.limit is not None:
        yield f"--max-gradient-norm={step.limit:g}"
    if step.optimizer in _OPTIMIZERS:
        yield f"--optimizer={_OPTIMIZERS[step.optimizer]}"


def _space(section: PlanSection, hardware: Hardware | None) -> Iterator[str]:
    for name, given in section.knobs.items():
        option = f"--{name.replace('_', '-')}"
        if name == "looks_up_rows":
            yield from (option,) if given else ()
        elif given is None:
            yield from (f"{option}=all",) if name in _ALL else ()
        else:
            yield from (f"{option}={one}" for one in (given if isinstance(given, list) else (given,)))
    if hardware is not None and hardware.num_devices > 1:
        several = (mode for mode in section.modes or () if mode is not ParallelMode.SINGLE)
        yield from (f"--parallel={mode}" for mode in several)


def _notes(section: PlanSection, step: AskedStep, files: NamedFiles) -> Iterator[str]:
    if not section.workload and (original := _original(step)) is not None:
        yield f"base_model: {step.base_model_config or step.base_model} is taken for a copy of {original}, by its name."
    if section.hardware is None:
        yield "the first command measures the machine that it runs on. Elsewhere name the one that trains: --hardware."
    yield "training plans for the longest batch that the data begin with; sequence_len is the most that it may have."
    if files.hardware is None or files.hardware.num_devices == 1 or not section.modes:
        modes = f" --parallel {' --parallel '.join(section.modes)}" if section.modes else ""
        yield f"the question is for one process. For several, add --ranks N{modes}."
    if step.sample_packing:
        yield "samples are packed, but attention is counted over whole rows; --packed-lengths says how they lie."
    if _dtype(step, files.hardware) is DType.BFLOAT16:
        yield "training computes under autocast. --autocast bfloat16 asks for that, and traces the model (needs torch)."
        if step.adapter in _LORA and step.peft_autocast_adapter_dtype is not False:
            yield (
                "PEFT keeps adapters in float32 (peft_autocast_adapter_dtype), which are counted in bfloat16. "
                "--lora-dtype float32 asks for that, and traces the model."
            )
    if _dtype(step, files.hardware) is None:
        yield "bf16: auto is decided on the machine that trains."
    if _packed(step) == "nf4":
        yield "the base is packed as nf4 with double quantization; bnb_config_kwargs may say otherwise."
    if step.batch_size is not None:
        yield "batch_size is not asked about. Write gradient_accumulation_steps."
    for key in ("host_budget", "blocks", "keep_last_step"):
        if getattr(section, key):
            yield f"protwin.{key} has no option, and is not asked about."
    if "n_disk_state" in section.knobs and section.knobs["n_disk_state"] is None:
        yield "protwin.knobs.n_disk_state: null has no option, and is not asked about."
