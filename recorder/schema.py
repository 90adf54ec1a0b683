"""The schema of a run: every table and column, with meaning, unit and what null says.

This is the one definition. Frames are checked against it, Parquet files are written and read by it, and
`python -m schedscope.recorder.schema > docs/schema.md` prints it as documentation. A change that an older reader
would misread raises `SCHEMA_VERSION`; readers refuse newer versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import pyarrow as pa
from schedscope.recorder.decision_columns import DecisionColumns
from schedscope.recorder.decisions import Decisions, Told
from schedscope.recorder.frame import SCHEMA_VERSION as SCHEMA_VERSION
from schedscope.recorder.rows import Row

RANK = "rank"
"""First column of every table. Files hold it; frames don't, because a journal belongs to one rank."""


Encoding = Literal["delta", "split", "dictionary", "length", "plain"]
"""`delta`: differences, for numbers that grow. `split`: all first bytes, then all second ones, for numbers that jump.
`dictionary`: few values. `length`: lengths apart from the bytes, for texts that hardly repeat."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    type: pa.DataType
    unit: str | None
    """`tokens`, `s`, `ns`, ...; None where there is nothing to count."""
    doc: str
    null: str | None = None
    """What null means; None: never null."""
    encoding: Encoding | None = None
    """How Parquet files write it, where the usual one for its type (`Column.written`) takes more room."""

    @property
    def written(self) -> Encoding:
        """How Parquet files write it."""
        if self.encoding is not None:
            return self.encoding
        if pa.types.is_list(self.type):
            return "split" if pa.types.is_integer(self.type.value_type) else "dictionary"
        if pa.types.is_integer(self.type) or pa.types.is_floating(self.type):
            return "split"
        return "dictionary" if pa.types.is_string(self.type) else "plain"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a run: one row per thing that happened, in the order in which it was recorded."""

    name: str
    doc: str
    columns: tuple[Column, ...]
    """Starts with `rank`."""
    row_group: int
    """Rows that Parquet files keep together at most: what reading any one of them decodes."""
    arrow: pa.Schema = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.columns[0].name == RANK
        fields = [pa.field(c.name, c.type, nullable=c.null is not None) for c in self.columns]
        object.__setattr__(self, "arrow", pa.schema(fields))

    @property
    def row(self) -> tuple[Column, ...]:
        """The columns of a recorded row, by position: all but `rank`."""
        return self.columns[1:]

    @property
    def names(self) -> tuple[str, ...]:
        """Column names, `rank` first."""
        return tuple(column.name for column in self.columns)


_INT32 = pa.int32()
_INT64 = pa.int64()
_FLOAT = pa.float64()
_BOOL = pa.bool_()
_STRING = pa.string()
_STRINGS = pa.list_(pa.string())
_IDS = pa.list_(pa.int32())
_BINARY = pa.binary()

_RANK = Column(RANK, _INT32, None, "Scheduler process of the run that wrote the row, from 0.")
_UNCHUNKED = "chunked prefill is off"
_NO_DELAYER = "the prefill delayer is off"
_NOT_LOOKED_AT = "the pass ended before it was looked at"


def _step(doc: str = "The step of the scheduler's loop it happened in, numbered from 0 per rank.") -> Column:
    return Column("step", _INT64, None, doc, encoding="delta")


def _seq(doc: str) -> Column:
    return Column("seq", _INT64, None, doc, encoding="delta")


