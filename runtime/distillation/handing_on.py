"""Both whole models over the stages of a pipeline, forward alone: each rank runs its blocks, and hands the state on.

[Note: Evaluating in stages]
Every rank calls the same model with the same batch.  As in training it runs the model's own forward from the beginning,
passes over the blocks of other stages ([Note: Passing over] in ``passing``), and has the hidden state of the stage
before written into its own before its first block.  The last stage sends what its last block gives to all others, into
whose hidden state it is written behind the last block.  So the code behind the blocks, with the final norm and the
head, runs on every rank on the same bits, and every rank has the result that one rank would have.  Before each hidden
state goes a header that says of what it is: ranks that evaluate different things are told so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import ScheduleError
from ..devices.device import TrainingDevice
from ..model.nested_tensors import tensors_in
from ..ranks.stages import Neighbours, StageRanks
from .pairs import STUDENT, TEACHER, Pairs, first_tensor
from .passing import check_all_here, check_sendable, check_writable, hidden_state, on_a_thread

_COLLECTED: Final = ("hidden_states", "attentions", "router_logits")
"""What models of transformers collect of all blocks."""


class HandingOn:
    """Of one evaluation ([Note: Evaluating in stages])."""

    def __init__(self, pairs: Pairs, stages: StageRanks, device: TrainingDevice) -> None:
        self._pairs = pairs
        self._stages = stages
        self._device = device
        self._last_rank = stages.of_replica[-1]
        self._neighbours = Neighbours(stages, group=stages.world.between_steps_group)
        self._batch: list[torch.Tensor] = []
        """What the model that runs was called with."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the block either model is called on all ranks of the pipeline, equally often and in the same order."""
        with ExitStack() as undo:
            undo.callback(self._neighbours.close)
            for part in (TEACHER, STUDENT):
                model = self._pairs.get_submodule(part)
                for handle in (*self._around(model), *self._between(part, model)):
                    undo.callback(handle.remove)
            yield

    def _around(self, model: nn.Module) -> Iterator[Any]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._batch = list(tensors_in((args, kwargs)))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._batch = []
            check_all_here(output)
            collected = [name for name in _COLLECTED if getattr(output, name, None) is not None]
            if collected:
                raise ScheduleError(
                    f"{type(model).__name__} was asked for {collected[0]} of all blocks, but each stage of a pipeline "
                    f"has those of its own alone. Leave output_{collected[0]} out, or evaluate on one rank."
                )

        yield model.register_forward_pre_hook(enter, with_kwargs=True)
        yield model.register_forward_hook(leave)

    def _between(self, part: str, model: nn.Module) -> Iterator[Any]:
        """Hooks behind the block before this stage's, behind its last one, and behind the last of all."""
        pairs, rank = self._pairs, self._stages.world.rank
        names = pairs.all_blocks
        if pairs.before:
            yield self._hook(model, pairs.before[-1], self._receiving(part, pairs.before[-1], rank - 1))
        receivers = [rank + 1] if pairs.has_next else [other for other in self._stages.of_replica if other != rank]
        yield self._hook(model, names[pairs.own.stop - 1], self._sending(part, names[pairs.own.stop - 1], receivers))
        if pairs.has_next:
            yield self._hook(model, names[-1], self._receiving(part, names[-1], self._last_rank))

    @staticmethod
    def _hook(model: nn.Module, name: str, hook: Callable[..., None]) -> Any:
        return model.get_submodule(name).register_forward_hook(hook, with_kwargs=True)

    def _receiving(self, part: str, name: str, sender: int) -> Callable[..., None]:
        def receive(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            hidden, pairs = hidden_state(args, kwargs, name), self._pairs
            check_writable(hidden, (args, kwargs), [*self._batch, *pairs.parameters(), *pairs.buffers()], name)
            self._move(lambda: self._receive(part, hidden, sender), hidden)

        return receive

    def _sending(self, part: str, name: str, receivers: list[int]) -> Callable[..., None]:
        def send(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            activation = first_tensor(output, name)
            check_sendable(activation, (args, kwargs), f"{name} of the {part}")
            self._move(lambda: self._send(part, activation, receivers), activation)

        return send

    def _move(self, work: Callable[[], None], activation: torch.Tensor) -> None:
        """Where a ledger watches this thread, on another one: what is made on the way is the host's."""

        def moved() -> None:
            with torch.inference_mode(activation.is_inference()):
                work()

        if self._device.ledger is None:
            moved()
        else:
            on_a_thread(moved)

    def _send(self, part: str, activation: torch.Tensor, receivers: list[int]) -> None:
        for receiver in receivers:
            self._neighbours.send(_header(part, activation), to=receiver)
            self._neighbours.send(activation, to=receiver)

    def _receive(self, part: str, hidden: torch.Tensor, sender: int) -> None:
        own = _header(part, hidden)
        theirs = torch.empty_like(own)
        self._neighbours.receive(theirs, of=sender)
        if not torch.equal(own, theirs):
            raise ScheduleError(
                f"rank {sender} evaluates the {_told(theirs)}, and this one the {_told(own)}. All ranks of a pipeline "
                f"call the same model with the same batch."
            )
        self._neighbours.receive(hidden, of=sender)


def _header(part: str, activation: torch.Tensor) -> torch.Tensor:
    """(2,) int64: which model it is, and the bytes of the hidden state."""
    return torch.tensor([(TEACHER, STUDENT).index(part), activation.nbytes])


def _told(header: torch.Tensor) -> str:
    part, size_bytes = header.tolist()
    return f"{(TEACHER, STUDENT)[part]} on hidden states of {size_bytes:,} B"
