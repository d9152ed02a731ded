"""Blocks as torch's own compiler fuses them: its kernels and what it saves, counted where it would write code."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

_TINY = 512
"""Bytes of a kernel that copies rows' sums to another type."""


@dataclass
class Counted:
    """One direction of a graph."""

    kernel_bytes: list[int] = field(default_factory=list)
    """Of every kernel that the compiler would write."""
    num_apart: int = 0
    """Products and attention."""


@dataclass
class Graphs:
    """A block's."""

    forward: Counted = field(default_factory=Counted)
    backward: Counted = field(default_factory=Counted)
    saved_bytes: int = 0
    """Of the storages that hold what forward makes for backward: views keep all of theirs."""


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """Within the block, what torch.compile compiles is counted, and runs as it is."""
    from torch._inductor import config, scheduler
    from torch._inductor.graph import GraphLowering

    found = Graphs()

    def counted(graph: Any) -> types.SimpleNamespace:
        graph.init_wrapper_code()
        graph._update_scheduler()
        of = found.backward if graph.is_backward else found.forward
        for node in graph.scheduler.nodes:
            size = node.get_read_write_buffers_sizes()
            if isinstance(node, scheduler.ExternKernelSchedulerNode):
                of.num_apart += size > 0
            elif size > _TINY and not isinstance(node, scheduler.NopKernelSchedulerNode):
                of.kernel_bytes.append(size)
        module = graph.orig_gm

        def call(args: list[Any]) -> Any:
            given = list(args)
            args.clear()
            made = torch.fx.Interpreter(module).run(*given)
            if not graph.is_backward:
                before = {_place(value) for value in given if isinstance(value, torch.Tensor)}
                saved = [value for value in made[1:] if isinstance(value, torch.Tensor)]
                held = {_place(value): value.untyped_storage().nbytes() for value in saved}
                found.saved_bytes = sum(size for place, size in held.items() if place not in before)
            return made

        return types.SimpleNamespace(call=call, runner=None, __file__="")

    monkeypatch.setattr(GraphLowering, "compile_to_module", counted)
    torch._dynamo.reset()
    # On a GPU halves are joined where they are read, which the CPU does where it is told to.
    with warnings.catch_warnings(), config.patch(force_disable_caches=True, force_pointwise_cat=True):
        warnings.simplefilter("ignore")  # of the compiler's own
        yield found
    torch._dynamo.reset()


def _place(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def count_block(block: nn.Module, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """What forward and backward of ``block`` are as compiled."""
    hidden = inputs.pop("hidden_states")
    with counting(monkeypatch) as found:
        out = torch.compile(block, fullgraph=True)(hidden, **inputs)
        made = out[0] if isinstance(out, tuple) else out
        made.backward(torch.randn_like(made))
    return found
