"""FSDP in the words of transformers, accelerate and axolotl: ``fsdp`` with options, and ``fsdp_config`` with keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..methods.runtime_profile import Runtime
from .asked_run import Checkpointing, Place, Reading, Split, Tool
from .keys import AUTO, Contradicts, KeyTable, LeftOut, Walk, one_of, said, shown

_STRATEGIES: Final = {
    "full_shard": (Split.PARAMETERS, False),
    "shard_grad_op": (Split.GRADIENTS, False),
    "no_shard": (Split.NOTHING, False),
    "hybrid_shard": (Split.PARAMETERS, True),
    "hybrid_shard_zero2": (Split.GRADIENTS, True),
    "1": (Split.PARAMETERS, False),
    "2": (Split.GRADIENTS, False),
    "3": (Split.NOTHING, False),
    "4": (Split.PARAMETERS, True),
    "5": (Split.GRADIENTS, True),
    "true": (Split.PARAMETERS, False),
    "false": (Split.GRADIENTS, False),
}
"""What ranks have in parts, and whether within a node alone; accelerate numbers them too."""
_OPTIONS: Final = ("offload", "auto_wrap")
"""Words of ``fsdp`` beside strategies."""
_OF_THE_FIRST: Final = ("sharding_strategy", "backward_prefetch", "use_orig_params", "sync_module_states")
_BEFORE: Final = "backward_pre"
_WRAPS: Final = ("transformer_based_wrap", "size_based_wrap", "no_wrap")

FSDP_KEYS: Final = KeyTable(
    tool=Tool.TRAINING_ARGUMENTS,
    read=frozenset(
        {
            "reshard_after_forward",
            "sharding_strategy",
            "cpu_offload",
            "offload_params",
            "activation_checkpointing",
            "auto_wrap_policy",
            "version",
            "backward_prefetch",
            "use_orig_params",
            "sync_module_states",
        }
    ),
    left_out={
        "min_num_params": LeftOut("units hold so many parameters at least; in the answer each holds one block"),
        "mixed_precision_policy": LeftOut("element types are those of the rest of the file in the answer", ("bf16",)),
        "forward_prefetch": LeftOut("the next gather begins before the forward of a block; in the answer too", (True,)),
        "limit_all_gathers": LeftOut("gathers run ahead without a limit: they take more memory", (True,)),
        "activation_checkpointing_offload": LeftOut("inputs of recomputed blocks go to the host"),
    },
    contradicts={
        "xla": Contradicts("XLA's devices are none of the catalogue's. Leave it out."),
        "xla_fsdp_v2": Contradicts("XLA's devices are none of the catalogue's. Leave it out."),
    },
    without_effect=frozenset(
        {
            "transformer_layer_cls_to_wrap",
            "transformer_cls_names_to_wrap",
            "state_dict_type",
            "final_state_dict_type",
            "cpu_ram_efficient_loading",
            "cpu_offload_pin_memory",
            "xla_fsdp_settings",
            "xla_fsdp_grad_ckpt",
            "ignored_modules",
        }
    ),
)
"""Keys without the ``fsdp_`` that older files put before them."""


def fsdp_options(walk: Walk) -> list[str] | None:
    """The words of ``fsdp``: an empty list where it is on without any, None where it is off."""
    given = walk.value("fsdp")
    if given in (None, False, "", []) or (isinstance(given, str) and given.lower() == "false"):
        return None
    if given is True or (isinstance(given, str) and given.lower() == "true"):
        return []
    words = given.replace(",", " ").split() if isinstance(given, str) else given
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        walk.refuse("fsdp", "true, or options such as full_shard auto_wrap offload")
        return None
    found = [word.lower() for word in words]
    for word in found:
        if word not in _OPTIONS and word not in _STRATEGIES:
            names = (*(name for name in _STRATEGIES if name[0] not in "12345tf"), *_OPTIONS, "full_shard")
            walk.contradict(f"{walk.prefix}fsdp has {shown(word)}. Choose from {', '.join(sorted(set(names)))}.")
    return found


def read_fsdp(options: Sequence[str], config: Mapping[str, Any], *, version: int | None = None) -> Reading:
    """What FSDP is asked to do; ``version``: of FSDP, where ``config`` names none.

    Raises PlanError, one message, if it contradicts itself or a plan.
    """
    content = {str(name).removeprefix("fsdp_"): value for name, value in config.items()}
    walk = Walk(FSDP_KEYS, content, "fsdp_config.")
    split, is_hybrid = _strategy(walk, options)
    found: dict[str, Any] = {"split": split, "shards_within_node": is_hybrid or None}
    if "offload" in options or walk.flag("cpu_offload") or walk.flag("offload_params"):
        found |= {"parameters_on": Place.HOST, "optimizer_on": Place.HOST}
        for key in ("cpu_offload", "offload_params"):
            walk.means(key, "parameters, gradients and optimizer state lie on the host")
    if walk.flag("activation_checkpointing"):
        found["checkpointing"] = Checkpointing.FULL
        walk.means("activation_checkpointing", "every block is recomputed in backward")
    wrap = walk.text("auto_wrap_policy")
    if wrap is not None and wrap.lower() not in _WRAPS:
        walk.refuse("auto_wrap_policy", "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP")
    elif wrap is not None and wrap.lower() == _WRAPS[0]:
        walk.means("auto_wrap_policy", "each unit holds one block")
    elif wrap is not None:
        walk.leaves_out("auto_wrap_policy", "units are gathered otherwise; in the answer each holds one block")
    found["runtime"] = _runtime(walk, version)
    if found["runtime"] is not Runtime.FSDP2 and walk.has("use_orig_params"):
        found["frozen_apart"] = not walk.flag("use_orig_params")
        apart = "apart from trained ones: under reentrant checkpointing hooks hold the inputs of blocks"
        walk.means("use_orig_params", f"frozen parameters are flat {apart if found['frozen_apart'] else 'with others'}")
    return walk.reading(said(found))


def _runtime(walk: Walk, usual: int | None) -> Runtime:
    """FSDP2, unless the file or its tool says 1, or the file has what FSDP1 alone takes."""
    version = walk.number("version", usual)
    walk.means("version", "of FSDP")
    is_old = version == 1 or (version is None and any(walk.has(key) for key in _OF_THE_FIRST))
    if not is_old:
        return Runtime.FSDP2
    walk.means("sync_module_states", "takes no time in a step; the first FSDP alone has it")
    prefetch = (walk.text("backward_prefetch") or _BEFORE).lower()
    if prefetch == "backward_post":
        walk.means("backward_prefetch", "a block is gathered when the backward of the one before has ended")
        return Runtime.FSDP_BACKWARD_POST
    if prefetch == _BEFORE:
        walk.means("backward_prefetch", "a block is gathered while the backward of the one before runs")
    elif prefetch == "no_prefetch":
        walk.leaves_out("backward_prefetch", "gathers of the backward do not run ahead of it: steps take longer")
    else:
        walk.refuse("backward_prefetch", "BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH")
    return Runtime.FSDP


def _strategy(walk: Walk, options: Sequence[str]) -> tuple[Split, bool]:
    named = [word for word in options if word in _STRATEGIES]
    found: tuple[Split, bool] = _STRATEGIES[named[0]] if named else (Split.PARAMETERS, False)
    for key in ("sharding_strategy", "reshard_after_forward"):
        given = walk.value(key)
        if given is None or given == AUTO:
            continue
        chosen = one_of(walk, key, _STRATEGIES, str(given))
        if chosen is not None:
            found = chosen
            kind = "DDP" if chosen[0] is Split.NOTHING else f"ranks have parts of the {chosen[0]}"
            walk.means(key, kind + (", of each node by itself" if chosen[1] else ""))
            return found
    return found
