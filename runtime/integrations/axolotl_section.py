"""The section ``protwin`` of an axolotl configuration, and what in the rest of the file contradicts a plan.

Needs neither axolotl nor torch, so that files can be read where neither is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from pydantic import BaseModel, Field, ValidationError, model_validator

from ...shared.basics.documents import FrozenModel
from ...shared.basics.errors import PlanError, ProtwinError
from ...shared.basics.units import parse_bytes
from ...shared.schema.plan import ParallelMode

PLUGIN: Final = "protwin.runtime.integrations.axolotl.PlanPlugin"
"""What ``plugins`` of a configuration names."""
OPTIMIZERS: Final = (
    "adamw_torch",
    "adamw_torch_fused",
    "sgd",
    "lion_32bit",
)
"""``optimizer`` of a configuration that a plan is carried out with."""
_ONE_RANK: Final = "the plan alone decides where parameters, gradients and optimizer state lie"


class PlanSection(FrozenModel):
    """What the plan is to be; every key may be left out."""

    budget: int | str | None = Field(default=None, description="Device memory to fill; all of it unless given.")
    host_budget: int | str | None = Field(default=None, description="Host memory of one rank; its share of the host.")
    hardware: str | None = Field(default=None, description="The machine, by name or file; it is measured unless given.")
    calibration: str | None = Field(default=None, description="A file of factors that were fitted on the machine.")
    plan: str | None = Field(default=None, description="The file of a plan; it is searched unless given.")
    workload: str | None = Field(default=None, description="The file of a workload; the model is traced unless given.")
    knobs: dict[str, int | list[int] | bool | str | None] = Field(
        default_factory=dict, description="Knobs of the plan that are not searched, such as n_persist and n_checkpoint."
    )
    modes: list[ParallelMode] | None = Field(
        default=None, description="What ranks may do together: ddp, replicated, sharded; all of them unless given."
    )
    blocks: str | list[str] | None = Field(
        default=None, description="The blocks of the model; they are found unless given."
    )
    keep_last_step: bool = Field(
        default=False, description="Whether the host keeps what is overwritten until a step is complete."
    )

    @model_validator(mode="after")
    def _agrees(self) -> PlanSection:
        for name in ("budget", "host_budget"):
            value = getattr(self, name)
            if isinstance(value, str):
                _check_size(name, value)
            elif value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be positive")
        given = [name for name in ("knobs", "modes") if getattr(self, name)]
        if self.plan is not None and given:
            raise ValueError(
                f"plan: {self.plan} is carried out as it is, and {' and '.join(given)} would be for a search. Leave "
                f"one of the two out"
            )
        return self

    @property
    def request(self) -> dict[str, Any]:
        """The fields of a ``PlanRequest`` that are given."""
        names = {"budget": "budget_bytes", "host_budget": "host_budget_bytes"}
        fields = ("budget", "host_budget", "hardware", "calibration", "plan", "workload", "knobs", "modes", "blocks")
        return {names.get(name, name): value for name in fields if (value := getattr(self, name))}


def _check_size(name: str, text: str) -> None:
    """Raise ValueError, as validators do, if ``text`` is no size."""
    try:
        parse_bytes(text)
    except ProtwinError as error:
        raise ValueError(f"{name}: {error}") from error


def section_of(configuration: Mapping[str, Any]) -> PlanSection:
    """The section of a configuration.  Raises PlanError if it is none."""
    given = configuration.get("protwin")
    if not isinstance(given, Mapping | PlanSection | None):
        raise PlanError(f"protwin: {given!r} is no section. Write keys and values below it, such as budget: 20GiB.")
    if isinstance(given, PlanSection):
        return given
    try:
        return PlanSection.model_validate({} if given is None else dict(given))
    except ValidationError as error:
        raise PlanError(_said(error)) from error


def _said(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(("protwin", *map(str, first["loc"])))
    if first["type"] == "extra_forbidden":
        return f"{place} is no key of the section. Choose from {', '.join(PlanSection.model_fields)}."
    return f"{place}: {first['msg'].removeprefix('Value error, ').rstrip('.')}."


def is_listed(configuration: Mapping[str, Any]) -> bool:
    """Whether the plugin is listed: else the section says nothing."""
    plugins = configuration.get("plugins") or ()
    return PLUGIN in plugins if isinstance(plugins, str | Sequence) else False


def contradictions(configuration: Mapping[str, Any]) -> list[str]:
    """What in the file a plan cannot go along with: each names the key, the reason, and what to do."""
    return [*_systems(configuration), *_memory(configuration), *_step(configuration)]


def _systems(configuration: Mapping[str, Any]) -> list[str]:
    found = []
    for key, system in (("deepspeed", "DeepSpeed"), ("fsdp", "FSDP"), ("fsdp_config", "FSDP")):
        if configuration.get(key):
            found.append(f"{key} asks for {system}, but {_ONE_RANK}. Leave {key} out, or the plugin.")
    for key, what in (
        ("tensor_parallel_size", "tensor parallelism"),
        ("context_parallel_size", "context parallelism"),
        ("sequence_parallel_degree", "sequence parallelism"),
        ("expert_parallel_size", "expert parallelism"),
        ("dp_shard_size", "sharded data parallelism"),
    ):
        value = configuration.get(key)
        if isinstance(value, int) and value > 1:
            found.append(
                f"{key}: {value} is {what} by axolotl, but {_ONE_RANK}, and what ranks do together (modes). Leave "
                f"{key} out."
            )
    for key in ("rl", "reward_model", "process_reward_model"):
        if configuration.get(key):
            found.append(
                f"{key} trains by another Trainer, whose losses no plan knows. Leave {key} out, or the plugin."
            )
    return found


def _memory(configuration: Mapping[str, Any]) -> list[str]:
    found = []
    for key, knob in (
        ("gradient_checkpointing", "n_checkpoint"),
        ("activation_offloading", "n_swap and n_offload_input"),
        ("layer_offloading", "n_persist"),
        ("tiled_mlp", "mlp_tiles"),
    ):
        if configuration.get(key):
            found.append(f"{key} is set, but the plan decides that ({knob}). Set {key}: false.")
    if configuration.get("torch_compile"):
        found.append(
            "torch_compile is set, but a plan is not carried out on a compiled model. Set torch_compile: false."
        )
    if configuration.get("auto_find_batch_size"):
        found.append("auto_find_batch_size changes the batch, but a plan is for one. Set it to false.")
    if configuration.get("fp16"):
        found.append("fp16 scales gradients, which have left the device by then. Set bf16: true, or train in float32.")
    return found


def _step(configuration: Mapping[str, Any]) -> list[str]:
    optimizer = configuration.get("optimizer")
    if optimizer is None or str(getattr(optimizer, "value", optimizer)) in OPTIMIZERS:
        return []
    named = getattr(optimizer, "value", optimizer)
    return [
        f"optimizer: {named} is one that no plan accounts for under a Trainer. Choose one of {', '.join(OPTIMIZERS)}."
    ]


class PlanArgs(BaseModel):
    """What the plugin adds to axolotl's own configuration: the section, and a check of the whole file."""

    SECTION: ClassVar[str] = "protwin"
    protwin: PlanSection | None = Field(default=None, description="What the plan of this training is to be.")

    @model_validator(mode="before")
    @classmethod
    def _goes_together(cls, data: Any) -> Any:
        """The manager of plugins keeps those of earlier files, so the plugin may not be this file's."""
        if isinstance(data, Mapping) and is_listed(data):
            checked_section(data)
        return data


def checked_section(configuration: Mapping[str, Any]) -> PlanSection:
    """The section; raises ValueError, as validators do, that names everything that contradicts it."""
    try:
        section = section_of(configuration)
    except PlanError as error:
        raise ValueError(str(error)) from error
    if found := contradictions(configuration):
        raise ValueError(" ".join(found))
    return section


def meanings(section: PlanSection) -> Sequence[tuple[str, str, str]]:
    """Every key: its value, or nothing, and what it means."""
    return [
        (name, _shown(getattr(section, name)), field.description or "")
        for name, field in PlanSection.model_fields.items()
    ]


def _shown(value: Any) -> str:
    if value is None or value in ({}, []):
        return "–"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)
