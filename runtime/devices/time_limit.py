"""How long work on a model may take before it ends in a message instead of an answer.

Models that run a step of Python for every token (state-space models without their kernels) take minutes to trace at
lengths that they are trained on, and a configuration may ask for a hundred thousand blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from torch.overrides import TorchFunctionMode

from ...shared.basics.errors import WorkloadError

TRACE_LIMIT_S: Final = 300.0
"""Most traces take seconds; the longest published model of many unlike blocks takes one minute on two cores."""


_QUESTIONS: Final = ("sym_", "is_", "size", "stride", "storage_offset", "numel", "dim")
"""How the names of operations begin that ask for a tensor's layout."""


class TimeLimitError(WorkloadError):
    """Work was given up since it took too long."""


@dataclass(frozen=True)
class _Limit:
    what: str
    limit_s: float
    end_s: float
    """By ``time.monotonic``."""


_LIMIT: ContextVar[_Limit | None] = ContextVar("limit", default=None)


@contextmanager
def time_limit(what: str, limit_s: float = TRACE_LIMIT_S) -> Iterator[None]:
    """Let ``check_time`` raise TimeLimitError from ``limit_s`` seconds on; a limit that is set already stays.

    ``what``: what is done, for the message.
    """
    outer = _LIMIT.get()
    token = _LIMIT.set(outer or _Limit(what, limit_s, time.monotonic() + limit_s))
    try:
        yield
    finally:
        _LIMIT.reset(token)


def check_time() -> None:
    """Raise TimeLimitError if the time is over."""
    limit = _LIMIT.get()
    if limit is not None and time.monotonic() > limit.end_s:
        raise TimeLimitError(
            f"{limit.what} took more than {limit.limit_s:g} s and was given up. A model that runs one step of Python "
            f"for every token takes as long as its sequence is: shorten it. For more time, trace it by itself, "
            f"protwin trace --time-limit {4 * limit.limit_s:g} --output workload.json, and pass that file as --model."
        )


def check_time_before(operator: Any) -> None:
    """``check_time`` where a dispatch mode sees ``operator``, unless it only asks about a tensor.

    Such questions come from C++ that lets no exception through: one of ours would end the process.
    """
    if operator.namespace == "aten" and not operator.overloadpacket.__name__.startswith(_QUESTIONS):
        check_time()


class TimeChecks(TorchFunctionMode):
    """Checks the time at every call of torch, where no operation is traced: while a model is built."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The call, if there is time left."""
        check_time()
        return func(*args, **(kwargs or {}))