_STEPS = Table(
    "steps",
    "One row per step, a turn of the scheduler's loop. Idle steps in a row share one row.",
    (
        _RANK,
        _step("Number of the step, from 0 per rank; of coalesced idle steps the first."),
        _seq("Logical tick at which the step ended: orders steps, passes, events and tokens of a rank."),
        Column(
            "kind",
            _STRING,
            None,
            "What the model ran: `prefill`, `decode` or `mixed`; `idle`: there was nothing to do; `none`: there was "
            "work, but a gate or a pass that admitted no one left nothing to run.",
        ),
        Column(
            "gate",
            _STRING,
            None,
            "What ended the step before a pass: `batch_is_full`, `queue_empty`, `min_free_slots_delay`, `no_slot`.",
            "a pass was made",
        ),
        Column("pass", _INT64, None, "The pass made in this step.", "no pass was made", encoding="delta"),
        Column(
            "count", _INT64, "steps", "Idle steps that this row stands for; 1 for any other kind.", encoding="delta"
        ),
        Column("now", _FLOAT, "s", "The scheduler's clock as the step's decisions read it."),
        Column("start_ns", _INT64, "ns", "Monotonic clock when the step began.", encoding="delta"),
        Column(
            "end_ns", _INT64, "ns", "Monotonic clock when the step, or the last coalesced one, ended.", encoding="delta"
        ),
        Column(
            "forward_ns",
            _INT64,
            "ns",
            "Time the model took for the batch of step `committed`: until its tokens were there, from when it was "
            "handed over or, if that was later, the tokens of the batch before were there.",
            "no batch's tokens were taken in",
        ),
        Column(
            "record_ns",
            _INT64,
            "ns",
            "Time that recording took on the scheduler's thread: passes and steps, since the last row was made.",
            "recorded by version 1 of the log, which did not measure it",
        ),
        Column("running", _INT32, "requests", "Requests in the running batch when the step began."),
        Column("queue_len", _INT32, "requests", "Requests waiting when the step began.", encoding="delta"),
        Column("available", _INT64, "tokens", "Free part of the KV pool when the step began."),
        Column("evictable", _INT64, "tokens", "Cached and used by no one: what eviction could free.", encoding="plain"),
        Column("protected", _INT64, "tokens", "Cached and locked by running requests.", encoding="delta"),
        Column("pool_size", _INT64, "tokens", "The whole KV pool.", encoding="delta"),
        Column("batch_is_full", _BOOL, None, "Mark after the step: admission is skipped until a request leaves."),
        Column(
            "batch_is_full_pass",
            _INT64,
            None,
            "The pass that set the mark.",
            "the mark is not set, or a gate set it",
            encoding="delta",
        ),
        Column(
            "new_token_ratio",
            _FLOAT,
            None,
            "Share of their remaining outputs that running requests are expected to use, 0 to 1, when the step began.",
            encoding="plain",
        ),
        Column(
            "processed_tokens",
            _INT64,
            "tokens",
            "Prefill tokens computed before this step; the clock of hrrn.",
            encoding="delta",
        ),
        Column("batch_tokens", _INT64, "tokens", "Tokens that the model computed in this step; 0 if it did not run."),
        Column(
            "committed",
            _INT64,
            None,
            "The step whose batch's tokens this step took in at its end: itself; with overlap "
            "(`disable_overlap_schedule` off) the one before, so that its batch was decided without them.",
            "there were none to take in",
            encoding="delta",
        ),
        Column(
            "retracted",
            _STRINGS,
            None,
            "rids that decoding had to send back to the queue for lack of memory, in order.",
        ),
        Column(
            "reports",
            _STRING,
            "JSON",
            "What the other ranks told the prefill delayer in this step: an array of objects.",
            "the prefill delayer is off, or this is the only rank",
        ),
        Column(
            "given",
            _STRING,
            "JSON",
            "What a scheduler that follows another server was told by it: an object with `entry_times`, when requests "
            "that this step sent back to the queue joined it, by rid, and `random_state`, that of the random generator "
            "before the step, or null.",
            "nothing; as always with our own engine",
        ),
    ),
    row_group=2_048,
)

