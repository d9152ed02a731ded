"""Settings of small runs."""

from __future__ import annotations

from typing import Any, Final

from protwin.runtime.runs.run_settings import RunSettings
from protwin.shared.schema.workload import DType
from protwin.shared.students.student import Student

LLAMA: Final = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
MIXTRAL: Final = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def student(**fields: Any) -> Student:
    return Student.model_validate(fields)


def settings(**changed: Any) -> RunSettings:
    fields: dict[str, Any] = {
        "teacher_weights": "3f",
        "teacher_configuration": MIXTRAL,
        "student": student(
            initialization={"ffn": "prune"}, all={"intermediate_size": 24, "num_key_value_heads": 2, "ffn": "full"}
        ),
        "dtype": DType.FLOAT32,
        "data": "a7",
        "sequence_length": 8,
        "micro_batch_size": 2,
        "micro_batches": 3,
        "num_tokens": 480,
    }
    return RunSettings(**(fields | changed))
