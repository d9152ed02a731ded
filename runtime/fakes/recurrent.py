"""Recurrent layers on fake tensors as cuDNN runs them.

[Note: Recurrent layers]
On CUDA a layer of ``torch.nn.LSTM``, ``GRU`` or ``RNN`` is one call of cuDNN for all steps and all layers.  Autograd
keeps its input, its result, the states that it began with, the weights in one buffer, and a reserve.  On the CPU the
layers fall apart: an LSTM into one call for each layer that states neither products nor what it keeps, the others into
operations for every step.

cuDNN does not say what its reserve is made of.  It is taken to be what PyTorch's own cells keep on CUDA for every step
(``aten/src/ATen/native/cuda/RNN.cu``): four gates and the cell of an LSTM, five of a GRU, the state of a plain one; and
the results of all layers but the last.

Weights are compacted into the buffer wherever they do not lie in one already, as those of a chunk, of a flat parameter
or of a cast never do (``aten/src/ATen/native/cudnn/RNN.cpp``).  Where autocast casts weights, the casts are the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

_MODES: Final = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cuDNN's numbers of them (cudnnRNNMode_t)."""
_GATES: Final = {0: 1, 1: 1, 2: 4, 3: 3}
_KEPT: Final = {0: 1, 1: 1, 2: 5, 3: 5}
"""What is kept of every step, in states; see [Note: Recurrent layers]."""
RECURRENT: Final = ("_cudnn_rnn", "_cudnn_rnn_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
"""Operators that run all steps of a layer: cuDNN's, and the one that a CPU has for an LSTM."""
CUDNN: Final = (torch.ops.aten._cudnn_rnn.default, torch.ops.aten._cudnn_rnn_backward.default)


def recurrent_kernels(library: torch.library.Library) -> None:
    """Let ``library`` run the layers of fake models as one call of cuDNN; others run as ever."""
    for name in _MODES:
        library.impl(f"{name}.input", _run_by_cudnn(name), "AutogradCPU")  # type: ignore[no-untyped-call]


def _run_by_cudnn(name: str) -> Callable[..., Any]:
    operator, mode = getattr(torch.ops.aten, name).input, _MODES[name]

    def run(input: torch.Tensor, states: Any, weights: Sequence[torch.Tensor], *settings: Any) -> Any:
        """``settings``: has_biases, num_layers, dropout, train, bidirectional, batch_first."""
        if not isinstance(input, FakeTensor) or not input.is_floating_point() or input.numel() == 0:
            composite = torch._C.DispatchKey.CompositeImplicitAutograd
            return operator._op_dk(composite, input, states, weights, *settings)
        _, num_layers, dropout, train, bidirectional, batch_first = settings
        has_cell = name == "lstm"
        hidden, cell = (states[0], states[1]) if has_cell else (states, None)
        compact: torch.Tensor | None = None
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            input, hidden = input.to(dtype), hidden.to(dtype)
            cell = None if cell is None else cell.to(dtype)
            weights, compact = [weight.to(dtype) for weight in weights], input.new_empty(0)
        hidden_size = weights[1].shape[0] // _GATES[mode]
        projected = hidden.shape[-1] if hidden.shape[-1] != hidden_size else 0
        stride = len(weights) // (num_layers * (2 if bidirectional else 1))
        given = (mode, hidden_size, projected, num_layers, batch_first, dropout, train, bidirectional, (), None)
        results = torch.ops.aten._cudnn_rnn(input, list(weights), stride, compact, hidden, cell, *given)
        return results[: 3 if has_cell else 2]

    return run


def answered(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What one of ``CUDNN`` makes."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    return _forward(named) if func is CUDNN[0] else _backward(named)


def _forward(named: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The result, the last states, the reserve and the weights in one buffer."""
    input, compact, cell = named["input"], named["weight_buf"], named["cx"]
    directions, batch_first = 2 if named["bidirectional"] else 1, named["batch_first"]
    length, samples = (input.shape[1], input.shape[0]) if batch_first else input.shape[:2]
    width = directions * (named["proj_size"] or named["hidden_size"])
    result = input.new_empty(length, samples, width)
    of_layer = directions * _KEPT[named["mode"]] * named["hidden_size"]
    kept = length * samples * (named["num_layers"] * of_layer + (named["num_layers"] - 1) * width)
    if compact is None:
        compact = input.new_empty(sum(weight.numel() for weight in named["weight"]))
    return (
        result.transpose(0, 1) if batch_first else result,
        torch.empty_like(named["hx"]),
        input.new_empty(0) if cell is None else torch.empty_like(cell),
        input.new_empty(kept * input.element_size() if named["train"] else 0, dtype=torch.uint8),
        compact,
    )


def _backward(named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Gradients of the input, of the states and of the weights, the latter in one buffer."""
    input, hidden, cell = named["input"], named["hx"], named["cx"]
    of_input, of_hidden, of_cell, of_weights = named["output_mask"]
    asked = named["weight"] if of_weights else []
    sizes = [weight.numel() for weight in asked]
    parts = torch.split(input.new_empty(sum(sizes)), sizes) if asked else ()
    return (
        torch.empty_like(input, memory_format=torch.contiguous_format) if of_input else None,
        torch.empty_like(hidden) if of_hidden else None,
        torch.empty_like(cell) if of_cell and cell is not None else None,
        [part.view(weight.shape) for part, weight in zip(parts, asked, strict=True)],
    )


def recurrent_flops(name: str, named: Mapping[str, Any]) -> int:
    """Floating-point operations of the products of one of ``RECURRENT``: twice as many backward."""
    steps = prod(int(size) for size in named["input"].shape[:2])
    per_step = sum(int(weight.numel()) for weight in _weights(named) if weight.dim() == 2)
    return 2 * steps * per_step * (2 if name.endswith("_backward") else 1)


def recurrent_shape(named: Mapping[str, Any]) -> tuple[int, ...]:
    """(layers and directions, steps, samples, gates, state) of the products that come one after the other."""
    weights = _weights(named)
    number = len(weights) // int(named["weight_stride0"]) if "weight" in named else 1
    *_, samples, state = (named["hx"] if "weight" in named else named["hx_"]).shape
    return (number, prod(named["input"].shape[:2]) // samples, samples, weights[1].shape[0], state)


def _weights(named: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    """Of all layers, as cuDNN is given them, or of the one that oneDNN is given by itself."""
    if "weight" in named:
        found: Sequence[torch.Tensor] = named["weight"]
        return found
    return [named[f"weight{number}"] for number in ((0, 1) if "weight0" in named else (1, 2))]
