"""The forms of an answer: SGLang's own, and OpenAI's two. Plain values; nothing here knows of HTTP."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from schedscope.engine.protocol import Call, ChatBody, CompletionBody, FieldError, Finish, OpenAIBody, Output


@dataclass(slots=True)
class Progress:
    """What one request has produced so far."""

    started: float
    """Monotonic seconds."""
    last: Output
    """Its latest increment."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)

    def add(self, output: Output) -> None:
        """Take in the next increment."""
        self.last = output
        self.text += output.text
        self.token_ids += output.token_ids


def native_answer(progress: Progress) -> dict[str, object]:
    """SGLang's form of an answer, and of a chunk: everything so far."""
    last = progress.last
    meta: dict[str, object] = {
        "id": last.rid,
        "finish_reason": None if last.finish is None else _finish_reason(last.finish, last.completion_tokens),
        "prompt_tokens": last.prompt_tokens,
        "completion_tokens": last.completion_tokens,
        "cached_tokens": last.cached_tokens,
        "queue_time": last.queue_time,
    }
    if last.finish is not None:
        meta["e2e_latency"] = time.monotonic() - progress.started
    return {"text": progress.text, "output_ids": progress.token_ids, "meta_info": meta}


def _finish_reason(finish: Finish, length: int) -> dict[str, object]:
    match finish.kind:
        case "stop":
            return {"type": "stop", "matched": finish.matched}
        case "length":
            return {"type": "length", "length": length}
        case "abort":
            return {
                "type": "abort",
                "message": finish.message or "Aborted",
                "status_code": finish.status,
                "err_type": None,
            }


class Shape(ABC):
    """How an OpenAI endpoint writes its answers; the two differ in names and in the form of a choice."""

    whole_object: str
    chunk_object: str

    def __init__(self, body: OpenAIBody, call: Call, model: str) -> None:
        self.call = call
        self._head = {
            "id": call.requests[0].rid,
            "created": int(time.time()),
            "model": body.model or model,
        }
        options = body.stream_options
        self.wants_usage = options is not None and bool(options.include_usage)
        self._usage_everywhere = options is not None and bool(options.continuous_usage_stats)
        self._cache_details = bool(body.return_cached_tokens_details)

    def whole(self, done: Sequence[Progress]) -> dict[str, object]:
        """The answer of a call that isn't streamed."""
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [self._choice(index, progress) for index, progress in enumerate(done)],
            "usage": self._usage(done),
            **self._extension(done[0]),
        }

    def chunk(self, index: int, progress: Progress, *, first: bool) -> dict[str, object]:
        """The latest increment of one choice."""
        return {
            **self._head,
            "object": self.chunk_object,
            "choices": [self._delta(index, progress, first)],
            **({"usage": self._usage([progress])} if self._usage_everywhere else {}),
            **(self._extension(progress) if progress.last.finish is not None else {}),
        }

    def usage_chunk(self, done: Sequence[Progress]) -> dict[str, object]:
        """The last chunk of a stream whose client asked for usage; it has no choices."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": self._usage(done)}

    @abstractmethod
    def _choice(self, index: int, progress: Progress) -> dict[str, object]:
        """A whole choice."""

    @abstractmethod
    def _delta(self, index: int, progress: Progress, first: bool) -> dict[str, object]:
        """What a choice has grown by."""

    def _usage(self, done: Sequence[Progress]) -> dict[str, object]:
        """Token counts; a prompt counts once, however many samples it has."""
        prompts = done[:: self.call.samples]
        prompt = sum(progress.last.prompt_tokens for progress in prompts)
        completion = sum(progress.last.completion_tokens for progress in done)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(progress.last.cached_tokens for progress in prompts)},
        }

    def _extension(self, progress: Progress) -> dict[str, object]:
        """SGLang's extra field, where asked for."""
        if not self._cache_details:
            return {}
        return {"sglext": {"cached_tokens_details": {"device": progress.last.cached_tokens, "host": 0}}}


class CompletionShape(Shape):
    """`/v1/completions`."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, body: CompletionBody, call: Call, model: str) -> None:
        super().__init__(body, call, model)
        self._echoes = _echoes(body)

    def _choice(self, index: int, progress: Progress) -> dict[str, object]:
        return self._text(index, self._echo(index) + progress.text, progress.last.finish)

    def _delta(self, index: int, progress: Progress, first: bool) -> dict[str, object]:
        echo = self._echo(index) if first else ""
        return self._text(index, echo + progress.last.text, progress.last.finish)

    def _echo(self, index: int) -> str:
        return self._echoes[index // self.call.samples] if self._echoes else ""

    def _text(self, index: int, text: str, finish: Finish | None) -> dict[str, object]:
        return {"index": index, "text": text, "logprobs": None, **_reason(finish)}


class ChatShape(Shape):
    """`/v1/chat/completions`."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, call: Call, model: str) -> None:
        super().__init__(body, call, model)

    def _choice(self, index: int, progress: Progress) -> dict[str, object]:
        message = {"role": "assistant", "content": progress.text}
        return {"index": index, "message": message, "logprobs": None, **_reason(progress.last.finish)}

    def _delta(self, index: int, progress: Progress, first: bool) -> dict[str, object]:
        delta = {**({"role": "assistant"} if first else {}), "content": progress.last.text}
        return {"index": index, "delta": delta, "logprobs": None, **_reason(progress.last.finish)}


def _reason(finish: Finish | None) -> dict[str, object]:
    if finish is None:
        return {"finish_reason": None}
    return {"finish_reason": finish.kind, "matched_stop": finish.matched}


def _echoes(body: CompletionBody) -> list[str]:
    """The prompts as text, where they are to be repeated. Raises FieldError for prompts of token ids."""
    if not body.echo:
        return []
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) != len(prompts):
        raise FieldError("echo", "only a prompt of text can be repeated")
    return texts
