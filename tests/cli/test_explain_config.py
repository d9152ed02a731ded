"""What an axolotl file asks of a plan: told, refused by name, and asked about by the command that is printed."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protwin.calibration.one_call.searching import space_of
from protwin.runtime.integrations.axolotl_file import step_of
from protwin.runtime.integrations.axolotl_question import KNOBS, NamedFiles, disagreements
from protwin.runtime.integrations.axolotl_section import PLUGIN, PlanSection
from protwin.shared.answers.search_result import SearchResult
from protwin.shared.basics.errors import PlanError
from protwin.shared.schema.plan import Plan
from protwin.sim.space.space import SearchSpace
from tests.cli.conftest import Protwin
from tests.proof_size import some_quick

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
GOOD: dict[str, Any] = {
    "base_model": "llama-3-8b",
    "plugins": [PLUGIN],
    "protwin": {"budget": "20GiB", "hardware": "rtx-3090"},
}


@pytest.fixture
def told(work: Path, protwin_here: Protwin) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The answer about a file with these keys changed; None takes one out."""

    def ask(**changes: Any) -> subprocess.CompletedProcess[str]:
        keys = {name: value for name, value in (GOOD | changes).items() if value is not None}
        (work / "a.yml").write_text(yaml.safe_dump(keys))
        return protwin_here("explain-config", "a.yml")

    return ask


def commands(output: str) -> list[list[str]]:
    return [shlex.split(line) for line in output.splitlines() if line.startswith("  protwin ")]


@some_quick("example", ["full", "lora"], quick=1)
def test_the_command_that_is_printed_asks_for_the_step_of_the_file(
    work: Path, protwin_here: Protwin, example: str
) -> None:
    (work / "base").mkdir()
    (work / "base" / "config.json").write_text(json.dumps(TINY))
    result = protwin_here("explain-config", ROOT / "examples" / "axolotl" / f"{example}.yml")
    assert result.returncode == 0, result.stderr
    (command,) = commands(result.stdout)
    searched = protwin_here(*command[1:], "--json")
    assert searched.returncode == 0, searched.stderr
    found = SearchResult.from_mapping(json.loads(searched.stdout), origin="standard output")
    plan, question = found.prediction.plan, found.prediction.question
    assert plan is not None
    assert question is not None
    assert (plan.micro_batches, plan.max_gradient_norm, str(plan.optimizer)) == (2, 0.5, "adamw")
    assert "--batch-size=2" in command
    assert "--sequence-length=32" in command
    assert question.compute_dtype == "float32"
    assert ("--lora-rank=4" in command, plan.n_checkpoint == 2 or example == "full") == (example == "lora", True)


def test_it_needs_neither_torch_nor_axolotl_and_says_where_yaml_is_missing(
    work: Path, environment: dict[str, str]
) -> None:
    (work / "a.yml").write_text(yaml.safe_dump(GOOD))

    def without(*modules: str) -> subprocess.CompletedProcess[str]:
        code = (
            f"import sys; sys.modules.update(dict.fromkeys({modules!r}))\n"
            "from protwin.shared.cli.main import main; sys.argv = ['protwin', 'explain-config', 'a.yml']; main()"
        )
        arguments = [sys.executable, "-c", code]
        return subprocess.run(
            arguments, cwd=work, env=environment, capture_output=True, text=True, timeout=600, check=False
        )

    done = without("torch", "transformers", "axolotl")
    assert done.returncode == 0, done.stderr
    (command,) = commands(done.stdout)
    assert " ".join(command) == (
        "protwin search --model=llama-3-8b --hardware=rtx-3090 --batch-size=1 --sequence-length=512 --dtype=bfloat16 "
        "--device-budget=20GiB --micro-batches=1 --max-gradient-norm=1"
    )
    refused = without("yaml")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "pip install pyyaml" in refused.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"deepspeed": "z.json", "fp16": True}, ["deepspeed asks for DeepSpeed", "fp16 scales gradients"]),
        ({"protwin": {"budgte": 1}}, ["a.yml", "protwin.budgte is no key"]),
        ({"protwin": {3: 1}}, ["protwin.3"]),
        ({"protwin": None}, ["no section protwin"]),
        ({"plugins": None}, ["do not list", PLUGIN]),
        ({"plugins": PLUGIN}, ["plugins is no list"]),
        ({"plugins": ["axolotl.integrations.liger.LigerPlugin"]}, ["do not list"]),
        ({"protwin": {"hardware": "rtx-39000"}}, ["protwin.hardware", "rtx-39000"]),
        ({"protwin": {"plan": "no.json"}}, ["protwin.plan", "no.json does not exist"]),
        ({"protwin": {"knobs": {"n_persits": 1}}}, ["n_persits is no knob", "n_persist"]),
        ({"protwin": {"knobs": {"n_persist": -1}}}, ["n_persist cannot be -1"]),
        ({"sequence_len": 0}, ["sequence_len cannot be 0"]),
        ({"micro_batch_size": "many"}, ["micro_batch_size cannot be 'many'"]),
        ({"base_model": None}, ["base_model is missing"]),
    ],
    ids=str,
)
def test_what_contradicts_is_one_message_that_names_both(told: Any, changes: dict[str, Any], said: list[str]) -> None:
    result = told(**changes)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert all(words in result.stderr for words in said), result.stderr
    assert "Nothing in the file contradicts" not in result.stdout
    assert commands(result.stdout) == []


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a: [1", "is no YAML"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"", "holds nothing"),
        (b"- a\n- b\n", "holds a list"),
        (b"a: 2026-13-45\n", "is no YAML that can be read"),
        (b"[" * 3_000, "is no YAML"),
        (BOMB.encode(), "stands for more than 100,000 values"),
        (b"a: !!python/object/apply:os.getcwd []\n", "is no YAML"),
        (None, "does not exist"),
    ],
    ids=range(9),
)
def test_a_file_that_is_none_is_one_message(
    work: Path, protwin_here: Protwin, content: bytes | None, said: str
) -> None:
    if content is not None:
        (work / "a.yml").write_bytes(content)
    result = protwin_here("explain-config", "a.yml")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "a.yml" in result.stderr
    assert said in result.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"load_in_8bit": True}, "quantised"),
        ({"adapter": "lora", "lora_target_linear": True}, "lora_r: 16"),
        ({"adapter": "lora", "lora_r": 8, "lora_target_modules": ".*_proj"}, "no list of plain names"),
        (
            {"adapter": "qlora", "lora_r": 8, "lora_target_linear": True, "peft_use_dora": True},
            "peft_use_dora reads whole weights",
        ),
        ({"base_model": "mine/unheard-of"}, "mine/unheard-of is neither a model of the catalogue"),
    ],
    ids=str,
)
def test_what_no_command_can_ask_is_said(told: Any, changes: dict[str, Any], said: str) -> None:
    result = told(**changes)
    assert result.returncode == 0, result.stderr
    assert commands(result.stdout) == []
    assert said in result.stdout


