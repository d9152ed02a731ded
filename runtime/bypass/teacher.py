"""The teacher of a bypass run: a folder in the Hugging Face form, and the tokenizer that belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ...shared.basics.errors import WorkloadError
from ...shared.catalogue.models import read_model_configuration
from ..chunks.saved_weights import SavedWeights
from ..data.documents import check_vocabulary, load_tokenizer
from ..model.configurations import build_model, training_dtype
from ..model.heads import reads_forward
from ..model.pretrained import load_generation, load_pretrained


@dataclass(frozen=True)
class TeacherFolder:
    """A teacher that is not loaded yet."""

    path: Path
    stored: Mapping[str, Any]
    """Its ``config.json``."""
    configuration: Mapping[str, Any]
    """The same with all that transformers adds."""
    name: str
    num_embedded: int
    """Tokens that its embedding has rows for."""

    @classmethod
    def opened(cls, path: Path) -> Self:
        """The teacher in ``path``.

        Raises FileError if its configuration or its weights are missing or damaged, WorkloadError if transformers
        refuses it, or if it is no causal language model.
        """
        described = read_model_configuration(path)
        SavedWeights(path).tensors  # noqa: B018 - a teacher without weights is refused before anything else
        twin = build_model(described.config, described.name, training_dtype(described.config, None))
        if not reads_forward(twin):
            raise WorkloadError(
                f"{path} holds a {type(twin).__name__}, which is no causal language model. A bypass run validates on "
                f"text; distil other models with protwin.runtime.distil."
            )
        embedded = int(twin.get_input_embeddings().weight.shape[0])
        return cls(path, described.config, twin.config.to_dict(), described.name, embedded)

    def fingerprint(self) -> str:
        """Of its weights.  Raises FileError if they cannot be read."""
        return SavedWeights(self.path).fingerprint()

    def load(self, dtype: str) -> Any:
        """The model on the host, in evaluation mode.  Raises FileError if its weights are not its configuration's."""
        chosen = training_dtype(self.stored, dtype)
        model = load_pretrained(self.path, self.stored, self.name, chosen, is_converting=True)
        load_generation(model, self.path)
        return model.eval()

    def tokenizer(self, other: Path | None) -> Any:
        """The tokenizer of the folder ``other``, or its own.

        Raises FileError if there is none, or if it has tokens that the teacher has no row for.
        """
        folder = other or self.path
        found = load_tokenizer(folder)
        check_vocabulary(found, self.num_embedded, folder)
        return found
