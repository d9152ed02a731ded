"""Models from their configurations: built with random weights, or without any on the meta device."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ...shared.basics.errors import WorkloadError
from ...shared.basics.extras import install_command
from ...shared.basics.suggestions import did_you_mean
from ...shared.catalogue.model_check import quantization_complaint
from ...shared.schema.workload import DType
from .heads import published_class


def training_dtype(configuration: Mapping[str, Any], override: str | None) -> torch.dtype:
    """The dtype to train in: ``override``, else the configuration's, else float32.  Raises WorkloadError."""
    wanted = override or configuration.get("dtype") or configuration.get("torch_dtype") or "float32"
    try:
        dtype = DType(wanted)
    except ValueError:
        dtype = None
    if dtype not in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16):
        raise WorkloadError(f"dtype {wanted!r} cannot be trained; use float32, bfloat16 or float16.")
    return getattr(torch, dtype)  # type: ignore[no-any-return]


def build_model(configuration: Mapping[str, Any], name: str, dtype: torch.dtype, *, device: str = "meta") -> Any:
    """The model that a Hugging Face ``config.json`` describes, with random weights on ``device``.

    Raises WorkloadError if transformers is missing or refuses the configuration.
    """
    try:
        import transformers
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        raise WorkloadError(
            f"tracing a configuration needs transformers. Install what training needs: {install_command('runtime')}"
        ) from error
    fields = dict(configuration)
    model_type = fields.pop("model_type", None)
    if not isinstance(model_type, str):
        raise WorkloadError(f"the configuration of {name} has no model_type.")
    quantization = quantization_complaint(fields)
    if quantization is not None:
        raise WorkloadError(f"the configuration of {name} {quantization}")
    if model_type not in CONFIG_MAPPING:
        families = did_you_mean(model_type, [family for family in CONFIG_MAPPING if isinstance(family, str)])
        raise WorkloadError(f"transformers knows no model_type {model_type!r}, which {name} names. {families:.300}")
    try:
        with quiet():
            config = AutoConfig.for_model(model_type, **fields)
        published = published_class(config, name)
        with quiet(), torch.device(device):
            if published is not None:
                model = published._from_config(config, dtype=dtype)
            else:
                model = getattr(transformers, _factory(config)).from_config(config, dtype=dtype)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, ArithmeticError, AssertionError) as error:
        raise WorkloadError(f"transformers refuses the configuration of {name}: {_first_line(error)}") from error
    except Exception as error:
        # transformers validates configurations with exceptions of a package that we do not depend on.
        if "validation" in type(error).__name__.lower():
            raise WorkloadError(f"transformers refuses the configuration of {name}: {error}") from error
        raise
    _check_decoder_start(model, name)
    _check_padding(model, name)
    return model


def _check_padding(model: Any, name: str) -> None:
    """Raise WorkloadError if a decoder that classifies cannot tell where its samples end.

    Its class is read off the last token that is no padding, so that batches of several samples need to know which is.
    """
    kind = type(model)
    is_reading_last = any(base.__name__ == "GenericForSequenceClassification" for base in kind.__mro__) or (
        "pad_token_id is None and batch_size != 1" in _source(kind.forward)
    )
    if is_reading_last and getattr(model.config.get_text_config(), "pad_token_id", None) is None:
        raise WorkloadError(
            f"the configuration of {name} has no pad_token_id, and {kind.__name__} reads the class of a sample off its "
            f"last token that is no padding. Add it."
        )


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _check_decoder_start(model: Any, name: str) -> None:
    """Raise WorkloadError if the decoder's input cannot be made of labels for want of its first token.

    Some families shift labels without one; so the model is asked.
    """
    if not model.config.is_encoder_decoder or getattr(model.config, "decoder_start_token_id", None) is not None:
        return
    try:
        model.prepare_decoder_input_ids_from_labels(labels=torch.zeros((1, 1), dtype=torch.long))
    except (AttributeError, TypeError, ValueError) as error:
        padding = getattr(model.config, "pad_token_id", None)
        raise WorkloadError(
            f"the configuration of {name} has no decoder_start_token_id, and nothing else says what the decoder's "
            f"input begins with. Add it"
            + (f" (many models begin with padding, here pad_token_id = {padding})." if padding is not None else ".")
        ) from error


def _factory(config: Any) -> str:
    """The class of transformers that makes a model which is published without a head: with its family's own."""
    if getattr(config, "is_encoder_decoder", False):
        return "AutoModelForSeq2SeqLM"
    if hasattr(config, "image_size") and hasattr(config, "patch_size") and not hasattr(config, "vocab_size"):
        return "AutoModelForImageClassification"
    return "AutoModelForCausalLM"


def _first_line(error: Exception) -> str:
    """What is wrong, without the list of everything that would be right."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' advice about generation settings out of our output; errors still surface."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
