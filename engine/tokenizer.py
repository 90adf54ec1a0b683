"""Text to token ids and back: a checkpoint's own tokenizer, or a byte-level one that needs no file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from schedscope.engine.errors import RequestError, ServerError

REPLACEMENT = "\ufffd"
"""What bytes that are no (or not yet a) UTF-8 character decode to."""


class Tokenizer(Protocol):
    """What the server needs of a tokenizer."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an output."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the model expects around it.

        Lone surrogates, which no UTF-8 text has, count as question marks.
        """
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, up to where the assistant's answer begins.

        Args:
            messages: Each with "role" and "content".

        Raises:
            RequestError: The model has no chat template, or its template refuses the messages.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """One id per UTF-8 byte: 0 pad, 1 bos, 2 eos, 3..258 the bytes.

    A larger id, which only a model can produce, decodes to a visible placeholder. Prompts get no bos.
    """

    PAD, BOS, EOS = 0, 1, 2
    FIRST_BYTE = 3
    FIRST_PLACEHOLDER = FIRST_BYTE + 256

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an output."""
        return frozenset((self.EOS,))

    def encode(self, text: str) -> list[int]:
        """Ids of the UTF-8 bytes of `text`."""
        return [byte + self.FIRST_BYTE for byte in text.encode(errors="replace")]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of one line "role: content" per message, then "assistant: "."""
        lines = [f"{message.get('role', 'user')}: {message.get('content', '')}\n" for message in messages]
        return self.encode("".join(lines) + "assistant: ")

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`. Raises ValueError for negative ones."""
        text = bytearray()
        for token in ids:
            if token >= self.FIRST_PLACEHOLDER:
                text += f"⟨{token}⟩".encode()
            elif token >= self.FIRST_BYTE:
                text.append(token - self.FIRST_BYTE)
            elif token < 0:
                raise ValueError(f"token id {token} is negative")
        return text.decode(errors="replace")


class _CheckpointTokenizer:
    """A transformers tokenizer."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def eos_token_ids(self) -> frozenset[int]:
        eos = self._inner.eos_token_id
        return frozenset() if eos is None else frozenset((eos,))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._inner.encode(_encodable(text))
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if self._inner.chat_template is None:
            raise RequestError("this model has no chat template: use a completion with a plain prompt")
        try:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # A template is a program of the checkpoint's: it may raise anything.
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        # The template has placed the special tokens already.
        ids: list[int] = self._inner.encode(_encodable(text), add_special_tokens=False)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def load_tokenizer(folder: str | None = None) -> Tokenizer:
    """The tokenizer in a checkpoint folder, never downloaded; None for the byte-level one.

    Raises:
        ServerError: No such folder, or no readable tokenizer in it.
    """
    if folder is None:
        return ByteTokenizer()
    if not Path(folder).is_dir():
        raise ServerError(f"no tokenizer folder {folder!r}")
    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((Path(folder) / name).is_file() for name in files):
        # transformers would make up an empty tokenizer that decodes everything to nothing.
        raise ServerError(f"no tokenizer in {folder!r}: it has none of {', '.join(files)}")
    from transformers import AutoTokenizer

    try:
        return _CheckpointTokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except Exception as error:  # Any damaged or foreign file: transformers has no one error for it.
        raise ServerError(f"can't load the tokenizer in {folder!r}: {error}") from error


class IncrementalDecoder:
    """Text of a growing output, piece by piece, without ever half a character.

    Decoding only the new ids would be wrong: a character may need several, and some tokenizers drop the space
    of the first word. So ids are decoded together with those emitted last, and held back while their text ends
    in U+FFFD. For tokenizers of bytes, the pieces joined are exactly the text of all ids.
    """

    _LIMIT = 16
    """Ids held back before giving up on them: no character is that long."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._emitted: list[int] = []
        self._emitted_text = ""
        self._held: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Add the next ids; returns the text that is certain now, often empty."""
        self._held.extend(ids)
        text = self._held_text()
        if text and not text.endswith(REPLACEMENT):
            return self._emit(len(self._held))
        if len(self._held) < self._LIMIT:
            return ""
        if not text:  # Special tokens only: nothing will ever come of them.
            self._held.clear()
            return ""
        for tail in range(1, 5):
            head = self._tokenizer.decode(self._emitted + self._held[:-tail])
            rest = self._tokenizer.decode(self._held[-tail:])
            if head + rest == self._emitted_text + text:  # So no character goes across.
                return self._emit(len(self._held) - tail)
        return ""

    def flush(self) -> str:
        """The text held back, when no more ids will come."""
        return self._emit(len(self._held)) if self._held else ""

    def _held_text(self) -> str:
        return self._tokenizer.decode(self._emitted + self._held)[len(self._emitted_text) :]

    def _emit(self, count: int) -> str:
        context, held = self._emitted + self._held[:count], self._held[count:]
        text = self._tokenizer.decode(context)[len(self._emitted_text) :]
        self._emitted, self._held = self._held[:count], held
        self._emitted_text = self._tokenizer.decode(self._emitted)
        return text
