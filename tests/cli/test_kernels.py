"""``--kernels``: what a package's kernels spare, as every command that predicts a configuration tells it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.cli.conftest import Protwin
from tests.runtime.packaged.test_reference_kernels import QWEN

BOTH = ("--kernels", "flash-linear-attention", "--kernels", "causal-conv1d")


def test_a_file_of_another_tool_is_answered_by_kernels_that_are_installed(work: Path, protwin_here: Protwin) -> None:
    configuration = QWEN.to_dict() | {"architectures": ["Qwen3NextForCausalLM"]}
    (work / "config.json").write_text(json.dumps(configuration))
    (work / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}))
    asked = ("--model", "config.json", "--hardware", "h100-80gb", "--sequence-length", "130", "--json")
    plain, found = (
        json.loads(protwin_here("explain-config", "ds.json", *asked, *kernels).stdout) for kernels in ((), BOTH)
    )
    assert any("add --kernels causal-conv1d --kernels flash-linear-attention" in line for line in plain["differences"])
    assert not any("--kernels" in line for line in found["differences"])
    assert found["configured"]["iteration_s"] < plain["configured"]["iteration_s"]
    assert re.findall(r"--kernels=(\S+)", found["command"]) == ["causal-conv1d", "flash-linear-attention"]


def test_an_unknown_package_is_named(protwin_here: Protwin) -> None:
    result = protwin_here("search", "--model", "gpt2", "--hardware", "rtx-3090", "--kernels", "mamba_ssm")
    assert result.returncode == 2
    assert "'mamba_ssm' is not one of 'flash-linear-attention', 'mamba-ssm', 'causal-conv1d'" in result.stderr
