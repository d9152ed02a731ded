"""Blocks of a model that another stage of a pipeline has: they are passed over, and take no memory here.

[Note: Passing over]
A stage runs the teacher's own forward from its beginning, so that masks, rotary tables and positions are made by who
knows how.  In the places of blocks before its own stand modules that hand on the hidden state that they are given, in
the form in which the block returns it, so that the code between blocks goes on as ever.  Only a forward tells that
form: the first time, the block runs on fake tensors, whose values nobody knows and which take no memory.  What a block
returns beside the hidden state is not there, and says so as soon as anybody uses it.

Parameters and buffers of such blocks are no part of the model meanwhile: they stay where they are, and may be on the
meta device.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...shared.basics.errors import ProtwinError, ScheduleError
from ..fakes.running import running_fakes
from ..model.blocks import NamedBlock
from ..model.kept_tensors import kept_tensors
from ..model.nested_tensors import tensors_in
from ..model.strides import contiguous_strides, is_dense


class PassedOver(nn.Module):
    """Stands for a block of another stage ([Note: Passing over])."""

    def __init__(self, block: nn.Module, name: str) -> None:
        """``name``: the block's path."""
        super().__init__()
        # Behind a function, where nobody looks for tensors: what the block has is no part of the model.
        self.__dict__["_block"] = lambda: block
        self._name = name
        self._form: Any = None
        """What the block returns, with numbers in the places of tensors."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The block's: models choose masks by it."""
        found: type = type(self.__dict__["_block"]())
        return found

    def __getattr__(self, name: str) -> Any:
        """The block's, where it is not this module's own: models ask blocks for their kind."""
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            return getattr(self.__dict__["_block"](), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden state that it is given, in the form of the block's result.  Raises ScheduleError."""
        hidden = hidden_state(args, kwargs, self._name)
        if self._form is None:
            self._form = _form_of(self.__dict__["_block"](), self._name, args, kwargs, hidden)
        return _in_form(self._form, hidden, self._name)


class NotHere:
    """In the place of something that a block of another stage has made beside the hidden state."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ScheduleError(
            f"block {self.__dict__['_name']} hands on more than its hidden state, but stages of a pipeline send that "
            f"alone to each other. Carry out a plan of one rank, or one in which every rank has all blocks."
        )

    __getattr__ = __getitem__ = __iter__ = __bool__ = __len__ = __call__ = __eq__ = __hash__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refused: ``func`` is given what is not here."""
        found = next(one for one in _leaves((args, kwargs or {})) if type(one) is cls)
        found._refuse()


def hidden_state(args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> torch.Tensor:
    """What a block is to change of what it is given: the first tensor, positional ones and ``hidden_states`` first.

    Raises ScheduleError if there is none.
    """
    found = next(tensors_in((args, kwargs.get("hidden_states"), kwargs)), None)
    if found is None:
        raise ScheduleError(f"block {name} is given no tensor, so that there is nothing that a stage could send.")
    return found


def check_all_here(given: Any) -> None:
    """Raise ScheduleError if ``given`` has anything that blocks of another stage have made beside the hidden state."""
    for one in _leaves(given):
        if type(one) is NotHere:
            one._refuse()


def check_writable(hidden: torch.Tensor, given: Any, others: Iterable[torch.Tensor], name: str) -> None:
    """Raise ScheduleError unless a received activation may be written into ``hidden``, which block ``name`` is given.

    ``given`` is all that the block is given; ``others`` are tensors that somebody else reads.
    """
    beside = [tensor for tensor in tensors_in(given) if tensor is not hidden]
    # Parameters that are away refuse to be read; whose memory they have can be asked.
    with torch._C.DisableTorchFunctionSubclass():
        own = hidden.untyped_storage()._cdata
        is_shared = any(tensor.untyped_storage()._cdata == own for tensor in (*beside, *others))
    if is_shared:
        raise ScheduleError(
            f"the hidden state before block {name} shares memory with something else that the teacher reads: the "
            f"activation of the stage before cannot be written into it. Carry out a plan in which every rank has all "
            f"blocks, or let the teacher's forward begin with token ids."
        )
    if not hidden.is_contiguous():
        raise ScheduleError(
            f"the hidden state before block {name} is not contiguous (strides {hidden.stride()}), so that stages of a "
            f"pipeline cannot exchange it. Let the teacher call contiguous(), or carry out a plan in which every rank "
            f"has all blocks."
        )


def check_sendable(activation: torch.Tensor, given: tuple[Any, Any], who: str) -> None:
    """Raise ScheduleError unless other stages have a hidden state like ``activation``, which block ``who`` gives.

    ``given`` are the positional arguments and the keywords that the block is given.
    """
    like = hidden_state(*given, who)
    if (activation.shape, activation.dtype) != (like.shape, like.dtype) or not activation.is_contiguous():
        raise ScheduleError(
            f"block {who} gives a tensor of shape {list(activation.shape)}, {activation.dtype} and strides "
            f"{activation.stride()}, where it is given one of {list(like.shape)} and {like.dtype}. Stages of a "
            f"pipeline send contiguous hidden states of one shape and type to each other: carry out a plan in which "
            f"every rank has all blocks."
        )


@contextmanager
def passed_over(model: nn.Module, blocks: Sequence[NamedBlock]) -> Iterator[None]:
    """Within the block, others stand for ``blocks`` of ``model``."""
    with ExitStack() as undo:
        for block in blocks:
            path, _, name = block.name.rpartition(".")
            parent = model.get_submodule(path)
            undo.callback(parent._modules.__setitem__, name, block.module)
            parent._modules[name] = PassedOver(block.module, block.name)
        yield


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) is dict or isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif type(value) is not NotHere and is_dataclass(value):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name, None))
    else:
        yield value


