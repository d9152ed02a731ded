"""What lies outside the blocks, and what several sections share, travels as blocks do, and no bit is another one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import nn

from protwin.runtime import carry_out
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import Chunk, build_layout
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Content, Memory, TaskKind
from protwin.shared.schema.workload import OuterSection, Uses, Workload
from tests.proof_size import some_quick
from tests.runtime.equality import miscounted, offloaded_chunks, trained
from tests.runtime.families import family_cases
from tests.runtime.models import SEED, Case, HandWritten, cases, gpt2, point_batches, token_batches
from tests.runtime.watchdog import ends_in_time

SMALL, LARGE = 1, 2**30
"""A chunk for every parameter, and one for all of equal uses."""
PROLOGUE, EPILOGUE = OuterSection.PROLOGUE, OuterSection.EPILOGUE


class Sharing(HandWritten):
    """All blocks share a matrix, and the first one's bias is added at the end too."""

    def __init__(self) -> None:
        super().__init__()
        for layer in list(self.stack)[1:]:
            layer.up.weight = self.stack[0].up.weight

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """(batch, 5) to (batch, 3)."""
        hidden = self.stack(self.entry(points)) + self.stack[0].norm.bias
        return self.exit(hidden)  # type: ignore[no-any-return]


def sharing() -> nn.Module:
    torch.manual_seed(SEED)
    return Sharing()


@lru_cache
def subject(name: str) -> Case:
    if name == "weights that blocks share":
        return Case(sharing, point_batches(2), has_loss=False)
    if name in ("t5", "bart"):
        return family_cases(2)[name]
    known = cases()[name]
    return Case(known.build, known.batches[:2], groups=known.groups, has_loss=known.has_loss)


NAMES = (
    "llama",
    "llama, tied",
    "gpt2 with dropout, tied",
    "llama, frozen prologue and blocks",
    "hand-written, batch statistics",
    "llama in bfloat16",
    "t5",
    "bart",
    "weights that blocks share",
)


def plan_for(workload: Workload, chunk_bytes: int, share: float, **knobs: object) -> Plan:
    """``share`` of the chunks are persistent; buffers are the fewest, or as many as ``more_buffers`` says beyond."""
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=chunk_bytes)
    n_persist = round(share * len(layout.chunks))
    more = int(str(knobs.pop("more_buffers", 0)))
    return Plan.model_validate(
        {
            "workload_id": workload.identity,
            "chunk_bytes": chunk_bytes,
            "n_persist": n_persist,
            "n_buffer": layout.min_buffers(n_persist) + more,
        }
        | knobs
    )


def chunks_outside(workload: Workload, plan: Plan) -> list[Chunk]:
    """Offloaded chunks of parameters that no block alone uses."""
    indices = {index for index, parameter in enumerate(workload.parameters) if parameter.block is None}
    return [c for c in offloaded_chunks(workload, plan) if indices & {placed.index for placed in c.parameters}]


KNOBS = (
    (SMALL, 0, {}),
    (SMALL, 0.1, {"more_buffers": 2, "micro_batches": 2}),
    (LARGE, 0, {"micro_batches": 2, "max_gradient_norm": 0.5}),
    (LARGE, 0.4, {"more_buffers": 1, "prefetch_depth": 3, "max_gradient_norm": 0.5}),
)


@some_quick(
    ("name", "chunk_bytes", "share", "knobs"),
    [(name, *knobs) for name in NAMES for knobs in KNOBS],
    quick=[(name, *KNOBS[turn % 4]) for turn, name in enumerate(NAMES) if name not in ("llama, tied", "bart")],
    ids=str,
)
def test_they_train_as_the_plain_loop(name: str, chunk_bytes: int, share: float, knobs: dict[str, object]) -> None:
    case = subject(name)
    plan = plan_for(case.workload, chunk_bytes, share, **knobs)
    assert chunks_outside(case.workload, plan)
    with ends_in_time():
        outcome = trained(case, plan)
    assert outcome.losses == case.plain_with(plan.micro_batches, plan.max_gradient_norm).losses
    assert outcome.different == []
    assert miscounted(case, plan, outcome) == []


