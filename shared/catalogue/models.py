"""The catalogue of models, and configurations of the user's own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import PositiveInt

from ..basics.documents import Document, FrozenModel, read_mapping
from ..basics.errors import CatalogueError, FileError
from ..basics.suggestions import did_you_mean
from ..schema.workload import DType
from .data_files import model_file_names, read_model_file
from .model_check import check_model_configuration
from .names import hub_name, model_called, plain_key


class ModelConfiguration(Document):
    """A model without its weights."""

    KIND: ClassVar[str] = "model"

    name: str
    source: str
    """Where the configuration was published, or the file that it was read from."""
    num_parameters: PositiveInt | None
    """Scalars of the model as it is trained, tied ones once; None for a file of one's own: its workload has them."""
    config: dict[str, Any]
    """The published ``config.json`` in the Hugging Face form, as transformers takes it."""

    @property
    def dtype(self) -> DType | None:
        """Element type in which the weights were published; None where the configuration names none."""
        name = published_dtype(self.config)
        return DType(name) if name is not None else None


def published_dtype(config: Mapping[str, Any]) -> str | None:
    """The element type that a ``config.json`` names for its weights, known or not; None where it names none."""
    stated = config.get("dtype", config.get("torch_dtype"))
    name = stated.removeprefix("torch.") if isinstance(stated, str) else None
    return name if name != "auto" else None


def has_flash_attention(config: Mapping[str, Any]) -> bool:
    """Whether transformers has FlashAttention for a model of the catalogue: T5 adds a bias, which its kernels lack."""
    return config.get("model_type") != "t5"


def hidden_size(config: Mapping[str, Any]) -> int | None:
    """The width of what blocks hand on, by any of its names in a ``config.json``; None where it says none."""
    for section in (config, config.get("text_config") or {}):
        for name in ("hidden_size", "n_embd", "d_model", "dim"):
            size = section.get(name)
            if isinstance(size, int):
                return size
        sizes = section.get("hidden_sizes")
        if sizes:
            return int(max(sizes))
    return None


class ListedModel(FrozenModel):
    """One line of the catalogue."""

    name: str
    num_parameters: PositiveInt | None
    dtype: DType
    """Element type in which the weights were published."""
    architecture: str
    source: str


class ModelList(Document):
    """All models of the catalogue, by name."""

    KIND: ClassVar[str] = "model_list"
    TABLES: ClassVar[str] = "tables.workloads:models_table"

    models: tuple[ListedModel, ...]

    @classmethod
    def of_catalogue(cls) -> Self:
        """The list as it is shipped."""
        return cls(models=tuple(_listed(model_configuration(name)) for name in model_names()))

    def with_words(self, words: Sequence[str]) -> Self:
        """The models that have all of ``words`` in name, architecture or source, or are called so.

        Case and separators make no difference.  Raises CatalogueError, with the nearest names, if there is none.
        """
        called = model_called(" ".join(words))
        keys = [plain_key(word) for word in words]
        found = tuple(
            model
            for model in self.models
            if model.name == called
            or all(any(key in plain_key(at) for at in (model.name, model.architecture, model.source)) for key in keys)
        )
        if not found:
            name = " ".join(words)
            raise CatalogueError(
                f"no model of the catalogue has {name!r} in its name, architecture or source. "
                f"{did_you_mean(hub_name(name), model_names())} protwin models lists all."
            )
        return type(self)(models=found)


def _listed(model: ModelConfiguration) -> ListedModel:
    return ListedModel(
        name=model.name,
        num_parameters=model.num_parameters,
        dtype=model.dtype or DType.FLOAT32,
        architecture=str(model.config["model_type"]),
        source=model.source,
    )


def model_names() -> tuple[str, ...]:
    """Names of the catalogue's models, sorted."""
    return model_file_names()


def known_model(name: str) -> str | None:
    """The catalogue's name of the model called ``name``, as people write it; None if it has none.

    A file or folder that is called so, such as a download of the model, comes before all but the catalogue's own name.
    """
    if name not in model_names() and os.path.exists(name):
        return None
    return model_called(name)


def model_configuration(name: str) -> ModelConfiguration:
    """The catalogue's configuration of ``name``.  Raises CatalogueError, with the nearest names, if there is none."""
    known = model_called(name)
    if known is None and name.endswith(".py"):
        raise CatalogueError(
            f"{name} is Python: a model of one's own is traced in Python, by protwin.runtime.trace(model, batch), and "
            f"the workload that this gives is saved by its save('workload.json'). Pass the path of that file."
        )
    if known is None:
        raise CatalogueError(
            f"there is no model {name!r} in the catalogue. {did_you_mean(hub_name(name), model_names())} "
            f"protwin models lists them; for a model of your own, pass the path of its config.json (Hugging Face form)."
        )
    return ModelConfiguration.from_mapping(read_model_file(known), origin=f"catalogue entry {known}")


def read_model_configuration(path: str | Path) -> ModelConfiguration:
    """The model that a ``config.json`` describes; ``path`` may be the folder that holds it.

    It is named after its file, or its folder if the file is called ``config.json``.  Raises FileError if the file is
    missing, damaged, or describes no model; the message names the field.
    """
    path = Path(path)
    if os.path.isdir(path):
        path = path / "config.json"
    content = read_mapping(path)
    if "kind" in content and "schema_version" in content:
        if content["kind"] != ModelConfiguration.KIND:
            raise FileError(
                f"{path} is a {content['kind']} file of protwin, and no model configuration. Pass the config.json that "
                f"lies beside a model's weights on the Hugging Face hub."
            )
        found = ModelConfiguration.from_mapping(content, origin=str(path))
        check_model_configuration(found.config, origin=str(path))
        return found
    check_model_configuration(content, origin=str(path))
    return ModelConfiguration(
        name=path.resolve().parent.name if path.name == "config.json" else path.stem,
        source=str(path),
        num_parameters=None,
        config=content,
    )


def load_model_configuration(name_or_path: str | Path) -> ModelConfiguration:
    """A catalogue model by name, or the model that a ``config.json`` describes.

    Raises CatalogueError if it is neither a known name nor a file, FileError if the file describes no model.
    """
    name = str(name_or_path)
    if known_model(name) is not None:
        return model_configuration(name)
    path = Path(name_or_path)
    if name.strip() and (os.path.exists(path) or path.suffix == ".json"):
        return read_model_configuration(path)
    return model_configuration(name)
