"""What a client asks for. Frozen: everything that changes while a request lives belongs to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from schedscope.engine import tokens

DEFAULT_MAX_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose output tokens. Names, defaults and meanings are SGLang's."""

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: all."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    """Seed of this request's own sampling; None takes the server's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation request as it arrived."""

    rid: str
    prompt: bytes
    """Prompt token ids, packed by `schedscope.engine.tokens.encode`."""
    sampling: SamplingParams = SamplingParams()
    priority: int | None = None
    """None: the server's default (with priority scheduling: the lowest possible)."""
    routing_key: str | None = None
    extra_key: str | None = None
    """Namespace of the prefix cache, as is `cache_salt`; an empty salt is none."""
    cache_salt: str | None = None

    @property
    def prompt_len(self) -> int:
        """Prompt length in tokens."""
        return tokens.length(self.prompt)
