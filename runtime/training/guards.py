"""What must not happen while a plan is carried out, since weights may be elsewhere, and the one way round it.

A plan that the runtime cannot carry out is refused here too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...shared.basics.errors import PlanError, ScheduleError
from ...shared.basics.units import format_bytes, format_enough_bytes
from ...shared.schema.plan import Plan
from ...shared.schema.schedule import Schedule
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ..chunks.placed_model import PlacedModel
from ..chunks.sharded_chunk import ShardedChunk
from ..devices.chunk_file import check_folder
from ..optimizers.facade import KEPT_ZEROS
from ..ranks.launch import by_rank


def refuse_with_ranks(plan: Plan, what: str) -> None:
    """Raise PlanError, with nothing changed, if ``plan`` has several ranks: ``what`` is known to one alone so far."""
    if plan.num_ranks > 1:
        raise PlanError(
            f"{what}. One rank alone can do that so far, and this plan has {plan.num_ranks}. Close the training, which "
            f"gives every rank the model with its weights."
        )


def refuse_own_checkpointing(modules: Iterable[nn.Module]) -> None:
    """Raise ScheduleError if one of ``modules``, of transformers, would checkpoint its activations."""
    if any(getattr(module, "gradient_checkpointing", False) is True for module in modules):
        raise ScheduleError(
            "the model checkpoints activations itself. Call model.gradient_checkpointing_disable(): the plan "
            "decides which blocks are checkpointed (n_checkpoint)."
        )


def weight_of_rank(num_tokens: int, of_ranks: Sequence[int]) -> float | None:
    """What the loss of a rank with ``num_tokens`` counts in the mean over ranks; None if all have as many.

    Raises PlanError if a number is negative or all are 0.
    """
    if min(of_ranks) < 0 or not any(of_ranks):
        raise PlanError(
            f"ranks are to be weighed by their tokens, but these are {by_rank(of_ranks)}. Pass how many tokens of its "
            f"batch each rank learns from: none may be negative, nor all of them 0."
        )
    return None if len(set(of_ranks)) == 1 else num_tokens * len(of_ranks) / sum(of_ranks)


def check_disk_folder(plan: Plan, folder: str | Path | None) -> None:
    """Raise PlanError if ``plan`` has chunks on a disk, and no folder is named; FileError if that is none.

    ``ChunkFile`` says whether it can be written and has room.
    """
    if not plan.n_disk_state:
        return
    if folder is None:
        raise PlanError(
            f"the plan has chunks on a disk (n_disk_state = {plan.n_disk_state}), but no folder is named. Name one on "
            f"a fast disk: carry_out(disk_folder=...), protwin run --disk-folder FOLDER."
        )
    check_folder(folder)


def check_devices(schedule: Schedule, limits_bytes: Sequence[int | None]) -> None:
    """Raise PlanError if some timing of ``schedule`` exceeds the memory of a device: of each rank's, None: no limit.

    The smallest rules, since all ranks carry out the same plan.
    """
    least_bytes = min((limit for limit in limits_bytes if limit is not None), default=None)
    if least_bytes is None:
        return
    peak = guaranteed_device_peak(schedule)
    if peak.size_bytes > least_bytes:
        unlike = [format_bytes(limit) if limit is not None else "no limit" for limit in limits_bytes]
        has = f"the device has {unlike[0]}" if len(set(unlike)) == 1 else f"of the devices there is {by_rank(unlike)}"
        raise PlanError(
            f"the plan's device memory may reach {format_bytes(peak.size_bytes)}, during "
            f"{schedule.tasks[peak.task].name}, but {has}. Search a plan for {format_bytes(least_bytes)}, or carry "
            f"this one out on devices of {format_enough_bytes(peak.size_bytes)} or more."
        )


# -- the model as a whole --------------------------------------------------------------------------------------------


class StateAccess:
    """Whether ``state_dict`` may be called: by who reads no values from it."""

    def __init__(self) -> None:
        self.is_allowed = False

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Within the block it may."""
        self.is_allowed = True
        try:
            yield
        finally:
            self.is_allowed = False


