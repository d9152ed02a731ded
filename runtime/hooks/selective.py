"""What a block in mode SELECTIVE keeps from its forward, and takes from there when its forward runs again.

torch's own selective checkpointing (``create_selective_checkpoint_contexts``) carries it out; here is its policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from ...shared.basics.errors import ScheduleError
from ...shared.phases.activation_modes import KeptResults
from ..model.nested_tensors import tensors_in

_DROPOUTS: Final = ("dropout_p", "p_dropout")
"""What kernels of attention call the share of probabilities that they drop."""


def draws_dropout(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a kernel of attention draws dropout by itself."""
    if any(kwargs.get(name) for name in _DROPOUTS):
        return True
    names = (argument.name for argument in operator._schema.arguments)
    return any(name in _DROPOUTS and bool(value) for name, value in zip(names, args, strict=False))


def written_by(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call changes in place."""
    arguments = operator._schema.arguments
    named = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
    return list(tensors_in([named.get(argument.name) for argument in arguments if argument.is_write]))


class _Policy:
    """Which results of one forward of one block are kept."""

    def __init__(self, block: str, kept: KeptResults) -> None:
        self._block = block
        self._kept = kept
        self._storages: set[int] = set()
        """Of what was kept so far, which lives as long as this."""

    def __call__(
        self, context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        schema = operator._schema
        if schema.is_mutable:
            self._check_left_alone(operator, args, kwargs)
        name = schema.name.rpartition("::")[2]
        if not self._kept.keeps(name, draws=draws_dropout(operator, args, kwargs)):
            return CheckpointPolicy.PREFER_RECOMPUTE
        self._storages.update(tensor.untyped_storage()._cdata for tensor in tensors_in(context.op_output))
        return CheckpointPolicy.MUST_SAVE

    def _check_left_alone(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ScheduleError if ``operator`` changes a result that is kept."""
        written = written_by(operator, args, kwargs)
        if any(tensor.untyped_storage()._cdata in self._storages for tensor in written):
            raise ScheduleError(
                f"block {self._block} changes what a matrix product or attention gave in place "
                f"({operator._schema.name}), which it did not when it was traced, so that mode selective cannot hand "
                f"it to the recomputation. Trace the model anew, or checkpoint or keep this block (n_selective, "
                f"activation_modes)."
            )


class _Both:
    """A context within another one."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._inner.__exit__(kind, error, traceback)
        finally:
            self._outer.__exit__(kind, error, traceback)


def selecting(
    block: str, kept: KeptResults, forward: AbstractContextManager[Any], again: AbstractContextManager[Any]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Both contexts of the checkpointed ``block``, within which results are kept and handed back."""
    policy = _Policy(block, kept)
    keeping, handing = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return _Both(forward, keeping), _Both(again, handing)
