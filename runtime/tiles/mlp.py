"""A token-wise module that runs tile by tile over tokens, forward and backward, and keeps nothing but its input.

[Note: Tiles of a module]
A module is token-wise if the output at each token depends on the inputs at that token alone.  Its forward runs without
a graph, tile by tile over all tokens of the batch laid end to end.  Its backward runs every tile again with a graph,
and that graph backward.  What it costs is one more forward; what it saves is all but one tile of the module's
intermediates, in forward and backward.

- Gradients of tiles *add up*: a loss sees every token once, whatever the number of tiles.
- The module's parameters are inputs of the autograd function, and get one gradient each: hooks on parameters, DDP and
  whoever waits for a gradient to be final see one event per backward.  Tiles run on stand-ins, which have the same
  memory and gradients of their own, so that nothing of a tile reaches ``.grad`` or a hook.  The stand-in's gradient is
  added to in place, tile after tile in their order: of each parameter one tile's gradient is there beside the sum.
- A frozen input trains parameters all the same.
- Random numbers of a recomputed tile are those of its forward; autocast is as it was then.  Casts of weights are made
  for each tile: one that autocast kept from a forward without a graph would have none when it is used again.

[Note: Tiles within a checkpoint]
Recomputation of a checkpointed block ends with the last tensor that the block's backward needs.  The input of the tiles
is saved by a node of its own, ahead of them.  Where nothing behind them saves anything (a residual sum does not),
recomputation ends there, and the module's forward runs twice in all, as in any checkpointed block.  A normalization of
the module's output would save its input, and runs in the same tiles ([Note: What follows an MLP]).  Where something
else behind them saves what the module gives (a dropout of the block), that has to be made again first, and the module's
forward runs three times: once more than without tiles.  A trace counts what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import get_device_states, set_device_states

from ...shared.basics.errors import ScheduleError
from .mlp_values import Layout, Values, laid_out
from .passes import in_passes
from .recorded_outputs import Recorded, check_hooks, recording, tell_hooks

Forward = Callable[..., Any]


@dataclass(eq=False)
class TiledModule:
    """``module``, whose ``forward`` is run in up to ``num_tiles`` tiles, each of one token at least."""

    name: str
    module: nn.Module
    forward: Forward
    """The module's own."""
    num_tiles: int

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What ``forward`` gives.  Raises ScheduleError if it is given or gives what has no place for tokens."""
        result, recorded = self.run_recorded(args, kwargs)
        tell_hooks(recorded)
        return result

    def run_recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Recorded]:
        """``run``, with what parts that have hooks gave over all tokens."""
        if torch.is_grad_enabled():
            check_hooks(self.module, self.name)
        values, inputs = Values.of((args, kwargs), self.name)
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        run = _Run(self, values)
        if not torch.is_grad_enabled() or not (trained or any(t.requires_grad for t in inputs)):
            outputs: Sequence[torch.Tensor | None] = run.forward(inputs)
        else:
            if any(tensor.requires_grad for tensor in inputs):
                # Ahead of the tiles, and so ahead of all their work: [Note: Tiles within a checkpoint].
                inputs = _Keep.apply(run, *inputs)  # type: ignore[no-untyped-call]
            outputs = _Tiles.apply(run, len(inputs), *inputs, *trained)  # type: ignore[no-untyped-call]
        assert run.layout is not None
        result, recorded = run.layout.restored(outputs)
        return result, recorded


@dataclass(eq=False)
class _Run:
    """One forward of a module in tiles, and what its backward needs of it."""

    tiled: TiledModule
    values: Values
    layout: Layout | None = None
    """Of the outputs; known when the first tile has run."""
    keeper: Any = None
    """The node that saved the inputs; None: the tiles' own did."""
    device_type: str = "cpu"
    random: tuple[torch.Tensor, list[int], list[torch.Tensor]] | None = None
    """Random states of the CPU and of devices, before the first tile."""
    autocast: list[dict[str, Any]] = field(default_factory=list)

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs over all tokens, made tile by tile without a graph."""
        self.device_type = inputs[0].device.type
        self.random = (torch.get_rng_state(), *get_device_states(*inputs))
        self.autocast = _autocast_of(inputs)
        outputs: list[torch.Tensor] = []
        with torch.no_grad(), self.as_then():
            flat = self.values.flattened(inputs)
            for tile in in_passes(list(self.tiles())):
                found = self.of_tile([tensor[:, tile] for tensor in flat], tile)
                assert self.layout is not None
                if not outputs:
                    outputs = self.layout.empty(found)
                self.layout.fill(outputs, found, tile)
                del found
        return tuple(outputs)

    def tiles(self) -> Iterator[slice]:
        """Stretches of tokens, as equal as can be."""
        num_tokens = self.values.num_tokens
        num_tiles = max(1, min(self.tiled.num_tiles, num_tokens))
        base, more = divmod(num_tokens, num_tiles)
        start = 0
        for number in range(num_tiles):
            stop = start + base + (number < more)
            yield slice(start, stop)
            start = stop

    def of_tile(self, inputs: Sequence[torch.Tensor], tile: slice) -> list[torch.Tensor]:
        """The tensors that the module gives for one tile."""
        args, kwargs = self.values.arguments(inputs)
        with recording(self.tiled.module) as recorded:
            result = self.tiled.forward(*args, **kwargs)
        found, layout = laid_out((result, recorded), tile.stop - tile.start, self.values, self.tiled.name)
        if self.layout is None:
            self.layout = layout
        else:
            self.layout.check(layout, self.tiled.name)
        return found

    @contextmanager
    def as_then(self) -> Iterator[None]:
        """Autocast as it was in forward, without keeping casts."""
        with ExitStack() as stack:
            for options in self.autocast:
                stack.enter_context(torch.autocast(**options))
            yield

    @contextmanager
    def random_as_then(self) -> Iterator[None]:
        """Random numbers as in forward; afterwards their state is as it was found."""
        assert self.random is not None
        cpu, devices, states = self.random
        kind = self.device_type if devices else "cuda"
        with torch.random.fork_rng(devices=devices, device_type=kind):
            torch.set_rng_state(cpu)
            set_device_states(devices, states, device_type=kind)
            yield


class _Keep(torch.autograd.Function):
    """The inputs as they are, saved for the tiles' backward."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``inputs``."""
        ctx.save_for_backward(*inputs)
        run.keeper = ctx
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """``gradients``."""
        return None, *gradients


