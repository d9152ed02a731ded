"""``protwin run --weights --data --save``: from one folder in the Hugging Face form to another, as a plain loop."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from protwin.runtime.commands.run_checkpoints import RunCheckpoints
from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.runtime.training.training import Training
from protwin.shared.schema.training_options import FULL_TRAINING, LoraOptions, TrainingOptions
from tests.cli.conftest import Protwin
from tests.proof_size import some_quick
from tests.runtime.data.test_packing import pack_naively
from tests.runtime.resuming import kept, offloaded, same_bits
from tests.runtime.small_language import chats, make_folder, make_tokenizer, texts, write_rows

LENGTH, BATCH_SIZE, RATE = 128, 2, 1e-2
RUN = ("run", "--plan=plan.json", "--workload=workload.json", "--weights=base", "--learning-rate=0.01")
Batch = dict[str, torch.Tensor]
Rows = Sequence[dict[str, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, data, and plans of two micro-batches: one offloads everything, one nothing."""
    folder = tmp_path_factory.mktemp("made")
    make_folder(folder / "base")
    write_rows(folder / "chats.jsonl", chats(12))
    write_rows(folder / "held.jsonl", chats(3))
    save_plans(folder)
    return folder


@pytest.fixture
def job(made: Path, work: Path) -> Path:
    """A copy of them, to run in."""
    shutil.copytree(made, work, dirs_exist_ok=True)
    return work


def save_plans(work: Path, *, dtype: str | None = None, options: TrainingOptions = FULL_TRAINING) -> None:
    configuration = json.loads((work / "base" / "config.json").read_text())
    workload = workload_of_configuration(
        configuration, name="base", batch_size=BATCH_SIZE, sequence_length=LENGTH, dtype=dtype, options=options
    )
    workload.save(work / "workload.json")
    offloaded(workload).model_copy(update={"micro_batches": 2}).save(work / "plan.json")
    kept(workload).model_copy(update={"micro_batches": 2}).save(work / "kept.json")


def sequences_by_hand(folder: Path, rows: Rows, orders: Sequence[Sequence[int]]) -> list[Batch]:
    """Conversations by the tokenizer's own mask, packed by a search of all sequences; each a batch of one."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = []
    for row in rows:
        made = tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        tokens, mask = [*made["input_ids"], tokenizer.eos_token_id], [*made["assistant_masks"], 0]
        documents.append((tokens, [t if m else -100 for t, m in zip(tokens, mask, strict=True)]))
    found = []
    for order in orders:
        for sequence in pack_naively([len(tokens) for tokens, _ in documents], order, LENGTH):
            tokens, labels = ([t for place in sequence for t in documents[place][part]] for part in (0, 1))
            padding = LENGTH - len(tokens)
            tokens, labels = tokens + [tokenizer.eos_token_id] * padding, labels + [-100] * padding
            found.append({"input_ids": torch.tensor([tokens]), "labels": torch.tensor([labels])})
    return found


def learned(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def trained_plainly(folder: Path, rows: Rows, steps: int, *, by_tokens: bool = True) -> Any:
    """The loop that everybody writes: AdamW, a scheduler of transformers, two micro-batches by their tokens."""
    orders = [np.random.default_rng((0, epoch)).permutation(len(rows)).tolist() for epoch in range(9)]
    sequences = iter(sequences_by_hand(folder, rows, orders))
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=steps)
    for _ in range(steps):
        pairs = [(next(sequences), next(sequences)) for _ in range(2)]
        batches = [{name: torch.cat([one[name], other[name]]) for name in one} for one, other in pairs]
        for batch in batches:
            share = sum(map(learned, batches)) / learned(batch) if by_tokens else 2
            (model(**batch).loss / share).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


def saved(folder: Path) -> Any:
    """The model in ``folder``, which holds all of its weights and nothing besides."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values())
    return model


def test_fine_tuning_is_a_plain_loop_bit_for_bit(protwin_here: Protwin, job: Path) -> None:
    tuning = ("--data=chats.jsonl", "--schedule=cosine", "--warmup-steps=2", "--steps=4", "--save=tuned")
    result = protwin_here(*RUN, *tuning, "--evaluation=held.jsonl", "--evaluate-every=2")
    assert result.returncode == 0, result.stderr
    plain, tuned = trained_plainly(job / "base", chats(12), steps=4), saved(job / "tuned")
    assert same_bits(dict(plain.state_dict()), dict(tuned.state_dict()))
    assert tuned.config.use_cache is True
    assert AutoTokenizer.from_pretrained(job / "tuned").chat_template == make_tokenizer().chat_template
    # The loss over all tokens that count of what was held out.
    with torch.no_grad():
        held = sequences_by_hand(job / "base", chats(3), [range(3)])
        mean = sum(tuned(**batch).loss.item() * learned(batch) for batch in held) / sum(map(learned, held))
    assert f"step 4: evaluation loss {mean:.4f}\n" in result.stdout
    assert [f"step {step}: evaluation" in result.stdout for step in range(5)] == [True, False, True, False, True]


