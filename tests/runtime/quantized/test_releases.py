"""Products of other releases of bitsandbytes: what a plain loop finds kept, bytes of casts by hand, and refusals."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, add_lora, carry_out, quantize, trace
from protwin.runtime.quantized.releases import mark
from protwin.shared.basics.errors import PlanError
from protwin.shared.phases.quantization import PackedProducts
from protwin.shared.schema.workload import DType, Workload
from tests.proof_size import some_quick
from tests.runtime.models import adamw, llama, token_batches
from tests.runtime.quantized.models import packed
from tests.runtime.resuming import kept as kept_plan

OLD = PackedProducts(release="0.41.1")
HALF = DType.FLOAT16
MAPS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@cache
def traced(
    products: PackedProducts | None,
    targets: tuple[str, ...],
    to: str = "nf4",
    *,
    hidden_size: int = 32,
    head: bool = False,
    num_rows: int = 24,
) -> Workload:
    """Of a Llama in bfloat16 on the meta device."""
    with torch.device("meta"):
        model = llama(num_layers=3, hidden_size=hidden_size).to(torch.bfloat16)
    quantize(model, to, head=head)
    if products is not None:
        mark(model, products)
    add_lora(model, rank=2, targets=targets)
    batch = {name: tensor.reshape(1, -1)[:, :num_rows] for name, tensor in token_batches(1)[0].items()}
    return trace(model, batch, repeats=0)


def unsaved_input_bytes(targets: tuple[str, ...]) -> list[int]:
    """Of what each block's maps read: what no node of autograd saves, by a plain loop over a model that is not packed.

    An input that needs no gradient has no product with a backward.
    """
    model = llama(num_layers=3).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    add_lora(model, rank=2, targets=targets)
    saved: set[int] = set()
    read: list[dict[int, int]] = []

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    alive = []
    for block in model.model.layers:
        found: dict[int, int] = {}
        read.append(found)

        def note(_: nn.Module, given: tuple[torch.Tensor, ...], found: dict[int, int] = found) -> None:
            (x,) = given
            alive.append(x)
            if x.requires_grad:
                found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()

        for module in block.modules():
            if type(module) is nn.Linear:
                module.register_forward_pre_hook(note)
    batch = {name: tensor.reshape(1, -1) for name, tensor in token_batches(1)[0].items()}
    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        model(**batch, use_cache=False)
    return [sum(size for place, size in found.items() if place not in saved) for found in read]


def net_bytes(workload: Workload, phase: str) -> list[int]:
    return [getattr(workload.profiles[block.profile], phase).net_bytes for block in workload.blocks]


@some_quick(("seed", "to"), [(seed, to) for seed in range(4) for to in ("nf4", "int8")], quick=[(0, "nf4")])
def test_inputs_that_nobody_else_saves_stay_until_backward(seed: int, to: str) -> None:
    rng = random.Random(seed)
    targets = ("q_proj", "v_proj") if seed == 0 else tuple(rng.sample(MAPS, rng.randint(1, 4)))
    before, now = traced(None, targets, to), traced(OLD, targets, to)
    more = [new - old for old, new in zip(net_bytes(before, "forward"), net_bytes(now, "forward"), strict=True)]
    assert more == unsaved_input_bytes(targets)
    assert any(more)
    back = [new - old for old, new in zip(net_bytes(before, "backward"), net_bytes(now, "backward"), strict=True)]
    assert back == [-size for size in more], "they go with their block's backward"


@pytest.mark.slow
def test_a_recomputed_block_has_its_inputs_before_its_backward_begins() -> None:
    """By hand: the unpacked weight of the last map, and the gradient of its input, lie there beside that input."""
    rows, inner = token_batches(1)[0]["input_ids"].numel(), 56
    first_bytes = 2 * 32 * inner + 2 * rows * inner
    for products, is_first in ((None, False), (OLD, True)):
        workload = traced(products, ("q_proj",))
        block = workload.profiles[workload.blocks[1].profile]
        levels = [level for _, level in block.checkpoint_backward.curve[:3]]
        assert (first_bytes in levels) is is_first


@pytest.mark.slow
def test_four_bits_keep_nothing_since_0_43_2() -> None:
    targets = ("q_proj", "v_proj")
    assert net_bytes(traced(PackedProducts(release="0.43.2"), targets), "forward") == net_bytes(
        traced(None, targets), "forward"
    )


@pytest.mark.slow
def test_weights_packed_from_another_type_are_cast_in_backward_and_before_0_50_in_forward() -> None:
    targets = ("q_proj", "v_proj", "down_proj")
    plain = traced(None, targets)
    now = traced(PackedProducts(release="0.50.2", packed_from=HALF), targets)
    then = traced(PackedProducts(release="0.49.0", packed_from=HALF), targets)
    same = traced(PackedProducts(release="0.49.0", packed_from=DType.BFLOAT16), targets)
    inner = plain.blocks[1].profile

    def names(workload: Workload, phase: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for operation in getattr(workload.profiles[inner], phase).operations:
            found[operation.name] = found.get(operation.name, 0) + operation.count
        return found

    casts_of = {
        (which, phase): names(workload, phase).get("_to_copy", 0) - names(plain, phase).get("_to_copy", 0)
        for which, workload in (("now", now), ("then", then), ("same", same))
        for phase in ("forward", "backward")
    }
    assert casts_of == {
        ("now", "forward"): 0,
        ("now", "backward"): 7,
        ("then", "forward"): 7,
        ("then", "backward"): 7,
        ("same", "forward"): 0,
        ("same", "backward"): 0,
    }
    assert net_bytes(then, "forward") == net_bytes(plain, "forward")


def test_both_copies_of_a_weight_are_there_until_the_cast_ends() -> None:
    """By hand: at a wide model's head, 2 + 2 bytes for each weight, beside what the head reads."""
    plain, then = (
        traced(products, ("q_proj",), hidden_size=512, num_rows=4, head=True)
        for products in (None, PackedProducts(release="0.41.1", packed_from=HALF))
    )
    num_scalars = next(p.num_elements for p in plain.parameters if p.name == "model.embed_tokens.weight")
    normed_bytes = 2 * 4 * 512
    assert plain.epilogue_forward.peak_bytes < 3 * num_scalars
    assert 0 <= then.epilogue_forward.peak_bytes - 4 * num_scalars <= 2 * normed_bytes
    assert then.epilogue_forward.net_bytes == plain.epilogue_forward.net_bytes + normed_bytes, "it keeps its input"


def test_products_of_other_releases_are_never_run() -> None:
    with torch.device("meta"):
        fake = llama(num_layers=2)
    real = llama(num_layers=2)
    for model in (fake, real):
        quantize(model)
    with pytest.raises(AssertionError, match="never run"):
        mark(real, OLD)
    mark(fake, OLD)
    for model in (fake, real):
        add_lora(model, rank=2)
    workload = trace(fake, token_batches(1)[0])
    with (
        pytest.raises(PlanError, match=r"products of bitsandbytes 0.41.1\), and its plans are not carried out here"),
        carry_out(real, kept_plan(workload), workload, optimizer=adamw, device=CpuDevice()),
    ):
        pass


# -- a packed head ---------------------------------------------------------------------------------------------------


def test_a_head_is_packed_as_bitsandbytes_packs_it() -> None:
    model, expected = (
        llama(num_layers=2),
        packed(llama(num_layers=2).lm_head, "nf4", double=False, blocksize=64, compute=None),
    )
    paths = quantize(model, head=True)
    assert len(paths) == 15
    assert "lm_head" in paths
    assert torch.equal(model.lm_head.weight, expected.weight)
