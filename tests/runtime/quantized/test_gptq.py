"""Bases in the layout of GPTQ: values by a plain loop, operations by a counter of dispatches, trainings bit for bit."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from protwin.runtime import add_lora, load_quantized, make_orthogonal, parameters_on_meta, quantize, trace
from protwin.runtime.quantized.gptq import GptqLinear
from protwin.shared.basics.errors import FileError, WorkloadError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.phases.quantization import Quantization, QuantizedType
from protwin.shared.schema.workload import Operation
from tests.proof_size import some_quick
from tests.runtime.accounts import BAR, MIXTURES, error_frac, measured_peak_bytes, plan_of
from tests.runtime.eager_lanes import eager_peak
from tests.runtime.equality import random_plans
from tests.runtime.models import Case, llama, token_batches
from tests.runtime.quantized.models import adapted
from tests.runtime.quantized.test_training import check
from tests.runtime.resuming import check_resumption, mixed, offloaded

SHAPE = {"hidden_size": 64, "intermediate_size": 96}
BITS = {"gptq": 4, "gptq-8bit": 8}


def packed_llama(to: str = "gptq", *, blocksize: int = 32, **changes: Any) -> nn.Module:
    model = llama(num_layers=3, **(SHAPE | changes))
    quantize(model, to, blocksize=blocksize)
    return model


def with_own_lora(model: nn.Module, **options: Any) -> nn.Module:
    torch.manual_seed(2)
    add_lora(model, rank=2, **options)
    return model


@lru_cache
def cases() -> dict[str, Case]:
    tokens = token_batches()
    return {
        "gptq": Case(lambda: with_own_lora(packed_llama()), tokens),
        "gptq-8bit, with biases": Case(
            lambda: with_own_lora(packed_llama("gptq-8bit", attention_bias=True), targets=["q_proj", "down_proj"]),
            tokens,
        ),
        "gptq in bfloat16, adapters of PEFT": Case(
            lambda: adapted(packed_llama().to(torch.bfloat16).requires_grad_(False)), tokens
        ),
    }


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", BITS)
@pytest.mark.parametrize("seed", range(3))
def test_values_are_what_a_plain_loop_reads_off_the_words(to: str, seed: int) -> None:
    """Value by value, as the layout is described: code ``i`` of a word in its bits from ``i`` times their number on."""
    draw = random.Random(seed)
    group = draw.choice([32, 64])
    num_in, num_out = group * draw.randrange(1, 4), 32 * draw.randrange(1, 3)
    torch.manual_seed(seed)
    linear = nn.Linear(num_in, num_out, bias=False)
    made = GptqLinear.of(linear, Quantization(type=QuantizedType(to), blocksize=group), linear.weight.detach())
    bits = BITS[to]
    per_word = 32 // bits

    def code(words: torch.Tensor, row: int, column: int) -> int:
        return (int(words[row // per_word, column]) >> (bits * (row % per_word))) % 2**bits

    unpacked, scales, dense = made.unpacked(), made.scales, linear.weight.detach()
    for row in range(num_in):
        for column in range(num_out):
            scale = float(scales[row // group, column])
            zero = code(made.qzeros.t(), column, row // group) + 1
            assert float(unpacked[row, column]) == pytest.approx(scale * (code(made.qweight, row, column) - zero))
            # Rounded to the nearest value there is.
            assert abs(float(unpacked[row, column]) - float(dense[column, row])) <= 0.5001 * scale
    x = torch.randn(3, 2, num_in)
    assert torch.equal(made(x), (x.reshape(6, -1) @ unpacked).view(3, 2, -1))


def test_a_group_of_zeros_stays_zero() -> None:
    linear = nn.Linear(64, 32, bias=False)
    weight = linear.weight.detach().clone()
    weight[:, :32] = 0
    made = GptqLinear.of(linear, Quantization(type=QuantizedType.GPTQ, blocksize=32), weight)
    assert torch.equal(made.unpacked()[:32], torch.zeros(32, 32))


# -- operations ------------------------------------------------------------------------------------------------------


class Dispatches(TorchDispatchMode):
    """Every operation with the bytes of storages that it reads and makes, counted here."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            given = [t for t in args if isinstance(t, torch.Tensor)]
            # An expanded tensor is no more than what lies in memory.
            read = sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in given)
            self.found.append((func._schema.name.removeprefix("aten::"), read + made.numel() * made.element_size()))
        return made