def test_micro_batches_may_count_alike(protwin_here: Protwin, job: Path) -> None:
    tuning = ("--data=chats.jsonl", "--schedule=cosine", "--warmup-steps=2", "--steps=3", "--save=tuned")
    result = protwin_here(*RUN, *tuning, "--loss-weighting=batches")
    assert result.returncode == 0, result.stderr
    tuned = dict(saved(job / "tuned").state_dict())
    assert same_bits(dict(trained_plainly(job / "base", chats(12), 3, by_tokens=False).state_dict()), tuned)
    assert not same_bits(dict(trained_plainly(job / "base", chats(12), 3).state_dict()), tuned)


def test_a_run_that_is_stopped_goes_on_with_the_next_batch(
    protwin_here: Protwin, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the second of four steps; another plan goes on, and ends where nothing stopped it."""
    tuning = ("--data=chats.jsonl", "--schedule=linear", "--epochs=3")
    whole = protwin_here(*RUN, *tuning, "--save=whole")
    assert whole.returncode == 0, whole.stderr
    after_step: Callable[..., None] = RunCheckpoints.after_step

    def interrupted(checkpoints: RunCheckpoints, training: Training, *given: Any, **more: Any) -> None:
        after_step(checkpoints, training, *given, **more)
        if training.num_steps == 3:
            raise KeyboardInterrupt

    keeping = ("--checkpoint=kept", "--checkpoint-every=2")
    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpoints, "after_step", interrupted)
        assert protwin_here(*RUN, *tuning, *keeping, "--save=parts").returncode == 130
    assert not (job / "parts").exists()
    going_on = ("--plan=kept.json", *RUN[2:], *tuning, *keeping, "--resume", "--save=parts")
    refused = protwin_here("run", *going_on, "--seed=1")
    assert refused.returncode == 2
    assert "was not saved by protwin run with this data and --seed 1" in refused.stderr
    result = protwin_here("run", *going_on)
    assert result.returncode == 0, result.stderr
    assert same_bits(dict(saved(job / "whole").state_dict()), dict(saved(job / "parts").state_dict()))
    # What is complete but was not written can be written still.
    again = protwin_here("run", *going_on[:-1], "--save=again")
    assert again.returncode == 0, again.stderr
    assert same_bits(dict(saved(job / "parts").state_dict()), dict(saved(job / "again").state_dict()))


def test_an_adapter_is_what_peft_reads(protwin_here: Protwin, job: Path) -> None:
    """PEFT's own model gives the same logits, and other ones than the base."""
    save_plans(job, options=TrainingOptions(lora=LoraOptions(rank=4, targets=("q_proj", "down_proj"))))
    lora = ("--lora-rank=4", "--lora-targets=q_proj,down_proj")
    scaled = ("--lora-alpha=6", "--use-rslora")
    result = protwin_here(
        *RUN, *lora, *scaled, "--data=chats.jsonl", "--steps=3", "--save=adapter", "--checkpoint=kept"
    )
    assert result.returncode == 0, result.stderr
    other = protwin_here(*RUN, *lora, "--data=chats.jsonl", "--steps=4", "--checkpoint=kept", "--resume")
    assert other.returncode == 2
    assert "kept was saved with --lora-alpha 6 --use-rslora, but this run is without --lora-alpha" in other.stderr
    assert sorted(path.name for path in (job / "adapter").iterdir() if "adapter" in path.name) == [
        "adapter_config.json", "adapter_model.safetensors"
    ]  # fmt: skip
    from protwin.runtime import add_lora
    from protwin.runtime.checkpoints.checkpoints import read_checkpoint

    tokens = torch.arange(40)[None]
    with torch.no_grad():
        base = saved(job / "base")
        before = base(tokens).logits
        own = saved(job / "base")
        add_lora(own, rank=4, targets=["q_proj", "down_proj"], alpha=6, use_rslora=True)
        own.load_state_dict(dict(read_checkpoint(job / "kept").weights))
        expected = own(tokens).logits
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT's own, of transformers
            adapted = peft.PeftModel.from_pretrained(base, job / "adapter")
        assert torch.allclose(adapted(tokens).logits, expected, atol=1e-6)
        assert not torch.allclose(before, expected, atol=1e-3)


@pytest.mark.slow
def test_dora_with_dropout_is_what_peft_trains(protwin_here: Protwin, job: Path) -> None:
    """From the search to the saved adapter, with the options of both; what drops is drawn alike."""
    lora = ("--lora-rank=4", "--lora-targets=q_proj,down_proj", "--lora-dropout=0.25", "--use-dora")
    shape = (f"--batch-size={BATCH_SIZE}", f"--sequence-length={LENGTH}")
    asked = ("--model=base/config.json", "--hardware=rtx-3090", "--dtype=float32", *shape, "--n-persist=0")
    assert protwin_here("search", *asked, *lora, "--chunk-bytes=16KiB", "--output=plan.json").returncode == 0
    run = ("run", "--plan=plan.json", "--weights=base", *shape, *lora, "--learning-rate=0.01", "--data=chats.jsonl")
    result = protwin_here(*run, "--steps=3", "--save=adapter", "--checkpoint=kept")
    assert result.returncode == 0, result.stderr
    other = protwin_here(*run[:-4], *run[-2:], "--use-dora", "--steps=4", "--checkpoint=kept", "--resume")
    assert other.returncode == 2

    model: Any = AutoModelForCausalLM.from_pretrained(job / "base").train()
    targets = ["q_proj", "down_proj"]
    configured = peft.LoraConfig(r=4, lora_alpha=4, target_modules=targets, lora_dropout=0.25, use_dora=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's own, of transformers
        adapted: Any = peft.get_peft_model(model, configured).train()
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if ".lora_A." in name:
            torch.nn.init.kaiming_uniform_(parameter, a=5**0.5)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=RATE, fused=True)
    orders = [np.random.default_rng((0, epoch)).permutation(12).tolist() for epoch in range(9)]
    sequences = iter(sequences_by_hand(job / "base", chats(12), orders))
    for _ in range(3):
        pair = [next(sequences), next(sequences)]
        batch = {name: torch.cat([one[name] for one in pair]) for name in pair[0]}
        adapted(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    saved_ones = load_file(job / "adapter" / "adapter_model.safetensors")
    assert same_bits(saved_ones, dict(peft.get_peft_model_state_dict(adapted)))
    assert sum("magnitude" in name for name in saved_ones) == 6


@some_quick("dtype", ["bfloat16", "float32"], quick=1)
def test_weights_are_converted_only_if_that_is_asked_for(protwin_here: Protwin, work: Path, dtype: str) -> None:
    other = {"bfloat16": torch.float32, "float32": torch.bfloat16}[dtype]
    make_folder(work / "base", dtype=other, shard_size="40KB")
    assert len(list((work / "base").glob("*.safetensors"))) > 1
    write_rows(work / "texts.jsonl", texts(8))
    save_plans(work, dtype=dtype)
    tuning = (*RUN, "--data=texts.jsonl", "--steps=1", "--save=tuned")
    refused = protwin_here(*tuning)
    assert refused.returncode == 2
    assert f"are {str(other).removeprefix('torch.')} (" in refused.stderr
    assert not (work / "tuned").exists()
    result = protwin_here(*tuning, f"--dtype={dtype}")
    assert result.returncode == 0, result.stderr
    assert saved(work / "tuned").dtype == getattr(torch, dtype)


@pytest.mark.slow
def test_a_search_and_a_run_need_no_file_between_them_but_the_plan(protwin_here: Protwin, job: Path) -> None:
    """The run finds the workload by the shape that the search was asked about."""
    shape = ("--batch-size=2", "--sequence-length=128")
    search = ("search", "--model=base", "--hardware=rtx-3090", *shape, "--n-checkpoint=0", "--output=found.json")
    run = ("run", "--plan=found.json", "--weights=base", "--data=chats.jsonl", "--steps=1")
    found = protwin_here(*search)
    assert found.returncode == 0, found.stderr
    # The weights are in float32, and that machine computes in bfloat16: what the plan has is found, and said.
    refused = protwin_here(*run, *shape, "--save=tuned")
    assert (refused.returncode, "or pass --dtype bfloat16 to have them converted" in refused.stderr) == (2, True)
    result = protwin_here(*run, *shape, "--dtype=bf16", "--save=tuned")
    assert result.returncode == 0, result.stderr
    assert saved(job / "tuned").dtype == torch.bfloat16
    missing = protwin_here(*run)
    assert (missing.returncode, "--batch-size" in missing.stderr) == (2, True)
    other = protwin_here(*run, "--batch-size=3", "--sequence-length=128")
    assert (other.returncode, "Search a plan for this one" in other.stderr) == (2, True)


def damage(job: Path, what: str) -> None:
    """One thing of a good job is as it must not be."""
    base = job / "base"
    if what == "another model":
        make_folder(base, num_hidden_layers=2)
    elif what == "other shapes":
        config = json.loads((base / "config.json").read_text()) | {"intermediate_size": 48}
        make_folder(base, intermediate_size=40)
        (base / "config.json").write_text(json.dumps(config))
    elif what == "a missing shard":
        (base / "model.safetensors").unlink()
        make_folder(base, shard_size="40KB")
        next(iter(sorted(base.glob("model-*.safetensors")))).unlink()
    elif what == "no weights":
        (base / "model.safetensors").unlink()
    elif what == "a torn file":
        content = (base / "model.safetensors").read_bytes()
        (base / "model.safetensors").write_bytes(content[: len(content) // 2])
    elif what == "a larger vocabulary":
        tokenizer = make_tokenizer()
        tokenizer.add_tokens([f"<|{number}|>" for number in range(9)])
        tokenizer.save_pretrained(base)
    elif what == "no tokenizer":
        for path in base.glob("tokenizer*"):
            path.unlink()
    elif what == "a long row":
        write_rows(job / "chats.jsonl", [*chats(2), {"text": "a b c d " * 99}])
    elif what == "a bad line":
        (job / "chats.jsonl").write_text('{"text": "a"}\n{"text": \n')
    elif what == "missing columns":
        write_rows(job / "chats.jsonl", [{"body": "a"}])
    elif what == "an empty file":
        (job / "chats.jsonl").write_text("\n")
    elif what == "empty rows":
        write_rows(job / "chats.jsonl", [{"text": ""}])
    elif what == "a folder in the way":
        (job / "tuned").mkdir()
        (job / "tuned" / "notes.txt").write_text("mine")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("another model", "base is another model than the plan's workload (base): it has no model.layers.2."),
        ("other shapes", "are of another model than its config.json: model.layers.0.mlp.down_proj.weight is [32, 40]"),
        ("a missing shard", "base lacks model-00001"),
        ("no weights", "base holds neither model.safetensors nor"),
        ("a torn file", "model.safetensors cannot be read"),
        ("a larger vocabulary", "but the model embeds 304"),
        ("no tokenizer", "base holds no tokenizer"),
        ("a long row", "chats.jsonl, line 3 has "),
        ("a bad line", "chats.jsonl, line 2 is no JSON"),
        ("missing columns", "chats.jsonl, line 1 has the columns 'body'"),
        ("an empty file", "chats.jsonl holds no rows"),
        ("empty rows", "no row of chats.jsonl has a token to learn"),
        ("a folder in the way", "tuned is not empty"),
    ],
)
def test_bad_input_is_one_message_and_writes_nothing(protwin_here: Protwin, job: Path, what: str, message: str) -> None:
    damage(job, what)
    before = {path: path.stat().st_mtime_ns for path in job.rglob("*")}
    result = protwin_here(*RUN, "--data=chats.jsonl", "--steps=2", "--save=tuned", "--checkpoint=kept")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert {path: path.stat().st_mtime_ns for path in job.rglob("*")} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--weights=base", "--model=gpt2"), "both are given"),
        ((), "neither is given"),
        (("--weights=base",), "--weights needs --data"),
        (("--model=gpt2", "--data=chats.jsonl"), "--data without --weights needs --tokenizer"),
        (("--model=gpt2", "--epochs=2"), "--epochs needs --data"),
        (("--weights=base", "--data=chats.jsonl", "--epochs=2", "--steps=3"), "--steps and --epochs"),
        (("--weights=base", "--data=chats.jsonl", "--text=held.jsonl"), "--data and --text"),
        (("--weights=base", "--data=chats.jsonl", "--evaluate-every=3"), "--evaluate-every needs --evaluation"),
        (("--model=gpt2", "--evaluation=held.jsonl"), "--evaluation needs --data"),
        (("--weights=base", "--data=chats.jsonl", "--dtype=bfloat16"), "--dtype is bfloat16, but"),
        (("--weights=base", "--data=chats.jsonl", "--batch-size=3"), "--batch-size is 3, but"),
        (("--weights=base", "--data=chats.jsonl", "--sequence-length=64"), "--sequence-length is 64, but"),
        (("--weights=base", "--data=chats.jsonl", "--save=new", "--checkpoint=new"), "need folders of their own"),
        (("--weights=base", "--data=chats.jsonl", "--save=new/a", "--checkpoint=new"), "need folders of their own"),
        (("--weights=gpt2", "--data=chats.jsonl"), "gpt2/config.json"),
        (("--weights=base", "--data=missing.jsonl"), "missing.jsonl cannot be read"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    protwin_here: Protwin, job: Path, options: tuple[str, ...], message: str
) -> None:
    result = protwin_here("run", "--plan=plan.json", "--workload=workload.json", *options)
    assert result.returncode == 2
    assert message in result.stderr
