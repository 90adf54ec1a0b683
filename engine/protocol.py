"""What the HTTP side and the engine say to each other, and what a client may send.

Names and meanings are SGLang's. A body is parsed into `Request`s here, and refused here: whatever passes can
be run by the engine. Every refusal is a `FieldError` that names the field as the client wrote it.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import msgspec
from msgspec import UNSET, UnsetType
from schedscope.engine import tokens
from schedscope.engine.errors import RequestError
from schedscope.engine.request import DEFAULT_MAX_NEW_TOKENS, Request, SamplingParams

MAX_BATCH = 4096
"""Requests that one body may ask for."""
MAX_NAME_CHARS = 1024
"""Longest rid, routing key, extra key or cache salt: they are recorded, and a queue holds many."""
MAX_STOPS = 32
DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions where the client gives none."""

_INT64 = range(-(2**63), 2**63)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Why a request ended."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    """stop: the token id or the text that ended it."""
    message: str | None = None
    """abort: why."""
    status: int | None = None
    """abort: the HTTP status that a client gets where nothing was sent yet; None: a normal answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One increment of one request."""

    rid: str
    token_ids: tuple[int, ...]
    """New tokens of this increment."""
    text: str
    """New text, whole characters, without the stop text."""
    finish: Finish | None
    """Set on the last increment, and only there."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """These three are totals so far."""
    queue_time: float | None
    """Seconds from arrival to admission; None while waiting."""


class Engine(Protocol):
    """What the server needs of an engine. All calls come from one event loop."""

    model_name: str
    tokenizer_path: str
    vocab_size: int
    """Token ids of a prompt are below it."""
    context_length: int
    max_request_tokens: int
    """Longest prompt and generation together, in tokens, that the pool can hold."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. Raises RequestError where this engine has no tokenizer."""
        ...

    def generate(self, request: Request) -> AsyncIterator[Output]:
        """Run one request; an async generator whose last output has `finish`.

        Raises RequestError for a request it can't take, ServerError once it has stopped. Closing it early
        aborts the request.
        """
        ...

    def abort(self, rid: str) -> None:
        """End a request, whatever its state; its generator yields an abort. Unknown rids are ignored."""
        ...

    def info(self) -> dict[str, object]:
        """JSON-ready configuration and state, for /server_info."""
        ...

    async def flush_cache(self) -> bool:
        """Empty the prefix cache. False, and nothing done, while requests wait or run."""
        ...

    def is_healthy(self) -> bool:
        """False once the engine can't take requests any more."""
        ...


@runtime_checkable
class ChatEngine(Protocol):
    """An engine that knows its model's chat template; others get a plain one."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation of `role` and `content`, up to where the assistant speaks."""
        ...


class FieldError(RequestError):
    """A field of a request that can't be served, named as in the client's body."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP call for text, as the requests it stands for."""

    requests: tuple[Request, ...]
    """Prompt by prompt, each `samples` times."""
    samples: int
    single: bool
    """One prompt, one sample: the answer is an object, not a list of them."""
    stream: bool
    rid: str | None
    """The rid of the whole call, where the client gave one."""
    ignored: tuple[str, ...]
    """Fields of the body that this server doesn't know."""


class SamplingBody(msgspec.Struct, kw_only=True):
    """`sampling_params` of a body; null is the default of a field, except where noted."""

    max_new_tokens: int | UnsetType | None = UNSET
    """null: as many as fit."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    sampling_seed: int | None = None
    n: int | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """`POST /generate`."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SamplingBody | list[SamplingBody] | None = None
    rid: str | list[str] | None = None
    priority: int | None = None
    routing_key: str | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    stream: bool | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options` of the OpenAI bodies."""

    include_usage: bool | None = None
    """One more chunk, without choices, with the usage of the whole call."""
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk."""


class OpenAIBody(msgspec.Struct, kw_only=True):
    """What `POST /v1/completions` and `POST /v1/chat/completions` have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_cached_tokens_details: bool | None = None
    rid: str | list[str] | None = None
    priority: int | None = None
    routing_key: str | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None


class CompletionBody(OpenAIBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message; only text is served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None


class ChatBody(OpenAIBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    """Comes before `max_tokens`; neither: as many as fit."""


class AbortBody(msgspec.Struct, kw_only=True):
    """`POST /abort_request`."""

    rid: str | None = None
    abort_all: bool | None = None


def decode_body(body: bytes, kind: type[T]) -> tuple[T, tuple[str, ...]]:
    """The body as `kind`, and the names of the fields that `kind` doesn't know. Raises FieldError."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise FieldError("body", f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise FieldError("body", "must be a JSON object")
    try:
        return msgspec.convert(value, kind), tuple(_unknown(value, kind))
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        missing = reason.rpartition("required field ")[2].strip("`")
        raise FieldError(path.strip(".`") or missing, reason[:1].lower() + reason[1:]) from None


