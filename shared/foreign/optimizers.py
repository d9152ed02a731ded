"""What other tools call optimizers, and what plans have in their place."""

from __future__ import annotations

from typing import Final

from ..schema.optimizer import Optimizer
from .keys import Walk, shown

_SAME: Final = {
    "adam": Optimizer.ADAM,
    "adamw": Optimizer.ADAMW,
    "adamw_torch": Optimizer.ADAMW,
    "adamw_torch_fused": Optimizer.ADAMW,
    "adamw_hf": Optimizer.ADAMW,
    "sgd": Optimizer.SGD,
    "adafactor": Optimizer.ADAFACTOR,
    "lion": Optimizer.LION,
    "lion_32bit": Optimizer.LION,
    "fusedlion": Optimizer.LION,
    "adamw_8bit": Optimizer.ADAMW_8BIT,
    "adamw_bnb_8bit": Optimizer.ADAMW_8BIT,
    "paged_adamw_8bit": Optimizer.PAGED_ADAMW_8BIT,
    "fusedadam": Optimizer.ADAM,
    "cpuadam": Optimizer.ADAM,
    "deepspeedcpuadam": Optimizer.ADAM,
}
"""By their names in lower case."""
_ALIKE: Final = {
    "adamw_apex_fused": (Optimizer.ADAMW, "apex's kernel takes about the time of torch's fused one"),
    "adamw_torch_8bit": (Optimizer.ADAMW_8BIT, "torchao's 8-bit AdamW is answered as that of bitsandbytes"),
    "adamw_torch_4bit": (
        Optimizer.ADAMW_8BIT,
        "moments of 4 bits are answered as those of 8 bits: they take half as much memory there",
    ),
    "adamw_torch_xla": (Optimizer.ADAMW, "XLA's device is not one of the catalogue's"),
    "adamw_torch_npu_fused": (Optimizer.ADAMW, "an NPU is not one of the catalogue's devices"),
    "paged_adamw_32bit": (
        Optimizer.ADAMW,
        "its state is paged: where the device is full it goes to the host, which takes time and spares memory",
    ),
    "paged_lion_32bit": (
        Optimizer.LION,
        "its state is paged: where the device is full it goes to the host, which takes time and spares memory",
    ),
    "onebitadam": (Optimizer.ADAM, "gradients are compressed to one bit, so that fewer bytes pass between ranks"),
    "zerooneadam": (Optimizer.ADAM, "gradients are compressed to one bit, so that fewer bytes pass between ranks"),
    "schedule_free_adamw": (Optimizer.ADAMW, "it keeps as much as AdamW, and its step reads a little more"),
    "stable_adamw": (Optimizer.ADAMW, "it keeps as much as AdamW, and its step reads a little more"),
}
"""Those that are answered by another one's state and step, and what that leaves out."""


def optimizer_of(walk: Walk, key: str, name: str | None, instead: Optimizer | None = None) -> Optimizer | None:
    """The optimizer that a file names at ``key``; None where it names none.

    Notes a contradiction where plans have none that keeps as much, and nobody names one ``instead``.
    """
    if name is None:
        return None
    lowered = name.lower().rpartition(".")[2]
    if lowered in _SAME:
        return _SAME[lowered]
    if lowered in _ALIKE:
        optimizer, about = _ALIKE[lowered]
        walk.leaves_out(key, about)
        return optimizer
    if instead is not None:
        walk.means(key, f"no plan knows what it keeps beside weights; {instead.words} is asked about in its place")
        return None
    walk.contradict(
        f"{walk.prefix}{key} is {shown(name)}, and no plan knows what it keeps beside weights. Ask with another one: "
        f"--optimizer adamw."
    )
    return None
