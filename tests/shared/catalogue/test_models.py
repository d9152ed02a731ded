"""The catalogue of models: published sizes, configurations that transformers builds, files that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protwin.shared.basics.errors import CatalogueError, FileError
from protwin.shared.catalogue.model_check import REQUIRED_SIZES
from protwin.shared.catalogue.models import (
    ModelConfiguration,
    load_model_configuration,
    model_configuration,
    model_names,
    read_model_configuration,
)
from protwin.shared.schema.workload import DType
from tests.shared.catalogue.model_size import num_parameters_of

PUBLISHED = {
    # Sums over the tensors of the published checkpoints, tied ones once; vit-huge as torchvision states vit_h_14.
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-large": 335_174_458,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "mixtral-8x7b": 46_702_792_704,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "vit-huge": 632_045_800,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "opt-1.3b": 1_315_758_080,
    "phi-4": 14_659_507_200,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
}

LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}
GPT2 = {"model_type": "gpt2", "vocab_size": 1000, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}


def written(folder: Path, content: object, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# -- what is in the catalogue ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    assert model_configuration(name).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", model_names())
def test_the_count_from_the_configuration_equals_the_stated_size(name: str) -> None:
    model = model_configuration(name)
    assert num_parameters_of(model.config) == model.num_parameters
    assert model.name == name
    assert "Hugging Face" in model.source


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama-3-8b", "num_key_value_heads", 32),  # full attention instead of grouped queries
        ("llama-3-8b", "tie_word_embeddings", True),
        ("llama-3.2-1b", "tie_word_embeddings", False),
        ("llama-2-7b", "intermediate_size", 4 * 4096),  # the MLP of a GPT
        ("qwen2.5-7b", "model_type", "llama"),  # no biases on query, key and value
        ("qwen3-8b", "model_type", "llama"),  # no normalization of query and key
        ("gpt2", "n_positions", 2048),
        ("mixtral-8x7b", "model_type", "mistral"),  # one expert
        ("gemma-2-9b", "model_type", "mistral"),  # two normalizations in a block
        ("t5-3b", "d_kv", 32),  # heads as wide as the model in all
        ("t5-base", "feed_forward_proj", "gated-gelu"),
        ("bert-large", "type_vocab_size", 1),
        ("vit-huge", "patch_size", 16),
        ("opt-1.3b", "max_position_embeddings", 2046),  # without the two positions that OPT adds
    ],
)
def test_a_wrong_configuration_has_another_size(name: str, field: str, value: object) -> None:
    model = model_configuration(name)
    assert num_parameters_of(model.config | {field: value}) != model.num_parameters


def test_published_element_types() -> None:
    assert model_configuration("llama-3-8b").dtype is DType.BFLOAT16
    assert model_configuration("llama-2-7b").dtype is DType.FLOAT16
    assert model_configuration("gpt2").dtype is None


def test_a_changed_configuration_does_not_change_the_catalogue() -> None:
    model_configuration("gpt2").config["n_layer"] = 1
    assert model_configuration("gpt2").config["n_layer"] == 12


def test_models_read_back_equal(tmp_path: Path) -> None:
    model = model_configuration("llama-3.1-8b")
    model.save(tmp_path / "model.json")
    assert ModelConfiguration.load(tmp_path / "model.json") == model
    assert read_model_configuration(tmp_path / "model.json") == model


def test_the_catalogues_import_no_torch() -> None:
    program = (
        "import sys; from protwin.shared.catalogue import machines, models; import protwin.shared.tables.machines; "
        "models.model_configuration('gpt2'); machines.machine('rtx-3090'); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # transformers' own
def test_transformers_builds_every_model_with_that_size() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from protwin.runtime.model.configurations import build_model

    for name in model_names():
        model = model_configuration(name)
        config = transformers.AutoConfig.for_model(**model.config)
        built = build_model(model.config, name, torch.bfloat16)
        assert type(built).__name__ in model.config["architectures"]
        assert sum(parameter.numel() for parameter in built.parameters()) == model.num_parameters, name
        assert str(config.dtype).removeprefix("torch.") == str(model.dtype), name
        if "rope_theta" in model.config:
            assert config.rope_parameters["rope_theta"] == model.config["rope_theta"], name


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("llama3-8", "llama-3-8b"), ("Mistral 7", "mistral-7b"), ("gpt-22", "gpt2"), ("qwen2.5_7bn", "qwen2.5-7b")],
)
def test_an_unknown_model_is_answered_with_the_nearest(asked: str, meant: str) -> None:
    with pytest.raises(CatalogueError, match=f"Did you mean {meant}") as caught:
        model_configuration(asked)
    assert "config.json" in str(caught.value)


def test_a_name_like_no_other_is_answered_with_the_nearest_and_how_many_there_are() -> None:
    with pytest.raises(CatalogueError, match=f"None of the {len(model_names())} known names resembles it") as caught:
        model_configuration("§§")
    assert sum(f" {name}," in str(caught.value) or f" {name}." in str(caught.value) for name in model_names()) == 3
    assert "config.json" in str(caught.value)


# -- a user's own ----------------------------------------------------------------------------------------------------


def test_a_configuration_file_is_read(tmp_path: Path) -> None:
    model = read_model_configuration(written(tmp_path, LLAMA, "tiny.json"))
    # Embedding and head; two layers of query and output, key and value, gated MLP and two norms; the last norm.
    expected = 2 * 1000 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64) + 64
    assert (model.name, model.num_parameters, model.dtype) == ("tiny", None, DType.BFLOAT16)
    assert num_parameters_of(model.config) == expected
    assert model.config == LLAMA


def test_a_configuration_is_named_after_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    path = written(folder, GPT2)
    assert read_model_configuration(path).name == "my-model"
    assert read_model_configuration(folder) == read_model_configuration(path)
    assert load_model_configuration(str(folder)) == read_model_configuration(path)
    assert load_model_configuration("gpt2") == model_configuration("gpt2")


def test_an_unknown_family_is_passed_on_uncounted(tmp_path: Path) -> None:
    content = {"model_type": "somenew", "hidden_size": 64, "num_attention_heads": 4, "ffn_dim": [64, 128]}
    model = read_model_configuration(written(tmp_path, content))
    assert model.num_parameters is None
    assert model.config == content


BAD_FIELDS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
    (LLAMA, {"hidden_size": 0}, "hidden_size is 0"),
    (LLAMA, {"hidden_size": -64}, "hidden_size is -64"),
    (LLAMA, {"hidden_size": "64"}, "hidden_size is '64'"),
    (LLAMA, {"hidden_size": 64.0}, "hidden_size is 64.0"),
    (LLAMA, {"hidden_size": True}, "hidden_size is True"),
    (LLAMA, {"hidden_size": 10**12}, "hidden_size is 1000000000000"),
    (LLAMA, {"hidden_size": [64]}, r"hidden_size is \[64\]"),
    (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
    (LLAMA, {"num_attention_heads": 0}, "num_attention_heads is 0"),
    (LLAMA, {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    (LLAMA, {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
    (LLAMA, {"vocab_size": -1}, "vocab_size is -1"),
    (LLAMA, {"vocab_size": float("nan")}, "vocab_size is nan"),
    (LLAMA, {"rope_theta": float("nan")}, "rope_theta is NaN"),
    (LLAMA, {"rope_scaling": {"factor": float("nan")}}, "rope_scaling.factor is NaN"),
    (LLAMA, {"model_type": 3}, "model_type 3"),
    (LLAMA, {"model_type": ""}, "model_type ''"),
    (GPT2, {"n_inner": -1}, "n_inner is -1"),
    (LLAMA, {"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok 3 exceeds num_local_experts 2"),
    (LLAMA, {"image_size": 8, "patch_size": 16}, "patch_size 16 exceeds image_size 8"),
    ({"model_type": "somenew"}, {"hidden_size": -1}, "hidden_size is -1"),
    ({"model_type": "somenew"}, {"text_config": {"hidden_size": -1}}, "text_config.hidden_size is -1"),
    ({"model_type": "somenew"}, {"text_config": {"model_type": []} | {"d_model": 0}}, "text_config.d_model is 0"),
]


@pytest.mark.parametrize(("base", "change", "message"), BAD_FIELDS, ids=[str(case[1]) for case in BAD_FIELDS])
def test_an_impossible_configuration_is_refused(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    assert read_model_configuration(written(tmp_path, base)), "without the change it is accepted"
    with pytest.raises(FileError, match=message):
        read_model_configuration(written(tmp_path, base | change))


@pytest.mark.parametrize(
    ("family", "field"), [(name, field) for name, sizes in REQUIRED_SIZES.items() for field in sizes]
)
def test_a_missing_size_is_not_made_up(tmp_path: Path, family: str, field: str) -> None:
    name = next(name for name in model_names() if model_configuration(name).config["model_type"] == family)
    content = model_configuration(name).config
    del content[field]
    with pytest.raises(FileError, match=f"{field} is missing"):
        read_model_configuration(written(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "damaged"),
        ("", "is empty"),
        ("[1, 2]", "holds a list"),
        ("3", "holds a number"),
        ("{}", "empty"),
        ('{"hidden_size": 64}', "no field model_type"),
        ('{"kind": "plan", "schema_version": 1}', "is a plan file"),
        ('{"kind": "model", "schema_version": 99}', "schema_version 99"),
        ("[" * 100_000, "damaged"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        read_model_configuration(written(tmp_path, content))


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"):
        read_model_configuration(tmp_path / "nothing.json")
    with pytest.raises(FileError, match="does not exist"):
        read_model_configuration(tmp_path)
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    with pytest.raises(FileError, match="cannot be read"):
        read_model_configuration(tmp_path / "binary.json")


def test_a_program_is_no_misspelt_name() -> None:
    with pytest.raises(CatalogueError, match=r"my_model\.py is Python: .*protwin\.runtime\.trace\(model, batch\)"):
        model_configuration("my_model.py")
