"""Frames: rows on their way from a scheduler to its journal.

A frame is a 28-byte header and a msgpack payload. The same bytes go through the ring and into the journal. Both
parts carry their own checksum, so that a reader can trust a frame's length before it trusts its content: a flipped
bit costs the one frame it is in, and a journal that ends in the middle of a frame is told from a damaged one. Each
writer numbers its frames from 0 without a hole; whatever gets lost, and wherever, shows as a missing number.
"""

from __future__ import annotations

import json
import re
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cache
from typing import Annotated, Any, NamedTuple
from zlib import crc32

import msgspec
from schedscope.engine import tokens
from schedscope.recorder.decisions import Decisions
from schedscope.recorder.observed import Observed, pack_observed
from schedscope.recorder.rows import Decided, PassFacts, decision_hash, pass_row

SCHEMA_VERSION = 2
"""Version of the schema that rows follow, see `schedscope.recorder.schema`. Here, because writers need no Arrow."""

Rows = dict[str, Any]
"""Rows per table, positional as in `schedscope.recorder.schema`, without the rank: lists, and `Decisions`."""

DECIDED = "decided"
"""Beside the tables, a frame may hold passes as the scheduler's thread tells them: number, step, tick, nanoseconds it
took to decide, `PassFacts`, hash of the decision, number of its rows, and `Decided`. Where decisions are kept, the hash
is left to the reader; where not, what was decided is left out."""
HAPPENED = "happened"
"""Rows of `events` whose details are not JSON text yet."""
PROMPTS = "prompts"
"""Rows of `tokens` whose ids are packed by `schedscope.engine.tokens`."""
WIDE_PROMPTS = "wide_prompts"
"""The same, as `array("q")` has them: SGLang's are, and to narrow them takes another process no time of hers."""
OUTPUTS = "outputs"
"""A row of `tokens` per request of a batch: tick, step, and rids, positions and ids as columns."""

SEEN = "seen"
"""Rows of `views` that are not packed yet: number, tick, and `Observed`."""

MARK = b"\xc1SSF"
"""Begins every frame. 0xc1 occurs neither in UTF-8 nor as a msgpack type."""

_HEADER = struct.Struct("<4sBxHQII")
"""Mark, kind, passes, ordinal, payload length, payload checksum."""
_CHECK = struct.Struct("<I")
"""Checksum of the header before it."""
_CHECK_AT = _HEADER.size
HEADER_BYTES = _CHECK_AT + _CHECK.size
_WIDE_BYTES = array("q").itemsize

MAX_PAYLOAD = 2**30
"""Bytes. Longer frames are refused where they are made."""

_encode_into = msgspec.msgpack.Encoder().encode_into
_MAX_PASSES = 2**16 - 1
_SURROGATE = re.compile("[\ud800-\udfff]")


class Kind(IntEnum):
    """What a frame holds."""

    ROWS = 0
    END = 1
    """The writer is done. Its ordinal is the number of row frames that the writer numbered."""
    HEAD = 2
    """First in a journal: whose it is."""
    HELLO = 3
    """First on a connection: who writes."""
    WELCOME = 4
    """The answer to it."""
    REFUSAL = 5
    """The other answer."""


class Header(NamedTuple):
    """A frame's header."""

    kind: Kind
    passes: int
    """Passes recorded in it; more than 65535 count as 65535."""
    ordinal: int
    length: int
    """Of the payload, bytes."""
    checksum: int


class Body(msgspec.Struct, frozen=True):
    """What a writer hands over: a frame that has no number yet."""

    frame: bytearray
    """The payload, behind room for the header."""
    passes: int
    """Passes recorded in it."""

    @property
    def payload(self) -> bytes:
        """A copy of it."""
        return bytes(self.frame[HEADER_BYTES:])


class Frame(NamedTuple):
    """A whole frame with a good checksum."""

    kind: Kind
    passes: int
    ordinal: int
    payload: bytes
    start: int
    """Offset of its first byte in what was scanned."""
    end: int
    """One past its last."""


class Damage(NamedTuple):
    """Bytes that are no whole frame."""

    start: int
    end: int
    ordinal: int | None
    """Of the frame that was there, if its header is good."""
    torn: bool
    """The data ends inside of what may be a frame still being written."""


class MalformedRowsError(ValueError):
    """A payload that doesn't follow the schema. Says table, row and column."""


def encode(rows: Mapping[str, Sequence[Any]], memory: bytearray | None = None) -> Body:
    r"""Pack rows. They are not checked against the schema here; readers do that.

    Args:
        rows: beside tables, `DECIDED`, `HAPPENED`, `PROMPTS`, `WIDE_PROMPTS`, `OUTPUTS` and `SEEN` may be there.
        memory: to pack them into, and the last frame's: to get new memory for each takes as long as packing.

    Unpaired surrogates, which neither UTF-8 nor Parquet can hold, are written as `\udXXX`. Raises OverflowError for
    integers beyond 64 bits, TypeError for values that msgpack doesn't know.
    """
    frame = bytearray() if memory is None else memory
    try:
        _encode_into(rows, frame, HEADER_BYTES)
    except UnicodeEncodeError:
        _encode_into(_without_surrogates(rows), frame, HEADER_BYTES)
    return Body(frame, len(rows.get("passes", ())) + len(rows.get(DECIDED, ())))