def counted(run: Any) -> list[tuple[str, int]]:
    with Dispatches() as seen, torch.no_grad():
        run()
    return seen.found


CHAIN = ["bitwise_right_shift", "_to_copy", "bitwise_and_", "sub", "mul"]
"""What AutoGPTQ's layer runs on a weight, in order (``qlinear_cuda_old.py``, branch without kernels)."""


@pytest.mark.parametrize(("to", "narrow"), [("gptq", 1), ("gptq-8bit", 2)])
@pytest.mark.parametrize("group", [32, 128])
def test_unpacking_moves_the_bytes_of_the_chain(to: str, narrow: int, group: int) -> None:
    """By hand: a shift reads packed bits and writes 4 bytes, a cast reads these, and so on; in float16."""
    num_in, num_out = 256, 96
    linear = nn.Linear(num_in, num_out, bias=False).half()
    made = GptqLinear.of(linear, Quantization(type=QuantizedType(to), blocksize=group), linear.weight.detach())
    found = counted(made.unpacked)
    on_weight = [(name, size) for name, size in found if size > 2 * num_in * num_out * narrow - 1]
    assert [name for name, _ in on_weight] == CHAIN
    count, packed, zeros = num_in * num_out, BITS[to] / 8, num_in * num_out / group
    shifts = 4 * 32 // BITS[to]
    by_hand = [
        (packed + 4) * count + shifts,
        (4 + narrow) * count,
        2 * narrow * count,
        2 * narrow * count + narrow * zeros,
        (narrow + 2) * count + 2 * zeros,
    ]
    assert [size for _, size in on_weight] == by_hand
    # Besides what groups share.
    assert sum(size for _, size in on_weight) / count == pytest.approx({4: 16.5, 8: 23.0}[BITS[to]], rel=0.01)


def test_a_trace_counts_what_is_dispatched() -> None:
    """Of all maps of a block together, operation by operation; a chain that unpacks in float32 is another one."""
    case = cases()["gptq"]
    block = case.build().model.layers[1]
    maps = [module for module in block.modules() if isinstance(module, GptqLinear)]
    assert len(maps) == 7
    dispatched = sorted(one for module in maps for one in counted(module.unpacked))

    def of_chain(operations: tuple[Operation, ...]) -> list[tuple[str, int]]:
        few = ("int8", "int32")
        chain = [op for op in operations if op.dtype in few or (op.name == "mul" and op.bytes_moved < 8 * op.flops)]
        return sorted((op.name, op.bytes_moved) for op in chain for _ in range(op.count))

    profile = case.workload.profiles[1]
    assert of_chain(profile.forward.operations) == dispatched
    assert of_chain(profile.recompute.operations) == dispatched
    assert of_chain(profile.checkpoint_backward.operations) == []

    def in_float(module: GptqLinear) -> list[tuple[str, int]]:
        return counted(lambda: module.scales.unsqueeze(1) * module.unpacked().reshape(-1, 32, module.out_features))

    assert sorted(one for module in maps for one in in_float(module)) != dispatched


def test_the_unpacked_weight_is_saved_for_backward_as_autograd_does_it() -> None:
    """A block that keeps its activations keeps its weights in 32 bits; nothing else differs from an unpacked one."""
    packed = cases()["gptq"].workload
    plain = trace(with_own_lora(llama(num_layers=3, **SHAPE)), token_batches(1)[0], repeats=0)
    weights_bytes = 4 * sum(p.scalars for p in packed.parameters if p.block == 1 and p.quantized is not None)
    one, other = packed.profiles[1], plain.profiles[1]
    assert one.forward.net_bytes == other.forward.net_bytes + weights_bytes
    assert one.checkpoint_forward.net_bytes == other.checkpoint_forward.net_bytes
    # Whole numbers of 32 bits and the narrow ones made of them lie there at once.
    largest = 64 * 96
    assert one.checkpoint_forward.peak_bytes >= 5 * largest


