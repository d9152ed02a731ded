"""A model in the hands of a plan: the right one, no other's, not copied, and made of the same parts to the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from ...shared.basics.errors import PlanError, ScheduleError
from ...shared.phases.operations import lowering_words
from ...shared.schema.workload import Workload
from ..packaged.substitution import missing_packages
from .compiled import compiled_part
from .identity import model_hash
from .memory_overlaps import overlap_of
from .strides import unkept_strides

_ATTRIBUTE: Final = "_protwin_training"
"""The attribute of a model that a plan is being carried out on."""


def check_model(model: nn.Module, workload: Workload, *, traced_hash: str | None = None) -> None:
    """Raise PlanError unless ``workload`` is of ``model``, free to be taken over, with memory for each parameter.

    ``traced_hash``: that of the model of which ``model`` is a part; None: it is whole.
    """
    compiled = compiled_part(model)
    if compiled is not None:
        raise PlanError(compiled)
    if (words := lowering_words(workload.compiled, workload.float8, workload.packed_products)) is not None:
        raise PlanError(
            f"the workload of {workload.model_name} is for predictions of what others run ({words}), and its plans are "
            f"not carried out here. Trace the model without --compile, --float8 and --bitsandbytes."
        )
    if missing := missing_packages(workload.kernels_taken):
        raise PlanError(
            f"the workload of {workload.model_name} is of a machine with kernels of {', '.join(missing)}, and this one "
            f"has none. Install {' '.join(missing)}, or trace the model without --kernels."
        )
    if (traced_hash or model_hash(model)) != workload.model_hash:
        raise PlanError(
            f"the workload was traced from another model ({workload.model_name}): {_difference(model, workload)}. "
            f"Trace this model again."
        )
    wrong = overlap_of(model) or unkept_strides(model)
    if wrong is not None:
        raise PlanError(wrong)
    check_untaken(model)


def check_untaken(model: nn.Module) -> None:
    """Raise PlanError if a plan is being carried out on ``model``."""
    if owner_of(model) is not None:
        raise PlanError(
            "a plan is being carried out on this model already. Close that training first; if it was lost, "
            "protwin.runtime.training_of(model).close() does."
        )


def owner_of(model: nn.Module) -> object | None:
    """The training that marked ``model`` as its own; None if there is none, or it is closed."""
    found: object | None = model.__dict__.get(_ATTRIBUTE)
    return found


@contextmanager
def taken_over(model: nn.Module, training: object) -> Iterator[None]:
    """Within the block, the model is marked as ``training``'s, and refuses to be copied or pickled."""

    def refuse(*_: Any) -> Any:
        raise ScheduleError(
            "the model was to be copied or pickled while a plan is being carried out on it: the weights of offloaded "
            "chunks are not on the device. Do so after close(), or take the weights from a checkpoint "
            "(training.save())."
        )

    attributes = {_ATTRIBUTE: training, "__deepcopy__": refuse, "__reduce_ex__": refuse}
    before = {name: model.__dict__[name] for name in attributes if name in model.__dict__}
    model.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del model.__dict__[name]
        model.__dict__.update(before)


class TakenOver:
    """Tells when a module or parameter of the model was exchanged, added or removed: nobody would train the new one."""

    def __init__(self, model: nn.Module) -> None:
        self._noted = [(name, module, _parts_of(module)) for name, module in model.named_modules()]

    def check(self) -> None:
        """Raise ScheduleError if the model is no longer made of what was taken over."""
        for name, module, parts in self._noted:
            now = _parts_of(module)
            if now != parts:
                known = parts.keys()
                changed = next(
                    (part for part, identity in parts.items() if now.get(part) != identity),
                    next((part for part in now if part not in known), "?"),
                )
                raise ScheduleError(
                    f"{f'{name}.' if name else ''}{changed} was exchanged, added or removed since the plan was carried "
                    f"out, so it would not be trained. Close the training first, trace the model again and search a "
                    f"plan for it."
                )


def _parts_of(module: nn.Module) -> dict[str, int]:
    """The names and identities of a module's own parts, whose order may change: a parametrization puts one last."""
    parts = (*module._modules.items(), *module._parameters.items())
    return {name: id(part) for name, part in parts}


def _difference(model: nn.Module, workload: Workload) -> str:
    """In what ``model`` differs first from the one that was traced."""
    traced = {parameter.name: parameter for parameter in workload.parameters}
    given = dict(_listed(model, workload))
    for lacking, has, how in (
        (traced.keys() - given.keys(), traced, "has a parameter {}, which this one lacks"),
        (given.keys() - traced.keys(), given, "lacks the parameter {} of this one"),
    ):
        if lacking:
            return f"that one {how.format(next(name for name in has if name in lacking))}"
    for name, parameter in traced.items():
        one = given[name]
        for what, then, now in (
            ("shape", list(parameter.shape), list(one.shape)),
            ("element type", str(parameter.dtype), str(one.dtype).removeprefix("torch.")),
            ("requires_grad", parameter.trainable, one.requires_grad),
        ):
            if then != now:
                return f"{what} of {name} was {then}, and is {now} here"
    unlisted = "" if workload.distillation is None else ", or parameters outside of the blocks,"
    return f"module classes, buffers or strides{unlisted} differ"


def _listed(model: nn.Module, workload: Workload) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a workload of ``model`` lists: a distillation's has those of blocks, and few others."""
    blocks = tuple(f"{block.name}." for block in workload.blocks)
    named = model.named_parameters(remove_duplicate=False)
    in_blocks = {id(parameter) for name, parameter in named if name.startswith(blocks)}
    traced = {parameter.name for parameter in workload.parameters}
    for name, parameter in model.named_parameters():
        if workload.distillation is None or id(parameter) in in_blocks or name in traced:
            yield name, parameter
