"""Models of several families in factors and back: the same outputs, ordinary files, and refusals by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from protwin.runtime import FactorCache, add_lora, dense_state_dict, make_dense, make_orthogonal
from protwin.runtime.osft.linear import OrthogonalLinear
from protwin.runtime.osft.orthogonal_model import orthogonal_maps
from protwin.shared.basics.errors import ProtwinError
from tests.runtime.families import families
from tests.runtime.models import gpt2, llama, token_batches

RATIO = 0.3
MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "gpt2": gpt2, "biased": lambda: llama(attention_bias=True)}


def loss(model: Any) -> torch.Tensor:
    return model.eval()(**token_batches(1)[0]).logits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_a_model_in_factors_gives_what_it_gave(name: str, ratio: float) -> None:
    model = MODELS[name]()
    expected = loss(model)
    paths = make_orthogonal(model, unfreeze_rank_ratio=ratio)
    assert len(paths) == {"llama": 28, "gpt2": 12, "biased": 28}[name]
    torch.testing.assert_close(loss(model), expected, atol=1e-5, rtol=0)
    names = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert len(names) == (0 if ratio == 1 else 3 * len(paths))
    assert all(name.rpartition("_")[2] == "high" for name in names)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_is_an_ordinary_model(name: str, tmp_path: Path) -> None:
    """Of trained factors: the file has the names of the dense model, and logits are the same."""
    model = MODELS[name]()
    names = list(model.state_dict())
    make_orthogonal(model, unfreeze_rank_ratio=RATIO)
    with torch.no_grad():
        for module in orthogonal_maps(model).values():
            module.u_low.add_(torch.randn_like(module.u_low), alpha=0.1)
            module.s_low.mul_(1.5)
    model.save_pretrained(tmp_path, state_dict=dense_state_dict(model))
    loaded = type(model).from_pretrained(tmp_path)
    assert not orthogonal_maps(loaded)
    torch.testing.assert_close(loss(loaded), loss(model), atol=1e-5, rtol=0)
    assert list(dense_state_dict(model)) == names


@pytest.mark.parametrize("name", MODELS)
def test_a_model_made_dense_is_factorised_anew(name: str) -> None:
    """For a third task: other factors, of the weights as they are by then."""
    model = MODELS[name]()
    kinds = [type(module) for module in model.modules()]
    paths = make_orthogonal(model, unfreeze_rank_ratio=RATIO)
    bias = {path: m.bias for path, m in orthogonal_maps(model).items()}
    before = {path: m.factors for path, m in orthogonal_maps(model).items()}
    with torch.no_grad():
        for module in orthogonal_maps(model).values():
            module.s_low.mul_(100)
    expected, state = loss(model), dense_state_dict(model)
    assert make_dense(model) == paths
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(model.get_submodule(path).bias is one for path, one in bias.items())
    torch.testing.assert_close(loss(model), expected, atol=1e-3, rtol=1e-3)
    assert make_orthogonal(model, unfreeze_rank_ratio=RATIO) == paths
    after = orthogonal_maps(model)
    assert not any(torch.equal(after[path].factors.u_high, one.u_high) for path, one in before.items())


def test_a_state_of_training_becomes_dense() -> None:
    model = llama(num_layers=1)
    make_orthogonal(model, unfreeze_rank_ratio=RATIO)
    state = {name: value * 2 for name, value in model.state_dict().items()}
    dense = dense_state_dict(model, state)
    own = dense_state_dict(model)
    path = "model.layers.0.self_attn.q_proj"
    torch.testing.assert_close(dense[f"{path}.weight"], own[f"{path}.weight"] * 8)
    del state[f"{path}.s_low"]
    with pytest.raises(ProtwinError, match=rf"nothing for {path}\.s_low"):
        dense_state_dict(model, state)


def test_weights_in_bfloat16_are_reconstructed_in_float32() -> None:
    model = llama(num_layers=1).bfloat16()
    make_orthogonal(model, unfreeze_rank_ratio=RATIO)
    module = model.get_submodule("model.layers.0.mlp.up_proj")
    f = {name: factor.double() for name, factor in module.factors.named().items()}
    exact = (f["u_high"] * f["s_high"]) @ f["v_high"] + (f["u_low"] * f["s_low"]) @ f["v_low"]
    dense = dense_state_dict(model)["model.layers.0.mlp.up_proj.weight"]
    assert dense.dtype == torch.bfloat16
    # Rounded once: at most half a unit in the last place, and what float32 adds.
    assert ((dense.double() - exact).abs() <= exact.abs() * 2**-8 * 1.01 + 1e-7).all()


def test_targets_are_named_by_end_path_and_pattern() -> None:
    def chosen(*targets: str) -> list[str]:
        return make_orthogonal(llama(num_layers=3), unfreeze_rank_ratio=RATIO, targets=targets)

    assert chosen("mlp.up_proj") == [f"model.layers.{n}.mlp.up_proj" for n in range(3)]
    assert chosen("model.layers.1.self_attn.q_proj") == ["model.layers.1.self_attn.q_proj"]
    assert len(chosen("model.layers.[02].*")) == 14
    assert chosen("o_proj", "lm_head") == [*(f"model.layers.{n}.self_attn.o_proj" for n in range(3)), "lm_head"]


def test_everything_else_is_trained_as_before_and_low_rank_matrices_stay_apart() -> None:
    model = llama(num_layers=2)
    add_lora(model, rank=2, targets=["q_proj"])
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    paths = make_orthogonal(model, unfreeze_rank_ratio=RATIO)
    assert len(paths) == 12
    assert not any("q_proj" in path for path in paths)
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert not parameter.requires_grad
    assert model.get_submodule("model.layers.0.self_attn.k_proj").u_low.requires_grad


@pytest.mark.parametrize("name", families())
def test_defaults_of_many_families(name: str) -> None:
    """Some maps of every family, none of them a router; the loss stays."""
    torch.manual_seed(0)
    family = families()[name]
    model = family.build().eval()
    before = model(**family.batch).loss.item()
    paths = make_orthogonal(model, unfreeze_rank_ratio=RATIO)
    assert paths
    assert all(path.startswith(tuple(f"{block}." for block in family.blocks)) for path in paths)
    assert model(**family.batch).loss.item() == pytest.approx(before, rel=1e-5)


def test_routers_of_experts_and_maps_of_one_direction_are_no_targets() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.shared_gate = nn.Linear(8, 1)
            self.up = nn.Linear(8, 8)

    model = nn.Sequential(nn.ModuleList([Expert(), Expert()]))
    assert make_orthogonal(model, unfreeze_rank_ratio=RATIO) == ["0.0.up", "0.1.up"]


# -- refusals ----------------------------------------------------------------------------------------------------------


class OwnLinear(nn.Linear):
    """A map with a forward of its own."""


def tied() -> nn.Module:
    return llama(num_layers=1, tie_word_embeddings=True)


def quantised() -> nn.Module:
    model = llama(num_layers=1)
    up = model.get_submodule("model.layers.0.mlp.up_proj")
    up.weight = nn.Parameter(up.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    return model


def packed() -> nn.Module:
    model = llama(num_layers=1)
    up = model.get_submodule("model.layers.0.mlp.up_proj")
    up.weight = nn.Parameter(torch.zeros(up.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
    return model


def own_class() -> nn.Module:
    model = llama(num_layers=1)
    model.model.layers[0].mlp.up_proj = OwnLinear(32, 56)
    return model


def hooked() -> nn.Module:
    model = llama(num_layers=1)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    return model


def adapted() -> nn.Module:
    model = llama(num_layers=1)
    add_lora(model, rank=2)
    return model


def factorised() -> nn.Module:
    model = llama(num_layers=1)
    make_orthogonal(model, unfreeze_rank_ratio=RATIO)
    return model


@pytest.mark.parametrize(
    ("build", "targets", "message"),
    [
        (llama, ["q_porj"], r"no linear map is called 'q_porj'.*q_proj"),
        (llama, ["up_proj", "nothing"], r"no linear map is called 'nothing'.*q_proj"),
        (llama, ["input_layernorm"], r"input_layernorm.* LlamaRMSNorm and no linear map"),
        (llama, ["mlp"], r"LlamaMLP and no linear map"),
        (llama, ["q_proj.weight"], r"names the parameter model\.layers\.0\.self_attn\.q_proj\.weight"),
        (llama, ["embed_tokens"], r"model\.embed_tokens is a Embedding"),
        (tied, ["lm_head"], r"lm_head is tied \(model\.embed_tokens\.weight and lm_head\.weight\)"),
        (quantised, [], r"mlp\.up_proj is float8_e4m3fn"),
        (packed, ["up_proj"], r"mlp\.up_proj is uint8"),
        (own_class, [], r"mlp\.up_proj is a OwnLinear"),
        (hooked, [], r"mlp\.up_proj has hooks"),
        (adapted, [], r"all linear maps .* have low-rank matrices beside them \(LoRA\).*q_proj"),
        (adapted, ["up_proj"], r"mlp\.up_proj, which 'up_proj' names, has low-rank matrices"),
        (llama, "up_proj", r"targets is 'up_proj'.*\['up_proj'\]"),
        (factorised, ["up_proj"], r"up_proj is factorised already.*make_dense"),
    ],
)
def test_what_cannot_be_factorised_is_refused_by_name(
    build: Callable[[], nn.Module], targets: list[str] | str, message: str
) -> None:
    """And nothing has changed."""
    model = build()
    before = list(model.modules())
    with pytest.raises(ProtwinError, match=message):
        make_orthogonal(model, unfreeze_rank_ratio=RATIO, targets=targets)
    assert list(model.modules()) == before


def test_a_model_without_memory_gets_factors_without_memory() -> None:
    with torch.device("meta"):
        config = llama(num_layers=1).config
        model = transformers.LlamaForCausalLM(config)
    make_orthogonal(model, unfreeze_rank_ratio=RATIO)
    real = llama(num_layers=1)
    make_orthogonal(real, unfreeze_rank_ratio=RATIO)
    expected = {name: (p.shape, p.requires_grad) for name, p in real.named_parameters()}
    assert {name: (p.shape, p.requires_grad) for name, p in model.named_parameters()} == expected
    assert all(p.is_meta for p in model.parameters())


def test_a_cache_gives_the_same_model(tmp_path: Path) -> None:
    first, second = llama(num_layers=2), llama(num_layers=2)
    told: list[tuple[int, int]] = []
    make_orthogonal(first, unfreeze_rank_ratio=RATIO, cache=FactorCache(tmp_path))
    cache = FactorCache(tmp_path)
    make_orthogonal(
        second, unfreeze_rank_ratio=RATIO, cache=cache, on_progress=lambda done, of: told.append((done, of))
    )
    assert cache.num_hits == 14
    assert told == [(done, 14) for done in range(15)]
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    assert isinstance(copy.deepcopy(first).model.layers[0].mlp.up_proj, OrthogonalLinear)