@pytest.mark.slow
@pytest.mark.parametrize("to", BITS)
def test_sizes_at_rest_are_those_of_the_layout(to: str) -> None:
    """Bits of weights; for each group 16 bits of a scale and those of a zero; 4 bytes for each input."""
    workload = trace(with_own_lora(packed_llama(to).half()), token_batches(1)[0], repeats=0)
    own = [p for p in workload.parameters if p.block == 0 and ".base." in p.name and not p.name.endswith("shifts")]
    maps = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)]
    bits = BITS[to]
    expected = sum(m * n * bits // 8 + m * n // 32 * 2 + m * n // 32 * bits // 8 + 4 * m for m, n in maps)
    assert sum(p.size_bytes for p in own) == expected
    assert sum(p.scalars for p in own) == sum(m * n for m, n in maps)
    assert {p.quantized.words for p in own if p.quantized is not None} == {f"{to} in groups of 32"}


@pytest.mark.slow
def test_what_stays_on_the_meta_device_has_the_sizes_of_what_does_not() -> None:
    batch = token_batches(1)[0]
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = with_own_lora(packed_llama())
        found.append(trace(model, batch, repeats=0))
    assert found[0].parameters == found[1].parameters
    assert found[0].model_hash == found[1].model_hash
    assert found[0].profiles == found[1].profiles


# -- trainings -------------------------------------------------------------------------------------------------------


@some_quick(
    ("name", "mixture"),
    product(list(cases()), ["kept", "checkpointed", "mixed"]),
    quick=[("gptq", "mixed"), ("gptq in bfloat16, adapters of PEFT", "kept")],
)
def test_an_offloaded_base_trains_adapters_to_the_bits_of_the_resident_one(name: str, mixture: str) -> None:
    case = cases()[name]
    check(case, plan_of(case, mixture, "offloaded"))


@some_quick(("name", "seed"), [(name, seed) for name in cases() for seed in range(4)], quick=1)
def test_random_plans_equal_the_plain_loop(name: str, seed: int) -> None:
    case = cases()[name]
    for plan in random_plans(case.workload, 2, seed=seed):
        check(case, plan)


@some_quick(
    ("name", "mixture", "residency"),
    product(list(cases()), MIXTURES, ["persistent", "offloaded", "mixed"]),
    quick=[("gptq", "mixed", "offloaded")],
)
def test_the_peak_is_the_account(name: str, mixture: str, residency: str) -> None:
    case = cases()[name]
    plan = plan_of(case, mixture, residency)
    accounted = eager_peak(compile_schedule(plan, case.workload))
    assert error_frac(measured_peak_bytes(case, plan), accounted) == pytest.approx(0, abs=BAR)


def test_a_training_resumes_under_another_plan(tmp_path: Path) -> None:
    case = cases()["gptq"]
    check_resumption(case, offloaded(case.workload), mixed(case.workload), tmp_path)


# -- files -----------------------------------------------------------------------------------------------------------


def saved_as_autogptq(model: nn.Module, folder: Path, **changes: torch.Tensor) -> None:
    """What ``save_quantized`` writes: tensors by their names, without those of this package."""
    tensors = {name: value for name, value in model.state_dict().items() if not name.endswith("shifts")}
    save_file(
        {name: value.contiguous().clone() for name, value in (tensors | changes).items()}, folder / "model.safetensors"
    )


def on_meta(**changes: Any) -> nn.Module:
    with parameters_on_meta():
        return llama(num_layers=3, **(SHAPE | changes))


def test_files_that_are_packed_are_taken_as_they_are(tmp_path: Path) -> None:
    packed = packed_llama()
    saved_as_autogptq(packed, tmp_path)
    model = on_meta()
    paths = load_quantized(model, tmp_path, "gptq", blocksize=32)
    assert len(paths) == 21
    mine, theirs = model.state_dict(), packed.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    batch = token_batches(1)[0]
    assert torch.equal(model(**batch).loss, packed(**batch).loss)


def test_a_bias_that_only_the_files_have_is_added(tmp_path: Path) -> None:
    """AutoGPTQ gives every map one."""
    packed = packed_llama()
    name = "model.layers.0.mlp.up_proj.bias"
    saved_as_autogptq(packed, tmp_path, **{name: torch.arange(96.0)})
    model = on_meta()
    load_quantized(model, tmp_path, "gptq", blocksize=32)
    module = model.get_submodule("model.layers.0.mlp.up_proj")
    assert torch.equal(module.bias, torch.arange(96.0))
    x = torch.randn(2, 64)
    assert torch.equal(module(x), packed.get_submodule("model.layers.0.mlp.up_proj")(x) + torch.arange(96.0))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"blocksize": 64}, "qzeros is .2, 8. in them and .1, 8. in the model"),
        ({"to": "gptq-8bit", "blocksize": 32}, "in them and"),
    ],
)
def test_files_that_are_packed_otherwise_are_refused_with_nothing_filled(
    tmp_path: Path, wrong: dict[str, Any], words: str
) -> None:
    saved_as_autogptq(packed_llama(intermediate_size=128), tmp_path)
    model = on_meta(intermediate_size=128)
    with pytest.raises((FileError, WorkloadError), match=words):
        load_quantized(model, tmp_path, **({"to": "gptq"} | wrong))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(isinstance(module, GptqLinear) for module in model.modules())


