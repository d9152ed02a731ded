"""What blocks do as compiled, beside what torch's own compiler counts of the same blocks, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tr
from torch import nn
from torch.nn import functional

from protwin.runtime.tracing.fake_subject import FakeSubject
from protwin.shared.observed.assembly import TracedShape
from protwin.shared.observed.compiled import FUSED
from protwin.shared.observed.flow import APART
from protwin.shared.observed.lowered import Lowering, lowered
from protwin.shared.observed.observation import Observation
from protwin.shared.schema.plan import ActivationMode
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import BlockId, Compiled, Float8
from tests.runtime.inductor import count_block

BATCH, LENGTH, WIDTH = 2, 96, 256
BLOCK = BlockId(0)
Inputs = dict[str, Any]


def hidden() -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)


def of_llama(family: str, num_key_value_heads: int = 2) -> Callable[[], tuple[Any, nn.Module, Inputs]]:
    """A model's configuration and a block of it, with what it is given."""

    def made() -> tuple[Any, nn.Module, Inputs]:
        import importlib

        module = importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
        config = getattr(tr, f"{family}Config")(
            hidden_size=WIDTH,
            intermediate_size=768,
            num_attention_heads=4,
            num_key_value_heads=num_key_value_heads,
            num_hidden_layers=1,
            vocab_size=512,
            head_dim=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            attn_implementation="sdpa",
        )
        block = getattr(module, f"{family}DecoderLayer")(config, 0)
        given = hidden()
        positions = getattr(module, f"{family}RotaryEmbedding")(config)(given.detach(), torch.arange(LENGTH)[None])
        return config, block, {"hidden_states": given, "position_embeddings": positions, "attention_mask": None}

    return made


def of_neox() -> tuple[Any, nn.Module, Inputs]:
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer, GPTNeoXRotaryEmbedding

    config = tr.GPTNeoXConfig(
        hidden_size=WIDTH,
        intermediate_size=1024,
        num_attention_heads=4,
        num_hidden_layers=1,
        vocab_size=512,
        rotary_pct=0.25,
        attn_implementation="sdpa",
    )
    given = hidden()
    positions = GPTNeoXRotaryEmbedding(config)(given.detach(), torch.arange(LENGTH)[None])
    return (
        config,
        GPTNeoXLayer(config, 0),
        {"hidden_states": given, "position_embeddings": positions, "attention_mask": None},
    )


def of_gpt2() -> tuple[Any, nn.Module, Inputs]:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = tr.GPT2Config(
        n_embd=WIDTH, n_head=4, n_layer=1, vocab_size=512, attn_implementation="sdpa", attn_pdrop=0.0
    )
    return config, GPT2Block(config, 0), {"hidden_states": hidden()}


def of_bert() -> tuple[Any, nn.Module, Inputs]:
    from transformers.models.bert.modeling_bert import BertLayer

    config = tr.BertConfig(
        hidden_size=WIDTH,
        num_attention_heads=4,
        num_hidden_layers=1,
        intermediate_size=1024,
        vocab_size=512,
        attn_implementation="sdpa",
        attention_probs_dropout_prob=0.0,
    )
    return config, BertLayer(config, 0), {"hidden_states": hidden()}


def traced(config: Any, length: int = LENGTH) -> TracedShape:
    with torch.device("meta"):
        model: Any = tr.BertForMaskedLM(config) if isinstance(config, tr.BertConfig) else None
        model = model or tr.AutoModelForCausalLM.from_config(config)
        model.to(torch.bfloat16)
    model.train()
    model.config.use_cache = False
    tokens = torch.zeros(BATCH, length, dtype=torch.long)
    return FakeSubject(model).at({"input_ids": tokens, "labels": tokens})


def pair(shape: TracedShape, mode: ActivationMode = ActivationMode.KEEP) -> tuple[Observation, Observation]:
    seen = shape.observed[mode]
    return seen[TaskKind.FORWARD, BLOCK], seen[TaskKind.BACKWARD, BLOCK]


def fused_bytes(seen: Observation) -> list[int]:
    return [operation.bytes_moved for operation in seen.operations if operation.name == FUSED]


