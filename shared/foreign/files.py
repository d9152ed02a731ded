"""Files of other tools: what stands in them, whose they are, and what they ask for."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ..basics.documents import read_text, stated_once, why_unreadable
from ..basics.errors import FileError, PlanError, ProtwinError
from ..basics.suggestions import listed
from ..basics.units import format_bytes
from ..schema.optimizer import Optimizer
from .asked_run import Reading, Tool
from .axolotl import read_axolotl
from .deepspeed import read_deepspeed
from .torchtitan import read_torchtitan
from .training_arguments import NESTED, read_training_arguments

_MOST_VALUES: Final = 100_000
"""Values of one file, with all that its anchors repeat: a few lines of anchors may stand for billions."""
_DEEPEST: Final = 100
"""Levels of sections and lists in each other, so that nothing that reads or shows them runs out of stack."""
_LARGEST_BYTES: Final = 2**20
"""A thousand times a configuration's size; pyyaml alone takes a minute for ten times as much."""
_MARKS: Final[Mapping[Tool, frozenset[str]]] = {
    Tool.AXOLOTL: frozenset(
        {
            "base_model",
            "micro_batch_size",
            "sequence_len",
            "datasets",
            "adapter",
            "sample_packing",
            "dataset_prepared_path",
            "val_set_size",
            "lora_r",
        }
    ),
    Tool.TORCHTITAN: frozenset(
        {"job", "training", "parallelism", "activation_checkpoint", "model", "metrics", "lr_scheduler", "experimental"}
    ),
    Tool.DEEPSPEED: frozenset(
        {
            "zero_optimization",
            "train_micro_batch_size_per_gpu",
            "train_batch_size",
            "gradient_clipping",
            "zero_allow_untested_optimizer",
            "steps_per_print",
            "wall_clock_breakdown",
        }
    ),
    Tool.TRAINING_ARGUMENTS: frozenset(
        {
            "per_device_train_batch_size",
            "output_dir",
            "num_train_epochs",
            "optim",
            "max_grad_norm",
            "lr_scheduler_type",
            "logging_steps",
            "model_name_or_path",
            "use_peft",
            "dataset_name",
            NESTED,
        }
    ),
}
"""Keys that one tool alone has at the top of its files."""
_ACCELERATE: Final = frozenset({"distributed_type", "compute_environment", "num_processes", "main_training_function"})
_NOT_READ: Final[Mapping[str, frozenset[str]]] = {
    "LLaMA-Factory": frozenset({"finetuning_type", "cutoff_len", "lora_target", "dataset_dir"}),
    "open-instruct": frozenset({"use_slow_tokenizer", "with_tracking", "use_flash_attn", "use_qlora", "use_lora"}),
    "nanotron": frozenset({"data_stages", "lighteval"}),
    "LitGPT": frozenset({"checkpoint_dir", "out_dir", "lora_query", "lora_projection"}),
    "ms-swift": frozenset({"tuner_type", "train_type", "sft_type", "tuner_backend", "rlhf_type"}),
    "LLM Foundry": frozenset({"device_train_microbatch_size", "global_train_batch_size", "train_loader"}),
    "NeMo": frozenset({"exp_manager"}),
}
"""Tools whose files share keys with those that are read, by keys that none of these has."""
_COMPONENTS: Final = {"_component_": "torchtune", "_target_": "Hydra"}
"""Who names classes in sections by such a key."""
_SUFFIXES: Final = (".json", ".yaml", ".yml", ".toml")


def read_content(path: Path) -> dict[str, Any]:
    """The keys and values of a JSON, YAML or TOML file.

    Raises FileError if it cannot be read or is none, ProtwinError if YAML is to be read and no reader is installed.
    """
    text, suffix = read_text(path), path.suffix.lower()
    if len(text) > _LARGEST_BYTES:
        raise FileError(
            f"{path} has {format_bytes(len(text))}, which no configuration has: {format_bytes(_LARGEST_BYTES)} at most "
            f"are read. Name the configuration itself."
        )
    if suffix == ".toml":
        try:
            found: Any = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise FileError(f"{path} is no TOML: {why_unreadable(error)}.") from error
    elif suffix == ".json" or (suffix not in _SUFFIXES and text.lstrip().startswith("{")):
        try:
            found = json.loads(text, object_pairs_hook=stated_once)
        except (ValueError, RecursionError) as error:
            raise FileError(f"{path} is no JSON: {why_unreadable(error)}.") from error
    else:
        found = _yaml(text, path)
    if not isinstance(found, dict):
        kind = "nothing" if found is None else f"a {type(found).__name__}"
        raise FileError(f"{path} holds {kind}, expected the keys and values of a configuration.")
    check_extent(found, path)
    return found


def _yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ProtwinError(
            f"{path} is YAML, which pyyaml reads, and it is not installed. Install it: pip install pyyaml"
        ) from error
    try:
        return yaml.load(text, _once_loader(yaml))
    except yaml.YAMLError as error:
        raise FileError(f"{path} is no YAML: {' '.join(str(error).split())}.") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is no YAML that can be read: {why_unreadable(error)}.") from error


