"""Models from their configurations: built with random weights, or without any on the meta device."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from ...shared.basics.errors import ProtwinError, WorkloadError, shortened
from ...shared.basics.extras import install_command
from ...shared.basics.suggestions import did_you_mean
from ...shared.catalogue.model_check import quantization_complaint
from ...shared.catalogue.own_code import AUTO_MAP, OwnCode
from ...shared.schema.workload import DType
from ...shared.students.families import FAMILIES, STUDENT_FAMILY
from .heads import own_class, published_class

_LOUD: Final = {"transformers": logging.ERROR, "torch._subclasses.fake_tensor": logging.CRITICAL}
"""Loggers, and from which level on they are heard: torch logs every operation that fails, which we report ourselves."""


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


def build_model(
    configuration: Mapping[str, Any],
    name: str,
    dtype: torch.dtype,
    *,
    device: str = "meta",
    code: OwnCode | None = None,
) -> Any:
    """The model that a Hugging Face ``config.json`` describes, with random weights on ``device``.

    ``code``: files that the model is made by, which run; without, the model is one of transformers, whatever files the
    configuration names.  Raises WorkloadError if transformers is missing or refuses the configuration, or if the code
    fails.
    """
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise WorkloadError(
            f"tracing a configuration needs transformers. Install what training needs: {install_command('runtime')}"
        ) from error
    fields = _decoded(dict(configuration))
    model_type = fields.pop("model_type", None)
    if not isinstance(model_type, str):
        raise WorkloadError(f"the configuration of {name} has no model_type.")
    quantization = quantization_complaint(fields)
    if quantization is not None:
        raise WorkloadError(f"the configuration of {name} {quantization}")
    if model_type not in CONFIG_MAPPING and (code is None or code.class_for("AutoConfig") is None):
        if fields.get(AUTO_MAP):
            raise WorkloadError(
                f"transformers knows no model_type {model_type!r}, which {name} names; code of its own does "
                f"({AUTO_MAP}), of which nothing ran. protwin bypass distils such models (--trust-remote-code). For "
                f"anything else, load the model yourself, and call protwin.runtime.trace and carry_out."
            )
        families = did_you_mean(model_type, [family for family in CONFIG_MAPPING if isinstance(family, str)])
        raise WorkloadError(f"transformers knows no model_type {model_type!r}, which {name} names. {families:.300}")
    try:
        with quiet():
            config, made = _classes(model_type, fields, name, code)
        with quiet(), torch.device(device):
            model = made._from_config(config, dtype=dtype)
    except ProtwinError:
        raise
    except ImportError as error:
        raise WorkloadError(f"{name} needs a package that is not installed: {first_line(error)}") from error
    except Exception as error:
        # Configurations are validated, and models built, by every family in its own way.
        fault = "transformers refuses the configuration of" if code is None else "code of its own fails in"
        raise WorkloadError(f"{fault} {name}: {first_line(error)}") from error
    _check_decoder_start(model, name)
    _check_padding(model, name)
    return model


def is_of_own_code(model: Any) -> bool:
    """Whether a model's class comes from files beside its configuration, and not from a package."""
    return type(model).__module__.startswith("transformers_modules.")


def _classes(model_type: str, fields: Mapping[str, Any], name: str, code: OwnCode | None) -> tuple[Any, Any]:
    """The configuration that ``fields`` are of, and the class of its model.

    Classes of ``code`` are loaded from its folder alone, and registered nowhere: elsewhere transformers' own count.
    """
    from transformers import AutoConfig

    made: Any = _own(code, "AutoConfig")
    config = AutoConfig.for_model(model_type, **fields) if made is None else made(**fields)
    if made is not None and made.model_type not in FAMILIES and not hasattr(config, STUDENT_FAMILY):
        for base in made.__mro__[1:]:
            if getattr(base, "model_type", None) in FAMILIES:
                setattr(config, STUDENT_FAMILY, base.model_type)
                break
    return config, _own(code, "AutoModelForCausalLM") or published_class(config, name) or own_class(config, name)


def _own(code: OwnCode | None, auto_class: str) -> Any | None:
    """The class that ``code`` has for ``auto_class``; None if it has none."""
    reference = None if code is None else code.class_for(auto_class)
    if code is None or reference is None:
        return None
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    found = get_class_from_dynamic_module(reference, str(code.folder), local_files_only=True)
    wanted = PreTrainedConfig if auto_class == "AutoConfig" else PreTrainedModel
    if not (isinstance(found, type) and issubclass(found, wanted)):
        raise WorkloadError(f"{reference} in {code.folder} is no {wanted.__name__} of transformers.")
    return found


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


def _decoded(value: Any) -> Any:
    """A configuration with the numbers that JSON has no sign for, which transformers writes in words."""
    if isinstance(value, Mapping):
        word = value.get("__float__")
        if len(value) == 1 and isinstance(word, str):
            return float(word)
        return {key: _decoded(part) for key, part in value.items()}
    return [_decoded(part) for part in value] if isinstance(value, list) else value


def first_line(error: BaseException) -> str:
    """What is wrong, without the list of everything that would be right."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # The first of a list of complaints says where, the second what.
    return shortened(" ".join(lines[:2]) if lines[0].endswith(":") else lines[0])


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' advice about generation settings out of our output; errors still surface."""
    loggers = {logging.getLogger(name): level for name, level in _LOUD.items()}
    levels = {logger: logger.level for logger in loggers}
    for logger, level in loggers.items():
        logger.setLevel(level)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
