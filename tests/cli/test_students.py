"""Searches for a model and its student: the workload of the command is that of the models that will run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from protwin.runtime.distillation.block_losses import block_loss
from protwin.runtime.distillation.tracing import trace_distillation
from protwin.runtime.students.student_model import make_student
from protwin.shared.schema.plan import Plan, TrainingMethod
from protwin.shared.students.student import Student
from tests.cli.conftest import Protwin

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "dtype": "float32",
}
STUDENT = """
kind = "student"
schema_version = 1
loss = "mse"
keys_to_learn = ["subblock_attention", "subblock_ffn"]

[all]
num_key_value_heads = 2

[block.1]
ffn = "absent"

[block.2]
intermediate_size = 16
"""
SHAPE = ("--batch-size", "2", "--sequence-length", "12")
FLOAT32 = ("--dtype", "float32")


@pytest.fixture
def files(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "student.toml").write_text(STUDENT)
    return folder


def test_a_student_is_searched_for_simulated_and_is_the_one_that_runs(protwin_here: Protwin, files: Path) -> None:
    named = ("--model", "config.json", "--student", "student.toml", "--hardware", "rtx-3090", *SHAPE, *FLOAT32)
    searched = protwin_here("search", *named, "--method", "bypass", "--output", "found.json")
    assert searched.returncode == 0, searched.stderr
    plan = Plan.load(files / "found.json")
    assert plan.method is TrainingMethod.BYPASS
    shape = ("--global-batch", "2", "--sequence-length", "12", "--processes", "1", "--json")
    advised = protwin_here("advise", *named[:6], "--method", "bypass", *shape)
    assert json.loads(advised.stdout)["machines"][0]["plan"]["method"] == "bypass", advised.stderr
    simulated = protwin_here("simulate", "--plan", "found.json", *named)
    assert simulated.returncode == 0, simulated.stderr
    torch.manual_seed(0)
    teacher = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    student = Student.load(files / "student.toml")
    batch = {"input_ids": torch.randint(0, 64, (2, 12))}
    made, loss = make_student(teacher, student), block_loss(student.loss)
    traced = trace_distillation(
        teacher, made, batch, loss, keys_to_learn=[key.value for key in student.keys_to_learn], repeats=0
    )
    assert plan.workload_id == traced.identity


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "bypass", "--model", "config.json", *SHAPE), "nobody says which. Name its file with --student"),
        (("--method", "full", "--model", "config.json", "--student", "student.toml", *SHAPE), "Leave --student out"),
        (("--model", "workload.json", "--student", "student.toml"), "name the model that it was traced from"),
        (("--method", "bypass", "--model", "workload.json"), "a workload of method full, and --method says bypass"),
        (("--model", "config.json", "--student", "plan.json", *SHAPE), "plan.json"),
        (("--model", "config.json", "--student", "student.toml", "--lora-rank", "4", *SHAPE), "what of it is learnt"),
    ],
)
def test_what_goes_with_no_student_is_refused(
    protwin_here: Protwin, files: Path, arguments: tuple[str, ...], message: str
) -> None:
    refused = protwin_here("search", *arguments, "--hardware", "rtx-3090")
    assert refused.returncode == 2
    assert message in refused.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "bypass", "--model", "config.json"), "nobody says which. Name its file with --student"),
        (("--method", "full", "--model", "config.json", "--student", "student.toml"), "Leave --student out"),
        (("--method", "bypass", "--model", "workload.json"), "a workload of method full, and --method says bypass"),
    ],
)
def test_advice_refuses_what_a_search_refuses(
    protwin_here: Protwin, files: Path, arguments: tuple[str, ...], message: str
) -> None:
    shape = () if "workload.json" in arguments else ("--sequence-length", "12")
    refused = protwin_here("advise", *arguments, "--hardware", "rtx-3090", "--global-batch", "2", *shape)
    assert refused.returncode == 2
    assert message in refused.stderr.replace("\n", " ")


@pytest.mark.slow
def test_a_sweep_asks_about_a_student_as_a_search_does(protwin_here: Protwin, files: Path) -> None:
    asked = ("--model", "config.json", "--student", "student.toml", *FLOAT32, "--sequence-length", "12")
    result = protwin_here("sweep", *asked, "--hardware", "rtx-3090", "--batch-size", "2", "--processes", "1", "--json")
    assert result.returncode == 0, result.stderr
    (point,) = json.loads(result.stdout)["points"]
    searched = protwin_here("search", *asked, "--hardware", "rtx-3090", "--batch-size", "2", "--json")
    assert point["found"]["plan"] == json.loads(searched.stdout)["plan"]


def test_a_sweep_over_stages_is_refused(protwin_here: Protwin, files: Path) -> None:
    asked = ("--model", "config.json", "--student", "student.toml", *FLOAT32, "--sequence-length", "12")
    refused = protwin_here("sweep", *asked, "--hardware", "rtx-3090-x4", "--ranks", "2")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "stages and replicas, which a sweep does not search" in " ".join(refused.stderr.split())