def pack_decided(told: Decided) -> bytes:
    """As it goes into a frame, and is hashed."""
    try:
        return told.pack()
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(_without_surrogates(told))


def pack(kind: Kind, payload: bytes, ordinal: int = 0, passes: int = 0) -> bytes:
    """A frame of any kind. Raises ValueError beyond `MAX_PAYLOAD`."""
    frame = bytearray(HEADER_BYTES) + payload
    _finish(frame, kind, ordinal, passes)
    return bytes(frame)


def stamp(body: Body, ordinal: int) -> bytearray:
    """The frame with that number. Raises ValueError beyond `MAX_PAYLOAD`."""
    _finish(body.frame, Kind.ROWS, ordinal, body.passes)
    return body.frame


def _finish(frame: bytearray, kind: int, ordinal: int, passes: int) -> None:
    """Fill in a frame's header."""
    length = len(frame) - HEADER_BYTES
    if length > MAX_PAYLOAD:
        raise ValueError(f"a frame of {length} bytes; at most {MAX_PAYLOAD} fit")
    view = memoryview(frame)
    _HEADER.pack_into(frame, 0, MARK, kind, min(passes, _MAX_PASSES), ordinal, length, crc32(view[HEADER_BYTES:]))
    _CHECK.pack_into(frame, _CHECK_AT, crc32(view[:_CHECK_AT]))


def parse_header(data: bytes | bytearray | memoryview, start: int = 0) -> Header:
    """The header at an offset. Raises ValueError unless a good one is there."""
    end = start + _HEADER.size
    mark, kind, passes, ordinal, length, checksum = _HEADER.unpack_from(data, start)
    if mark != MARK or _CHECK.unpack_from(data, end)[0] != crc32(memoryview(data)[start:end]):
        raise ValueError("no frame starts here")
    return Header(Kind(kind), passes, ordinal, length, checksum)


def scan(data: bytes) -> Iterator[Frame | Damage]:
    """Take data apart, from the front: all of it is covered, in order, by what this yields.

    Only the last item can be torn. Bytes behind a broken header count as damaged up to the next good header, and as
    torn if there is none: then nobody can say what they were going to be.
    """
    start = 0
    while start < len(data):
        header = _header_at(data, start)
        if header is None:
            found = _next_header(data, start + 1)
            yield Damage(start, len(data) if found is None else found, None, found is None)
            if found is None:
                return
            start = found
            continue
        end = start + HEADER_BYTES + header.length
        if end > len(data):
            yield Damage(start, len(data), header.ordinal, True)
            return
        payload = data[start + HEADER_BYTES : end]
        if crc32(payload) == header.checksum:
            yield Frame(header.kind, header.passes, header.ordinal, payload, start, end)
        else:
            yield Damage(start, end, header.ordinal, False)
        start = end


