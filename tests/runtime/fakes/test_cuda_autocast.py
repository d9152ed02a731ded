"""Autocast of fake tensors that stand for CUDA's: the same casts as torch's own rules for CUDA make."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from protwin.runtime import trace
from protwin.runtime.fakes import cuda_autocast as rules
from protwin.runtime.fakes.cuda_autocast import cuda_autocast
from protwin.runtime.model.nested_tensors import tensors_in
from protwin.runtime.tracing import facts
from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.plan import ActivationMode
from protwin.shared.schema.training_options import TrainingOptions
from protwin.shared.schema.workload import DType
from tests.runtime.models import hand_written

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
"""Of a square float32 matrix, a narrow one, and a vector of whole numbers."""


def row(matrix: torch.Tensor) -> torch.Tensor:
    """A vector of the matrix's type, without a view, which needs the device."""
    return torch.empty(4, dtype=matrix.dtype, device=matrix.device)


CALLS: dict[str, Call] = {
    "linear": lambda wide, narrow, _: functional.linear(wide, narrow),
    "matmul": lambda wide, narrow, _: wide @ narrow,
    "mv": lambda wide, narrow, _: torch.mv(wide, row(narrow)),
    "addr": lambda wide, narrow, _: torch.addr(wide, row(narrow), row(wide)),
    "einsum": lambda wide, narrow, _: torch.einsum("ij,jk->ik", wide, narrow),
    "conv1d": lambda wide, narrow, _: functional.conv1d(wide.unsqueeze(0), narrow.unsqueeze(2)),
    "prelu": lambda wide, narrow, _: functional.prelu(wide, row(narrow)),
    "softmax": lambda _, narrow, __: narrow.softmax(-1),
    "softmax, named type": lambda _, narrow, __: narrow.softmax(-1, dtype=torch.float64),
    "log_softmax": lambda _, narrow, __: functional.log_softmax(narrow, -1),
    "layer_norm": lambda wide, narrow, _: functional.layer_norm(narrow, (4,), row(wide), row(wide)),
    "rms_norm": lambda wide, narrow, _: functional.rms_norm(narrow, (4,), row(wide)),
    "group_norm": lambda _, narrow, __: functional.group_norm(narrow, 2),
    "sum": lambda _, narrow, __: narrow.sum(),
    "sum over a dim": lambda _, narrow, __: narrow.sum(-1),
    "sum of whole numbers": lambda _, __, whole: whole.sum(),
    "cumsum": lambda _, narrow, __: narrow.cumsum(0),
    "norm": lambda _, narrow, __: torch.ops.aten.norm(narrow, 2),
    "norm over a dim": lambda _, narrow, __: torch.ops.aten.norm(narrow, 2, [0]),
    "norm over a dim, kept": lambda _, narrow, __: torch.ops.aten.norm(narrow, 2, [0], True),
    "vector norm": lambda _, narrow, __: torch.linalg.vector_norm(narrow),
    "pow": lambda _, narrow, __: narrow**2,
    "exp": lambda _, narrow, __: narrow.exp(),
    "rsqrt": lambda _, narrow, __: narrow.rsqrt(),
    "softplus": lambda _, narrow, __: functional.softplus(narrow),
    "gelu": lambda _, narrow, __: functional.gelu(narrow),
    "mean": lambda _, narrow, __: narrow.mean(),
    "sigmoid": lambda _, narrow, __: narrow.sigmoid(),
    "cross entropy": lambda _, narrow, whole: functional.cross_entropy(narrow, whole),
    "mse_loss": lambda wide, narrow, _: functional.mse_loss(narrow, wide),
    "average pool": lambda _, narrow, __: functional.avg_pool3d(narrow.view(1, 4, 4, 1), 1),
    "cat": lambda wide, narrow, _: torch.cat([wide, narrow]),
    "stack of equals": lambda _, narrow, __: torch.stack([narrow, narrow]),
    "addcmul": lambda wide, narrow, _: torch.addcmul(narrow, wide, narrow),
    "dot of equals": lambda _, narrow, __: torch.dot(row(narrow), row(narrow)),
    "index_put": lambda wide, narrow, whole: wide.index_put((whole,), narrow),
    "scatter_add": lambda wide, narrow, whole: row(wide).scatter_add(0, whole, row(narrow)),
}


@contextmanager
def torchs_own(dtype: torch.dtype) -> Iterator[None]:
    """CUDA's autocast, which torch.autocast() denies to a machine without CUDA."""
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


@contextmanager
def ours(dtype: torch.dtype) -> Iterator[None]:
    with cuda_autocast(), torch.autocast("cpu", dtype=dtype):
        yield


