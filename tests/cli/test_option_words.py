"""An option that does not exist is answered with the option that the user means."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest
import typer

from protwin.shared.cli.option_words import OTHER_VALUES, OTHER_WORDS, meant_options, meant_values
from protwin.shared.cli.root import COMMANDS, root_command
from protwin.shared.foreign.asked_run import Tool
from protwin.shared.phases.quantization import QuantizedType
from protwin.shared.phases.tiling import LossHead
from protwin.shared.schema.plan import ParallelMode
from tests.cli.conftest import Protwin

NAMES = sorted(COMMANDS.keys() - {"hardware", "models", "checkpoint", "published"})


@cache
def options(command: str) -> tuple[str, ...]:
    """What ``protwin command`` takes, as typer tells it."""
    loaded = typer.main.get_command(root_command().commands[command].load())  # type: ignore[attr-defined]
    return tuple(option for parameter in loaded.params for option in parameter.opts if option.startswith("--"))


@pytest.mark.parametrize(
    ("command", "typed", "meant"),
    [
        ("search", "--gpu", "--hardware"),  # vendors of machines, calculators of memory
        ("search", "--gpus", "--ranks"),
        ("search", "--nproc_per_node", "--ranks"),  # torchrun
        ("search", "--seq-len", "--sequence-length"),  # torchtune, Megatron-LM has --seq-length
        ("search", "--context-length", "--sequence-length"),
        ("search", "--max_seq_length", "--sequence-length"),  # TRL
        ("search", "--bs", "--batch-size"),
        ("search", "--per_device_train_batch_size", "--batch-size"),  # transformers
        ("search", "--gradient-accumulation-steps", "--micro-batches"),
        ("search", "--global-batch-size", "--global-batch"),  # Megatron-LM
        ("search", "--vram", "--device-budget"),
        ("search", "--gradient-checkpointing", "--n-checkpoint"),
        ("search", "--tiles", "--loss-tiles"),
        ("run", "--lr", "--learning-rate"),
        ("run", "--dataset", "--data"),
        ("run", "--max_steps", "--steps"),
        ("run", "--output_dir", "--save"),
        ("run", "--eval", "--evaluation"),
        ("trace", "--precision", "--dtype"),
        ("advise", "--optim", "--optimizer"),
        ("advise", "--batch-size", "--global-batch"),  # protwin search
    ],
)
def test_words_of_other_tools_are_known(command: str, typed: str, meant: str) -> None:
    assert meant_options(typed, options(command))[0] == meant


@pytest.mark.parametrize("command", NAMES)
def test_a_slip_is_seen_through(command: str) -> None:
    """Every option with two letters exchanged, a letter lost or underscores: the option itself is named first."""
    known = options(command)
    for option in known:
        assert meant_options(option.replace("-", "_").replace("__", "--", 1), known) == (option,)
        middle = 2 + len(option[2:]) // 2
        slips = {option[: middle - 1] + option[middle] + option[middle - 1] + option[middle + 1 :],
                 option[:middle] + option[middle + 1 :]} if len(option) > 9 else set()  # fmt: skip
        assert all(meant_options(slip, known)[0] == option for slip in slips - set(known)), (option, slips)


def test_other_words_lead_to_options_that_exist_and_are_none_themselves() -> None:
    every = {option for command in NAMES for option in options(command)}
    assert OTHER_WORDS.keys() <= every
    assert meant_options("--no-such-thing", every) == ()


def test_the_command_line_says_so() -> None:
    """In the message of the command; the letters of --gpu are nearest to those of --output."""
    done = subprocess.run(
        [sys.executable, "-m", "protwin", "search", "--gpu", "rtx-3090"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "Error: No such option: --gpu. Did you mean --hardware?"


@pytest.mark.parametrize(
    ("option", "typed", "meant"),
    [
        ("--quantize", "4bit", "nf4"),
        ("--parallel", "fsdp", "sharded"),
        ("--goal", "cheap", "cheapest"),
        ("--goal", "x", ""),
    ],
)
def test_a_value_that_an_option_does_not_have_is_answered_with_one_that_it_has(
    protwin: Protwin, option: str, typed: str, meant: str
) -> None:
    told = " ".join(protwin("search", "--model=gpt2", "--hardware=rtx-4090", option, typed).stderr.split())
    assert f"Invalid value for '{option}': '{typed}' is not one of '" in told, "without pydantic's own words"
    assert told.endswith(f" Did you mean {meant}?" if meant else ".")


def test_other_words_for_values_are_of_values_that_some_option_has() -> None:
    for value in OTHER_VALUES:
        assert meant_values(value, [value]) == (value,)
    assert meant_values("liger", ["eager"]) == ("eager",), "where the other word is of none, spelling decides"
    values = {str(one) for kind in (ParallelMode, QuantizedType, LossHead, Tool) for one in kind}
    assert OTHER_VALUES.keys() <= values