class FrameReader:
    """Frames out of a stream of chunks. Holds at most one unfinished frame and a chunk."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        """Bytes of an unfinished frame."""
        return len(self._buffer)

    def feed(self, chunk: bytes) -> list[tuple[Header, bytes]]:
        """Take a chunk, give the frames that it completes, with their whole bytes. Payloads are not checked.

        Raises ValueError for anything but frames: a stream can't be damaged, so the other side is not one of us.
        """
        self._buffer += chunk
        frames = []
        start = 0
        while len(self._buffer) - start >= HEADER_BYTES:
            header = parse_header(self._buffer, start)
            if header.length > MAX_PAYLOAD:
                raise ValueError(f"a frame of {header.length} bytes; at most {MAX_PAYLOAD} are allowed")
            end = start + HEADER_BYTES + header.length
            if end > len(self._buffer):
                break
            frames.append((header, bytes(self._buffer[start:end])))
            start = end
        del self._buffer[:start]
        return frames


def decode(payload: bytes) -> Rows:
    """The rows of a payload, each checked against the schema: number of values, types, ranges, nulls.

    Raises MalformedRowsError.
    """
    try:
        found = _decoder().decode(payload)
        rows = {table: values for table in found.__struct_fields__ if (values := getattr(found, table))}
        was_told = DECIDED in rows
        rows = unpack(rows)
        if was_told:  # of the rows that were just made, only types were checked, not ranges
            msgspec.convert({"passes": rows["passes"]}, type(found))
        return rows
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedRowsError(_located(str(error))) from None


def unpack(rows: Rows) -> Rows:
    """The same rows, with what was left packed on the scheduler's thread as rows of tables.

    Raises msgspec.DecodeError for a decision or a prompt that can't be unpacked.
    """
    if happened := rows.pop(HAPPENED, None):
        texts = ((*row, None if detail is None else _json(detail)) for *row, detail in happened)
        rows.setdefault("events", []).extend(texts)
    if prompts := rows.pop(PROMPTS, None):
        rows.setdefault("tokens", []).extend((*row, tokens.decode(ids)) for *row, ids in prompts)
    if prompts := rows.pop(WIDE_PROMPTS, None):
        rows.setdefault("tokens", []).extend((*row, _narrow(ids)) for *row, ids in prompts)
    for seq, step, rids, positions, ids in rows.pop(OUTPUTS, ()):
        columns = zip(rids, positions, ids, strict=True)
        rows.setdefault("tokens", []).extend((seq, step, rid, position, [id_]) for rid, position, id_ in columns)
    if seen := rows.pop(SEEN, None):
        views = ((*row, pack_observed(view) if isinstance(view, Observed) else bytes(view)) for *row, view in seen)
        rows.setdefault("views", []).extend(views)
    told = Decisions()
    told.extend(rows.pop("decisions", ()))
    for number, step, seq, decide_ns, facts, digest, count, decided in rows.pop(DECIDED, ()):
        if not digest:
            packed = pack_decided(decided) if isinstance(decided, Decided) else bytes(decided)
            digest = decision_hash(packed)
            told.add(number, count, packed)
        rows.setdefault("passes", []).append(pass_row(number, step, seq, facts, digest, decide_ns))
    if told:
        rows["decisions"] = told
    return rows


def _narrow(packed: bytes) -> list[int]:
    """Raises msgspec.ValidationError."""
    if len(packed) % _WIDE_BYTES:
        raise msgspec.ValidationError(f"{len(packed)} bytes of token ids - at `$.tokens[...]`")
    ids = array("q", packed).tolist()
    if ids and not 0 <= min(ids) <= max(ids) <= tokens.MAX_TOKEN_ID:
        raise msgspec.ValidationError(f"token ids from {min(ids)} to {max(ids)} - at `$.tokens[...]`")
    return ids


def _header_at(data: bytes, start: int) -> Header | None:
    if len(data) - start < HEADER_BYTES:
        return None
    try:
        return parse_header(data, start)
    except ValueError:
        return None


def _next_header(data: bytes, start: int) -> int | None:
    while (start := data.find(MARK, start)) >= 0:
        if _header_at(data, start) is not None:
            return start
        start += 1
    return None


def written(text: str) -> str:
    """A text as frames and files have it: unpaired surrogates are spelled out."""
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


_json = json.JSONEncoder(ensure_ascii=False).encode


def _without_surrogates(value: Any) -> Any:
    """The same rows with unpaired surrogates spelled out."""
    if isinstance(value, str):
        return written(value)
    if isinstance(value, Mapping):
        return {key: _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.astuple(value)
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value


# ---- the schema as a decoder: only readers need it, and only they import Arrow ------------------------------------


@cache
def _decoder() -> msgspec.msgpack.Decoder[Any]:
    from schedscope.recorder.schema import TABLES

    fields: list[tuple[str, Any, Any]] = []
    for table in TABLES.values():
        row: Any = tuple.__class_getitem__(tuple(_python_type(c.type, c.null is not None) for c in table.row))
        fields.append((table.name, list[row], msgspec.field(default_factory=list)))
    for packed, table_name, last in (
        (HAPPENED, "events", Any),
        (PROMPTS, "tokens", bytes),
        (WIDE_PROMPTS, "tokens", bytes),
    ):
        columns = TABLES[table_name].row[:-1]
        row = tuple.__class_getitem__((*(_python_type(c.type, c.null is not None) for c in columns), last))
        fields.append((packed, list[row], msgspec.field(default_factory=list)))
    id_ = Annotated[int, msgspec.Meta(ge=0, le=tokens.MAX_TOKEN_ID)]
    said = tuple[int, int, list[str], list[int], list[id_]]
    fields.append((OUTPUTS, list[said], msgspec.field(default_factory=list)))
    fields.append((SEEN, list[tuple[int, int, msgspec.Raw]], msgspec.field(default_factory=list)))
    decided = tuple[int, int, int, int, PassFacts, str, int, msgspec.Raw]
    fields.append((DECIDED, list[decided], msgspec.field(default_factory=list)))
    return msgspec.msgpack.Decoder(msgspec.defstruct("Rows", fields, forbid_unknown_fields=True))


def _python_type(arrow: Any, nullable: bool) -> Any:
    int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
    types: dict[str, Any] = {
        "int32": int32,
        "int64": Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)],
        "double": float,
        "bool": bool,
        "string": str,
        "binary": bytes,
        "list<item: string>": list[str],
        "list<item: int32>": list[int32],
        "list<element: string>": list[str],
        "list<element: int32>": list[int32],
    }
    found = types[str(arrow)]
    return found | None if nullable else found


def _located(text: str) -> str:
    """A message of msgspec with a table and column instead of numbers, where it has them."""
    from schedscope.recorder.schema import TABLES

    message, _, path = text.partition(" - at `$.")
    where = re.match(r"(\w+)\[(?:\d+|\.\.\.)\](?:\[(\d+)\])?", path)
    if where is None or where[1] not in TABLES:
        return text
    column = f".{TABLES[where[1]].row[int(where[2])].name}" if where[2] else ""
    return f"{where[1]}{column}: {message}"