def test_files_packed_by_the_order_of_activations_or_in_another_format_are_refused(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.g_idx"
    saved_as_autogptq(packed_llama(), tmp_path, **{name: torch.arange(64, dtype=torch.int32) % 2})
    model = on_meta()
    with pytest.raises(FileError, match="desc_act"):
        load_quantized(model, tmp_path, "gptq", blocksize=32)
    assert not any(isinstance(module, GptqLinear) for module in model.modules())
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"checkpoint_format": "gptq_v2"}}))
    with pytest.raises(FileError, match="gptq_v2"):
        load_quantized(model, tmp_path, "gptq", blocksize=32)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"to": "gptq"}, "q_proj cannot be packed to gptq: it has 64 inputs, which is no multiple of 128"),
        ({"to": "gptq", "blocksize": 64}, "down_proj cannot be packed.*it has 96 inputs"),
        ({"to": "gptq", "blocksize": 48}, "gptq takes groups of 32, 64"),
        ({"to": "gptq", "blocksize": 32, "double": True}, "no double quantization"),
        ({"to": "gptq", "blocksize": 32, "compute_dtype": torch.float16}, "computes in that of the weight"),
        ({"to": "gptq4"}, "gptq"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, Any], words: str) -> None:
    model = llama(num_layers=1, **SHAPE)
    with pytest.raises(WorkloadError, match=words):
        quantize(model, **asked)
    assert not any(isinstance(module, GptqLinear) for module in model.modules())


def test_outputs_that_fill_no_words_are_refused() -> None:
    model = llama(num_layers=1, hidden_size=64, intermediate_size=80)
    with pytest.raises(WorkloadError, match="80 outputs, which is no multiple of 32"):
        quantize(model, "gptq", blocksize=32, skip=["down_proj"])


def test_methods_that_train_weights_refuse_packed_ones_by_name() -> None:
    model = packed_llama()
    with pytest.raises(WorkloadError, match="q_proj is quantized to gptq in groups of 32, but orthogonal"):
        make_orthogonal(model, unfreeze_rank_ratio=0.5)
    with pytest.raises(WorkloadError, match="already"):
        quantize(model, "gptq", blocksize=32)
    with pytest.raises(WorkloadError, match="is packed into few bits, and DoRA"):
        add_lora(model, rank=2, use_dora=True)
    with_own_lora(model)
    model.model.layers[0].mlp.up_proj.base.scales.requires_grad_(True)
    with pytest.raises(WorkloadError, match=r"up_proj\.base\.scales belongs to a weight packed as gptq"):
        trace(model, token_batches(1)[0], repeats=0)