_PASSES = Table(
    "passes",
    "One row per pass: one sort of the waiting queue and the admission loop behind it.",
    (
        _RANK,
        Column("pass", _INT64, None, "Number of the pass, from 0 per rank.", encoding="delta"),
        _step(),
        _seq("Logical tick of its step: inputs with a smaller tick were there, others were not."),
        Column("now", _FLOAT, "s", "The scheduler's clock as the decision read it."),
        Column(
            "configured_policy",
            _STRING,
            None,
            "The policy that the configuration gives, after the replacement of one that can't run at all.",
        ),
        Column("active_policy", _STRING, None, "The policy that sorted this pass."),
        Column(
            "fallback",
            _STRING,
            None,
            "Why the active policy is not the one asked for: `queue_too_long`, `radix_cache_disabled`.",
            "it is the one asked for",
        ),
        Column("queue_len", _INT32, "requests", "Waiting requests that were sorted.", encoding="delta"),
        Column("running", _INT32, "requests", "Requests in the running batch before the pass."),
        Column("chunked_in", _STRING, None, "rid whose prompt was unfinished before the pass.", "there was none"),
        Column("chunked_out", _STRING, None, "rid whose prompt is unfinished after the pass.", "there is none"),
        Column(
            "chunk_limit",
            _INT64,
            "tokens",
            "Cap that shortest-prefill-first put on the continuing chunk, to leave room for shorter prompts.",
            "no cap",
        ),
        Column(
            "stop",
            _STRING,
            None,
            "What ended the admission loop: `queue_end`, `NO_TOKEN`, `OTHER`, `budget`, `no_slot`, `preempt_failed`.",
        ),
        Column(
            "rem_total",
            _FLOAT,
            "tokens",
            "Memory budget before the pass: free and evictable, less what running requests may still generate.",
            encoding="plain",
        ),
        Column("cur_rem", _FLOAT, "tokens", "Memory budget before the pass, without that reserve for outputs."),
        Column("rem_input", _INT64, "tokens", "Left of `max_prefill_tokens` before the pass."),
        Column("rem_chunk", _INT64, "tokens", "Left of `chunked_prefill_size` before the pass.", _UNCHUNKED),
        Column(
            "end_rem_total",
            _FLOAT,
            "tokens",
            "`rem_total` after the last verdict; unchanged if there was none.",
            encoding="plain",
        ),
        Column("end_cur_rem", _FLOAT, "tokens", "`cur_rem` after the last verdict."),
        Column("end_rem_input", _INT64, "tokens", "`rem_input` after the last verdict."),
        Column("end_rem_chunk", _INT64, "tokens", "`rem_chunk` after the last verdict.", _UNCHUNKED),
        Column("batch_is_full_before", _BOOL, None, "The mark before the pass."),
        Column("batch_is_full", _BOOL, None, "The mark after the pass."),
        Column(
            "new_token_ratio",
            _FLOAT,
            None,
            "Share of their remaining outputs that running requests are expected to use, 0 to 1.",
        ),
        Column(
            "processed_tokens",
            _INT64,
            "tokens",
            "Prefill tokens computed before the pass; the clock of hrrn.",
            encoding="delta",
        ),
        Column(
            "refresh_calls",
            _INT64,
            "passes",
            "Earlier passes that counted towards the refresh of waiting prefixes in the cache.",
            encoding="delta",
        ),
        Column(
            "random_state",
            _STRING,
            None,
            "Hash of the random generator's state before the pass.",
            "the policy uses no chance",
        ),
        Column(
            "delayer_allow",
            _BOOL,
            None,
            "Whether the prefill delayer let this pass prefill.",
            _NO_DELAYER,
        ),
        Column(
            "delayer_reason",
            _STRING,
            None,
            "Its reason: `token_watermark`, `delay`, `wait_timeout`, `wait_success`, `no_wait`; empty where no rank "
            "could prefill.",
            _NO_DELAYER,
        ),
        Column("delayer_estimation", _STRING, None, "Which ranks could prefill: `all`, `mixed`, `none`.", _NO_DELAYER),
        Column("delayer_num_prefillable", _INT32, "ranks", "Ranks that could prefill.", _NO_DELAYER),
        Column(
            "delayer_delayed_count",
            _INT32,
            "passes",
            "Passes delayed in a row, after this one.",
            f"not waiting, or {_NO_DELAYER}",
        ),
        Column(
            "delayer_skip_first",
            _BOOL,
            None,
            "After this pass: the first wish to wait is still to be let through.",
            _NO_DELAYER,
        ),
        Column(
            "delayer_slot_condition",
            _BOOL,
            None,
            "Fewer free slots than the largest recent prefill batch: a wish to wait.",
            _NO_DELAYER,
        ),
        Column(
            "delayer_queue_condition",
            _BOOL,
            None,
            "Fewer waiting requests than would fill a batch: a wish to wait.",
            _NO_DELAYER,
        ),
        Column("delayer_report", _STRING, "JSON", "What this rank told the others: an object.", _NO_DELAYER),
        Column("admitted", _INT32, "requests", "Requests in the prefill batch, the continuing chunk included."),
        Column("preempted", _STRINGS, None, "rids of running requests sent back to the queue, in order of release."),
        Column("decide_ns", _INT64, "ns", "Time spent deciding: sorting and the admission loop."),
        Column(
            "divergence",
            _STRING,
            None,
            "Where another scheduler than ours was seen to decide otherwise than our core does: the first such field.",
            "it decided alike, or it is ours, or nobody has looked yet",
        ),
        Column(
            "decision_hash",
            _STRING,
            "hex",
            "Hash of the whole decision: two passes with equal ones decided alike.",
            "recorded by version 1 of the log, which hashed in another way",
            encoding="length",
        ),
    ),
    row_group=1_024,
)