def test_a_packed_base_and_what_lora_has_beside_its_rank_are_asked_about(told: Any) -> None:
    lora = {"lora_r": 8, "lora_target_linear": True}
    asked = {
        "qlora": told(adapter="qlora", load_in_4bit=True, **lora),
        "int8": told(adapter="lora", load_in_8bit=True, lora_dropout=0.1, **lora),
        "dora": told(adapter="lora", peft_use_dora=True, **lora),
    }
    said = {name: set(commands(result.stdout)[-1]) for name, result in asked.items()}
    assert {"--quantize=nf4", "--double-quantize", "--lora-rank=8"} < said["qlora"]
    assert {"--quantize=int8", "--lora-dropout=0.1"} < said["int8"]
    assert "--double-quantize" not in said["int8"]
    assert "--use-dora" in said["dora"]
    assert not [option for option in said["dora"] if option.startswith("--quantize")]


def test_a_copy_of_a_model_of_the_catalogue_is_asked_about_as_the_original(told: Any) -> None:
    copied = told(base_model="NousResearch/Meta-Llama-3-8B")
    (command,) = commands(copied.stdout)
    assert "--model=llama-3-8b" in command
    assert "NousResearch/Meta-Llama-3-8B is taken for a copy of llama-3-8b" in copied.stdout
    assert "taken for a copy" not in told(base_model="meta-llama/Meta-Llama-3-8B").stdout
    assert commands(told(base_model="NousResearch/Meta-Llama-3-9B").stdout) == []


def test_a_machine_that_is_not_named_is_probed_first(told: Any) -> None:
    result = told(protwin={"budget": "9 GiB"}, adapter="lora", lora_r=8, lora_target_modules=["q_proj", "v_proj"])
    probe, search = commands(result.stdout)
    assert probe == ["protwin", "hardware", "probe", "--output", "machine.toml"]
    assert "measures the machine that it runs on" in result.stdout
    assert {"--hardware=machine.toml", "--device-budget=9 GiB", "--lora-targets=q_proj,v_proj"} < set(search)


def test_a_given_plan_is_simulated_and_its_step_is_the_files(folder: Path, told: Any, protwin_here: Protwin) -> None:
    section = {"plan": "plan.json", "workload": "workload.json", "hardware": "rtx-3090"}
    num_samples = json.loads((folder / "workload.json").read_text())["num_samples"]
    result = told(protwin=section, max_grad_norm=0, micro_batch_size=num_samples)
    assert result.returncode == 0, result.stderr
    (command,) = commands(result.stdout)
    assert command[:2] == ["protwin", "simulate"]
    assert protwin_here(*command[1:]).returncode == 0
    for changes, said in (
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps is 3, but protwin.plan has 1"),
        ({"max_grad_norm": 2}, "clips gradients to 2, but protwin.plan limits their norm to no limit"),
        ({"micro_batch_size": num_samples + 1}, f"was traced with {num_samples} samples"),
    ):
        refused = told(**{"protwin": section, "max_grad_norm": 0, "micro_batch_size": num_samples} | changes)
        assert refused.returncode == 2
        assert said in refused.stderr
    assert Plan.load(folder / "plan.json").micro_batches == 1


def test_json_has_what_the_tables_say(work: Path, protwin_here: Protwin) -> None:
    example = ROOT / "examples" / "axolotl" / "full.yml"
    result = protwin_here("explain-config", example, "--json")
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout)
    assert set(printed["section"]) == set(PlanSection.model_fields)
    assert [shlex.split(one) for one in printed["commands"]] == commands(protwin_here("explain-config", example).stdout)


def test_knobs_are_refused_as_a_search_refuses_them() -> None:
    assert list(KNOBS) == list(SearchSpace.model_fields)
    step, files = step_of(GOOD), NamedFiles(None, None, None)
    chance = random.Random(20)
    refused = 0
    for _ in range(600):
        name = chance.choice([*KNOBS, "n_other"])
        values = [None, [], -1, 0, 1, 3, 10**6, 10**6 + 1, 2**62 + 1, "x", [1, 2], [0, 1], [1, -1], "all"]
        if name == "looks_up_rows":
            values = [None, [], True, False, "x", [1, 2]]
        value = chance.choice(values)
        try:
            space_of({name: value})
            is_taken = True
        except PlanError:
            is_taken = False
            refused += 1
        section = PlanSection.model_validate({"knobs": {name: value}})
        assert (disagreements(section, step, files) == []) == is_taken, (name, value)
    assert 100 < refused < 500