def _once_loader(yaml: ModuleType) -> Any:
    """The safe loader of pyyaml, in C where there is one; it refuses a key that is there twice: one would be lost."""

    class Once(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            # As written, and not with what "<<" adds: that gives way to the section's own keys.
            names = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for key, _ in node.value if len(set(names)) < len(names) else ():
                if isinstance(key, yaml.ScalarNode) and names.count((key.tag, key.value)) > 1:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value!r:.60} is stated more than once", key.start_mark
                    )
            return super().construct_mapping(node, deep)

    return Once


def check_extent(found: Any, path: Path) -> None:
    """Raise FileError if the file stands for more values than a configuration can have, or nests them too deep."""
    waiting, number = [(found, 0)], 0
    while waiting:
        one, depth = waiting.pop()
        number += 1
        if depth > _DEEPEST:
            raise FileError(f"{path} has sections or lists in each other, more than {_DEEPEST} deep. Write fewer.")
        if number > _MOST_VALUES:
            raise FileError(f"{path} stands for more than {_MOST_VALUES:,} values, by its anchors. Write fewer.")
        if isinstance(one, dict):
            waiting += [(value, depth + 1) for value in one.values()]
        elif isinstance(one, list | tuple | set):
            waiting += [(value, depth + 1) for value in one]


def _not_read(content: Mapping[str, Any]) -> tuple[str, list[str]] | None:
    """The tool whose files are not read, and the keys by which this is one of it; None where it is none."""
    for name, marks in _NOT_READ.items():
        if found := sorted(marks & content.keys()):
            return name, found
    for section in content.values():
        for key, name in _COMPONENTS.items():
            if isinstance(section, Mapping) and key in section:
                return name, [key]
    return None


def tool_of(content: Mapping[str, Any], path: Path) -> Tool:
    """Whose file it is, by its keys.

    Raises PlanError if it could be nobody's, or as well one tool's as another's, or if it is one that is not read.
    """
    if (other := _not_read(content)) is not None:
        name, keys = other
        raise PlanError(
            f"{path} is a file of {name} (by {', '.join(keys[:3])}), which is not read. Write what it says as "
            f"{Tool.TRAINING_ARGUMENTS.words}, or ask protwin search by its options."
        )
    found = {tool: sorted(marks & content.keys()) for tool, marks in _MARKS.items()}
    most = max(len(keys) for keys in found.values())
    likely = [tool for tool, keys in found.items() if len(keys) == most]
    if most == 0 and "kind" in content and "schema_version" in content:
        raise PlanError(
            f"{path} is a {content['kind']} file of protwin. Name the file of another tool: {_all_words()}."
        )
    if most == 0 and _ACCELERATE & content.keys():
        raise PlanError(
            f"{path} is a configuration of Accelerate, which says how ranks share a training, and nothing of its "
            f"batches. Write its fsdp_config or deepspeed_config into TrainingArguments (fsdp, fsdp_config, deepspeed)."
        )
    if most == 0:
        raise PlanError(
            f"{path} has none of the keys by which a file is known to be {_all_words()}. Name the tool, if it is one "
            f"of them: --tool {Tool.DEEPSPEED}."
        )
    if len(likely) > 1:
        both = " and ".join(f"{tool.words} (by {', '.join(found[tool][:3])})" for tool in likely)
        raise PlanError(f"{path} could be {both}. Name the tool: --tool {likely[0]}.")
    return likely[0]


def _all_words() -> str:
    return listed([tool.words for tool in Tool], "or")


_READERS: Final[Mapping[Tool, Callable[[Mapping[str, Any], Path, Tool | None, Optimizer | None], Reading]]] = {
    Tool.AXOLOTL: lambda content, folder, _, optimizer: read_axolotl(content, folder=folder, optimizer=optimizer),
    Tool.TORCHTITAN: lambda content, _, __, optimizer: read_torchtitan(content, optimizer=optimizer),
    Tool.DEEPSPEED: lambda content, _, __, optimizer: read_deepspeed(content, optimizer=optimizer),
    Tool.TRAINING_ARGUMENTS: lambda content, folder, tool, optimizer: read_training_arguments(
        content, folder=folder, tool=tool, optimizer=optimizer
    ),
    Tool.TRL: lambda content, folder, tool, optimizer: read_training_arguments(
        content, folder=folder, tool=tool, optimizer=optimizer
    ),
}
"""From a file's content, its folder, the tool and the optimizer that somebody named, if any."""


def read_run(
    content: Mapping[str, Any], path: Path, tool: Tool | None = None, optimizer: Optimizer | None = None
) -> Reading:
    """What the file at ``path``, of this content, asks for.

    ``tool``: whose it is, None to go by its keys; ``optimizer``: what stands in the place of its own, which then may be
    one that no plan knows.

    Raises PlanError, one message that names the file, if it contradicts itself or a plan, or if nobody knows whose it
    is; FileError if a file that it names cannot be read.
    """
    named = tool or tool_of(content, path)
    try:
        return _READERS[named](content, path.parent, tool, optimizer)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