def parse_generate(body: bytes, engine: Engine, routing_key: str | None = None) -> Call:
    """The call that a `/generate` body makes. `routing_key`: the header's, where the body has none."""
    generate, ignored = decode_body(body, GenerateBody)
    return _call(generate, engine, routing_key, ignored)


def parse_completion(body: bytes, engine: Engine, routing_key: str | None = None) -> tuple[CompletionBody, Call]:
    """The body of `/v1/completions` and the call that it makes."""
    completion, ignored = decode_body(body, CompletionBody)
    limit = DEFAULT_COMPLETION_TOKENS if completion.max_tokens is None else completion.max_tokens
    generate = _native(completion, limit)
    prompt = completion.prompt
    if isinstance(prompt, str):
        generate.text = prompt
    elif any(isinstance(part, str) for part in prompt):
        generate.text = [part for part in prompt if isinstance(part, str)]
        if len(generate.text) != len(prompt):
            raise FieldError("prompt", "texts and token ids in one list")
    else:
        generate.input_ids = [part for part in prompt if not isinstance(part, str)]
    with _openai_names("prompt", "max_tokens"):
        return completion, _call(generate, engine, routing_key, ignored)


def parse_chat(body: bytes, engine: Engine, routing_key: str | None = None) -> tuple[ChatBody, Call]:
    """The body of `/v1/chat/completions` and the call that it makes."""
    chat, ignored = decode_body(body, ChatBody)
    if not chat.messages:
        raise FieldError("messages", "is empty")
    messages = [
        {"role": message.role, "content": _content(message, f"messages[{index}].content")}
        for index, message in enumerate(chat.messages)
    ]
    named = chat.max_completion_tokens is not None
    generate = _native(chat, chat.max_completion_tokens if named else chat.max_tokens)
    with _openai_names("messages", "max_completion_tokens" if named else "max_tokens"):
        if isinstance(engine, ChatEngine):
            generate.input_ids = [*_encoded("input_ids", engine.encode_chat, messages)]
        else:
            generate.text = plain_chat(messages)
        return chat, _call(generate, engine, routing_key, ignored)


def plain_chat(messages: Sequence[Mapping[str, str]]) -> str:
    """A conversation as text, for engines without a chat template."""
    turns = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    return f"{turns}assistant:"


def _unknown(value: Mapping[str, Any], kind: type) -> Iterator[str]:
    """Fields of a body that nothing here reads, `sampling_params` included."""
    yield from value.keys() - kind.__struct_fields__  # type: ignore[attr-defined]
    sampling = value.get("sampling_params") if kind is GenerateBody else None
    for body in sampling if isinstance(sampling, list) else [sampling or {}]:
        yield from (f"sampling_params.{name}" for name in body.keys() - SamplingBody.__struct_fields__)


def _native(body: OpenAIBody, max_new_tokens: int | None) -> GenerateBody:
    return GenerateBody(
        sampling_params=SamplingBody(
            max_new_tokens=max_new_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=body.ignore_eos,
            sampling_seed=body.seed,
            n=body.n,
        ),
        rid=body.rid,
        priority=body.priority,
        routing_key=body.routing_key,
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        stream=body.stream,
    )


@contextmanager
def _openai_names(prompt: str, limit: str) -> Iterator[None]:
    """Refusals inside name the fields of an OpenAI body."""
    try:
        yield
    except FieldError as error:
        name = error.field.removeprefix("sampling_params.")
        name = re.sub(r"^(text|input_ids)\b", prompt, name)
        raise FieldError({"max_new_tokens": limit, "sampling_seed": "seed"}.get(name, name), error.reason) from None


