"""An axolotl file as it lies on the disk, read without axolotl and without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...shared.basics.errors import PlanError
from .axolotl_section import OPTIMIZERS, PLUGIN, is_listed

_Count = Annotated[int, Field(ge=1)]


class AskedStep(BaseModel):
    """What else of the file decides which plan is best, with axolotl's own defaults and conversions."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    base_model: str = Field(min_length=1)
    base_model_config: str | None = None
    sequence_len: _Count = 512
    micro_batch_size: _Count | None = 1
    gradient_accumulation_steps: _Count | None = 1
    batch_size: _Count | None = None
    max_grad_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    optimizer: str | None = OPTIMIZERS[0]
    bf16: bool | Literal["auto", "full"] | None = "auto"
    bfloat16: bool | None = None
    float16: bool | None = None
    adapter: str | None = None
    lora_r: _Count | None = None
    lora_target_modules: str | list[str] | None = None
    lora_target_linear: bool | None = None
    lora_modules_to_save: list[str] | None = None
    lora_dropout: float | None = None
    peft_use_dora: bool | None = None
    peft_autocast_adapter_dtype: bool | None = None
    load_in_8bit: bool | None = None
    load_in_4bit: bool | None = None
    unfrozen_parameters: list[str] | None = None
    sample_packing: bool | None = None
    pad_to_sequence_len: bool | None = None

    @property
    def limit(self) -> float | None:
        """The limit of the norm: the Trainer's own is 1, and it takes 0 for none."""
        return 1.0 if self.max_grad_norm is None else self.max_grad_norm or None


def check_plugin(found: dict[str, Any], path: Path) -> None:
    """Raise PlanError if a configuration has no section ``protwin`` or does not list the plugin."""
    plugins = found.get("plugins")
    if plugins is not None and not (isinstance(plugins, list) and all(isinstance(one, str) for one in plugins)):
        raise PlanError(f"{path}: plugins is no list of names. Write - {PLUGIN} below it.")
    if "protwin" not in found:
        raise PlanError(f"{path} has no section protwin, which would say what the plan is to be. Write protwin: {{}}.")
    if not is_listed(found):
        raise PlanError(
            f"{path} has a section protwin, but its plugins do not list {PLUGIN}: axolotl would train without a plan. "
            f"Write plugins: [{PLUGIN}], or leave the section out."
        )


def step_of(configuration: dict[str, Any]) -> AskedStep:
    """What the plan is for.  Raises PlanError, which names the key, if a value is none that axolotl takes."""
    try:
        return AskedStep.model_validate(configuration)
    except ValidationError as error:
        first = error.errors()[0]
        place = str(first["loc"][0])
        if first["type"] == "missing":
            raise PlanError(f"{place} is missing: no model is named. Write {place}: and a name or a folder.") from error
        raise PlanError(f"{place} cannot be {first['input']!r}: {first['msg']}.") from error
