"""Gradients that are not finite, found before a step spreads them into the weights.

[Note: Looking ahead]
The cheapest look at a gradient reads all of it once, which takes a sixth of what fused AdamW takes on the same gradient
(one core of a CPU).  Gradients that stay on the device until the step can be looked at while backward goes on: on the
CPU by a thread beside it, on an accelerator by kernels that nobody waits for.  What a look found holds as long as the
gradient is the same tensor in the same version; what was changed since, or never looked at, is looked at when it is
stepped.  The thread gives plain answers, not tensors: it may hold what it gave a little longer, and an account of the
device's memory would find that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NoReturn

import torch

from ...shared.basics.errors import ProtwinError

_MOST_NAMES = 3
"""Parameters that a message names."""
_Noted = tuple["weakref.ref[torch.Tensor]", int]
"""A gradient and the version that was looked at."""
_Seen = torch.Tensor | Future[list[bool]]
"""What a look at several gradients gives: their sums on an accelerator, whether each is finite from the thread."""


class NonFiniteGradientError(ProtwinError):
    """A gradient holds NaN or infinity."""


class GradientLooks:
    """Looks at gradients ahead of their step (Note: Looking ahead)."""

    def __init__(self, device: torch.device) -> None:
        self._looks: list[tuple[list[_Noted], _Seen]] = []
        self._thread = _single_thread() if device.type == "cpu" else None

    def look(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Begin to look at gradients that are final."""
        present = [gradient for gradient in gradients if gradient is not None]
        if present:
            noted = [(weakref.ref(gradient), gradient._version) for gradient in present]
            self._looks.append((noted, self._begin(present)))

    def _begin(self, gradients: list[torch.Tensor]) -> _Seen:
        return _sums(gradients) if self._thread is None else self._thread.submit(_look_and_empty, gradients)

    def note_finite(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Somebody else has looked at ``gradients``, and all of them are finite.  On any thread."""
        noted = [(weakref.ref(gradient), gradient._version) for gradient in gradients if gradient is not None]
        seen: Future[list[bool]] = Future()
        seen.set_result([True] * len(noted))
        self._looks.append((noted, seen))

    def refuse_non_finite(self, gradients: Sequence[torch.Tensor | None], labels: Sequence[str]) -> None:
        """``refuse_non_finite``, with the help of what was seen; forgets that.  Waits for looks under way."""
        looks, self._looks = self._looks, []
        finite: dict[int, _Noted] = {}
        for (reference, version), is_finite in zip(
            (one for noted, _ in looks for one in noted), _what_was_seen([seen for _, seen in looks]), strict=True
        ):
            gradient = reference()
            if is_finite and gradient is not None:
                finite[id(gradient)] = reference, version
        unknown = [
            None if gradient is None or _is_same(gradient, finite.get(id(gradient))) else gradient
            for gradient in gradients
        ]
        refuse_non_finite(unknown, labels)

    def forget(self) -> None:
        """Wait for looks under way, and forget what they saw."""
        looks, self._looks = self._looks, []
        for _, seen in looks:
            if isinstance(seen, Future):
                seen.result()

    def let_end(self) -> None:
        """As ``close``, without waiting."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def close(self) -> None:
        """End the thread.  Idempotent."""
        self._looks.clear()
        if self._thread is not None:
            self._thread.shutdown()


def _single_thread() -> ThreadPoolExecutor:
    num_threads = torch.get_num_threads()
    thread = ThreadPoolExecutor(1, thread_name_prefix="protwin-looks", initializer=partial(torch.set_num_threads, 1))
    thread.submit(torch.get_num_threads).result()
    # torch would hand the thread's own number on to every thread that starts from now on.
    torch.set_num_threads(num_threads)
    return thread


def _is_same(gradient: torch.Tensor, noted: _Noted | None) -> bool:
    return noted is not None and noted[0]() is gradient and noted[1] == gradient._version


def _sums(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sums of gradients; of those of several element types, in float64."""
    sums = [gradient.sum() for gradient in gradients]
    if any(of.dtype != sums[0].dtype for of in sums):
        sums = [of.double() for of in sums]
    is_spread = any(of.device != sums[0].device for of in sums)
    return torch.stack([of.cpu() for of in sums] if is_spread else sums)


def _look_and_empty(gradients: list[torch.Tensor]) -> list[bool]:
    """Whether the sum of each gradient is finite; holds no gradient when it is known."""
    try:
        return _sums(gradients).isfinite().tolist()
    finally:
        gradients.clear()


def _what_was_seen(looks: Sequence[_Seen]) -> list[bool]:
    """Whether each sum was finite, in order.  One wait for all looks of an accelerator."""
    if any(isinstance(seen, torch.Tensor) for seen in looks):
        sums = [seen.double() for seen in looks if isinstance(seen, torch.Tensor)]
        return torch.cat(sums).isfinite().tolist()
    return [is_finite for seen in looks if isinstance(seen, Future) for is_finite in seen.result()]


def non_finite(gradients: Sequence[torch.Tensor | None]) -> list[int]:
    """Places of the gradients that hold NaN or infinity.  On an accelerator, one wait for it if there are none.

    A sum is not finite if any element is not.  Since finite elements may add up beyond their range, a sum that is not
    finite is looked into.  (A sum in a wider type would copy a narrow gradient.)
    """
    present = [(place, gradient) for place, gradient in enumerate(gradients) if gradient is not None]
    if not present:
        return []
    sums = _sums([gradient for _, gradient in present])
    suspects = [pair for pair, is_finite in zip(present, sums.isfinite().tolist(), strict=True) if not is_finite]
    return [place for place, gradient in suspects if not _is_finite(gradient)]


def _is_finite(gradient: torch.Tensor) -> bool:
    """Exactly, and without a mask of the gradient's size."""
    return bool(torch.stack(torch.aminmax(gradient)).isfinite().all())


def refuse_non_finite(gradients: Sequence[torch.Tensor | None], labels: Sequence[str]) -> None:
    """Raise NonFiniteGradientError if a gradient holds NaN or infinity; ``labels`` say whose they are."""
    _refuse([labels[place] for place in non_finite(gradients)])


def refuse_of_ranks(found: Sequence[tuple[str, int]]) -> None:
    """Raise NonFiniteGradientError for gradients that are not finite on some rank: whose they are, and a rank each."""
    _refuse([f"{label} on rank {rank}" for label, rank in found])


def refuse_overflow() -> NoReturn:
    """Raise NonFiniteGradientError for a mean over ranks that is not finite though gradients are on every rank."""
    raise NonFiniteGradientError(
        "the mean of gradients over ranks is not finite, though they are on every rank: their sum overflows. Lower the "
        "learning rate, or train in an element type of wider range."
    )


def _refuse(names: Sequence[str]) -> None:
    if names:
        named = ", of ".join(names[:_MOST_NAMES])
        more = f" and of {len(names) - _MOST_NAMES} more parameters" if len(names) > _MOST_NAMES else ""
        raise NonFiniteGradientError(
            f"the gradient of {named}{more} is not finite. Lower the learning rate, limit the norm of the gradients "
            f"(max_gradient_norm), or look for an overflow or a division by zero in that block."
        )