_DECISIONS = Table(
    "decisions",
    "What a pass said about one request: a row for each one in the queue, and for the continuing chunk. Rows of a pass "
    "stand together: the continuing chunk, then the queue as sorted.",
    (
        _RANK,
        Column("pass", _INT64, None, "The pass.", encoding="delta"),
        Column("rid", _STRING, None, "The request.", encoding="length"),
        Column(
            "place_before",
            _INT32,
            None,
            "Place in the queue before sorting, from 0; ties in the key fall back to it.",
            "the continuing chunk, which is not in the queue",
        ),
        Column(
            "place_after",
            _INT32,
            None,
            "Place in the queue after sorting, from 0.",
            "the continuing chunk, which is not in the queue",
        ),
        Column(
            "key",
            _STRING,
            "JSON",
            "Sort key, smallest first: an array, compared from left to right. What ends a key and only repeats other "
            "columns is left out: `rid` under hrrn, then `place_before`, which makes it unique. Infinite numbers, "
            "which JSON lacks, are the texts `inf` and `-inf`.",
            "the continuing chunk, or a recorded server did not tell",
        ),
        Column(
            "key_names",
            _STRING,
            None,
            "Names of the key's elements, joined by commas; empty if only the place before sorting counts.",
            "the continuing chunk, or a recorded server did not tell",
        ),
        Column(
            "prefix_len",
            _INT64,
            "tokens",
            "Found in the cache by sorting, in whole pages; of an earlier look if the policy doesn't match.",
            encoding="dictionary",
        ),
        Column(
            "matched",
            _INT64,
            "tokens",
            "The same as the policies count it: at most one token short of the sequence.",
            encoding="dictionary",
        ),
        Column(
            "deprioritized",
            _BOOL,
            None,
            "Held back because an earlier waiting request brings the same prefix, which it then finds cached.",
        ),
        Column(
            "partner",
            _STRING,
            None,
            "rid of that earlier request.",
            "not deprioritized, or the threshold asks for no shared token, or a recorded server did not tell",
        ),
        Column("shared_len", _INT64, "tokens", "Length of the prefix it shares with the partner.", "not deprioritized"),
        Column(
            "result",
            _STRING,
            None,
            "SGLang's verdict: `CONTINUE`, `NO_TOKEN`, `OTHER`; `CHUNK` for the continuing chunk.",
            _NOT_LOOKED_AT,
        ),
        Column(
            "reason",
            _STRING,
            None,
            "Why it was refused, or what ended the pass behind it. Finer than `result`; `unknown`: a recorded server "
            "did not tell.",
            _NOT_LOOKED_AT,
        ),
        Column("admitted", _BOOL, None, "It is in the prefill batch."),
        Column(
            "admit_prefix_len",
            _INT64,
            "tokens",
            "Cached tokens it would use, as admission found them.",
            _NOT_LOOKED_AT,
            encoding="dictionary",
        ),
        Column("extend_len", _INT64, "tokens", "Tokens to compute in this pass.", "not admitted"),
        Column("chunked", _BOOL, None, "Its prompt is unfinished after this pass."),
        Column(
            "need", _FLOAT, "tokens", "What the decisive check asked for.", "not looked at, or nothing was compared"
        ),
        Column("have", _FLOAT, "tokens", "What there was.", "not looked at, or nothing was compared", encoding="plain"),
        Column("rem_total", _FLOAT, "tokens", "Memory budget after this verdict.", _NOT_LOOKED_AT, encoding="plain"),
        Column("cur_rem", _FLOAT, "tokens", "The same without the reserve for outputs.", _NOT_LOOKED_AT),
        Column("rem_input", _INT64, "tokens", "Left of `max_prefill_tokens` after this verdict.", _NOT_LOOKED_AT),
        Column(
            "rem_chunk",
            _INT64,
            "tokens",
            "Left of `chunked_prefill_size` after this verdict.",
            f"not looked at, or {_UNCHUNKED}",
        ),
        Column("preempted", _STRINGS, None, "rids of running requests preempted to look at it."),
    ),
    row_group=8_192,
)