def uses_of(workload: Workload) -> dict[str, tuple[object, ...]]:
    found = {p.name: p.uses for p in workload.parameters if p.uses is not None}
    return {name: (uses.forward, uses.backward, uses.gradient) for name, uses in found.items()}


def test_a_trace_sees_who_uses_what() -> None:
    """By hand: lookups need no weights in backward; of three, a decoder's is done behind the last encoder block."""
    embedding, head = ((PROLOGUE,), (), PROLOGUE), ((EPILOGUE,), (EPILOGUE,), EPILOGUE)
    assert uses_of(subject("llama").workload) == {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": head,
        "lm_head.weight": head,
    }
    tied = uses_of(subject("gpt2 with dropout, tied").workload)
    assert tied["transformer.wte.weight"] == ((PROLOGUE, EPILOGUE), (EPILOGUE,), PROLOGUE)
    assert tied["transformer.wpe.weight"] == embedding
    assert uses_of(subject("t5").workload) == {
        "shared.weight": ((PROLOGUE, 2, EPILOGUE), (EPILOGUE,), PROLOGUE),
        # Backward comes to it before it comes to any encoder block.
        "encoder.final_layer_norm.weight": ((2,), (3,), 3),
        "decoder.final_layer_norm.weight": head,
    }
    shared = uses_of(subject("weights that blocks share").workload)
    blocks = tuple(range(4))
    assert shared["stack.0.up.weight"] == (blocks, blocks, 0)
    # A bias is added: backward reads nothing, but a block is taken to need all that it holds, and the epilogue's two
    # passes are one.
    assert shared["stack.0.norm.bias"] == ((0, EPILOGUE), (0, EPILOGUE), 0)


def test_backward_does_not_bring_an_embedding_back() -> None:
    workload = subject("llama").workload
    schedule = compile_schedule(plan_for(workload, SMALL, 0), workload)
    first = schedule.buffers[schedule.tasks[0].allocates[0]]
    assert [t.chunk for t in schedule.tasks if t.kind is TaskKind.GATHER].count(first.chunk) == 1
    static = [b.content for b in schedule.buffers if b.is_static and b.memory is Memory.DEVICE]
    assert static == [Content.RESIDENT], "nothing is nailed to the device"


def test_a_gradient_that_comes_later_than_traced_is_refused() -> None:
    """The wrong variant of the trace: it says that a tied embedding's gradient is final with the head's."""
    case = subject("llama, tied")
    wrong = Uses(forward=(PROLOGUE, EPILOGUE), backward=(EPILOGUE,), gradient=EPILOGUE)
    workload = case.workload.model_copy(
        update={
            "parameters": tuple(
                p.model_copy(update={"uses": wrong}) if p.uses and len(p.uses.forward) > 1 else p
                for p in case.workload.parameters
            )
        }
    )
    model = case.build()
    with (
        ends_in_time(),
        carry_out(model, plan_for(workload, SMALL, 0), workload, optimizer=case.make_optimizer),
        # When the head's backward has ended, the embedding has no gradient yet; then one comes.
        pytest.raises(ScheduleError, match="got a gradient after backward had left the sections"),
    ):
        case.loss(model, case.batches[0]).backward()


@pytest.mark.parametrize(
    ("build", "batch"),
    [(gpt2, token_batches(1)[0]), (subject("t5").build, subject("t5").batches[0])],
    ids=["tied", "encoder and decoder"],
)
def test_evaluation_brings_what_parts_of_the_model_need(
    build: Callable[[], nn.Module], batch: dict[str, torch.Tensor]
) -> None:
    """Generation runs an encoder by itself, whose embedding lies outside the blocks."""
    model, plain = build().eval(), build().eval()
    case = Case(build, [batch])
    settings = {"max_new_tokens": 4, "do_sample": False}
    with (
        ends_in_time(),
        carry_out(model, plan_for(case.workload, SMALL, 0), case.workload, optimizer=case.make_optimizer) as training,
        training.evaluation(),
    ):
        expected = plain.generate(batch["input_ids"], **settings)
        assert torch.equal(model.generate(batch["input_ids"], **settings), expected)
        assert torch.equal(model(**batch).logits, plain(**batch).logits)
