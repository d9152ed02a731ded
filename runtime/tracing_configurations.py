"""From a model's configuration to a Workload, without weights: the model is built on the meta device."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from ..shared.errors import WorkloadError
from ..shared.workload import DType, Workload
from .tracing import trace

_MAX_TOKENS: Final = 2**40


def workload_of_configuration(
    configuration: Mapping[str, Any], *, name: str, batch_size: int, sequence_length: int, dtype: str | None = None
) -> Workload:
    """The workload of full training of the model that a Hugging Face ``config.json`` describes.

    ``dtype`` overrides the configuration's; without either, float32.  Batches are unpadded.  Raises WorkloadError
    if transformers is missing, refuses the configuration, or the shape makes no sense for the model.
    """
    if batch_size < 1 or sequence_length < 1 or batch_size * sequence_length > _MAX_TOKENS:
        raise WorkloadError(
            f"a batch of {batch_size} x {sequence_length} tokens cannot be traced; both must be positive and their "
            f"product at most 2**40."
        )
    with _quiet():
        model = _build(configuration, name, _dtype(configuration, dtype))
    limit = getattr(model.config, "max_position_embeddings", None)
    has_learned_positions = model.config.model_type in ("gpt2", "bert", "opt", "gpt_neo")
    if has_learned_positions and limit is not None and sequence_length > limit:
        raise WorkloadError(
            f"{name} has learned positions for {limit} tokens but sequence_length is {sequence_length}. Lower it."
        )
    with _quiet():
        return trace(model, _batch(model, batch_size, sequence_length), name=name)


def _dtype(configuration: Mapping[str, Any], override: str | None) -> torch.dtype:
    wanted = override or configuration.get("dtype") or configuration.get("torch_dtype") or "float32"
    if wanted not in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16):
        raise WorkloadError(f"dtype {wanted!r} cannot be trained; use float32, bfloat16 or float16.")
    return getattr(torch, wanted)  # type: ignore[no-any-return]


def _build(configuration: Mapping[str, Any], name: str, dtype: torch.dtype) -> Any:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    except ImportError as error:
        raise WorkloadError(
            "tracing a configuration needs transformers. Install it with: pip install 'protwin[runtime]'"
        ) from error
    fields = dict(configuration)
    model_type = fields.pop("model_type", None)
    if not isinstance(model_type, str):
        raise WorkloadError(f"the configuration of {name} has no model_type.")
    try:
        config = AutoConfig.for_model(model_type, **fields)
        factory = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        with torch.device("meta"):
            return factory.from_config(config, dtype=dtype)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        raise WorkloadError(f"transformers refuses the configuration of {name}: {error}") from error
    except Exception as error:
        # transformers validates configurations with exceptions of a package that we do not depend on.
        if "validation" in type(error).__name__.lower():
            raise WorkloadError(f"transformers refuses the configuration of {name}: {error}") from error
        raise


def _batch(model: Any, batch_size: int, sequence_length: int) -> dict[str, torch.Tensor]:
    tokens = torch.empty((batch_size, sequence_length), dtype=torch.long, device="meta")
    return {"input_ids": tokens, "labels": tokens.clone()}


@contextmanager
def _quiet() -> Iterator[None]:
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
