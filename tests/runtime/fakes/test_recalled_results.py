"""Results that are recalled are as torch's fake mode makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from protwin.runtime.fakes.recalled_results import RecalledResults
from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.schema.training_options import LoraOptions, TrainingOptions
from tests.runtime.tiles.small_families import SMALL

aten: Any = torch.ops.aten
KINDS: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"model_type": "llama"},
    "mamba2": SMALL | {"model_type": "mamba2", "num_heads": 8, "n_groups": 2, "chunk_size": 8},
    "deepseek_v3": SMALL | {"model_type": "deepseek_v3", "kv_lora_rank": 8, "first_k_dense_replace": 1},
    "t5": SMALL | {"model_type": "t5", "decoder_start_token_id": 0, "dropout_rate": 0.1},
    "gpt2": SMALL | {"model_type": "gpt2", "attn_pdrop": 0.1, "resid_pdrop": 0.1},
}


def facts(tensor: torch.Tensor | None, given: list[FakeTensor]) -> Any:
    """All that somebody may see of a tensor without values."""
    if tensor is None:
        return None
    assert isinstance(tensor, FakeTensor)
    storage = tensor.untyped_storage()
    return (
        (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, tensor.layout),
        [(one is tensor, one.untyped_storage()._cdata == storage._cdata) for one in given],
        (storage.nbytes(), tensor.requires_grad, tensor.is_leaf, tensor.is_inference(), tensor.constant is None),
        torch._C._dispatch_key_set(tensor),
    )


def fakes_in(values: Any) -> list[FakeTensor]:
    found: list[FakeTensor] = []
    for value in values:
        found += fakes_in(value) if isinstance(value, (list, tuple)) else [value] * isinstance(value, FakeTensor)
    return found


class Compared(RecalledResults):
    """Asks torch too, whatever is recalled."""

    num_asked = num_made = 0

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        type(self).num_asked += 1
        if operator._schema.is_mutable:
            return super().run(operator, args, kwargs)
        expected, found = operator(*args, **kwargs), super().run(operator, args, kwargs)
        given = fakes_in((*args, *kwargs.values()))
        assert isinstance(found, tuple) == isinstance(expected, tuple), operator
        pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        for one, other in pairs:
            if other is None or isinstance(other, FakeTensor):
                assert facts(one, given) == facts(other, given), operator
        return found

    def _made(self, *given: Any) -> FakeTensor:
        type(self).num_made += 1
        return super()._made(*given)


@pytest.mark.parametrize("kind", ["llama", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k != "llama")])
def test_all_of_a_trace_is_as_torch_makes_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = TrainingOptions(lora=LoraOptions(rank=2, dropout=0.1)) if kind == "llama" else TrainingOptions()

    def traced() -> Any:
        return workload_of_configuration(
            KINDS[kind] | {"num_hidden_layers": 1}, name=kind, batch_size=2, sequence_length=24, options=options
        )

    expected = traced()
    monkeypatch.setattr("protwin.runtime.fakes.running.RecalledResults", Compared)
    Compared.num_asked = Compared.num_made = 0
    assert traced() == expected
    assert Compared.num_made > Compared.num_asked / 2, "most of what is asked is recalled"
    monkeypatch.setattr(Compared, "run", lambda _, operator, args, kwargs: operator(*args, **kwargs))
    assert traced() == expected


CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.mul.Tensor, (2,)),
    (aten.mul.Tensor, (2.0,)),
    (aten.mul.Tensor, (True,)),
    (aten.div.Tensor, (2,)),
    (aten.view.default, ([-1],)),
    (aten._unsafe_view.default, ([-1],)),
    (aten.transpose.int, (0, 1)),
    (aten.slice.Tensor, (0, 1, 3)),
    (aten.select.int, (0, 1)),
    (aten.expand.default, ([2, -1, -1],)),
    (aten.as_strided.default, ([2], [1], 1)),
    (aten.unsqueeze.default, (0,)),
    (aten.detach.default, ()),
    (aten.alias.default, ()),
    (aten.lift_fresh.default, ()),
    (aten.clone.default, ()),
    (aten._to_copy.default, ()),
    (aten.sum.dim_IntList, ([0],)),
    (aten.sum.default, ()),
    (aten.topk.default, (1,)),
    (aten.var_mean.correction, ()),
    (aten.split.Tensor, (1,)),
    (aten.empty_like.default, ()),
    (aten._softmax.default, (0, False)),
    (aten.unique_consecutive.default, ()),
    (aten.nonzero.default, ()),
    (aten.add_.Tensor, (1,)),
]


def test_results_lie_as_those_of_torch() -> None:
    """Of tensors that lie in many ways, first, and again, and where something else decides."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recalled = Compared(mode)
    Compared.num_made = 0
    with mode:
        whole, integers = torch.empty(4, 6), torch.empty(4, 6, dtype=torch.long)
        tensors = [
            *(
                whole,
                whole.t(),
                whole[1:, ::2],
                whole[:3, ::2],
                whole[:1].expand(4, 6),
                torch.empty(4, 2),
                torch.empty(()),
            ),
            *(integers, torch.empty(4, 6, dtype=torch.bfloat16), torch.tensor(3)),
            torch.empty(4, 6, dtype=torch.complex64).conj(),
        ]
        outcomes = [_ran(recalled, call, tensor, args) for _ in range(2) for tensor in tensors for call, args in CALLS]
        assert {"made", "refused"} == set(outcomes)
        assert outcomes.count("made") > len(outcomes) / 2
        assert Compared.num_made > len(outcomes) / 2
        torch.set_default_dtype(torch.float64)
        try:
            halved = recalled.run(aten.div.Tensor, (integers, 2), {})
        finally:
            torch.set_default_dtype(torch.float32)
        assert halved.dtype is torch.float64
        more = recalled.run(aten.add.Tensor, (torch.tensor(3), 1), {})
    assert int(more) == 4, "what is known of values stays known"


def _ran(recalled: RecalledResults, operator: Any, tensor: torch.Tensor, args: tuple[Any, ...]) -> str:
    """What became of a call; where torch refuses it, so is it recalled."""
    try:
        recalled.run(operator, (tensor, *args), {})
    except (RuntimeError, IndexError, ValueError, NotImplementedError):
        return "refused"
    return "made"