_REQUESTS = Table(
    "requests",
    "One row per request, written when it ends. Times are of the monotonic clock; of a request that was retracted or "
    "preempted they are the first ones.",
    (
        _RANK,
        Column(
            "rid",
            _STRING,
            None,
            "The request's id. Unpaired surrogates in it are written as `\\udXXX`.",
            encoding="length",
        ),
        Column("prompt_tokens", _INT64, "tokens", "Length of the prompt."),
        Column("output_tokens", _INT64, "tokens", "Tokens generated."),
        Column(
            "cached_tokens",
            _INT64,
            "tokens",
            "Prompt tokens taken from the prefix cache when it first ran.",
            encoding="dictionary",
        ),
        Column("max_new_tokens", _INT64, "tokens", "Most it asked for."),
        Column("ignore_eos", _BOOL, None, "It asked to go on after an end-of-text token."),
        Column("priority", _INT64, None, "As sent.", "none was sent"),
        Column("routing_key", _STRING, None, "As sent.", "none was sent"),
        Column("extra_key", _STRING, None, "As sent: with the salt, the namespace of the cache.", "none was sent"),
        Column("cache_salt", _STRING, None, "As sent.", "none was sent"),
        Column("arrive_ns", _INT64, "ns", "It reached the scheduler.", encoding="delta"),
        Column("queue_ns", _INT64, "ns", "It joined the waiting queue.", "it never did", encoding="delta"),
        Column("admit_ns", _INT64, "ns", "It was first admitted to a prefill batch.", "it never was", encoding="delta"),
        Column("first_token_ns", _INT64, "ns", "Its first token was there.", "none was generated", encoding="delta"),
        Column("finish_ns", _INT64, "ns", "It ended.", encoding="delta"),
        Column("retractions", _INT32, None, "How often decoding sent it back to the queue for lack of memory."),
        Column("preemptions", _INT32, None, "How often a more urgent request did."),
        Column(
            "end_reason",
            _STRING,
            None,
            "`stop`: an end token or string; `length`: all it asked for, or that fits; `abort`: by the client or the "
            "scheduler.",
        ),
        Column("end_detail", _STRING, None, "More about it: what matched, who aborted.", "nothing more to say"),
    ),
    row_group=16_384,
)

