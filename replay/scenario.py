"""Scenario files: small, complete inputs for one scheduling decision, and what should come of it.

The format is described in docs/scenario-format.md. This module reads it; `schedscope.replay.scenario_run` runs it
and `schedscope.replay.scenario_check` compares.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml
from schedscope.engine.errors import ScenarioError

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, le=2**26)]
"""Tokens, requests, passes: no more than a machine can hold."""
Finite = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
Part = str | dict[str, list[int]]
Sequence = list[Part]


class _Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class CacheEntry(_Strict):
    """A request that ran alone and finished."""

    seq: Sequence
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    locked: bool = False


class SceneRequest(_Strict):
    """A waiting, running or chunked request."""

    rid: str
    input: Sequence
    output: Count | Sequence = 0
    max_new_tokens: Count = 128
    ignore_eos: bool = False
    priority: int | None = None
    routing_key: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    entry_time: Finite = 0.0
    arrival_processed_tokens: Count = 0
    retracted: bool | None = None
    finished: bool = False
    done: Count | None = None


class Generator(_Strict):
    """`count` copies of a request."""

    count: Annotated[int, msgspec.Meta(ge=0, le=100_000)]
    template: dict[str, Any]
    at: Count | None = None


class Pool(_Strict):
    """So many free tokens before the pass."""

    free: Count


class Probe(_Strict):
    """A look-up after the last pass."""

    seq: Sequence
    extra_key: str | None = None
    cache_salt: str | None = None


class RankReport(_Strict):
    """What another rank tells the delayer."""

    prefillable: bool = False
    force_allow: bool = False
    running_batch: int = 0
    max_prefill_bs: int = 0
    waiting_queue_len: int = 0
    queue_timeout_expired: bool = False


class DelayerStart(_Strict):
    """The delayer's state before the first pass."""

    skip_first: bool = True
    delayed_count: Count | None = None
    age_ms: Finite = 0.0
    max_prefill_bs: Count = 0
    other_ranks: list[RankReport] = []


class DelayerRank(_Strict):
    """One rank in one pass of a delayer scenario."""

    prefillable: bool
    token_usage: Finite = 1.0
    running_batch: int = 0
    waiting_queue_len: int = 0
    max_prefill_bs: int | None = None
    max_running_requests: int | None = None
    actual_prefill_bs: int = 0
    calls: int = 1
    now: Finite | None = None


class DelayerPass(_Strict):
    """One pass of a delayer scenario."""

    ranks: list[DelayerRank]
    now: Finite = 0.0
    repeat: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 1


class CacheAction(_Strict):
    """One step of an evict scenario; exactly one of insert, touch, lock, probe, evict, sizes."""

    insert: Sequence | None = None
    touch: Sequence | None = None
    lock: Sequence | None = None
    probe: Sequence | None = None
    evict: Count | None = None
    sizes: bool | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None


class Scenario(_Strict):
    """One scenario, as it stands in the file."""

    version: Literal[1]
    id: str
    kind: Literal["pass", "delayer", "evict", "check"]
    title: str = ""
    reason: str = ""
    source: list[str] = []
    verified: bool = True
    config: dict[str, Any] = {}
    segments: dict[str, Count] = {}
    cache: list[CacheEntry] = []
    running: list[SceneRequest] = []
    chunked_req: SceneRequest | None = None
    pool: Pool | None = None
    waiting_queue: list[SceneRequest] = []
    waiting_queue_generate: list[Generator] = []
    processed_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    batch_is_full: bool = False
    delayer: DelayerStart | None = None
    passes: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | list[DelayerPass] = 1
    probe: list[Probe] = []
    ops: list[CacheAction] = []
    given: Any = None
    workload: Any = None
    expect: dict[str, Any] = {}

    def queue(self) -> list[SceneRequest]:
        """The waiting requests in queue order, generated ones included."""
        requests = list(self.waiting_queue)
        for generator in self.waiting_queue_generate:
            where = f"{self.id}: waiting_queue_generate"
            try:
                made = [_convert(_fill(generator.template, i), SceneRequest, where) for i in range(generator.count)]
            except RecursionError:
                raise ScenarioError(f"{where}: the template contains itself") from None
            at = len(requests) if generator.at is None else generator.at
            requests[at:at] = made
        return requests


class Placed(msgspec.Struct, frozen=True):
    """A scenario and where it was read."""

    scenario: Scenario
    where: str


def read_scenarios(paths: list[Path]) -> Iterator[Placed]:
    """All scenarios of the files and folders, in name order within a folder.

    Raises ScenarioError, naming file, line and key.
    """
    for placed in try_scenarios(paths):
        if isinstance(placed, ScenarioError):
            raise placed
        yield placed


def try_scenarios(paths: list[Path]) -> Iterator[Placed | ScenarioError]:
    """`read_scenarios` that goes on behind a scenario, or a file, that can't be read, and gives its error instead."""
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and _is_scenario_file(p))
            if not found:
                yield ScenarioError(f"{path}: no .yaml, .yml or .jsonl file in this folder")
            for file in found:
                yield from _read_file(file)
        elif path.is_file():
            yield from _read_file(path)
        else:
            yield ScenarioError(f"{path}: no such file or folder")


def _is_scenario_file(path: Path) -> bool:
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    return bool(suffixes) and suffixes[-1] in {".yaml", ".yml", ".jsonl"}


def _read_file(path: Path) -> Iterator[Placed | ScenarioError]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        yield ScenarioError(f"{path}: can't be read: {error}")
        return
    if ".jsonl" in path.suffixes:
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                where = f"{path}:{number}"
                try:
                    raw = _parsed(where, partial(msgspec.json.decode, line))
                except ScenarioError as error:
                    yield error
                else:
                    yield _placed(where, raw)
        return
    try:
        documents = _parsed(str(path), lambda: list(yaml.load_all(text, Loader=_Loader)))
    except ScenarioError as error:
        yield error
        return
    for raw in documents:
        if raw is not None:
            yield _placed(str(path), raw)


def _placed(where: str, raw: Any) -> Placed | ScenarioError:
    try:
        return Placed(_convert(raw, Scenario, where), where)
    except ScenarioError as error:
        return error


def _parsed(where: str, parse: Callable[[], Any]) -> Any:
    try:
        return parse()
    except RecursionError:
        raise ScenarioError(f"{where}: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ScenarioError(f"{where}: not the notation that its name says: {error}") from None


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _convert(raw: Any, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{where}: {error}") from None
    except RecursionError:
        raise ScenarioError(f"{where}: a part of it contains itself") from None


_NUMBER = re.compile(r"\{i(?::0?(\d{1,2}))?\}")


def _fill(template: Any, number: int) -> Any:
    """The template with `{i}` and `{i:04}` replaced in all strings."""
    if isinstance(template, str):
        return _NUMBER.sub(lambda found: str(number).zfill(int(found[1] or 0)), template)
    if isinstance(template, list):
        return [_fill(item, number) for item in template]
    if isinstance(template, dict):
        return {key: _fill(value, number) for key, value in template.items()}
    return template
