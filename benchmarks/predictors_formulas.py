"""Predictors that are formulas over a model's shape: llm-analysis, and why Calculon is not asked."""

from __future__ import annotations

import logging

from predictors_rows import Row

from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.catalogue.machines import machine
from protwin.shared.catalogue.models import model_configuration
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Content, Memory
from protwin.sim.engine.simulator import simulate

MODEL, DEVICE, BATCH_SIZE, SEQUENCE_LENGTH = "gpt2-xl", "a100-80gb", 4, 1024
QUESTION = f"{MODEL} without dropout, {BATCH_SIZE} x {SEQUENCE_LENGTH}, bfloat16, plain, {DEVICE}"
WITHOUT_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
CHUNK_BYTES = 2**30


def ask_llm_analysis() -> list[Row]:
    """Accounts of a step of GPT-2 XL, whose blocks llm-analysis has the formulas of."""
    try:
        from llm_analysis.analysis import LLMAnalysis
        from llm_analysis.config import DtypeConfig, ModelConfig, ParallelismConfig, get_gpu_config_by_name
    except ImportError as error:
        return [_unasked("llm-analysis", f"not installed ({error}): pip install --no-deps llm-analysis fire termcolor")]
    config = model_configuration(MODEL).config | WITHOUT_DROPOUT
    shape = ModelConfig(
        name=MODEL,
        num_layers=config["n_layer"],
        n_head=config["n_head"],
        hidden_dim=config["n_embd"],
        vocab_size=config["vocab_size"],
        max_seq_len=SEQUENCE_LENGTH,
    )
    logging.disable(logging.WARNING)
    analysis = LLMAnalysis(shape, get_gpu_config_by_name("a100-sxm-80gb"), DtypeConfig(), ParallelismConfig())
    theirs = analysis.training(batch_size_per_gpu=BATCH_SIZE, gradient_accumulation_steps=1, seq_len=SEQUENCE_LENGTH)
    logging.disable(logging.NOTSET)

    workload = workload_of_configuration(
        config, name=MODEL, batch_size=BATCH_SIZE, sequence_length=SEQUENCE_LENGTH, dtype="bfloat16"
    )
    layout = layout_of(workload, CHUNK_BYTES)
    plan = Plan(workload_id=workload.identity, chunk_bytes=CHUNK_BYTES, n_persist=len(layout.chunks), n_buffer=0)
    record = simulate(plan, workload, machine(DEVICE), layout=layout)
    curve = record.curve(Memory.DEVICE)
    assert curve is not None
    held = {holding.content: holding.size_bytes for holding in curve.alive_at_peak}
    phases = [
        workload.prologue_forward,
        workload.epilogue_forward,
        workload.epilogue_backward,
        workload.prologue_backward,
    ]
    for block in range(workload.num_blocks):
        phases += [workload.profile_of(block).forward, workload.profile_of(block).backward]
    saved_bytes = sum(workload.profile_of(block).forward.net_bytes for block in range(workload.num_blocks))

    def row(account: str, unit: str, ours: float, key: str, why: str, *, is_comparable: bool = False) -> Row:
        return Row("llm-analysis", QUESTION, account, unit, ours, float(theirs[key]), is_comparable, why)

    return [
        row(
            "parameters",
            "",
            workload.num_parameters,
            "num_params_total",
            "theirs leaves out biases and learned positions",
            is_comparable=True,
        ),
        row(
            "FLOPs of a step",
            "",
            sum(phase.flops for phase in phases),
            "num_flops_total_per_micro_batch",
            "ours halves attention under the causal mask, and counts element-wise operations",
            is_comparable=True,
        ),
        row(
            "optimizer state",
            "B",
            held[Content.OPTIMIZER_STATE],
            "optimizer_state_memory_per_gpu",
            "12 bytes a parameter in both",
            is_comparable=True,
        ),
        row(
            "saved by the blocks",
            "B",
            saved_bytes,
            "activation_memory_per_gpu",
            "theirs: Megatron's fused activation; ours: every tensor that eager transformers keeps, logits apart",
        ),
        row(
            "iteration",
            "s",
            record.iteration_s,
            "latency_per_iter",
            "theirs takes the peak as reached and no time for element-wise kernels and the optimizer: a lower bound",
        ),
    ]


def ask_calculon() -> list[Row]:
    """Nothing: it cannot be installed from the index, and has no model of what is asked."""
    return [
        _unasked(
            "Calculon",
            "not on the package index (its name there is another program), and its blocks are those of Megatron's GPT "
            "alone: no gated MLP, no grouped heads",
        )
    ]


def _unasked(peer: str, why: str) -> Row:
    return Row(peer, QUESTION, "", "", None, None, is_comparable=False, why=why)
