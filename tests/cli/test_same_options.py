"""Commands that ask about a model take the same options: what a workload can be is asked of all of them alike."""

from __future__ import annotations

import os
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
from typer.main import get_command

from protwin.shared.basics.errors import WorkloadError
from protwin.shared.cli.option_groups import with_groups
from protwin.shared.cli.options import command_app
from protwin.shared.cli.root import APPS
from protwin.shared.cli.training_choice import TrainingChoice
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.training_options import TrainingOptions
from protwin.shared.workloads.source import WorkloadRequest
from protwin.sim.commands.model_choice import PredictedTraining
from tests.cli.conftest import Protwin

ASKING: Final = ("search", "simulate", "advise", "sweep")
"""Commands that predict, of a model in any training."""
OTHERS: Final = ("trace", "run")
"""Commands that have a model too; what they can say of its training, the others can ask about."""

S, M, A, W = ASKING
EXCEPTIONS: Final[list[tuple[str, str, str]]] = [
    # options, the commands among ASKING that have them, why the others have not
    (
        "--chunk-bytes --n-persist --n-host-stepped --n-disk-state --n-disk --n-staging --n-buffer --prefetch-depth "
        "--n-checkpoint --n-swap --n-offload-input --looks-up-rows",
        S,
        "knobs of plans: advise and sweep leave them open, and the plan of simulate names them",
    ),
    ("--n-shard", f"{S} {M}", "a knob that simulate may change, so that a plan of one rank is asked about on several"),
    (
        "--product-stride --mlp-tiles --loss-tiles --max-gradient-norm --host-gradients --margin",
        f"{S} {A} {W}",
        "knobs of plans, and the room that a search leaves: the plan of simulate has them",
    ),
    ("--micro-batches", f"{S} {W}", "advise divides its global batch; the plan of simulate has it"),
    ("--batch-size", f"{S} {M} {W}", "advise searches it"),
    ("--global-batch", f"{S} {A}", "the plan of simulate fixes it, and a sweep has its shapes"),
    (
        "--parallel --shard-ranks",
        f"{S} {M} {W}",
        "advise compares all ways on the ranks of every machine",
    ),
    (
        "--sequence-ranks",
        f"{S} {W}",
        "the plan of simulate has it, and advise chooses ranks by how they divide the batch, not sequences",
    ),
    ("--goal --risk --baseline --what-if", S, "questions about one answer"),
    ("--longest --state", A, "a ranking by sequences, and answers kept over hours"),
    ("--processes", f"{A} {W}", "the others ask one question"),
    (
        "--as --bucket-scalars --caches-keys --expandable-segments --foreach --holds-inputs --keeps-gradients "
        "--loss-metrics --reduce-dtype --reentrant --two-buckets",
        M,
        "how another system carries out the one plan; searches are of plans of our own",
    ),
    ("--plan --timeline", M, "it has one plan"),
    ("--lora-alpha --use-rslora", "", "scales of adapters, which cost nothing"),
    ("--mlp-module", "", "the MLP of a model that a trace does not find one in; the workload then knows it"),
    ("--real --seed --time-limit", "", "a measurement's"),
    (
        "--checkpoint --checkpoint-every --data --device-to-host --disk-folder --epochs --evaluate-every --evaluation "
        "--host-to-device --learning-rate --loss-weighting --osft-cache --replan-after --resume --save --schedule "
        "--steps --text --tokenizer --warmup-steps --weights --workload",
        "",
        "a training's that really runs",
    ),
]


def options(command: str) -> set[str]:
    module, attribute = APPS[command].split(":")
    parameters = get_command(getattr(import_module(module), attribute)).params
    return {name for parameter in parameters for name in parameter.opts if name.startswith("--")} - {"--help"}


HAS: Final = {command: options(command) for command in (*ASKING, *OTHERS)}
EXCEPTED: Final = {name: set(having.split()) for names, having, _ in EXCEPTIONS for name in names.split()}


WITH_A_TRACE: Final = (
    "--autocast",
    "--no-autocast-cache",
    "--freeze",
    "--image-size",
    "--images",
    "--kernels",
    "--lora-dropout",
    "--lora-dtype",
    "--use-dora",
)
"""Of trainings that no model of the catalogue is known in without one, which ``protwin largest`` never makes."""