@contextmanager
def refusing_access(model: nn.Module) -> Iterator[StateAccess]:
    """Within the block, whatever torch does to a whole module is refused: saving, loading, converting, compiling it.

    An offloaded parameter has no memory on the device, and torch does not look before it reads.
    """
    access = StateAccess()

    def refuse_state(*_: Any) -> None:
        if access.is_allowed:
            return
        raise ScheduleError(
            "state_dict() or load_state_dict() while a plan is being carried out: offloaded chunks are not on the "
            "device. Read the weights by training.state_dict(), save them by training.save(). Call close() first, and "
            "carry the plan out again afterwards, if they are to be changed."
        )

    def refuse_change(module: nn.Module, change: Callable[[torch.Tensor], Any], recurse: bool = True) -> nn.Module:
        if not _changes_nothing(module, change):
            raise ScheduleError(
                "the model is to be converted or moved while a plan is being carried out: offloaded chunks are not on "
                "the device. Call close() before model.to(), model.half() and the like."
            )
        return module

    def refuse_compiling(*_: Any, **__: Any) -> None:
        raise ScheduleError(
            "a part of the model is to be compiled while a plan is being carried out: what brings its weights would be "
            "compiled too, and nobody has traced what compiled code saves for backward. Compile it after close()."
        )

    def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
        if not set_to_none:
            raise ScheduleError(KEPT_ZEROS)
        type(module).zero_grad(module)

    own: dict[str, Callable[..., Any]] = {
        "_apply": refuse_change,
        "compile": refuse_compiling,
        "zero_grad": zero_grad,
    }
    with ExitStack() as undo:
        for module in model.modules():
            saving = module.register_state_dict_pre_hook(refuse_state)  # type: ignore[no-untyped-call]
            undo.callback(saving.remove)
            loading = module.register_load_state_dict_pre_hook(refuse_state)  # type: ignore[no-untyped-call]
            undo.callback(loading.remove)
            for name, instead in own.items():
                if name not in module.__dict__:
                    module.__dict__[name] = partial(instead, module)
                    undo.callback(module.__dict__.pop, name, None)
        yield access


def _changes_nothing(module: nn.Module, change: Callable[[torch.Tensor], Any]) -> bool:
    """Whether ``change`` leaves tensors as those of ``module`` are: such as ``to`` the device where they are already.

    Trainers and launchers call that whether or not there is anything to move.  It is tried on small tensors of the same
    devices, dtypes and numbers of dimensions.
    """
    kinds = {(tensor.device, tensor.dtype, tensor.dim()) for tensor in (*module.parameters(), *module.buffers())}
    with torch.no_grad():
        for device, dtype, dim in kinds:
            probe = torch.zeros((2,) * dim, device=device, dtype=dtype)
            # On an accelerator every tensor counts as shared.
            is_same = change(probe) is probe and not probe.any()
            if not is_same or (device.type == "cpu" and probe.untyped_storage().is_shared()):
                return False
    return True


def state_on_host(model: nn.Module, placed: PlacedModel, access: StateAccess) -> dict[str, Any]:
    """Copies of everything that ``model.state_dict()`` holds, on the host; tied weights are one tensor.

    Offloaded chunks are read from their homes: no device memory is needed.  No step may be under way.  Of several ranks
    the first has it, and the others, who send their parts of one region after the other, have nothing.
    """
    is_first = placed.ranks is None or placed.ranks.rank == 0
    values: dict[int, torch.Tensor] = {}
    for chunk in placed.chunks:
        found = chunk.values_on_first() if isinstance(chunk, ShardedChunk) else chunk.values() if is_first else None
        if found is not None:
            for parameter, value in zip(chunk.parameters, found.values(), strict=True):
                values[id(parameter)] = value.detach().to("cpu", copy=True)
    if not is_first:
        return {}
    with access.allowed():
        # The parameters themselves, which are not read: their memory may be elsewhere.
        state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if id(value) in values:
            state[name] = values[id(value)]
        elif isinstance(value, torch.Tensor):
            state[name] = value.detach().to("cpu", copy=True)
    return state


# -- other optimizers ------------------------------------------------------------------------------------------------


