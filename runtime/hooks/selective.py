"""What a block in mode SELECTIVE keeps from its forward, and takes from there when its forward runs again.

torch's own selective checkpointing (``create_selective_checkpoint_contexts``) carries it out; here is its policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ...shared.phases.kept_results import KeptResults

_DROPOUTS: Final = ("dropout_p", "p_dropout")
"""What kernels of attention call the share of probabilities that they drop."""


def draws_dropout(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a kernel of attention draws dropout by itself."""
    if "dropout_p" in kwargs or "p_dropout" in kwargs:
        return any(bool(kwargs.get(name, 0.0)) for name in _DROPOUTS)
    names = (argument.name for argument in operator._schema.arguments)
    return any(name in _DROPOUTS and bool(value) for name, value in zip(names, args, strict=False))


class _Policy:
    """Which results of one forward of one block are kept."""

    def __init__(self, product_stride: int) -> None:
        self._kept = KeptResults(product_stride)

    def __call__(self, _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator._schema.name.rpartition("::")[2]
        is_kept = self._kept.keeps(name, draws=draws_dropout(operator, args, kwargs))
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


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
    product_stride: int, forward: AbstractContextManager[Any], again: AbstractContextManager[Any]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Both contexts of a checkpointed block, within which results are kept and handed back."""
    keeping, handing = create_selective_checkpoint_contexts(_Policy(product_stride))
    return _Both(forward, keeping), _Both(again, handing)