# -- the form of a result --------------------------------------------------------------------------------------------


class _Place(int):
    """The number of a tensor in a form."""


def _form_of(
    block: nn.Module, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], hidden: torch.Tensor
) -> tuple[Any]:
    """What ``block`` returns, with numbers in the places of tensors, in a tuple of one.  Raises ScheduleError."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        given = _mapped((tuple(args), dict(kwargs)), _faked)
    output = on_a_thread(lambda: _fake_result(block, name, mode, given))
    first = next(tensors_in(output), None)
    if first is None or (first.shape, first.dtype) != (hidden.shape, hidden.dtype):
        returned = "no tensor" if first is None else f"a tensor of shape {list(first.shape)} and {first.dtype}"
        raise ScheduleError(
            f"block {name} is given a hidden state of shape {list(hidden.shape)} and {hidden.dtype}, and returns "
            f"{returned} first. Stages of a pipeline send hidden states of one shape and type alone: carry out a plan "
            f"in which every rank has all blocks."
        )
    places: dict[int, _Place] = {}
    return (_mapped(output, lambda tensor: places.setdefault(id(tensor), _Place(len(places)))),)


def _fake_result(block: nn.Module, name: str, mode: FakeTensorMode, given: tuple[Any, Any]) -> Any:
    """What a copy of ``block`` without values gives on fake tensors."""
    with mode:
        made: dict[int, Any] = {}
        for tensor in (*block.parameters(), *block.buffers(), *kept_tensors(block.modules())):
            made[id(tensor)] = (
                nn.Parameter(_faked(tensor), False) if isinstance(tensor, nn.Parameter) else _faked(tensor)
            )
    # Weights are not copied: the copy has fake ones in their places.
    twin = copy.deepcopy(block, made)
    try:
        with torch.no_grad(), running_fakes(mode):
            return twin.forward(*given[0], **given[1])
    except ProtwinError:
        raise
    except Exception as error:
        raise ScheduleError(
            f"what block {name} returns cannot be told without its weights ({type(error).__name__}: {error}), but "
            f"stages of a pipeline pass over blocks of others. Carry out a plan in which every rank has all blocks."
        ) from error


def on_a_thread(work: Callable[[], Any]) -> Any:
    """What ``work`` gives where nobody watches tensors: modes of torch are a thread's own."""
    found: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="protwin-form")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _faked(tensor: torch.Tensor) -> torch.Tensor:
    """Of the same shape, strides and type; within a mode of fake tensors."""
    strides = tensor.stride() if is_dense(tensor.shape, tensor.stride()) else contiguous_strides(tensor.shape)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu")


def _in_form(form: tuple[Any], hidden: torch.Tensor, name: str) -> Any:
    """A result of ``form`` whose first tensor is ``hidden``."""
    return _mapped(form[0], lambda place: hidden if place == 0 else NotHere(name), of=_Place)


def _mapped(value: Any, change: Callable[[Any], Any], *, of: type = torch.Tensor) -> Any:
    """``value`` with what is ``of`` a class changed, in containers of the same classes."""
    if isinstance(value, of):
        return change(value)
    if isinstance(value, dict):
        items = {key: _mapped(item, change, of=of) for key, item in value.items()}
        if type(value) is dict:
            return items
        made = copy.copy(value)
        for key, item in items.items():
            made[key] = item
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change, of=of) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change, of=of) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        twin: Any = copy.copy(value)
        for field in fields(value):
            object.__setattr__(twin, field.name, _mapped(getattr(value, field.name, None), change, of=of))
        return twin
    return value