def dtypes(call: Call, device: str, context: AbstractContextManager[None], dtype: torch.dtype) -> list[torch.dtype]:
    """What a call gives on fake tensors of a device."""
    with FakeTensorMode(), torch.no_grad():
        wide = torch.empty(4, 4, device=device)
        narrow = torch.empty(4, 4, device=device, dtype=dtype)
        whole = torch.empty(4, device=device, dtype=torch.long)
        with context:
            return [tensor.dtype for tensor in tensors_in(call(wide, narrow, whole))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_operation_gives_the_type_that_it_gives_on_cuda(dtype: torch.dtype) -> None:
    expected = {name: dtypes(call, "cuda", torchs_own(dtype), dtype) for name, call in CALLS.items()}
    assert {name: dtypes(call, "cpu", ours(dtype), dtype) for name, call in CALLS.items()} == expected
    for name in ("softmax", "layer_norm", "sum", "average pool", "pow"):  # the wrong variant: the CPU's list
        assert dtypes(CALLS[name], "cpu", torch.autocast("cpu", dtype=dtype), dtype) != expected[name]


def test_the_lists_are_those_of_this_torch() -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    named = {name.removeprefix("aten::") for name in registered if "cudnn" not in name}
    lists = (rules.NARROW, rules.FLOAT32, rules.FLOAT32_RESULT, tuple(rules.NORMS), rules.WIDEST, rules.REFUSED)
    listed = [name for names in lists for name in names]
    assert sorted(listed) == sorted(named)


def test_the_cpus_rules_come_back() -> None:
    narrow = torch.ones(4, 4, dtype=torch.bfloat16)
    with ours(torch.bfloat16):
        assert narrow.softmax(-1).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert narrow.softmax(-1).dtype == torch.bfloat16
        assert functional.avg_pool3d(narrow[None, None], 1).dtype == torch.float32


def test_weights_are_cast_once_as_long_as_autocast_lasts() -> None:
    """A cell of a recurrent network, whose rule only CUDA has; gradients come to the weights all the same."""
    cell, hidden = nn.GRUCell(4, 4), torch.ones(2, 4)
    with ours(torch.bfloat16):
        first, second = cell(hidden, hidden), cell(hidden, hidden)

        def casts(result: torch.Tensor) -> set[Any]:
            waiting, found = [result.grad_fn], set()
            while waiting:
                node = waiting.pop()
                if node is not None:
                    found |= {node} if any("AccumulateGrad" in str(n) for n, _ in node.next_functions) else set()
                    waiting += [n for n, _ in node.next_functions]
            return found

        assert casts(first) == casts(second)
        torch.clear_autocast_cache()
        assert not casts(first) & casts(cell(hidden, hidden))
    (first + second).sum().backward()
    assert all(parameter.grad is not None for parameter in cell.parameters())


def test_a_model_for_cuda_is_traced_by_cudas_lists() -> None:
    with torch.device("meta"):
        model, points = hand_written(), torch.empty(6, 5)

    def norms(kind: DeviceKind, context: AbstractContextManager[Any]) -> set[DType]:
        with context:
            traced = trace(model, points, loss=lambda output, _: output.sum(), repeats=0, device_kind=kind)
        forward = traced.profile_of(1).forward
        assert any(op.name == "addmm" and op.dtype is DType.BFLOAT16 for op in forward.operations)
        return {op.dtype for op in forward.operations if op.name == "native_layer_norm"}

    assert norms(DeviceKind.CUDA, torch.autocast("cpu", dtype=torch.bfloat16)) == {DType.FLOAT32}
    assert norms(DeviceKind.CUDA, torchs_own(torch.bfloat16)) == {DType.FLOAT32}

    def narrowed(module: nn.Module, args: Any) -> Any:
        return (args[0].to(torch.bfloat16),)

    for layer in model.stack:
        layer.norm.register_forward_pre_hook(narrowed)
    assert norms(DeviceKind.CUDA, torch.autocast("cpu", dtype=torch.bfloat16)) == {DType.FLOAT32}
    assert norms(DeviceKind.CPU, torch.autocast("cpu", dtype=torch.bfloat16)) == {DType.BFLOAT16}


def test_what_cuda_refuses_is_refused() -> None:
    half = torch.full((4,), 0.5)
    with ours(torch.float16), pytest.raises(WorkloadError, match="binary_cross_entropy_with_logits"):
        functional.binary_cross_entropy(half, half)


def test_a_checkpointed_block_leaves_what_a_kept_one_does_in_whatever_order_casts_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients alone: were a cast freed nowhere, every block that is like this one would leak it in every step."""
    config = {"model_type": "bert", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}
    config |= {"num_attention_heads": 2, "vocab_size": 60, "architectures": ["BertForSequenceClassification"]}
    given: dict[str, Any] = {"name": "bert", "batch_size": 2, "sequence_length": 24, "dtype": "float32"}
    options = TrainingOptions(autocast=DType.FLOAT16)
    own = facts._casts_until_backward
    found = []
    for chance in map(random.Random, range(4)):

        def in_another_order(seen: Any, held: Any, chance: random.Random = chance) -> Any:
            outlived = seen[ActivationMode.CHECKPOINT].outlived_bytes
            items = list(outlived.items())
            chance.shuffle(items)
            outlived.clear()
            outlived.update(items)
            return own(seen, held)

        monkeypatch.setattr(facts, "_casts_until_backward", in_another_order)
        found.append(workload_of_configuration(config, options=options, **given))
    assert all(one.model_dump() == found[0].model_dump() for one in found)
    for block in range(1, 5):
        profile = found[0].profile_of(block)
        kept = profile.forward.net_bytes + profile.backward.net_bytes
        phases = (profile.checkpoint_forward, profile.recompute, profile.checkpoint_backward)
        # What the block's own backward frees where it is kept goes with the end of the model's forward otherwise.
        own = [shared for shared in found[0].shared_inputs if shared.made_by == block]
        until_end = sum(shared.size_bytes for shared in own if shared.freed_in_kept)
        assert until_end > 0
        assert sum(phase.net_bytes for phase in phases) == kept + until_end