_EVENTS = Table(
    "events",
    "One row per thing that happened to a request or to the cache. Kinds: `arrive` (it reached the scheduler), `queue` "
    "(it joined the queue), `refuse` (it was turned away), `admit` (it joined a prefill batch), `first_token`, "
    "`finish`, `abort` (a client gave up), `retract` and `preempt` (it lost its memory and joined the queue again), "
    "`timeout` (it waited or ran too long); of the cache `insert` and `evict`.",
    (
        _RANK,
        _seq("Logical tick: orders steps, passes, events and tokens of a rank."),
        _step(),
        Column("pass", _INT64, None, "The pass it happened in.", "it happened outside a pass", encoding="delta"),
        Column("time", _FLOAT, "s", "The scheduler's clock.", encoding="plain"),
        Column("kind", _STRING, None, "What happened, see above."),
        Column("rid", _STRING, None, "The request.", "an event of the cache alone"),
        Column(
            "tokens",
            _INT64,
            "tokens",
            "How many it was about: prompt (`arrive`), computed (`admit`), output (`finish`), inserted, evicted, given "
            "back.",
            "not about tokens",
        ),
        Column("node", _INT64, None, "The cache node.", "not an event of the cache"),
        Column("detail", _STRING, "JSON", "More, by kind: an object.", "nothing more to say"),
    ),
    row_group=4_096,
)

_TOKENS = Table(
    "tokens",
    "Token ids, each once: the prompt when a request arrives, outputs as they come. Empty if tokens are not recorded.",
    (
        _RANK,
        _seq("Logical tick: orders steps, passes, events and tokens of a rank."),
        _step(),
        Column("rid", _STRING, None, "The request.", encoding="length"),
        Column(
            "position", _INT64, "tokens", "Place of the first id in the request's sequence, from 0.", encoding="delta"
        ),
        Column("ids", _IDS, None, "Token ids, from there on."),
    ),
    row_group=16_384,
)

_VIEWS = Table(
    "views",
    "What a pass of another scheduler than ours could read, as far as the other tables don't tell. One row per pass; "
    "empty where we scheduled, since a re-run then makes it.",
    (
        _RANK,
        Column("pass", _INT64, None, "The pass.", encoding="delta"),
        _seq("Logical tick of the pass."),
        Column(
            "view",
            _BINARY,
            "msgpack",
            "An array: rids of the running batch; their output tokens; places of those that ended; tokens that the "
            "cache holds locked for each; KV tokens of each; free and evictable tokens; free request rows; the chunked "
            "request; fill lengths of the queue; largest recent prefill batch; pool usage; the delayer's state; "
            "reports of other ranks; the delayer's clock; state of the random generator.",
        ),
    ),
    row_group=256,
)

_CHECKPOINTS = Table(
    "checkpoints",
    "The scheduler's state now and then: any later pass is rebuilt from here and the events behind it.",
    (
        _RANK,
        _seq("Logical tick: everything up to it is in the state, nothing after it."),
        _step("The step about to begin."),
        Column("pass", _INT64, None, "The next pass to be made.", encoding="delta"),
        Column(
            "since",
            _INT64,
            None,
            "Tick of the checkpoint from which on the log holds all its token ids, 0 for the run's beginning; its own "
            "tick: it stands alone, and nothing before it is needed.",
            encoding="delta",
        ),
        Column(
            "state",
            _BINARY,
            "msgpack",
            "The state. Its token ids are given as pieces of `sources`, by tick: of a request that arrived then, its "
            "prompt and outputs in `tokens`; of a checkpoint, what it carried.",
        ),
        Column(
            "carried",
            _IDS,
            None,
            "Token ids of the state that neither `tokens` nor a checkpoint has `since` then, and those that only "
            "requests have that came long before.",
        ),
    ),
    row_group=8,
)

TABLES: dict[str, Table] = {
    table.name: table for table in (_STEPS, _PASSES, _DECISIONS, _REQUESTS, _EVENTS, _TOKENS, _VIEWS, _CHECKPOINTS)
}


