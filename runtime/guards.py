"""What must not happen to a model while a plan is carried out on it, since its weights may be elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ..shared.errors import ScheduleError


@contextmanager
def refusing_access(model: nn.Module) -> Iterator[None]:
    """Within the block, whatever torch does to all weights at once is refused: saving, loading, converting, moving.

    An offloaded parameter has no memory on the device, and torch does not look before it reads.
    """

    def refuse_state(*_: Any) -> None:
        raise ScheduleError(
            "state_dict() or load_state_dict() while a plan is being carried out: offloaded chunks are not on the "
            "device. Call close() first, and carry the plan out again afterwards."
        )

    def refuse_change(*_: Any, **__: Any) -> None:
        raise ScheduleError(
            "the model is to be converted or moved while a plan is being carried out: offloaded chunks are not on the "
            "device. Call close() before model.to(), model.half() and the like."
        )

    with ExitStack() as undo:
        for module in model.modules():
            saving = module.register_state_dict_pre_hook(refuse_state)  # type: ignore[no-untyped-call]
            undo.callback(saving.remove)
            loading = module.register_load_state_dict_pre_hook(refuse_state)  # type: ignore[no-untyped-call]
            undo.callback(loading.remove)
            if "_apply" not in module.__dict__:
                module.__dict__["_apply"] = refuse_change
                undo.callback(module.__dict__.pop, "_apply", None)
        yield
