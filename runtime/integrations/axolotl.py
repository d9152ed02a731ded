"""The plugin of axolotl: ``plugins: [protwin.runtime.integrations.axolotl.PlanPlugin]`` trains by a plan.

axolotl asks its plugins for the class of the Trainer.  The optimizer and the scheduler are then made where that class
makes them, by axolotl's own code, and what steps is the plan's (``planned_trainer``); saving and resuming are the
Trainer's.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .axolotl_section import PlanArgs, checked_section
from .trainer_class import planned_trainer

if TYPE_CHECKING:
    BasePlugin = object
else:
    from axolotl.integrations.base import BasePlugin

__all__ = ["PlanArgs", "PlanPlugin"]


class PlanPlugin(BasePlugin):
    """Trains by a plan that is searched when training begins, or that the section ``protwin`` names."""

    def get_input_args(self) -> str:
        """Where the section's keys are described."""
        return f"{PlanArgs.__module__}.{PlanArgs.__name__}"

    def register(self, cfg: Any) -> None:
        """Nothing is done before the file is validated."""

    def pre_model_load(self, cfg: Any) -> None:
        """Weights begin on the host, whatever fits on the device: the plan brings them there."""
        checked_section(cfg)
        if not cfg.get("device_map"):
            cfg["device_map"] = {"": "cpu"}

    def get_trainer_cls(self, cfg: Any) -> type:
        """The Trainer that axolotl would take, and trains by a plan.  Raises ValueError if the file contradicts it."""
        section = checked_section(cfg)
        carrying_out = {"keep_last_step": True} if section.keep_last_step else {}
        return planned_trainer(_trainer_class(cfg), carry_out=carrying_out, **section.request)


def _trainer_class(cfg: Any) -> type:
    named = str(cfg.get("trainer_cls") or "axolotl.core.trainers.base.AxolotlTrainer")
    module, _, name = named.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"trainer_cls: {named} cannot be imported ({error}). Name a class by module and name."
        ) from error
    assert isinstance(found, type)
    return found
