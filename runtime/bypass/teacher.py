"""The teacher of a bypass run: a folder in the Hugging Face form, and the tokenizer that belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ...shared.basics.errors import WorkloadError
from ...shared.catalogue.models import read_model_configuration
from ...shared.catalogue.own_code import OwnCode, trusted_code
from ..chunks.meta_parameters import parameters_on_meta
from ..chunks.saved_weights import SavedWeights, persistent_buffers
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
    code: OwnCode | None = None
    """Files that it is made by; None: transformers' own code makes it."""

    @classmethod
    def opened(cls, path: Path, *, trust_remote_code: bool = False) -> Self:
        """The teacher in ``path``.

        Raises FileError if its configuration or its weights are missing or damaged, or if it comes with code of its own
        that is not trusted; WorkloadError if transformers refuses it, or if it is no causal language model.
        """
        described = read_model_configuration(path)
        code = trusted_code(path, described.config, is_trusted=trust_remote_code)
        SavedWeights(path).tensors  # noqa: B018 - a teacher without weights is refused before anything else
        twin = build_model(described.config, described.name, training_dtype(described.config, None), code=code)
        is_causal = code is not None and code.class_for("AutoModelForCausalLM") is not None
        if not (is_causal or reads_forward(twin)):
            raise WorkloadError(
                f"{path} holds a {type(twin).__name__}, which is no causal language model. A bypass run validates on "
                f"text; distil other models with protwin.runtime.distil."
            )
        embedded = int(twin.get_input_embeddings().weight.shape[0])
        return cls(path, described.config, twin.config.to_dict(), described.name, embedded, code)

    def fingerprint(self) -> str:
        """Of its weights.  Raises FileError if they cannot be read."""
        return SavedWeights(self.path).fingerprint()

    def built(self, dtype: str) -> tuple[Any, SavedWeights | None]:
        """The model in evaluation mode without the memory of its weights, and the files that fill it.

        Where transformers renames, splits or joins what the files hold, or code of its own may, it is loaded whole, and
        None stands for the files.  Raises what ``load`` does.
        """
        with parameters_on_meta():
            model = build_model(
                self.stored, self.name, training_dtype(self.stored, dtype), device="cpu", code=self.code
            )
        saved = SavedWeights(self.path)
        if self.code is not None or any(persistent_buffers(model)) or saved.misfits(model, fills_all=True):
            return self.load(dtype), None
        load_generation(model, self.path)
        return model.eval(), saved

    def load(self, dtype: str) -> Any:
        """The model on the host, in evaluation mode.  Raises FileError if its weights are not its configuration's."""
        chosen = training_dtype(self.stored, dtype)
        model = load_pretrained(self.path, self.stored, self.name, chosen, is_converting=True, code=self.code)
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
