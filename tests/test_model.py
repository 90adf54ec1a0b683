"""Loading models: what works, and what is refused with which words."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from schedscope.engine.errors import ConfigError, SchedscopeError, ServerError
from schedscope.engine.model import Model, load_model


def tiny(folder: Path, **changes: Any) -> Path:
    """A random Llama checkpoint."""
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    config = LlamaConfig(
        **{
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 64,
            "max_position_embeddings": 128,
            "eos_token_id": 5,
            **changes,
        }
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def weights(model: Model) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in model.module.named_parameters()}


def test_the_built_in_model() -> None:
    model = load_model(device="cpu")
    assert (model.vocab_size, model.context_length, model.eos_token_ids) == (1024, 32768, frozenset({2}))
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (2, 4, 2, 16)
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert (model.path, model.tokenizer_folder) == (None, None)
    assert model.bytes_per_slot == 2 * 2 * 2 * 16 * 4


def test_built_in_weights_follow_from_the_seed_alone() -> None:
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    first = weights(load_model(device="cpu", seed=3))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    torch.rand(5)
    again = weights(load_model(device="cpu", seed=3))
    assert first.keys() == again.keys()
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    other = weights(load_model(device="cpu", seed=4))
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_checkpoint(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "my-model")
    change_config(folder, dtype="bfloat16")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    model = load_model(str(folder), device="cpu")
    assert (model.name, model.path, model.tokenizer_folder) == ("my-model", str(folder), str(folder))
    assert (model.vocab_size, model.context_length, model.head_dim) == (64, 128, 8)
    assert model.eos_token_ids == {5, 6, 7}
    assert model.dtype == torch.float32
    assert load_model(str(folder), device="cpu", dtype="auto").dtype == torch.bfloat16
    assert load_model(str(folder), device="cpu", dtype="float16").dtype == torch.float16


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"path": "/no/such/folder"}, ServerError, "no model folder '/no/such/folder'"),
        ({"device": "tpu"}, ConfigError, "unknown device 'tpu'"),
        ({"device": "meta"}, ConfigError, "'meta' is not supported"),
        ({"device": "cpu", "dtype": "int8"}, ConfigError, "unknown dtype 'int8'"),
    ],
)
def test_wrong_options(options: dict[str, str], error: type[SchedscopeError], text: str) -> None:
    with pytest.raises(error, match=text):
        load_model(options.pop("path", None), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none() -> None:
    with pytest.raises(ServerError, match="finds no CUDA device"):
        load_model(device="cuda")


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"has no config\.json"):
        load_model(str(tmp_path), device="cpu")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ServerError, match="can't read"):
        load_model(str(tmp_path), device="cpu")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(ServerError, match="can't read"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel .* is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "choose one of LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantized checkpoint"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope type 'dynamic'",
        ),
        ({"num_hidden_layers": 2}, "weights are missing .* model.layers.1"),
        ({"hidden_size": 32}, "can't load the weights"),
    ],
)
def test_checkpoints_that_cannot_be_served(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    change_config(tiny(tmp_path), **changes)
    with pytest.raises(ServerError, match=text):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_damaged_weights(damage: str, tmp_path: Path) -> None:
    path = tiny(tmp_path) / "model.safetensors"
    if damage == "truncate":
        path.write_bytes(path.read_bytes()[:100])
    else:
        path.unlink()
    with pytest.raises(ServerError, match="can't load the weights"):
        load_model(str(tmp_path), device="cpu")


def test_modules_import_transformers_only_when_needed() -> None:
    """The tokenizer is light, and nothing pays for transformers before a model is loaded."""
    code = (
        "import sys, schedscope.engine.tokenizer as t; t.load_tokenizer(None)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "import schedscope.engine.runner; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