def to_arrow(table: Table, rank: int, rows: Sequence[Row] | Decisions) -> pa.Table:
    """Recorded rows as Arrow, with their rank."""
    if isinstance(rows, Decisions):
        pieces = [_decisions(table, rank, piece) for piece in rows.pieces()] or [table.arrow.empty_table()]
        return pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces).combine_chunks()
    values: Sequence[Any] = list(zip(*rows, strict=True)) or [()] * len(table.row)
    arrays = [pa.array([rank] * len(rows), pa.int32())]
    arrays += [pa.array(column, definition.type) for column, definition in zip(values, table.row, strict=True)]
    return pa.Table.from_arrays(arrays, schema=table.arrow)


def _decisions(table: Table, rank: int, piece: list[Told] | list[Row]) -> pa.Table:
    columns = DecisionColumns()
    for each in piece:
        if not isinstance(each, Told):
            return to_arrow(table, rank, cast("list[Row]", piece))
        columns.add(*each)
    return decisions_table(columns, rank)


def decisions_table(columns: DecisionColumns, rank: int) -> pa.Table:
    """Rows of `decisions`, with their rank."""
    table = TABLES["decisions"]
    if not columns.rows:
        return table.arrow.empty_table()
    ranks = pa.repeat(pa.scalar(rank, pa.int32()), columns.rows)
    return pa.Table.from_arrays([ranks, *columns.arrays([each.type for each in table.row])], schema=table.arrow)


_HEAD = f"""\
# schedscope log, version {SCHEMA_VERSION}

<!-- Generated: python -m schedscope.recorder.schema > docs/schema.md -->

A run is a directory. Everything in it can be read at any moment, while it is recorded and after any crash.

```
20260131-142500-name/
  manifest.json                    what was recorded: versions, command, configuration, gaps
  rank=0/                          one per scheduler process
    00000000-00000010.p0-10999/    a merged segment, of 11 journals and passes 0 to 10999; never changed again
      index.json                   rows per table, frames, gaps, checksums
      rids.index                   which row groups mention a request
      steps.parquet passes.parquet decisions.parquet ...
    00000011.p11000-11999/         a segment as it was sealed
    00000012.journal               what is not sealed yet; goes away when its segment is there
    rids.index                     of a flight recorder: which of its many small segments mention a request
```

A table without rows in a segment has no file there. Every reader of Parquet can read the sealed part, for
example DuckDB with `read_parquet('<run>/rank=*/*.p*/passes.parquet', hive_partitioning=false)`; the `schedscope`
command and `schedscope.recorder.run.Run` add what is in the journals. A directory whose name starts with a dot is
a segment being written: leave it out. While a run is recorded, segments whose numbers a merged one covers are about
to be removed: leave them out too. Of a sealed run there are none.

A record that was lost is a gap. `manifest.json` lists them when the run is sealed, `Run.gaps` at any time.

"Never" in the column *null* means that there is always a value. Times in ns come from the monotonic clock of the
recorded machine: only differences mean anything. Times in s are the scheduler's own clock, which its decisions read.
"""


def to_markdown() -> str:
    """The documentation of all tables."""
    return "\n".join([_HEAD, *(_table_markdown(table) for table in TABLES.values())])


def _table_markdown(table: Table) -> str:
    lines = [
        f"## {table.name}",
        "",
        table.doc,
        "",
        "| column | type | unit | meaning | null |",
        "|---|---|---|---|---|",
    ]
    for column in table.columns:
        cells = (f"`{column.name}`", _type_name(column.type), column.unit or "", column.doc, column.null or "never")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def _type_name(type_: pa.DataType) -> str:
    if pa.types.is_list(type_):
        return f"list of {_type_name(type_.value_type)}"
    return {"double": "float64"}.get(str(type_), str(type_))


if __name__ == "__main__":
    print(to_markdown(), end="")