def test_the_largest_model_is_asked_about_in_every_training_that_is_known_without_a_trace() -> None:
    def of(group: type[object]) -> set[str]:
        def command(*, training: Any) -> None: ...

        command.__annotations__["training"] = group
        typer_ = command_app()
        typer_.command()(with_groups(command))
        return {name for one in get_command(typer_).params for name in one.opts if name.startswith("--")}

    assert of(PredictedTraining) - options("largest") == set(WITH_A_TRACE)


@pytest.mark.parametrize("option", sorted(set().union(*HAS.values())))
def test_every_option_is_in_all_commands_or_is_a_known_exception(option: str) -> None:
    having = {command for command in ASKING if option in HAS[command]}
    assert having == EXCEPTED.get(option, set(ASKING)), (
        f"{option}: give it to {', '.join(sorted(set(ASKING) - having))} too, or say in EXCEPTIONS why not"
    )


def test_exceptions_are_of_options_that_exist_and_have_a_reason() -> None:
    assert set(EXCEPTED) <= set().union(*HAS.values())
    assert all(reason for *_, reason in EXCEPTIONS)
    assert len(EXCEPTED) == sum(len(names.split()) for names, *_ in EXCEPTIONS), "each option once"


def test_every_part_of_training_has_an_option() -> None:
    """What ``TrainingChoice`` has and what ``TrainingOptions`` has grow together; the table says how each is written.

    What is predicted alone is put in by ``PredictedTraining``.
    """
    written = {
        "lora": "--lora-rank --lora-targets --lora-dropout --lora-dtype --use-dora",
        "packed": "--quantize --double-quantize --quantization-blocksize --quantize-head",
        "subspaces": "--unfreeze-rank-ratio --osft-target",
        "frozen": "--freeze",
        "pictures": "--image-size --images",
        "autocast": "--autocast",
        "no_autocast_cache": "--no-autocast-cache",
        "loss": "--loss",
        "kernels": "--kernels",
        "keeps_outputs": "--keeps-outputs",
    }
    assert {field.name for field in fields(TrainingChoice)} == set(written)
    of = {"lora", "quantized", "osft", "frozen", "images", "autocast", "loss_head", "kernels", "keeps_outputs"}
    of |= {"autocast_cache", "compiled", "float8", "float8_gather"}
    assert set(TrainingOptions.model_fields) == of
    for option in " ".join([*written.values(), "--compile --float8 --float8-gather"]).split():
        assert all(option in HAS[command] for command in ASKING), option


LORA: Final = "--lora-rank 8 --lora-targets q_proj,v_proj --lora-dropout 0.25 --lora-dtype float32"
TRAININGS: Final = (
    f"{LORA} --use-dora --autocast bfloat16 --freeze model.embed_tokens --packed-lengths uniform:8:32",
    f"{LORA} --quantize nf4 --double-quantize --quantization-blocksize 128 --dtype bfloat16 --loss fused",
    "--method osft --unfreeze-rank-ratio 0.5 --osft-target q_proj --image-size 28x56 --images 2",
    "--compile blocks --float8 rowwise --loss narrow --keeps-outputs",
    "--compile blocks --float8 tensorwise --float8-gather dynamic",
)


@pytest.mark.parametrize("training", TRAININGS)
def test_all_commands_ask_about_the_same_training(
    training: str, tmp_path: Path, protwin_here: Protwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    Plan(workload_id="any", chunk_bytes=2**20, n_persist=1, n_buffer=1).save(tmp_path / "plan.json")
    asked: list[dict[str, Any]] = []

    def note(request: WorkloadRequest, **_: object) -> None:
        told = ("model", "options", "packed_lengths", "dtype", "student", "sequence_length")
        asked.append({name: getattr(request, name) for name in told})
        raise WorkloadError("it was asked")

    for where in ("commands.model_choice", "questions.advise"):
        for name in ("resolve_workload", "untraced_workload"):
            monkeypatch.setattr(f"protwin.sim.{where}.{name}", note)
    question = f"--model qwen2.5-0.5b --hardware rtx-4090 --sequence-length 64 {training}".split()
    own = {
        "search": ["--batch-size", "1"],
        "simulate": ["--batch-size", "1", "--plan", os.fspath(tmp_path / "plan.json")],
        "advise": ["--global-batch", "1"],
        "sweep": ["--batch-size", "1"],
    }
    for command in ASKING:
        done = protwin_here(command, *question, *own[command])
        assert (done.returncode, "it was asked" in done.stderr) == (2, True), done.stderr
    assert len(asked) >= len(ASKING)
    assert all(one == asked[0] for one in asked)
    assert asked[0]["options"] != TrainingOptions()
