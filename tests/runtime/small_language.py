"""A tiny language model's folder as the Hugging Face hub has it: weights, tokenizer, chat template; and data for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END: Final = "<|end|>"
PLAIN_TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ '\\n' }}{% endfor %}"
)
"""Does not say what the assistant generates."""
MARKED_TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
)
SENTENCES: Final = (
    "the quick brown fox jumps over the lazy dog",
    "a plan says what stays on the device",
    "chunks go to the host and come back",
    "every block runs once in a step",
    "the loss falls when there is something to learn",
)


def make_tokenizer(template: str | None = MARKED_TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte pairs learned from ``SENTENCES``, with every byte in the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END, "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    wrapped.chat_template = template
    return wrapped


def make_folder(
    folder: Path,
    *,
    template: str | None = MARKED_TEMPLATE,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
    **config: Any,
) -> Path:
    """A folder with a Llama of random weights in ``dtype`` and its tokenizer."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = shape | {"vocab_size": 304, "max_position_embeddings": 128, "eos_token_id": 0} | config
    model = LlamaForCausalLM(LlamaConfig(**config)).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard_size)
    make_tokenizer(template).save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """A JSON Lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(number: int) -> list[dict[str, str]]:
    """Rows of text of different lengths."""
    return [{"text": " ".join(SENTENCES[place % 5] for place in range(i, i + 1 + i % 3))} for i in range(number)]


def chats(number: int) -> list[dict[str, Any]]:
    """Rows of conversations, of one and of two turns."""
    return [
        {
            "messages": [
                {"role": role, "content": SENTENCES[(i + turn) % 5]}
                for turn in range(1 + i % 2)
                for role in ("user", "assistant")
            ]
        }
        for i in range(number)
    ]