class _Tiles(torch.autograd.Function):
    """The autograd function of [Note: Tiles of a module]."""

    @staticmethod
    def forward(ctx: Any, run: _Run, num_inputs: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The module's outputs over all tokens; ``tensors``: inputs by token, then trained parameters."""
        ctx.run = run
        ctx.set_materialize_grads(False)
        inputs, parameters = tensors[:num_inputs], tensors[num_inputs:]
        ctx.num_inputs = num_inputs
        ctx.versions = [parameter._version for parameter in parameters]
        ctx.parameters = parameters
        if run.keeper is None:
            ctx.save_for_backward(*inputs)
        outputs = run.forward(inputs)
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Every tile once more with a graph, and that backward; one gradient for each input and parameter."""
        run: _Run = ctx.run
        name = run.tiled.name
        if torch.is_grad_enabled():
            raise ScheduleError(
                f"gradients of gradients were asked for (create_graph) of {name}, which runs in tiles and keeps no "
                f"graph. Leave create_graph out, or train with mlp_tiles = 1."
            )
        if ctx.versions != [parameter._version for parameter in ctx.parameters]:
            raise ScheduleError(
                f"a parameter of {name} was changed between its forward and its backward, which runs it again. Change "
                f"parameters after backward."
            )
        inputs = (ctx if run.keeper is None else run.keeper).saved_tensors
        needs = ctx.needs_input_grad[2:]
        backward = _Backward(run, inputs, needs[: ctx.num_inputs], ctx.parameters)
        found = backward.run(gradients)
        return None, None, *found


class _Backward:
    """The backward of one run: sums of gradients of parameters, and gradients of inputs, tile by tile."""

    def __init__(
        self, run: _Run, inputs: Sequence[torch.Tensor], needs: Sequence[bool], parameters: Sequence[torch.Tensor]
    ) -> None:
        self._run = run
        self._needs = needs
        self._inputs = inputs
        self._stand_ins = {id(p): nn.Parameter(p.detach(), requires_grad=True) for p in parameters}
        self._gradients: list[torch.Tensor | None] = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format) if need else None
            for tensor, need in zip(inputs, needs, strict=True)
        ]

    def run(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of inputs and parameters; None for a parameter that no tile has used."""
        run = self._run
        assert run.layout is not None
        flat = [tensor.detach() for tensor in run.values.flattened(self._inputs)]
        with run.random_as_then(), run.as_then(), standing_in(run.tiled.module, self._stand_ins):
            given = run.layout.flattened(gradients)
            for tile in in_passes(list(run.tiles())):
                self._run_tile(flat, tile, [None if g is None else g[tile] for g in given])
        return [*self._gradients, *(_taken(stand_in) for stand_in in self._stand_ins.values())]

    def _run_tile(self, flat: Sequence[torch.Tensor], tile: slice, gradients: Sequence[torch.Tensor | None]) -> None:
        run = self._run
        inputs = [tensor[:, tile].detach() for tensor in flat]
        for tensor, need in zip(inputs, self._needs, strict=True):
            tensor.requires_grad_(need)
        with torch.enable_grad():
            outputs = run.of_tile(inputs, tile)
        reached = [
            (output, gradient.reshape(output.shape))
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        del outputs
        leaves = [*(tensor for tensor in inputs if tensor.requires_grad), *self._stand_ins.values()]
        if reached:
            of, given = zip(*reached, strict=True)
            del reached
            torch.autograd.backward(of, given, inputs=leaves)
            del of, given
        for tensor, whole in zip(inputs, self._gradients, strict=True):
            if whole is not None:
                place = run.values.flat(whole)[:, tile]
                place.zero_() if tensor.grad is None else place.copy_(tensor.grad)


def _taken(stand_in: nn.Parameter) -> torch.Tensor | None:
    """Its gradient, which nobody else has then."""
    gradient, stand_in.grad = stand_in.grad, None
    return gradient


@contextmanager
def standing_in(module: nn.Module, stand_ins: dict[int, nn.Parameter]) -> Iterator[None]:
    """Within the block, ``module`` has stand-ins in place of parameters, which are given by their ``id``."""
    replaced = [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and id(parameter) in stand_ins
    ]
    try:
        for part, name, parameter in replaced:
            part._parameters[name] = stand_ins[id(parameter)]
        yield
    finally:
        for part, name, parameter in replaced:
            part._parameters[name] = parameter


def _autocast_of(inputs: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """Autocast on the devices of ``inputs`` and on the CPU, as it is now."""
    kinds = dict.fromkeys((inputs[0].device.type, "cpu"))
    return [
        {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": False,
        }
        for kind in kinds
        if torch.amp.is_autocast_available(kind)
    ]
