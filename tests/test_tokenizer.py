"""Tokenizers and decoding piece by piece."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from schedscope.engine.errors import RequestError, ServerError
from schedscope.engine.tokenizer import ByteTokenizer, IncrementalDecoder, Tokenizer, load_tokenizer

BYTES = ByteTokenizer()
ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=60)


def checkpoint_tokenizer(folder: Path, template: str | None = None) -> Tokenizer:
    """A byte-level BPE with a few merges, saved as a checkpoint's tokenizer is."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator(["the cat sat on the mat", "größer 😀😀 日本語 the the"] * 9, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return checkpoint_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_byte_ids() -> None:
    assert BYTES.encode("aé") == [100, 198, 172]
    assert BYTES.decode([1, 100, 0, 198, 172, 2, 258]) == "aé\ufffd"
    assert BYTES.decode([259, 100, 1023]) == "⟨259⟩a⟨1023⟩"
    assert BYTES.eos_token_ids == {2}
    assert load_tokenizer(None).encode("") == []
    assert BYTES.encode("\ud800") == BYTES.encode("?")
    with pytest.raises(ValueError, match="negative"):
        BYTES.decode([-1])
    assert BYTES.decode(BYTES.encode_chat([{"role": "user", "content": "hi"}])) == "user: hi\nassistant: "


@given(text=ANY_TEXT)
def test_byte_round_trip(text: str) -> None:
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == text
    assert all(3 <= token <= 258 for token in ids)


@given(ids=st.lists(st.integers(0, 5000)))
def test_any_id_decodes_to_printable_text(ids: list[int]) -> None:
    printable = BYTES.decode([token for token in ids if token > 258])
    assert printable.isprintable()
    assert isinstance(BYTES.decode(ids), str)


@settings(max_examples=100, deadline=None)
@given(text=ANY_TEXT)
def test_checkpoint_round_trip(trained: Tokenizer, text: str) -> None:
    # The names of special tokens in a prompt are special tokens.
    if "<s>" not in text and "</s>" not in text:
        assert trained.decode(trained.encode(text)) == text


def test_checkpoint_tokenizer(trained: Tokenizer, tmp_path: Path) -> None:
    assert trained.eos_token_ids == {1}
    assert trained.decode([0, *trained.encode("the cat"), 1]) == "the cat"
    assert trained.encode("\udfff") == trained.encode("?")
    with pytest.raises(RequestError, match="no chat template"):
        trained.encode_chat([{"role": "user", "content": "hi"}])
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}[{{ m.role }}] {{ m.content }} {% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
    )
    chatty = checkpoint_tokenizer(tmp_path, template)
    ids = chatty.encode_chat([{"role": "user", "content": "hi"}])
    assert ids == [0, *chatty.encode("[user] hi [me]")]
    with pytest.raises(RequestError, match="no tools"):
        chatty.encode_chat([{"role": "tool", "content": "hi"}])


def test_tokenizers_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="no tokenizer folder"):
        load_tokenizer(str(tmp_path / "missing"))
    with pytest.raises(ServerError, match="no tokenizer in"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ServerError, match="can't load the tokenizer"):
        load_tokenizer(str(tmp_path))


def in_pieces(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    decoder, pieces, start = IncrementalDecoder(tokenizer), [], 0
    for size in sizes:
        pieces.append(decoder.push(ids[start : start + size]))
        start += size
    pieces += [decoder.push([token]) for token in ids[start:]]
    pieces.append(decoder.flush())
    assert decoder.flush() == ""
    return pieces


SIZES = st.lists(st.integers(0, 7), max_size=12)


@given(text=ANY_TEXT, sizes=SIZES)
def test_pieces_never_hold_half_a_character(text: str, sizes: list[int]) -> None:
    pieces = in_pieces(BYTES, BYTES.encode(text), sizes)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


BAD_BYTES = st.one_of(st.sampled_from((0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF)), st.integers(0, 255))


@settings(max_examples=300)
@given(ids=st.lists(st.one_of(BAD_BYTES.map(lambda b: b + 3), st.integers(0, 300)), max_size=60), sizes=SIZES)
@example(ids=[0xFF + 3] * 100 + [0xE2 + 3, 0x82 + 3, 0xAC + 3], sizes=[])
@example(ids=[2] * 40 + [100], sizes=[])
@example(ids=[0x80 + 3] * 39 + [0xF0 + 3, 0x9F + 3, 0x98 + 3, 0x80 + 3], sizes=[])
def test_pieces_join_to_the_whole_for_any_ids(ids: list[int], sizes: list[int]) -> None:
    assert "".join(in_pieces(BYTES, ids, sizes)) == BYTES.decode(ids)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 329), max_size=50), sizes=SIZES)
def test_pieces_of_a_checkpoint_tokenizer(trained: Tokenizer, ids: list[int], sizes: list[int]) -> None:
    assert "".join(in_pieces(trained, ids, sizes)) == trained.decode(ids)


def test_pieces_keep_the_spaces_of_a_tokenizer_that_strips_the_first() -> None:
    """As SentencePiece does: a word alone loses its space, after another one it doesn't."""

    class Words(ByteTokenizer):
        words = ("", "▁the", "▁cat", "<0xE2>", "<0x82>", "<0xAC>")

        def decode(self, ids: object) -> str:
            raw = b""
            for token in ids:  # type: ignore[attr-defined]
                word = self.words[token]
                raw += bytes([int(word[3:5], 16)]) if word.startswith("<") else word.replace("▁", " ").encode()
            return raw.decode(errors="replace").removeprefix(" ")

    decoder = IncrementalDecoder(Words())
    assert [decoder.push([i]) for i in (1, 2, 0, 2, 3, 4, 5, 1)] == ["the", " cat", "", " cat", "", "", "€", " the"]


def test_a_long_run_of_bad_bytes_neither_stalls_nor_grows() -> None:
    decoder = IncrementalDecoder(BYTES)
    text = "".join(decoder.push([0xFF + 3]) for _ in range(20_000))
    assert len(text) > 19_900
    assert len(text + decoder.flush()) == 20_000