@contextmanager
def refusing_other_optimizers(model: nn.Module, own: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Within the block, no torch optimizer but ``own`` steps a parameter of ``model``; ScheduleError before it does.

    It would step what is on the device a second time, and leave out the rest, whose gradients have gone to the host.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    guarded = _Guarded(names, frozenset(id(inner) for optimizer in own for inner in _with_inner(optimizer)))
    _WATCH.add(guarded)
    try:
        yield
    finally:
        _WATCH.remove(guarded)


@dataclass(frozen=True, eq=False)
class _Guarded:
    """A model's parameters, and who may step them."""

    names: dict[int, str]
    """Of its parameters, by ``id``."""
    own: frozenset[int]
    """The ``id`` of the optimizers that may."""

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self.own:
            return
        stepped = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self.names]
        if stepped:
            more = f" and {len(stepped) - 1} more parameters" if len(stepped) > 1 else ""
            raise ScheduleError(
                f"another optimizer ({type(optimizer).__name__}) was about to step {self.names[id(stepped[0])]}{more}, "
                f"which the training steps by itself while a plan is being carried out. Nothing was stepped. Call "
                f"training.step() alone; choose the optimizer with optimizer= and parameter_groups= of carry_out(), "
                f"and let schedulers have training.optimizer."
            )


class _StepWatch:
    """One hook on the steps of all optimizers of this process, while any plan is being carried out.

    torch's hook is the process's, and torch goes through its hooks while a lane steps: another one that came or went
    meanwhile would be an error there.  So one serves every training, and it goes with the last one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._guarded: tuple[_Guarded, ...] = ()
        self._handle: Any = None

    def add(self, guarded: _Guarded) -> None:
        with self._lock:
            self._guarded = (*self._guarded, guarded)
            if self._handle is None:
                self._handle = register_optimizer_step_pre_hook(self._before_step)

    def remove(self, guarded: _Guarded) -> None:
        with self._lock:
            self._guarded = tuple(other for other in self._guarded if other is not guarded)
            if not self._guarded:
                self._handle.remove()
                self._handle = None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for guarded in self._guarded:
            guarded.check(optimizer)


_WATCH: Final = _StepWatch()


def _with_inner(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """An optimizer, and those that it keeps in its attributes and may step by, as wrappers do."""
    yield optimizer
    for value in vars(optimizer).values():
        for inner in value if isinstance(value, list | tuple) else (value,):
            if isinstance(inner, torch.optim.Optimizer):
                yield from _with_inner(inner)


# -- writes that would be lost ---------------------------------------------------------------------------------------


class OffloadedWeights:
    """Tells when somebody has written to a parameter that has its home on the host, where the write does not arrive.

    torch counts a tensor's changes; gathers go round that count, and nobody else may change these.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._noted = [(name, parameter) for name, parameter in parameters]
        self._versions = {id(parameter): parameter._version for _, parameter in self._noted}

    @contextmanager
    def but_for_wrapping(self, wrapped: Iterable[tuple[nn.Module, nn.Parameter]]) -> Iterator[None]:
        """Within the block, a module of ``wrapped`` may have its parameter's changes counted while it runs.

        See [Note: Parameters that are adapted] in ``runtime/adapters/peft_parts.py``.
        """

        def note(parameter: nn.Parameter, *_: Any) -> None:
            with torch._C.DisableTorchFunctionSubclass():
                self._versions[id(parameter)] = parameter._version

        names = {id(parameter): name for name, parameter in self._noted}
        with ExitStack() as undo:
            for module, parameter in wrapped:
                if id(parameter) in names:
                    # Alone: a module around this one may be wrapping its own parameter.
                    check = partial(self._check_one, names[id(parameter)], parameter)
                    undo.callback(module.register_forward_pre_hook(check).remove)
                    undo.callback(module.register_forward_hook(partial(note, parameter), always_call=True).remove)
            yield

    def check(self) -> None:
        """Raise ScheduleError if a parameter was written to."""
        for name, parameter in self._noted:
            self._check_one(name, parameter)

    def _check_one(self, name: str, parameter: nn.Parameter, *_: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if parameter._version != self._versions[id(parameter)]:
                raise ScheduleError(
                    f"parameter {name} was written to while a plan is being carried out. The host steps its chunk, "
                    f"so that the change is lost. Close the training before weights are changed, or keep every chunk "
                    f"persistent (n_persist)."
                )
