"""Explanations as JSON values: every fact by its name, links as rank, pass and rid."""

from __future__ import annotations

from typing import Any

from schedscope.replay.explain_words import flip_words, pass_sentence, request_sentence, run_sentence
from schedscope.replay.explanation import PassExplanation, RequestExplanation
from schedscope.replay.flip import Flip
from schedscope.replay.ledger import RequestLedger, RunLedger


def plain(value: Any) -> Any:
    """Facts as JSON values: named tuples as objects, `pass_number` and `number` of a pass as `pass`."""
    if isinstance(value, Flip):
        return {**_fields(value), "words": flip_words(value)}
    if hasattr(value, "_asdict"):
        return _fields(value)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _fields(value: Any) -> dict[str, Any]:
    return {_NAMES.get(name, name): plain(item) for name, item in value._asdict().items()}


_NAMES = {"pass_number": "pass", "number": "pass"}


def ledger_json(ledger: RequestLedger) -> dict[str, Any]:
    """A request's ledger."""
    return {**plain(ledger), "queued_ns": ledger.queued_ns, "sentence": request_sentence(ledger)}


def request_json(found: RequestExplanation) -> dict[str, Any]:
    """Why a request waited."""
    return {**plain(found), "ledger": ledger_json(found.ledger)}


def pass_json(found: PassExplanation) -> dict[str, Any]:
    """Why a pass came out as it did."""
    return {"sentence": pass_sentence(found), **plain(found)}


def run_json(ledger: RunLedger) -> dict[str, Any]:
    """A run's ledger."""
    waited = [{"rank": rank, "rid": rid, "ns": ns} for rank, rid, ns in ledger.waited]
    return {"sentence": run_sentence(ledger), **plain(ledger), "waited": waited}
