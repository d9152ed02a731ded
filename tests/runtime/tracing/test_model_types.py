"""Every kind of model that transformers can build is answered, or gets one message, in time."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from protwin.runtime.devices.time_limit import time_limit
from protwin.runtime.model.configurations import quiet
from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.basics.errors import ProtwinError
from tests.proof_size import examples, share

NUM_LAYERS: Final = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "depth",
)
LIMIT_S: Final = examples(60, 4)
LISTS: Final = ("Unrecognized configuration class", "Model type should be one of", "Should contain one of")


def small_configuration(model_type: str) -> dict[str, Any] | None:
    """The family's own configuration with few layers; None if it has none that transformers takes."""
    try:
        with quiet():
            full = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
            small = shortened(full)
            CONFIG_MAPPING[model_type](**{key: value for key, value in small.items() if key != "model_type"})
    except Exception:
        return None
    return small | {"model_type": model_type}


def shortened(config: dict[str, Any]) -> dict[str, Any]:
    """Two layers, and two of whatever is listed layer by layer."""
    counts = {config[key] for key in NUM_LAYERS if type(config.get(key)) is int and config[key] > 2}
    made: dict[str, Any] = {}
    for key, value in config.items():
        if key in NUM_LAYERS and type(value) is int and value > 2:
            made[key] = 2
        elif isinstance(value, list) and len(value) in counts:
            made[key] = value[:2]
        else:
            made[key] = shortened(value) if isinstance(value, dict) else value
    return made


@pytest.mark.filterwarnings("default")  # transformers' own
@pytest.mark.parametrize("model_type", share(sorted(CONFIG_MAPPING_NAMES), 160))
def test_a_kind_of_model_is_answered_or_gets_one_message(model_type: str) -> None:
    """With a sequence, and without one if it says that it has none."""
    config = small_configuration(model_type)
    if config is None:
        pytest.skip("its own configuration cannot be shortened")
    for length in (64, None):
        try:
            with time_limit("the test", LIMIT_S):
                workload = workload_of_configuration(config, name="mine", batch_size=2, sequence_length=length)
        except ProtwinError as error:
            message = str(error)
            assert "\n" not in message
            assert not any(words in message for words in LISTS), message
            if "Leave it out" not in message:
                return
        else:
            assert workload.num_blocks > 0
            return
    pytest.fail("it wants a sequence and none")