def _content(message: ChatMessage, field: str) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    for index, part in enumerate(message.content):
        if part.type != "text":
            raise FieldError(f"{field}[{index}].type", f"only text is served, not {part.type!r}")
    return "".join(part.text or "" for part in message.content)


def _call(generate: GenerateBody, engine: Engine, routing_key: str | None, ignored: tuple[str, ...]) -> Call:
    single, prompts = _prompts(generate, engine)
    count = len(prompts)
    bodies = _spread("sampling_params", generate.sampling_params, count)
    samples = _samples(bodies)
    if count * samples > MAX_BATCH:
        field = "sampling_params.n" if samples > 1 else prompts[0][0].partition("[")[0]
        raise FieldError(field, f"{count * samples} requests in one call, at most {MAX_BATCH}")
    rids = _rids(generate.rid, count, samples, single)
    if generate.priority is not None and generate.priority not in _INT64:
        raise FieldError("priority", "is not a signed 64-bit number")
    routing_key = _name("routing_key", routing_key if generate.routing_key is None else generate.routing_key)
    extra_keys = _names("extra_key", generate.extra_key, count)
    salts = _names("cache_salt", generate.cache_salt, count)
    requests = []
    for index, (field, ids) in enumerate(prompts):
        prompt = _packed(field, ids, engine)
        where = f"sampling_params[{index}]" if isinstance(generate.sampling_params, list) else "sampling_params"
        sampling = _sampling(bodies[index] or SamplingBody(), where, field, len(ids), engine)
        requests += [
            Request(
                rid=rids[index * samples + sample],
                prompt=prompt,
                sampling=sampling,
                priority=generate.priority,
                routing_key=routing_key,
                extra_key=extra_keys[index],
                cache_salt=salts[index],
            )
            for sample in range(samples)
        ]
    return Call(
        requests=tuple(requests),
        samples=samples,
        single=single and samples == 1,
        stream=bool(generate.stream),
        rid=generate.rid if isinstance(generate.rid, str) else None,
        ignored=ignored,
    )


def _prompts(generate: GenerateBody, engine: Engine) -> tuple[bool, list[tuple[str, Sequence[int]]]]:
    """Whether it is a single prompt, and every prompt with the field that it came in."""
    text, ids = generate.text, generate.input_ids
    if text is None and ids is None:
        raise FieldError("text", "neither text nor input_ids is given")
    if text is not None and ids is not None:
        raise FieldError("input_ids", "text is given too")
    if isinstance(text, str):
        return True, [("text", _encoded("text", engine.encode, text))]
    if text is not None:
        fields = [f"text[{index}]" for index in range(len(text))]
        if not text:
            raise FieldError("text", "is empty")
        return False, [(field, _encoded(field, engine.encode, one)) for field, one in zip(fields, text, strict=True)]
    assert ids is not None
    if not ids:
        raise FieldError("input_ids", "is empty")
    lists = [part for part in ids if isinstance(part, list)]
    if not lists:
        return True, [("input_ids", [part for part in ids if isinstance(part, int)])]
    if len(lists) != len(ids):
        raise FieldError("input_ids", "token ids and lists of them in one list")
    return False, [(f"input_ids[{index}]", part) for index, part in enumerate(lists)]


def _encoded(field: str, encode: Callable[[T], Sequence[int]], value: T) -> Sequence[int]:
    try:
        return encode(value)
    except RequestError as error:
        raise FieldError(field, str(error)) from None


def _packed(field: str, ids: Sequence[int], engine: Engine) -> bytes:
    if not ids:
        raise FieldError(field, "is empty: a prompt needs at least one token")
    limit = min(engine.vocab_size, tokens.MAX_TOKEN_ID + 1)
    if not 0 <= min(ids) <= max(ids) < limit:
        index = next(index for index, token in enumerate(ids) if not 0 <= token < limit)
        raise FieldError(f"{field}[{index}]", f"{ids[index]} is no token id of this model (0 to {limit - 1})")
    return tokens.encode(ids)


def _samples(bodies: Sequence[SamplingBody | None]) -> int:
    counts = {1 if body is None or body.n is None else body.n for body in bodies}
    if len(counts) > 1:
        raise FieldError("sampling_params", "n is not the same for all prompts")
    samples = counts.pop()
    if samples < 1:
        raise FieldError("sampling_params.n", f"{samples} is less than 1")
    return samples


