"""Tensors that several sections share: who holds them, and what that makes of the phases."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protwin.shared.compile.activation_levels import SharedBytes
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.observed.observed_inputs import ObservedInput, PhaseKey
from protwin.shared.phases.shared_inputs import SharedInput
from protwin.shared.schema.plan import ActivationMode, Plan
from protwin.shared.schema.schedule import OuterSection, Section, TaskKind
from protwin.shared.schema.workload import BlockId, Phase, Workload
from tests.shared.small_models import chain

KEEP, CHECKPOINT, SWAP = ActivationMode.KEEP, ActivationMode.CHECKPOINT, ActivationMode.SWAP
SIZE = 700
NUM_BLOCKS = 4
MODES = list(product((KEEP, CHECKPOINT), repeat=NUM_BLOCKS))
ROW = tuple(range(NUM_BLOCKS))
"""Every block is observed by itself."""


def forward(section: Section) -> PhaseKey:
    return TaskKind.FORWARD, section


def backward(block: int) -> PhaseKey:
    return TaskKind.BACKWARD, BlockId(block)


EPILOGUE = forward(OuterSection.EPILOGUE)
MASK = ObservedInput(SIZE, ROW, kept=EPILOGUE, checkpointed=backward(0))
"""Added to what attention saves, and so saved by no block, but given to all."""


def shared_bytes(shared: SharedInput, modes: Sequence[ActivationMode]) -> SharedBytes:
    """Of one choice of modes."""
    return SharedBytes.of([shared], np.array([[mode is CHECKPOINT for mode in modes]]))


def going(shared: SharedInput, modes: Sequence[ActivationMode]) -> tuple[str, int | None]:
    """Where the tensor goes, by what the phases say once everything is put together."""
    found = shared_bytes(shared, modes)
    counted = {
        block
        for block, mode in enumerate(modes)
        if block in (shared.freed_in_checkpointed if mode is CHECKPOINT else shared.freed_in_kept)
        and not found.freed_later[0, block]
    }
    backwards = counted | set(np.flatnonzero(found.freed_now[0]).tolist())
    column = NUM_BLOCKS if shared.let_go_by is None else shared.let_go_by
    forwards = [] if found.let_go_later[0, column] else [shared.let_go_by]
    assert len(backwards) + len(forwards) == 1, "it goes once"
    return ("backward", backwards.pop()) if backwards else ("forward", forwards[0])


@pytest.mark.parametrize("modes", MODES)
def test_a_mask_goes_with_the_first_checkpointed_block_or_with_the_forward(modes: tuple[ActivationMode, ...]) -> None:
    first = next((block for block, mode in enumerate(modes) if mode is CHECKPOINT), None)
    expected = ("forward", None) if first is None else ("backward", first)
    assert going(MASK.shared_input(ROW), modes) == expected


@pytest.mark.parametrize("modes", MODES)
def test_what_a_kept_block_saves_lives_until_its_backward_or_that_of_an_earlier_checkpointed_one(
    modes: tuple[ActivationMode, ...],
) -> None:
    """Block 2 saves it; the blocks from 1 on are given it."""
    seen = ObservedInput(SIZE, (1, 2, 3), kept=backward(2), checkpointed=backward(1))
    assert going(seen.shared_input(ROW), modes) == ("backward", 1 if modes[1] is CHECKPOINT else 2)


BLOCKS = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True).map(tuple)


@given(BLOCKS, BLOCKS, st.lists(st.sampled_from(ActivationMode), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS))
def test_the_last_holder_is_the_first_block_that_holds_it_in_its_mode(
    kept_by: tuple[int, ...], checkpointed_by: tuple[int, ...], modes: list[ActivationMode]
) -> None:
    held = [block for block, mode in enumerate(modes) if block in (checkpointed_by if mode is CHECKPOINT else kept_by)]
    shared = SharedInput(size_bytes=SIZE, kept_by=kept_by, checkpointed_by=checkpointed_by)
    assert going(shared, modes) == (("backward", held[0]) if held else ("forward", None))


def test_swapping_is_keeping() -> None:
    """Only what a block makes itself travels."""
    seen = ObservedInput(SIZE, (0, 1, 2, 3), kept=backward(1), checkpointed=backward(0)).shared_input(ROW)
    for modes in product((KEEP, CHECKPOINT, SWAP), repeat=NUM_BLOCKS):
        as_kept = tuple(KEEP if mode is SWAP else mode for mode in modes)
        assert going(seen, modes) == going(seen, as_kept)


def test_the_encoder_lets_go_of_its_own() -> None:
    """Of two trees: a tensor of the first two blocks goes with the forward of the second, not of the whole model."""
    seen = ObservedInput(SIZE, (0, 1), kept=forward(BlockId(1)), checkpointed=backward(0)).shared_input(ROW)
    assert going(seen, (KEEP,) * 4) == ("forward", 1)
    assert going(seen, (KEEP, KEEP, CHECKPOINT, CHECKPOINT)) == ("forward", 1)
    assert going(seen, (KEEP, CHECKPOINT, KEEP, KEEP)) == ("backward", 1)


def test_one_block_may_be_seen_for_many_of_which_one_alone_frees_it() -> None:
    """A bias that the first block makes: the second was seen to free it, and stands for the third."""
    seen = ObservedInput(SIZE, (1, 2), kept=EPILOGUE, checkpointed=backward(1))
    shared = seen.shared_input((0, 1, 1, 2))
    assert shared.checkpointed_by == (1, 2, 3)
    assert shared_bytes(shared, (CHECKPOINT,) * 4).freed_later.tolist() == [[0, 0, SIZE, 0]]
    assert going(shared, (CHECKPOINT,) * 4) == ("backward", 1)
    assert going(shared, (CHECKPOINT, KEEP, CHECKPOINT, KEEP)) == ("backward", 2)


@pytest.mark.parametrize(
    ("seen", "stands_for"),
    [
        (ObservedInput(SIZE, ROW, kept=backward(0), checkpointed=backward(0)), ROW),
        (ObservedInput(SIZE, ROW, kept=EPILOGUE, checkpointed=EPILOGUE), ROW),
        # A block's own input, which it widens: its own mode decides, and its own phases know.
        (ObservedInput(SIZE, (2,), kept=forward(BlockId(2)), checkpointed=backward(2)), ROW),
        # Outlives the blocks in either mode.
        (ObservedInput(SIZE, ROW, kept=backward(0), checkpointed=(TaskKind.BACKWARD, OuterSection.PROLOGUE)), ROW),
        (ObservedInput(SIZE, ROW, kept=(TaskKind.BACKWARD, OuterSection.EPILOGUE), checkpointed=backward(0)), ROW),
        # Two answers to what a forward lets go.
        (ObservedInput(SIZE, ROW, kept=EPILOGUE, checkpointed=forward(BlockId(1))), ROW),
        # The output of the block before, in a row of which one block was observed for several.
        (ObservedInput(SIZE, (1,), kept=backward(0), checkpointed=backward(1)), (0, 1, 1, 2)),
    ],
)
def test_what_phases_say_themselves_is_not_followed(seen: ObservedInput, stands_for: tuple[int, ...]) -> None:
    assert not seen.depends_on_modes(stands_for)


def test_the_prologues_output_is_followed_where_the_model_holds_it_longer_than_a_block() -> None:
    assert ObservedInput(SIZE, (0,), kept=EPILOGUE, checkpointed=backward(0)).depends_on_modes(ROW)


# -- phases ----------------------------------------------------------------------------------------------------------

PHASE = Phase(net_bytes=100, gradient_bytes=40, curve=((0.5, 900), (1, 100)), adding_curve=((1, 700),), measured_s=2.0)


@given(held=st.integers(0, 2000), freed=st.integers(0, 2000))
def test_what_is_held_is_there_all_the_time_and_what_is_freed_until_the_end(held: int, freed: int) -> None:
    changed = PHASE.with_shared(held_bytes=held, freed_bytes=freed)
    assert changed.net_bytes == 100 + held - freed
    assert changed.curve == ((0.5, 900 + held), (1, 100 + held))
    assert changed.adding.net_bytes == changed.net_bytes - 40
    assert changed.adding.curve == ((1, 700 + held),)
    assert changed.measured_s == 2.0
    assert changed is PHASE.with_shared(held_bytes=held, freed_bytes=freed)


def levels(model: Workload, modes: tuple[ActivationMode, ...]) -> int:
    """What all phases of an iteration leave together."""
    layout = build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=2**20)
    plan = Plan(
        workload_id=model.identity,
        chunk_bytes=2**20,
        n_persist=len(layout.chunks),
        n_buffer=0,
        n_checkpoint=modes.count(CHECKPOINT),
        activation_modes=modes,
    )
    return sum(task.phase.net_bytes for task in compile_schedule(plan, model).tasks if task.phase is not None)


@pytest.mark.parametrize("modes", MODES)
def test_nothing_of_it_is_left_after_an_iteration(modes: tuple[ActivationMode, ...]) -> None:
    """In every mixture; the wrong variant counts it off in all the phases that were seen to free it."""
    model = chain(NUM_BLOCKS)
    shared = MASK.shared_input(ROW)
    profiles = model.profiles
    freeing = profiles[model.blocks[0].profile].model_copy(
        update={
            "checkpoint_backward": profiles[model.blocks[0].profile].checkpoint_backward.with_shared(freed_bytes=SIZE)
        }
    )
    seen = model.model_copy(
        update={
            "profiles": (*profiles, freeing),
            "blocks": (model.blocks[0].model_copy(update={"profile": len(profiles)}), *model.blocks[1:]),
            "epilogue_forward": model.epilogue_forward.with_shared(freed_bytes=SIZE),
        }
    )
    followed = seen.model_copy(update={"shared_inputs": (shared,)})
    assert levels(followed, modes) == levels(model, modes) - SIZE
    assert (levels(seen, modes) != levels(model, modes) - SIZE) == (modes[0] is CHECKPOINT)


def test_a_shared_input_of_a_block_that_is_not_there_is_refused() -> None:
    model = chain(NUM_BLOCKS)
    content = model.model_dump(mode="json")
    for name in ("kept_by", "checkpointed_by", "freed_in_kept", "freed_in_checkpointed"):
        content["shared_inputs"] = [{"size_bytes": 8, name: [NUM_BLOCKS]}]
        with pytest.raises(ValidationError, match=f"a shared input names block {NUM_BLOCKS} of {NUM_BLOCKS}"):
            Workload.model_validate(content)
    content["shared_inputs"] = [{"size_bytes": 8, "let_go_by": NUM_BLOCKS}]
    with pytest.raises(ValidationError, match=f"a shared input names block {NUM_BLOCKS} of {NUM_BLOCKS}"):
        Workload.model_validate(content)
