"""Models: a checkpoint folder of the Llama or Qwen family, or a small random one that needs no file.

The modules are transformers' own with one thing replaced, the attention function
(`schedscope.engine.attention`). transformers takes seconds to import, so it is imported when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from schedscope.engine import attention
from schedscope.engine.errors import ConfigError, ServerError
from torch import Tensor

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Supported values of `architectures` in a checkpoint's config.json."""
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""The same as `model_type`."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BUILT_IN_NAME = "schedscope-tiny-llama"

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A loaded model and what a scheduler must know of it."""

    module: torch.nn.Module
    """A transformers causal language model whose attention is `attention.paged_attention`."""
    name: str
    path: str | None
    """Checkpoint folder; None for the built-in model."""
    tokenizer_folder: str | None
    """Folder for `tokenizer.load_tokenizer`; None for the built-in tokenizer."""
    vocab_size: int
    context_length: int
    """Most positions of a request, prompt and output together."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eos_token_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of keys and values per position, all layers together."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def hidden_states(self, input_ids: Tensor, positions: Tensor, plan: attention.AttentionPlan) -> Tensor:
        """Last hidden states, [tokens, hidden], of `input_ids` and `positions`, each [tokens]."""
        body: Any = self.module.get_submodule("model")
        output = body(
            input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, paged=plan
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits, [rows, vocab], of hidden states [rows, hidden]."""
        logits: Tensor = self.module.get_submodule("lm_head")(hidden)
        return logits


def load_model(path: str | None = None, *, device: str | None = None, dtype: str | None = None, seed: int = 0) -> Model:
    """Load a checkpoint folder, or build the small random model.

    Args:
        path: Folder with config.json and weights in transformers' layout, never downloaded. None builds a
            Llama of 2 layers and 1,024 tokens whose output is noise, but equal on every machine and run.
        device: "cpu", "cuda" or "cuda:<n>". None takes CUDA where there is one.
        dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own. None is float32 on a CPU
            and the checkpoint's own elsewhere.
        seed: Seed of the built-in model's weights. A checkpoint has no use for it.

    Raises:
        ServerError: No such folder, not a supported or readable checkpoint, or no such device.
        ConfigError: `device` or `dtype` is none of the above.
    """
    target = _device(device)
    if dtype is not None and dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}: choose one of auto, {', '.join(DTYPES)}")
    attention.register()
    if path is None:
        module = _built_in(seed)
        name, wanted = BUILT_IN_NAME, DTYPES.get(dtype or "float32", torch.float32)
    else:
        name = Path(path).resolve().name
        if dtype is None and target.type == "cpu":
            dtype = "float32"
        module = _from_folder(path, DTYPES.get(dtype or "auto", "auto"))
        wanted = module.dtype
    module = module.to(device=target, dtype=wanted).eval().requires_grad_(False)
    config = module.config
    heads = config.num_attention_heads
    return Model(
        module=module,
        name=name,
        path=path,
        tokenizer_folder=path,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        eos_token_ids=_eos_token_ids(config) | _eos_token_ids(module.generation_config),
        device=target,
        dtype=wanted,
    )


def _device(name: str | None) -> torch.device:
    available = torch.cuda.is_available()
    if name is None:
        return torch.device("cuda" if available else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}: choose cpu, cuda or cuda:<number>") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: choose cpu, cuda or cuda:<number>")
    if device.type == "cuda" and not available:
        raise ServerError(f"device {name!r} asked for, but torch finds no CUDA device: use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ServerError(f"no device {name!r}: torch finds {torch.cuda.device_count()} CUDA device(s)")
    return device


def _built_in(seed: int) -> Any:
    """A Llama whose weights depend on `seed` alone. Leaves torch's global generator as it was.

    Weights are uniform whole numbers times one factor, which rounds alike on every machine; a normal
    distribution would not. The factor follows from the fan-in, so that attention and context matter: with
    the usual deviation of 0.02 the next token would follow from the last one alone.
    """
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=1024,
        max_position_embeddings=32768,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    config._attn_implementation = attention.IMPLEMENTATION
    with torch.random.fork_rng(devices=[]):
        module = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(module.named_parameters()):
            if weight.dim() == 2:
                whole = torch.randint(-(2**15), 2**15, weight.shape, generator=generator)
                weight.copy_(whole * ((3 / weight.shape[1]) ** 0.5 / 2**15))
    return module


def _from_folder(path: str, dtype: torch.dtype | str) -> Any:
    folder = Path(path)
    if not folder.is_dir():
        raise ServerError(f"no model folder {path!r}: give a folder with config.json and weights")
    if not (folder / "config.json").is_file():
        raise ServerError(f"{path!r} is not a checkpoint folder: it has no config.json")
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServerError(f"can't read {folder / 'config.json'}: {error}") from error
    _check_supported(path, config)
    try:
        with _quiet():
            module, info = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=attention.IMPLEMENTATION,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # Any damaged or foreign file: transformers has no one error for it.
        raise ServerError(f"can't load the weights in {path!r}: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        # transformers would serve random numbers in their place, with only a warning.
        raise ServerError(f"{len(missing)} weights are missing in {path!r}, the first is {missing[0]}")
    return module


def _check_supported(path: str, config: Any) -> None:
    named = list(getattr(config, "architectures", None) or [])
    if config.model_type not in MODEL_TYPES or (named and not set(named) & set(ARCHITECTURES)):
        found = ", ".join(named) or config.model_type
        raise ServerError(
            f"architecture {found} of {path!r} is not supported: choose one of {', '.join(ARCHITECTURES)}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ServerError(f"{path!r} is a quantized checkpoint, which is not supported: use the original one")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        raise ServerError(
            f"rope type {rope['rope_type']!r} of {path!r} is not supported: "
            "its angles depend on the longest request of a batch"
        )


def _eos_token_ids(config: Any) -> frozenset[int]:
    ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar, which would land in the server's log."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