def _rids(rid: str | list[str] | None, count: int, samples: int, single: bool) -> list[str]:
    """One rid per request, each prompt's samples after each other."""
    total = count * samples
    if rid is None:
        return [uuid.uuid4().hex for _ in range(total)]
    if isinstance(rid, str):
        _name("rid", rid, empty=False)
        return [rid] if single and samples == 1 else [f"{rid}_{index}" for index in range(total)]
    given: list[str | None] = _spread("rid", rid, count)
    for index, one in enumerate(given):
        _name(f"rid[{index}]", one, empty=False)
    if len(set(rid)) != count:
        twice = next(one for one in rid if rid.count(one) > 1)
        raise FieldError("rid", f"{twice!r} is given twice")
    return rid if samples == 1 else [f"{one}_{sample}" for one in rid for sample in range(samples)]


def _spread(field: str, value: T | list[T] | None, count: int) -> list[T | None]:
    """One value per prompt."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise FieldError(field, f"{len(value)} values for {count} prompts")
    return [*value]


def _names(field: str, value: str | list[str] | None, count: int) -> list[str | None]:
    return [_name(field, one) for one in _spread(field, value, count)]


def _name(field: str, value: str | None, *, empty: bool = True) -> str | None:
    """The value, an empty one as None."""
    if value is not None and len(value) > MAX_NAME_CHARS:
        raise FieldError(field, f"{len(value)} characters, at most {MAX_NAME_CHARS}")
    if not value and not empty:
        raise FieldError(field, "is empty")
    return value or None


def _sampling(body: SamplingBody, where: str, prompt_field: str, prompt_len: int, engine: Engine) -> SamplingParams:
    def require(holds: bool, name: str, reason: str) -> None:
        if not holds:
            raise FieldError(f"{where}.{name}", reason)

    room = min(engine.context_length, engine.max_request_tokens) - prompt_len
    if room < 1:
        raise FieldError(
            prompt_field,
            f"{prompt_len} tokens leave no room to generate: this server holds {room + prompt_len} tokens of "
            "a request, prompt and generation together",
        )
    wanted = body.max_new_tokens
    if isinstance(wanted, int):
        require(wanted >= 0, "max_new_tokens", f"{wanted} is negative")
        require(
            wanted <= room,
            "max_new_tokens",
            f"{wanted} after a prompt of {prompt_len} tokens: this server holds {room + prompt_len} tokens "
            "of a request",
        )
    temperature = 1.0 if body.temperature is None else body.temperature
    require(
        math.isfinite(temperature) and temperature >= 0,
        "temperature",
        f"{temperature} is not a number from 0",
    )
    top_p = 1.0 if body.top_p is None else body.top_p
    require(0 < top_p <= 1, "top_p", f"{top_p} is not in (0, 1]")
    top_k = -1 if body.top_k is None else body.top_k
    require(top_k == -1 or 1 <= top_k in _INT64, "top_k", f"{top_k} is neither -1 (all) nor at least 1")
    min_p = 0.0 if body.min_p is None else body.min_p
    require(0 <= min_p <= 1, "min_p", f"{min_p} is not in [0, 1]")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    require(len(stop) <= MAX_STOPS, "stop", f"{len(stop)} texts, at most {MAX_STOPS}")
    require(all(stop), "stop", "a stop text is empty")
    ends = body.stop_token_ids or []
    require(
        all(0 <= token <= tokens.MAX_TOKEN_ID for token in ends),
        "stop_token_ids",
        "holds what is no token id",
    )
    require(body.sampling_seed is None or body.sampling_seed in _INT64, "sampling_seed", "is not 64-bit")
    return SamplingParams(
        max_new_tokens=wanted if isinstance(wanted, int) else _default_length(wanted, room),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=tuple(stop),
        stop_token_ids=tuple(ends),
        ignore_eos=bool(body.ignore_eos),
        seed=body.sampling_seed,
    )


def _default_length(wanted: UnsetType | None, room: int) -> int:
    return room if wanted is None else min(DEFAULT_MAX_NEW_TOKENS, room)