def between_bytes(seen: Observation) -> int:
    """Of what is neither product nor attention."""
    return sum(operation.bytes_moved for operation in seen.operations if operation.operation_class not in APART)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "saved_within", "more_moved", "more_saved"),
    [
        pytest.param(of_llama("Llama"), 0.001, 1.2, 1.05, id="llama"),
        pytest.param(of_llama("Mistral"), 0.001, 1.2, 1.05, id="mistral"),
        pytest.param(of_llama("Qwen2"), 0.001, 1.2, 1.05, id="qwen2"),
        pytest.param(of_llama("Qwen3"), 0.07, 1.2, 1.05, id="qwen3"),
        pytest.param(of_gpt2, 0.001, 1.2, 1.05, id="gpt2"),
        # Its norms, its activation and its dropouts are one kernel each without a compiler too, and save the same.
        pytest.param(of_bert, 0.001, 1.05, 0.999, id="bert"),
    ],
)
def test_blocks_move_and_save_what_inductor_counts(
    made: Callable[[], tuple[Any, nn.Module, Inputs]],
    saved_within: float,
    more_moved: float,
    more_saved: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Operations one by one move more than ``more_moved`` times as much, and save more than ``more_saved`` times."""
    config, block, inputs = made()
    eager = traced(config)
    compiled = lowered(eager, Lowering(Compiled.BLOCKS))
    counted = count_block(block.to(torch.bfloat16).train(), inputs, monkeypatch)
    moved = {"ours": 0, "theirs": 0, "eager": 0}
    for ours, plain, theirs in zip(pair(compiled), pair(eager), (counted.forward, counted.backward), strict=True):
        # Directions are within 9 %; operations one by one move 1.0 (backward of BERT) to 5.1 times as much.
        assert sum(fused_bytes(ours)) == pytest.approx(sum(theirs.kernel_bytes), rel=0.1)
        assert abs(len(fused_bytes(ours)) - len(theirs.kernel_bytes)) <= 0.4 * len(theirs.kernel_bytes)
        assert abs(sum(operation.name != FUSED for operation in ours.operations) - theirs.num_apart) <= 1
        moved["ours"] += sum(fused_bytes(ours))
        moved["theirs"] += sum(theirs.kernel_bytes)
        moved["eager"] += between_bytes(plain)
    assert moved["ours"] == pytest.approx(moved["theirs"], rel=0.08)
    assert moved["eager"] > more_moved * moved["theirs"]
    saved = sum(pair(compiled)[0].saved_bytes)
    assert saved == pytest.approx(counted.saved_bytes, rel=saved_within)
    assert sum(pair(eager)[0].saved_bytes) > more_saved * counted.saved_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "within"),
    [
        *(
            pytest.param(of_llama(name, heads), within, id=f"{name}-{heads}")
            for name, heads, within in (
                ("Llama", 4, 0.001),
                ("Phi3", 4, 0.001),
                ("Phi3", 2, 0.001),
                ("Qwen3", 4, 0.001),
                ("Granite", 4, 0.001),
                ("Starcoder2", 4, 0.001),
                ("Cohere", 4, 0.001),
                ("Olmo2", 4, 0.06),  # of its last norm what is read is handed on, too
            )
        ),
        pytest.param(of_neox, 0.001, id="gpt-neox"),
    ],
)
def test_blocks_save_what_inductor_saves(
    made: Callable[[], tuple[Any, nn.Module, Inputs]], within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many heads of keys as of queries, maps that are one, heads turned in part: sizes alone tell less of these."""
    config, block, inputs = made()
    counted = count_block(block.to(torch.bfloat16).train(), inputs, monkeypatch)
    saved = sum(pair(lowered(traced(config), Lowering(Compiled.BLOCKS)))[0].saved_bytes)
    assert saved == pytest.approx(counted.saved_bytes, rel=within)


def cast(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In float8, with what undoes its scale."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = largest / values.abs().max().clamp(min=1e-12).float()
    return (values.float() * scale).clamp(-largest, largest).to(torch.float8_e4m3fn), scale.reciprocal()


def multiplied(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The product of what both are cast to: rows of the first, columns of the second."""
    (rows, of_rows), (columns, of_columns) = cast(first.contiguous()), cast(second.t().contiguous())
    return torch._scaled_mm(rows, columns.t(), scale_a=of_rows, scale_b=of_columns, out_dtype=torch.bfloat16)


class NarrowProduct(torch.autograd.Function):
    """A linear map whose three products cast their operands."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given, weight)
        return multiplied(given, weight.t())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given, weight = ctx.saved_tensors
        (gradient,) = gradients
        return multiplied(gradient, weight), multiplied(gradient.t(), given)


class NarrowLinear(nn.Linear):
    """Without a bias."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        made: Any = NarrowProduct.apply(given.reshape(-1, given.shape[-1]), self.weight)  # type: ignore[no-untyped-call]
        return (
            made.reshape(*given.shape[:-1], -1)
            if self.bias is None
            else made.reshape(*given.shape[:-1], -1) + self.bias
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "within"),
    # What follows a norm that comes last in BERT is saved as the cast of it, which is not counted.
    [
        (of_llama("Llama"), 0.001),
        (of_llama("Llama", 4), 0.001),
        (of_llama("Phi3"), 0.001),
        (of_llama("Qwen2"), 0.001),
        (of_llama("Qwen3"), 0.001),
        (of_bert, 0.05),
    ],
)
@pytest.mark.parametrize("scaling", [Float8.TENSORWISE, Float8.ROWWISE])
def test_what_products_in_float8_cast_is_computed_again(
    made: Callable[[], tuple[Any, nn.Module, Inputs]], within: float, scaling: Float8, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's partitioner saves neither norms nor activations: a third less of a Llama's block."""
    config, block, inputs = made()
    block.to(torch.bfloat16).train()
    for module in block.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = NarrowLinear
    counted = count_block(block, inputs, monkeypatch)
    eager = traced(config)
    wide, narrow = (pair(lowered(eager, Lowering(Compiled.BLOCKS, one)))[0] for one in (None, scaling))
    assert sum(narrow.saved_bytes) == pytest.approx(counted.saved_bytes, rel=within)
    assert wide.end_bytes - narrow.end_bytes == sum(wide.saved_bytes) - sum(narrow.saved_bytes) > 0
    again = [fused_bytes(pair(lowered(eager, Lowering(Compiled.BLOCKS, one)))[1]) for one in (None, scaling)]
    assert len(again[1]) > len(again[0])
    assert sum(again[1]) > sum(again[0])


def test_a_llama_block_is_what_a_hand_counts() -> None:
    """In units of the block's input, with an MLP of 3 and keys of 0.5."""
    config, _, _ = of_llama("Llama")()
    eager = traced(config)
    forward, backward = pair(lowered(eager, Lowering(Compiled.BLOCKS)))
    unit = BATCH * LENGTH * WIDTH * 2
    # Norm, both rotations, norm of a sum, gate and up, sum of three.
    whole = 2 + (2 + 1) + 3 + 9 + 4
    assert sum(fused_bytes(forward)) / unit == pytest.approx(whole, rel=0.06)
    # Inputs and gate of the MLP's three products; q, k, v, output, its product, and both norms; sums of rows.
    assert sum(forward.saved_bytes) / unit == pytest.approx(3 * 3 + 1 + 0.5 + 0.5 + 1 + 1 + 2, rel=0.01)
    assert max(forward.levels) < max(pair(eager)[0].levels)
    assert backward.net_bytes + forward.net_bytes == sum(seen.net_bytes for seen in pair(eager))
    assert backward.num_graphs == forward.num_graphs == 1


@pytest.mark.parametrize("heads", [2, 4])
def test_values_that_are_a_view_keep_what_one_map_has_made(heads: int) -> None:
    """In units of the block's input: queries, keys and values of Phi-3 are one map's, gate and up another's."""
    unit = BATCH * LENGTH * WIDTH * 2
    joined, apart = (
        sum(pair(lowered(traced(of_llama(name, heads)()[0]), Lowering(Compiled.BLOCKS)))[0].saved_bytes) / unit
        for name in ("Phi3", "Llama")
    )
    of_keys = heads / 4
    # Two norms, turned queries and keys, attention's output, the map's behind it; gate, up and their product.
    assert joined == pytest.approx(2 + 1 + of_keys + 1 + 1 + 3 * 3 + (1 + 2 * of_keys), rel=0.01)
    assert apart == pytest.approx(2 + 1 + of_keys + 1 + 1 + 3 * 3 + of_keys, rel=0.01)


def test_an_mlp_beside_attention_reads_what_the_block_is_given() -> None:
    """In units of GPT-NeoX's input: its second norm reads no sum, and nothing of attention's output map is saved."""
    saved = sum(pair(lowered(traced(of_neox()[0]), Lowering(Compiled.BLOCKS)))[0].saved_bytes)
    # Two norms, turned queries and keys, attention's output in both layouts; one map of three, and the MLP's two sides.
    assert saved / (BATCH * LENGTH * WIDTH * 2) == pytest.approx(2 + 2 + 2 + 3 + 2 * 4, rel=0.01)


def test_checkpointed_blocks_compute_what_others_do_and_save_it_later() -> None:
    config, _, _ = of_llama("Llama")()
    eager = traced(config)
    compiled = lowered(eager, Lowering(Compiled.BLOCKS))
    kept, again = compiled.observed[ActivationMode.KEEP], compiled.observed[ActivationMode.CHECKPOINT]
    forward = again[TaskKind.FORWARD, BLOCK]
    assert sum(fused_bytes(forward)) <= sum(fused_bytes(kept[TaskKind.FORWARD, BLOCK]))
    assert forward.net_bytes == eager.observed[ActivationMode.CHECKPOINT][TaskKind.FORWARD, BLOCK].net_bytes
    recomputed = again[TaskKind.RECOMPUTE, BLOCK]
    output = forward.output_bytes
    assert recomputed.net_bytes == pytest.approx(kept[TaskKind.FORWARD, BLOCK].net_bytes - output, rel=0.01)
    before = eager.observed[ActivationMode.CHECKPOINT]
    for keys in ((TaskKind.RECOMPUTE, TaskKind.BACKWARD),):
        nets = [sum(mode[key, BLOCK].net_bytes for key in keys) for mode in (again, before)]
        assert nets[0] == nets[1]


def test_the_loss_is_fused_with_the_whole_model_or_beside_blocks() -> None:
    config, _, _ = of_llama("Llama")()
    eager = traced(config)
    shapes = {"eager": eager, **{parts: lowered(eager, Lowering(parts)) for parts in Compiled}}
    seen = {}
    for name, shape in shapes.items():
        found = shape.observed[ActivationMode.KEEP]
        seen[name] = [found[kind, place] for (kind, place) in found if str(place) == "epilogue"]
    assert seen[Compiled.BLOCKS] == seen["eager"]
    assert sum(map(between_bytes, seen[Compiled.MODEL])) < 0.7 * sum(map(between_bytes, seen["eager"]))
    assert [found.num_graphs for found in seen[Compiled.MODEL]] == [1, 1]
    assert pair(shapes[Compiled.MODEL])[0].num_graphs == 0
    # torchtitan's choice: the loss of a compiled model, and blocks that are graphs of their own.
    assert seen[Compiled.BLOCKS_AND_LOSS] == seen[Compiled.MODEL]
    assert pair(shapes[Compiled.BLOCKS_AND_LOSS]) == pair(shapes[Compiled.BLOCKS])


class CrossEntropy(nn.Module):
    """As torchtitan compiles it (``cross_entropy_loss`` in torchtitan/components/loss.py)."""

    def forward(self, hidden_states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(hidden_states.flatten(0, 1).float(), labels.flatten(0, 1))


@pytest.mark.slow
def test_a_compiled_loss_has_no_logits_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 512
    logits = torch.randn(BATCH, LENGTH, vocabulary, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (BATCH, LENGTH))
    counted = count_block(CrossEntropy(), {"hidden_states": logits, "labels": labels}, monkeypatch)
    assert 0 < counted.saved_bytes <= 3 * 4 * BATCH * LENGTH  # the largest logit and the sum of each row
    most = 2 * 2 * BATCH * LENGTH * vocabulary
    assert sum(counted.backward.kernel_bytes) < 1.1 * most, "reads logits in 16 bits, writes their gradient so"
    head = lowered(traced(of_llama("Llama")()[0]), Lowering(Compiled.BLOCKS_AND_LOSS)).observed[ActivationMode.KEEP]
    forward, _ = (found for (_, place), found in head.items() if str(place) == "epilogue")
    eager = traced(of_llama("Llama")()[0]).observed[ActivationMode.KEEP]
    whole, _ = (found for (_, place), found in eager.items() if str(place) == "epilogue")
    logits_bytes, hidden_bytes = 2 * BATCH * LENGTH * vocabulary, 2 * BATCH * LENGTH * WIDTH
    # Eager, there are the logits, and their log-softmax in float32.
    assert forward.net_bytes < logits_bytes + 3 * hidden_bytes < 3 * logits_bytes < whole.net_bytes
