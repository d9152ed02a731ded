"""``--loss`` says how the loss is made, beside the number of chunks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.shared.basics.errors import ProtwinError
from protwin.shared.cli.loss_options import (
    USUAL_CHUNKS,
    check_loss_of_plan,
    check_whole_loss,
    loss_tiles_of,
)
from protwin.shared.cli.training_choice import TrainingChoice
from protwin.shared.phases.tiling import LossHead
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.training_options import TrainingOptions
from protwin.shared.schema.workload import Workload
from protwin.shared.workloads.check import narrow_words
from protwin.shared.workloads.source import load_workload
from tests.cli.conftest import Protwin
from tests.cli.refusals import refusal
from tests.cli.saved import decoder

SHAPE = ("--batch-size=2", "--sequence-length=256")
SIZES = {"vocab_size": 4096, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "intermediate_size": 48}


@pytest.mark.parametrize(
    ("loss", "asked", "found"),
    [
        (None, None, None),
        (None, [1, 4], [1, 4]),
        (LossHead.EAGER, None, [1]),
        (LossHead.EAGER, [1], [1]),
        (LossHead.NARROW, None, [1]),
        (LossHead.FUSED, None, [1]),
        (LossHead.CHUNKED, None, [USUAL_CHUNKS]),
        (LossHead.CHUNKED, [2, 4], [2, 4]),
    ],
)
def test_a_way_allows_its_numbers_of_tiles(
    loss: LossHead | None, asked: list[int] | None, found: list[int] | None
) -> None:
    assert loss_tiles_of(loss, asked) == found


def test_ways_that_contradict_the_number_are_refused() -> None:
    with pytest.raises(ProtwinError, match=r"--loss fused has whole logits, but --loss-tiles 4 .* --loss chunked"):
        loss_tiles_of(LossHead.FUSED, [1, 4])
    with pytest.raises(ProtwinError, match="--loss chunked never has whole logits, but --loss-tiles allows 1"):
        loss_tiles_of(LossHead.CHUNKED, [1, 4])


def test_chunks_are_no_part_of_the_options() -> None:
    found = [TrainingChoice(loss=loss).options(None).loss_head for loss in (None, *LossHead)]
    assert found == [None, LossHead.EAGER, LossHead.NARROW, LossHead.FUSED, LossHead.EAGER]


def test_what_is_measured_has_no_chunks() -> None:
    for loss in (None, LossHead.EAGER, LossHead.NARROW, LossHead.FUSED):
        check_whole_loss(loss)
    with pytest.raises(ProtwinError, match="Write --loss eager, narrow or fused"):
        check_whole_loss(LossHead.CHUNKED)


def test_plans_that_make_it_another_way_are_refused() -> None:
    whole = Plan(workload_id="any", chunk_bytes=1, n_persist=0, n_buffer=1)
    tiled = whole.model_copy(update={"loss_tiles": 4})
    for loss in (None, LossHead.EAGER, LossHead.NARROW, LossHead.FUSED):
        check_loss_of_plan(loss, whole)
    for loss in (None, LossHead.CHUNKED):
        check_loss_of_plan(loss, tiled)
    with pytest.raises(ProtwinError, match="--loss chunked is asked for, but the plan has loss_tiles 1"):
        check_loss_of_plan(LossHead.CHUNKED, whole)
    with pytest.raises(ProtwinError, match="--loss fused has whole logits, but the plan has loss_tiles 4"):
        check_loss_of_plan(LossHead.FUSED, tiled)
    known = decoder()
    check_loss_of_plan(LossHead.EAGER, whole, known)
    with pytest.raises(ProtwinError, match=r"--loss fused is asked for, .* traced with loss eager"):
        check_loss_of_plan(LossHead.FUSED, whole, known)


@pytest.mark.slow
def test_a_plan_is_searched_and_carried_out_with_it(protwin_here: Protwin, work: Path) -> None:
    (work / "model.json").write_text(json.dumps(LLAMA))
    model = ("--model=model.json", *SHAPE, "--dtype=float32")
    machine = ("--hardware=rtx-3090", "--no-cache")
    for loss in LossHead:
        made = protwin_here("search", *model, *machine, f"--loss={loss}", f"--output={loss}.json")
        assert made.returncode == 0, made.stderr
        assert ("loss fused" in made.stdout) is (loss is LossHead.FUSED)
    plans = {loss: Plan.load(work / f"{loss}.json") for loss in LossHead}
    assert [plans[loss].loss_tiles for loss in LossHead] == [1, 1, 1, USUAL_CHUNKS]
    assert plans[LossHead.FUSED].workload_id != plans[LossHead.EAGER].workload_id
    assert plans[LossHead.EAGER].workload_id == plans[LossHead.CHUNKED].workload_id
    peaks = {}
    for loss in LossHead:
        asked = ("--seed=1", "--steps=6", f"--loss={loss}", "--output=record.json")
        ran = protwin_here("run", f"--plan={loss}.json", *model, *asked)
        assert ran.returncode == 0, ran.stderr
        record = Record.load(work / "record.json")
        assert record.peak_device_bytes is not None
        assert record.guaranteed_peak_device_bytes == pytest.approx(record.peak_device_bytes, rel=0.005)
        peaks[loss] = record.peak_device_bytes
    assert peaks[LossHead.FUSED] < peaks[LossHead.EAGER]
    other = ("run", "--plan=fused.json", *model, "--steps=6")
    assert "They differ: loss fused there, loss eager here (--loss)." in refusal(protwin_here, work, other)
    other = ("simulate", "--plan=fused.json", *model, *machine, "--loss=chunked")
    assert "the plan has loss_tiles 1" in refusal(protwin_here, work, other)
    made = protwin_here("trace", *model, "--loss=fused", "--output=workload.json")
    assert made.returncode == 0, made.stderr
    assert Workload.load(work / "workload.json").loss_head is LossHead.FUSED
    other = ("search", "--model=workload.json", *machine, "--loss=eager")
    assert "traced with loss fused" in refusal(protwin_here, work, other)


def of_gpt2(dtype: str, loss: LossHead | None) -> Workload:
    return load_workload("gpt2", batch_size=1, sequence_length=64, dtype=dtype, options=TrainingOptions(loss_head=loss))


def test_a_narrow_loss_of_float32_is_an_eager_one() -> None:
    narrow, eager = (of_gpt2("float32", loss) for loss in (LossHead.NARROW, LossHead.EAGER))
    assert narrow.epilogue_forward == eager.epilogue_forward
    assert narrow.epilogue_backward == eager.epilogue_backward
    assert "nothing is spared" in (narrow_words(narrow) or "")
    for dtype, loss in (("float32", LossHead.EAGER), ("float32", LossHead.FUSED), ("bfloat16", LossHead.NARROW)):
        assert narrow_words(of_gpt2(dtype, loss)) is None


def test_commands_say_so_once(protwin_here: Protwin, work: Path) -> None:
    asked = ("--model=gpt2", "--hardware=rtx-4090", "--sequence-length=64", "--dtype=float32", "--loss=narrow")
    for command in (("search", "--batch-size=1"), ("advise", "--global-batch=1", "--processes=1")):
        done = protwin_here(*command, *asked)
        assert (done.returncode, done.stderr.count("nothing is spared")) == (0, 1), done.stderr
