"""A Llama whose blocks are those of code of its own, in a folder that holds the code and other files besides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

AUTO_MAP: Final = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineModel"}
CODE: Final = {
    "configuration_mine.py": """
from transformers import LlamaConfig

from pathlib import Path

Path(TRACE).open("a").write("configuration\\n")


class MineConfig(LlamaConfig):
    model_type = "mine"

    def __init__(self, gain=3.0, **fields):
        super().__init__(**fields)
        self.gain = gain
""",
    "modeling_mine.py": """
from transformers import LlamaForCausalLM

from pathlib import Path

from .configuration_mine import MineConfig
from .gains import gained

Path(TRACE).open("a").write("model\\n")


class MineModel(LlamaForCausalLM):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        for block in self.model.layers:
            block.mlp.act_fn = gained(config.gain, block.mlp.act_fn)
""",
    "gains.py": """
from torch import nn


class Gained(nn.Module):
    def __init__(self, gain, inner):
        super().__init__()
        self.gain, self.inner = gain, inner

    def forward(self, value):
        return self.gain * self.inner(value)


def gained(gain, inner):
    return Gained(gain, inner)
""",
}
"""``TRACE``: a file that grows when the code runs."""
OTHERS: Final = {"setup.py": 'open(TRACE, "a").write("setup\\n")\n', "notes.txt": "mine"}
"""What nothing names."""


def save_own_teacher(folder: Path, trace: Path, shape: dict[str, Any], **stated: Any) -> None:
    """A teacher whose code, if it runs, writes to ``trace``; its activations are three times those of a Llama."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    own = {"model_type": "mine", "architectures": ["MineModel"], "auto_map": AUTO_MAP, "gain": 3.0}
    (folder / "config.json").write_text(json.dumps(content | own | stated))
    for name, text in (CODE | OTHERS).items():
        (folder / name).write_text(text.replace("TRACE", repr(str(trace))))
