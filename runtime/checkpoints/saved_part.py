"""What of a model a checkpoint holds: all of it, or what is left when a part has its weights elsewhere.

A distillation's teacher never changes: its weights are in its own folder, and a checkpoint says whose they are.

Of a pipeline every stage has some blocks, and the checkpoint is that of the whole: each stage gives and gets its part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ...shared.basics.errors import FileError
from .manifest import LeftOut


@dataclass(frozen=True, slots=True)
class SavedPart:
    """Of one training."""

    configuration: str | None
    """JSON text, of a transformers model: of what is saved."""
    left_out: LeftOut | None = None
    """None: everything is saved."""
    elsewhere: tuple[str, ...] = ()
    """What the names of all that other stages of a pipeline have begin with: the paths of their blocks, with a dot."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The names that the whole model has for tensors that blocks of several stages share, by those that a stage has."""
    num_stages: int = 1
    """Stages that save together; each has some blocks."""

    def is_elsewhere(self, name: str) -> bool:
        """Whether another stage has the tensor or module of this name."""
        return f"{name}.".startswith(self.elsewhere)

    def in_form_of(self, left_out: LeftOut | None) -> SavedPart:
        """What is read of a checkpoint that leaves ``left_out`` out.

        Older ones hold what would be left out today.  Raises FileError if another part was left out.
        """
        own = self.left_out
        if left_out is None or own == left_out:
            return replace(self, left_out=left_out)
        if own is None or (own.part, own.kept) != (left_out.part, left_out.kept):
            raise FileError(
                f"the checkpoint holds no weights of the model's {left_out.part}, which this training needs of it. "
                f"Resume from another one."
            )
        raise FileError(
            f"the checkpoint was saved beside another {own.part}: its weights differ (identity {left_out.identity}; "
            f"this one's is {own.identity}). Pass the {own.part} that it was saved beside."
        )

    def parameters(
        self, model: nn.Module, placed: Iterable[tuple[str, nn.Parameter]]
    ) -> list[tuple[str, nn.Parameter]]:
        """What is saved, with its name; ``placed`` are the parameters that chunks have.

        Of a part that is kept all parameters are saved, also those that no chunk has.
        """
        if self.left_out is None:
            return list(placed)
        kept = self.left_out.kept
        named = ((f"{kept}.{name}", parameter) for name, parameter in model.get_submodule(kept).named_parameters())
        return [(self.renamed.get(name, name), parameter) for name, parameter in named]

    def buffers(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Every buffer once: its name, itself, and whether it is saved with the weights.

        Those of a part that is left out are saved beside them: a forward may change them.
        """
        transient = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }
        for name, buffer in model.named_buffers():
            is_left_out = self.left_out is not None and name.startswith(f"{self.left_out.part}.")
            yield self.renamed.get(name, name), buffer, name not in transient and not is_left_out
