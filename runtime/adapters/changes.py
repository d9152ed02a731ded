"""What is done to adapters while a plan is carried out: the plan knows those that were there, and active, in its trace.

Between two steps adapters may be switched or disabled, for an evaluation; when training goes on they have to be as they
were.  What writes to weights or exchanges modules is refused before it begins: PEFT goes from layer to layer, and
would stop half done at the first one that is not on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Final

from torch import nn

from ...shared.basics.errors import ScheduleError
from ..model.ownership import TakenOver
from .peft_parts import is_of, is_peft, peft_parts, wrapped_parameters

_MERGES: Final = ("merge", "unmerge", "merge_adapter", "unmerge_adapter", "merge_and_unload", "unload")
_STATE: Final = "adapter_state_dict"
_ALLOCATES: Final = "update_and_allocate"
_CHANGES: Final = ("add_adapter", "load_adapter", "delete_adapter", "add_weighted_adapter", "inject_adapter")


class WatchedParts:
    """Tells when a model is no longer made of the parts, or run with the adapters, that a plan was carried out on."""

    def __init__(self, model: nn.Module) -> None:
        self._adapters, self._taken_over = ActiveAdapters(model), TakenOver(model)

    def check(self) -> None:
        """Raise ScheduleError if so."""
        self._taken_over.check()
        self._adapters.check()


@contextmanager
def watched_parts(
    model: nn.Module,
    but_for_wrapping: Callable[[Iterable[tuple[nn.Module, nn.Parameter]]], AbstractContextManager[None]],
) -> Iterator[WatchedParts]:
    """Within the block, a plan is carried out on ``model``, whose adapters cannot be changed.

    ``but_for_wrapping`` lets parameters that are adapted as such be wrapped (``wrapped_parameters``).
    """
    with but_for_wrapping(wrapped_parameters(model)), refusing_adapter_changes(model):
        yield WatchedParts(model)


@contextmanager
def refusing_adapter_changes(model: nn.Module) -> Iterator[None]:
    """Within the block, adapters cannot be merged, added, loaded or deleted, in PEFT's models or transformers' own."""
    with ExitStack() as undo:
        for module in model.modules():
            names = (*_MERGES, *_CHANGES, _ALLOCATES) if is_peft(module) else _CHANGES
            for name in names:
                if callable(getattr(type(module), name, None)) and name not in module.__dict__:
                    module.__dict__[name] = partial(_refuse, name)
                    undo.callback(module.__dict__.pop, name, None)
            if is_of(module, "ModulesToSaveWrapper") and _STATE not in module.__dict__:
                module.__dict__[_STATE] = _state_of_saved
                undo.callback(module.__dict__.pop, _STATE, None)
        yield


def _state_of_saved(adapter_name: str, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What a wrapper of ``modules_to_save`` gives of ``state_dict``, without asking its modules for theirs."""
    prefix = f"modules_to_save.{adapter_name}."
    return {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    if name == _ALLOCATES:
        raise ScheduleError(
            f"{name}() while a plan is being carried out: AdaLoRA chooses ranks by gradients, which are stepped and "
            f"gone by then. Train with LoRA (LoraConfig), or AdaLoRA without a plan."
        )
    if name in _MERGES:
        raise ScheduleError(
            f"{name}() while a plan is being carried out: it writes to weights or exchanges modules, and the weights "
            f"of offloaded chunks are not on the device. Nothing was changed. Call training.close() first, then {name}"
            f"(); or save the adapter now (model.save_pretrained(folder, state_dict=training.state_dict())), and merge "
            f"it into another model."
        )
    raise ScheduleError(
        f"{name}() while a plan is being carried out: the plan knows the adapters that were there when the model was "
        f"traced, and no others. Nothing was changed. Call training.close() first, then {name}(); trace the model "
        f"again and search a plan for it."
    )


class ActiveAdapters:
    """Tells when other adapters are active than when a plan was carried out."""

    def __init__(self, model: nn.Module) -> None:
        self._noted = [(path, part, _state(part)) for path, part in peft_parts(model)]
        self._noted = [noted for noted in self._noted if noted[2] != _NONE]

    def check(self) -> None:
        """Raise ScheduleError if adapters were switched, disabled or enabled."""
        for path, part, before in self._noted:
            now = _state(part)
            if now != before:
                raise ScheduleError(
                    f"adapters were switched since the plan was carried out: {path or type(part).__name__} has "
                    f"{_shown(now)}, and had {_shown(before)} when the model was traced. Switch back (set_adapter(), "
                    f"or leave disable_adapter()) before the next forward in training; or close the training, trace "
                    f"the model again and search a plan for it. Within training.evaluation() any adapter may be active."
                )


_FACTS: Final = ("_active_adapter", "active_adapter", "_disable_adapters", "_adapters_disabled")
_State = tuple[tuple[str, ...], bool]
_NONE: Final[_State] = ((), False)


def _state(part: object) -> _State:
    """The active adapters of a part that PEFT made, and whether they are disabled."""
    # Not by getattr alone: models of PEFT answer for what they wrap.
    facts: dict[str, Any] = {name: getattr(type(part), name) for name in _FACTS if hasattr(type(part), name)}
    facts |= {name: part.__dict__[name] for name in _FACTS if name in part.__dict__}
    active = facts.get("_active_adapter", facts.get("active_adapter", ()))
    names = (active,) if isinstance(active, str) else tuple(active) if isinstance(active, list | tuple) else ()
    return names, bool(facts.get("_disable_adapters", False) or facts.get("_adapters_disabled", False))


def _shown(state: _State) -> str:
    names, is_disabled = state
    listed = " and ".join(repr(name) for name in names) or "none"
    return f"{listed} disabled" if is_disabled else f"{listed} active"
