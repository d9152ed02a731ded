"""A LightningModule as a plan sees it: a module whose forward is one of the steps, and the batches that it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import PlanError, WorkloadError
from ..integrations.largest_batch import generators_kept, largest_batch
from ..model.batches import Batch, filled, named_leaves
from ..model.kept_tensors import attributes_as_found
from ..model.snapshot import buffers_kept, random_states_kept

PREFIX: Final = "module."
"""Of the names that parameters of a LightningModule have within a ``StepModule``."""
StepContext = Callable[[str], AbstractContextManager[Any]]
"""What a step of this name runs within: the precision that Lightning was asked for."""


class StepModule(nn.Module):
    """Calls a step of ``module`` as its own forward, so that what comes before and after a step can be hooked.

    DDP of Lightning does the same.  A step calls the module's own ``forward`` as often as it wants to.  As a trace
    calls it, with the tensors of a batch by name, it makes the batch of them again.
    """

    def __init__(self, module: nn.Module, context: StepContext, attached: Callable[[nn.Module], None]) -> None:
        """``attached`` makes sure that a copy of ``module`` knows its Trainer."""
        super().__init__()
        self.module = module
        self._context, self._attached = context, attached
        self._step = "training_step"
        self._traced: tuple[Any, tuple[Any, ...]] | None = None
        self.stepped: tuple[nn.Parameter, ...] = ()
        """Parameters in the order of the optimizer's groups, by which Lightning adds up the norm of gradients."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of the module, in the order of ``stepped``: sums of norms in another one have other last bits."""
        yield from self.stepped
        known = {id(parameter) for parameter in self.stepped}
        yield from (parameter for parameter in super().parameters(recurse) if id(parameter) not in known)

    def forward(self, *args: Any, **named: Any) -> Any:
        """What the step gives."""
        if named:
            assert self._traced is not None
            batch, rest = self._traced
            args = (filled(batch, named), *rest)
        self._attached(self.module)
        with self._context(self._step):
            return getattr(self.module, self._step)(*args)

    @contextmanager
    def running(self, step: str) -> Iterator[None]:
        """Within the block it calls the step of this name."""
        self._step, before = step, self._step
        try:
            yield
        finally:
            self._step = before

    @contextmanager
    def traced_with(self, batch: Any, *rest: Any) -> Iterator[Batch]:
        """Within the block it takes the tensors of ``batch`` by name; gives them so."""
        self._traced = batch, rest
        try:
            yield dict(named_leaves(batch))
        finally:
            self._traced = None


@contextmanager
def quiet(module: Any) -> Iterator[None]:
    """Within the block steps of a LightningModule leave nothing behind.

    What they log goes nowhere.  Attributes, metrics, buffers and random states are afterwards what they were.
    """
    with ExitStack() as undo:
        undo.enter_context(random_states_kept())
        undo.enter_context(buffers_kept(module))
        kept = undo.enter_context(attributes_as_found(module))
        values = [(tensor, tensor.detach().clone()) for tensor in kept]
        module.__dict__["log"] = module.__dict__["log_dict"] = _not_logged
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)


def _not_logged(*_: Any, **__: Any) -> None:
    """Stands for ``log`` and ``log_dict`` where a step runs for a measurement."""


def largest_arguments(trainer: Any) -> tuple[tuple[Any, ...], int, bool]:
    """What ``training_step`` is given with the largest of the first batches, how many were looked at, and if all were.

    The data begin afterwards where they would have begun.  Raises WorkloadError if they are read by the step itself, or
    have no batch, and PlanError if looking at them would change what training meets.
    """
    loop = trainer.fit_loop
    is_new = loop._combined_loader is None
    with random_states_kept(), ExitStack() as undo:
        loop.setup_data()
        combined = loop._combined_loader
        if combined is None:
            raise WorkloadError("the Trainer has no training data, so that there is nothing to plan for.")
        loaders = list(combined.flattened)
        if not is_new and any(getattr(one, "persistent_workers", False) for one in loaders):
            raise PlanError(
                "workers that persist have begun to read the training data (estimated_stepping_batches does that), and "
                "a plan needs to see a batch before. Pass batch= such as training_step is given."
            )
        if is_new:
            undo.callback(_begin_anew, loop, loaders)
        for one in loaders:
            undo.enter_context(generators_kept(one))
        twin = type(combined)(combined.iterables, combined._mode)
        twin.limits = combined.limits
        found, number, is_all = largest_batch(_Batches(twin, loaders))
    given = loop.epoch_loop._build_kwargs({}, _as_given(trainer, found), 0)
    if "batch" not in given:
        raise WorkloadError("training_step() reads the data itself (dataloader_iter), and a plan is for batches.")
    return tuple(given.values()), number, is_all


def _begin_anew(loop: Any, loaders: list[Any]) -> None:
    loop._combined_loader = loop._data_fetcher = None
    for one in loaders:
        if getattr(one, "_iterator", None) is not None:
            one._iterator = None


class _Batches:
    """The batches of a CombinedLoader without their numbers."""

    def __init__(self, combined: Any, loaders: list[Any]) -> None:
        for loader in loaders:
            if isinstance(loader, Iterator) or isinstance(getattr(loader, "dataset", None), Iterator):
                raise WorkloadError(
                    "the training data can be gone through once alone, and a plan needs to see a batch before. Pass "
                    "batch= such as training_step is given, or data that begin anew."
                )
        self._combined = combined

    def __iter__(self) -> Iterator[Any]:
        """Each batch."""
        return (batch for batch, _, _ in self._combined)


def _as_given(trainer: Any, batch: Any) -> Any:
    """``batch`` as Lightning gives it to ``training_step``."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)
