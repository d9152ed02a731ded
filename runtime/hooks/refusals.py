"""What a walker refuses, in words for who wrote the model and the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...shared.basics.errors import ScheduleError
from ..data.packed_batches import packing_of_batch
from ..model.compiled import refuse_compiled_call

_ONCE = (
    "Every forward must run the same blocks in the same order, as they were traced or are named. If the model skips "
    "blocks by chance (LayerDrop), set that chance to 0; if it runs them as often as a batch asks for, name modules "
    "around them (trace(..., blocks=...)). A batch without the images or sounds that the traced one had runs fewer "
    "blocks: trace the model with a batch of that kind, and train on such batches by a plan of their own."
)


def refuse_transforms() -> None:
    """Raise ScheduleError within compiled code, or a transform of torch.func, whose tensors have no memory to place."""
    refuse_compiled_call()
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise ScheduleError(
            "the model is called within a transform of torch.func (grad, vmap, jvp and the like), which goes round "
            "autograd's backward, where the schedule is followed. Call the model by itself, and loss.backward()."
        )


def refuse_call(model: nn.Module, given: Any) -> None:
    """Raise ScheduleError as ``refuse_transforms``, WorkloadError if keyword arguments ``given`` mix packed samples.

    Values that lie on another device are not looked at: that would wait for it.
    """
    refuse_transforms()
    packing_of_batch(model, given)


def refuse_second_graph() -> None:
    """Raise ScheduleError if the backward that runs keeps a graph of itself, to be differentiated again."""
    if torch.is_grad_enabled():
        raise ScheduleError(
            "backward keeps a graph of itself (create_graph=True), to be differentiated again when chunks have been "
            "released and gradients have left. Call loss.backward() alone; penalties on gradients cannot be part of a "
            "loss here. training.skip_step() gives this iteration up."
        )


def refuse_kept_graph() -> None:
    """Raise ScheduleError if the backward that runs keeps what forward saved."""
    if torch._C._autograd._get_current_graph_task_keep_graph():
        raise ScheduleError(
            "backward keeps its graph (retain_graph=True): all that forward saved would stay on the device beside the "
            "next forward, where the plan has no room for it, and no second backward can run through it. Call "
            "loss.backward() without retain_graph; where there are several losses, add them up and call backward() "
            "once. It is still possible."
        )


def refuse_cache(given: Mapping[str, Any]) -> None:
    """Raise ScheduleError if keyword arguments ``given`` to the model ask for a key-value cache."""
    asked = [name for name in ("use_cache", "past_key_values") if given.get(name) not in (None, False)]
    if asked:
        raise ScheduleError(
            f"the model is called with {asked[0]}, but a key-value cache keeps every block's keys and values until the "
            f"output goes, and recomputed blocks would append to it twice. Leave {asked[0]} out of training; within "
            f"training.evaluation(), as in generate(), it may be given."
        )


def other_block(name: str, expected: str) -> ScheduleError:
    """The model runs another block than the schedule has next."""
    return ScheduleError(f"the model runs block {name} where the schedule expects {expected}. {_ONCE}")


def missing_block(name: str) -> ScheduleError:
    """The model's forward ended too early."""
    return ScheduleError(
        f"the model's forward ended before block {name}, which the schedule expects. {_ONCE} A block is not seen "
        f"to run where the model calls its forward itself ({name}.forward(x) in the place of {name}(x)), under "
        f"torch.no_grad(), or within reentrant checkpointing: let the model call the block, and leave checkpointing "
        f"to the plan."
    )


def gradients_within_forward() -> ScheduleError:
    """Something is differentiated before the loss is there."""
    return ScheduleError(
        "gradients are taken in a block, or through one, while forward still runs (torch.autograd.grad, or backward(), "
        "within the model), but blocks are to be recomputed and followed. Name blocks so that this happens outside of "
        "them (trace(..., blocks=...)), with respect to a tensor that is made there, such as x = x.view_as(x)."
    )


def second_backward() -> ScheduleError:
    """Backward has run already."""
    return ScheduleError(
        "backward runs for the second time in one iteration (torch.autograd.grad counts too), but chunks have been "
        "released and gradients have left. Add the losses up and call backward() once."
    )


def earlier_graph() -> ScheduleError:
    """Backward runs through what is over."""
    return ScheduleError(
        "backward runs through the graph of an earlier forward, whose iteration has ended or was given up, or whose "
        "training was closed: its chunks have been released and its gradients have left. Call backward() once after "
        "every forward, before the next one, and before close()."
    )


def by_the_back_door(name: str) -> ScheduleError:
    """Backward enters a block, but not by what it returned."""
    return ScheduleError(
        f"backward enters block {name} by another way than what the block returned: the loss holds something that the "
        f"block kept aside, such as an auxiliary loss on an attribute. Let the block return it together with its "
        f"output, and hand it on from there."
    )


def unreached_block(name: str, at: str) -> ScheduleError:
    """Backward is past a block that it has not come to."""
    return ScheduleError(
        f"backward reached {at} before block {name}, which the schedule expects first: nothing in the loss leads back "
        f"to that block's output (x.detach() between blocks, a loss of an inner layer's output, a block that returns "
        f"its input as it is), or it is reached later. Take the loss of the model's output; let a block that is "
        f"dropped by chance multiply what it adds by 0; where gradients are to end on the way, freeze what comes "
        f"before (protwin.runtime.freeze, or requires_grad_(False)) and trace again."
    )
