"""Models of many families: their blocks are found, fake traces equal real ones, plans equal the plain loop."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn

from protwin.runtime import carry_out, trace
from protwin.runtime.model.blocks import find_blocks
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Phase, Workload
from tests.proof_size import some_quick
from tests.runtime.families import families
from tests.runtime.models import adamw, gpt2, hand_written, llama, snapshot, token_batches, uncached


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def block_phases(workload: Workload) -> list[Phase]:
    return [phase for block in range(workload.num_blocks) for phase in workload.profile_of(block).phases]


def outer_phases(workload: Workload) -> list[Phase]:
    return [
        workload.prologue_forward,
        workload.epilogue_forward,
        workload.epilogue_backward,
        workload.prologue_backward,
    ]


def memory(phases: list[Phase]) -> list[tuple[int, int]]:
    return [(phase.net_bytes, phase.peak_bytes) for phase in phases]


def check_equal(made_up: Workload, real: Workload) -> None:
    """Blocks agree to the byte; what looks at masks, within an encoder and decoder too, differs by a little."""
    assert made_up.identity == real.identity
    assert (made_up.traced_with, real.traced_with) == ("fake", "real")
    outputs = [[w.profile_of(block).output_bytes for block in range(w.num_blocks)] for w in (made_up, real)]
    assert outputs[0] == outputs[1]
    assert memory(block_phases(made_up)) == memory(block_phases(real))
    little = 100 * real.num_tokens
    for ours, theirs in zip(block_phases(made_up), block_phases(real), strict=True):
        assert ours.flops == pytest.approx(theirs.flops, abs=little)
    for ours, theirs in zip(outer_phases(made_up), outer_phases(real), strict=True):
        assert ours.net_bytes == theirs.net_bytes
        assert ours.peak_bytes == pytest.approx(theirs.peak_bytes, abs=little)
        assert ours.flops == pytest.approx(theirs.flops, abs=little)


def fake(build: Callable[[], nn.Module], batch: dict[str, torch.Tensor]) -> Workload:
    with torch.device("meta"):
        model = build()
    # As the CPU runs it, which the real tensors beside it are on.
    return trace(model, {name: tensor.to("meta") for name, tensor in batch.items()}, device_kind=DeviceKind.CPU)


def plain_losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    uncached(model)
    optimizer = adamw([{"params": list(model.parameters())}])
    losses = []
    for _ in range(2):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@some_quick("name", families(), quick=["bert", "mixtral", "t5"])
def test_a_family_from_trace_to_training(name: str) -> None:
    family = families()[name]
    torch.manual_seed(0)
    model = family.build()
    assert tuple(block.name for block in find_blocks(model)) == family.blocks
    workload = trace(model, family.batch, repeats=0)
    check_equal(fake(family.build, family.batch), workload)
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=8_000)
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=8_000,
        n_persist=1,
        n_buffer=layout.min_buffers(1) + 1,
        prefetch_depth=2,
        n_checkpoint=2,
    )
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = plain_losses(reference, family.batch)
    losses = []
    torch.manual_seed(1)
    with carry_out(model, plan, workload, optimizer=adamw) as training:
        for _ in range(2):
            loss = model(**family.batch).loss
            loss.backward()
            training.step()
            losses.append(loss.item())
    assert training.num_cpu_adam_steps >= 2 * workload.num_blocks
    assert losses == expected
    weights = snapshot(reference)
    assert [name for name, tensor in snapshot(model).items() if not torch.equal(tensor, weights[name])] == []


@some_quick("is_tied", [False, True], quick=1)
def test_fake_and_real_llama_agree(is_tied: bool) -> None:
    def build() -> nn.Module:
        return llama(num_layers=7, tie_word_embeddings=is_tied)

    batch = token_batches(1)[0]
    check_equal(fake(build, batch), trace(build(), batch, repeats=0))


def test_fake_and_real_gpt2_agree_without_dropout() -> None:
    def build() -> nn.Module:
        return gpt2(num_layers=6, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)

    batch = token_batches(1)[0]
    check_equal(fake(build, batch), trace(build(), batch, repeats=0))


# -- finding blocks --------------------------------------------------------------------------------------------------


def test_blocks_of_a_sequential_are_found() -> None:
    assert [block.name for block in find_blocks(hand_written())] == [f"stack.{index}" for index in range(4)]


class Layer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh())


class OtherLayer(Layer):
    """Another class."""


def test_classes_of_blocks_may_take_turns_but_not_all_differ() -> None:
    turns = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([Layer(), OtherLayer(), Layer(), OtherLayer()]))
    assert [block.name for block in find_blocks(turns)] == ["1.0", "1.1", "1.2", "1.3"]
    parts = nn.ModuleList([nn.ModuleList([Layer(), Layer()]), nn.Sequential(Layer(), Layer())])
    assert [block.name for block in find_blocks(parts)] == ["0.0", "0.1", "1.0", "1.1"]


class Uneven(nn.Module):
    """A residual block; a width of 0 leaves it no parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width) if width else nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, 4) in and out."""
        return hidden + self.inner(hidden).sum(-1, keepdim=True)


@pytest.mark.parametrize("widths", [(200, 1, 200), (200, 0, 200), (0, 200)])
def test_every_block_of_a_list_is_found_however_small(widths: tuple[int, ...]) -> None:
    trunk = nn.ModuleList(Uneven(width) for width in widths)
    heads = nn.ModuleList(Uneven(1) for _ in range(3))
    model = nn.ModuleDict({"trunk": trunk, "heads": heads})
    assert [block.name for block in find_blocks(model)] == [f"trunk.{index}" for index in range(len(widths))]


def test_blocks_can_be_named() -> None:
    model = llama()
    container = find_blocks(model, "model.layers")
    assert [block.name for block in container] == [f"model.layers.{index}" for index in range(4)]
    assert find_blocks(model, [f"model.layers.{index}" for index in range(4)]) == container
    assert [block.name for block in find_blocks(model, ["model.layers.1", "model.layers.3"])] == [
        "model.layers.1",
        "model.layers.3",
    ]


def test_named_blocks_train_and_the_others_come_with_the_parts_around_them() -> None:
    """Blocks that nobody named are of the prologue and the epilogue."""
    model, batch = llama(), token_batches(1)[0]
    workload = trace(model, batch, blocks=["model.layers.1", "model.layers.2"], repeats=0)
    assert workload.num_blocks == 2
    assert {p.block for p in workload.parameters if p.name.startswith("model.layers.0.")} == {None}
    plan = Plan(workload_id=workload.identity, chunk_bytes=2**20, n_persist=0, n_buffer=2, n_checkpoint=1)
    expected = plain_losses(llama(), batch)
    losses = []
    with carry_out(model, plan, workload, optimizer=adamw) as training:
        for _ in range(2):
            loss = model(**batch).loss
            loss.backward()
            training.step()
            losses.append(loss.item())
        assert training.num_gathers > 0
    assert losses == expected


class NoStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum()


def test_a_model_without_blocks_is_told_how_to_name_them() -> None:
    with pytest.raises(WorkloadError, match=r"no blocks found in NoStack.*blocks=.*first \(Linear\), second"):
        trace(NoStack(), torch.ones(2, 4))
    workload = trace(NoStack(), torch.ones(2, 4), blocks=["first", "second"], repeats=0)
    assert [block.name for block in workload.blocks] == ["first", "second"]


class Stacked(nn.Module):
    """Blocks that are lists of modules themselves, in a list that is called (a) and in one that is not (b)."""

    def __init__(self, in_list: bool) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)) for _ in range(5)]
        self.body: nn.ModuleList | nn.Sequential = nn.ModuleList(blocks) if in_list else nn.Sequential(*blocks)
        self.head = nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.body, nn.Sequential):
            return self.head(self.body(x)).square().mean()
        for block in self.body:
            x = x + block(x)
        return self.head(x).square().mean()


@pytest.mark.parametrize("build", [partial(Stacked, True), partial(Stacked, False)], ids=["list", "sequential"])
def test_blocks_may_be_sequential_themselves(build: Callable[[], Stacked]) -> None:
    torch.manual_seed(0)
    plain, batch = build(), torch.randn(4, 24)
    model, names = copy.deepcopy(plain), [f"body.{block}" for block in range(5)]
    for named in (None, "body", ["body"], names):
        assert [block.name for block in find_blocks(model, named)] == names
    assert [
        block.name for block in trace(copy.deepcopy(model).to("meta"), batch.to("meta"), loss=given).blocks
    ] == names
    workload = trace(model, batch, loss=given, repeats=0)
    plan = Plan(workload_id=workload.identity, chunk_bytes=2**14, n_persist=1, n_buffer=2, n_checkpoint=2)
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    with carry_out(model, plan, workload) as training:
        for _ in range(3):
            model(batch).backward()
            training.step()
            plain(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, expected)


def given(output: torch.Tensor, batch: object) -> torch.Tensor:
    """The model gives its loss."""
    return output


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ("model.layer", r"no module 'model.layer'. Its lists of modules are: model.layers"),
        (["model.layers", "model.layers.1.mlp"], "model.layers.1.mlp lies inside block model.layers.1"),
        ([], "holds no modules"),
    ],
)
def test_blocks_named_wrongly(blocks: str | list[str], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        find_blocks(llama(), blocks)
