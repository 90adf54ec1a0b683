"""Explanations in words: one sentence first, details below it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from schedscope.engine.verdict import Reason
from schedscope.replay.describe import ENDINGS, FALLBACKS, FOLD_FROM, STOPS, number, printable, verdict_words
from schedscope.replay.explanation import Against, Change, Ending, Look, Mark, PassExplanation, Place, Pool, short_of
from schedscope.replay.flip import Flip
from schedscope.replay.ledger import CAUSES, CauseTotal, CostliestMark, Part, RequestLedger, RunLedger, Span
from schedscope.replay.provenance import Origin

_NAMED = 3
"""Requests that a list names before it counts the rest."""

_SENTENCES = {
    "longer_match": "while requests with a longer match went first",
    "priority": "while requests of higher priority went first",
    "order": "while others went first by the policy's order",
    "held_back": "held back as a duplicate",
    "memory": "because it did not fit into memory itself",
    "blocked_head": "behind a request that did not fit into memory",
    "memory_spent": "because others had spent the memory",
    "input_budget": "because others had spent the prefill budget",
    "chunk_budget": "because others had spent the chunk",
    "prefill_max_requests": "because the prefill batch had all the requests it may",
    "no_slot": "for a running slot",
    "batch_full": "while the batch was marked full",
    "min_free_slots_delay": "for more free slots, as min_free_slots_delay asks",
    "delayer": "because the prefill delayer said wait",
    "step_in_progress": "for a step to end",
    "deciding": "while it was being admitted",
    "gap": "while records are missing",
    "unrecorded": "while decisions about it were not recorded",
}
_WHY_MARKED = {
    "no_slot": "no running slot was left",
    "preempt_failed": "no running slot was left, and no running request could be preempted",
    Reason.MEMORY: "a request did not fit into memory",
    Reason.MEMORY_IGNORE_EOS: "a request's pages did not fit into memory",
    Reason.MEMORY_FUTURE: "a request would not have fitted once outputs had grown",
    Reason.TOTAL_SPENT: "memory and output reserves were spent",
    Reason.CURRENT_SPENT: "memory was spent",
}
_LEVERS = {
    "memory": "{} more tokens of free memory",
    "slots": "{} more running slots",
    "chunk": "{} more tokens of chunk",
    "input": "{} more prefill tokens a pass",
    "requests": "{} more requests a prefill batch",
    "output": "asking for {} fewer output tokens",
    "matched": "{} more matched tokens",
    "front": "standing first in the queue",
    "duplicates": "not holding duplicates back",
    "delayer": "no prefill delayer",
    "mark": "no mark that the batch is full",
}


def duration(ns: int) -> str:
    """A time for people: three digits and a unit."""
    for unit, size in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if ns >= size:
            value = ns / size
            return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{ns} ns"


def names(rids: Sequence[str], most: int = _NAMED) -> str:
    """Requests by name, and how many more."""
    shown = ", ".join(map(printable, rids[:most]))
    return f"{shown} and {len(rids) - most:,} more" if len(rids) > most else shown


def count(amount: int, one: str, many: str | None = None) -> str:
    """A number of things."""
    return f"{amount:,} {one if amount == 1 else many or one + 's'}"


# ---- a request's ledger --------------------------------------------------------------------------------------


def request_sentence(ledger: RequestLedger) -> str:
    """How long a request waited and what for, in a sentence."""
    who = printable(ledger.rid)
    if not ledger.spans:
        return f"{who} was never in the queue."
    total = ledger.queued_ns
    waited = f"{who} has waited {duration(total)} so far" if ledger.waits else f"{who} waited {duration(total)}"
    if len(ledger.spans) > 1:
        waited += f", in {len(ledger.spans)} stays"
    largest = [(key, ns) for key, ns in ledger.by_cause().items() if ns * 20 >= total and ns][:_NAMED]
    reasons = [f"{duration(ns)} {_cause_sentence(ledger, *key)}" for key, ns in largest]
    left = ledger.spans[-1].left_as
    end = f", and ended in the queue ({left})" if left not in {"admitted", None} else ""
    return f"{waited}: {', '.join(reasons)}{end}." if reasons else f"{waited}{end}."


def _cause_sentence(ledger: RequestLedger, cause: str, after: str | None) -> str:
    words = _SENTENCES[cause]
    parts = [part for part in ledger.parts if (part.cause, part.after) == (cause, after)]
    whom = list(dict.fromkeys(part.rid for part in parts if part.rid is not None and part.rid != ledger.rid))
    if cause in {"longer_match", "priority", "order"}:
        words = words.replace("requests", count(len(whom), "request")).replace("others", count(len(whom), "other"))
    elif cause == "held_back" and whom:
        words = f"held back as a duplicate of {names(whom)}"
    elif cause == "blocked_head" and whom:
        words = f"behind {names(whom)}, which did not fit into memory"
    return f"{words}, after it was {after}" if after is not None else words


def cause_words(part: Part) -> str:
    """What a part was charged to, in a line."""
    return _caused(part.cause, part)


def _caused(cause: str, mark: Part | CostliestMark | None) -> str:
    """A cause, and why the batch was marked full if that is it."""
    words = CAUSES[cause]
    if cause != "batch_full" or mark is None:
        return words
    if mark.running is not None:
        return f"{words}: {slots_words(mark.running, mark.slots)}"
    return words if mark.reason is None else f"{words}: {_WHY_MARKED.get(mark.reason, mark.reason)}"


def slots_words(running: int, slots: int | None) -> str:
    """What a gate found that lets nobody in for want of a running slot."""
    return f"no running slot, {running}{'' if slots is None else f' of {slots}'} running"


def total_words(total: CauseTotal) -> str:
    """A cause of a run's ledger in a line, with the mark that cost most where it is marks."""
    words = _caused(total.cause, total.mark)
    if total.mark is not None:
        mark = total.mark
        where = f"at step {mark.step}" if mark.pass_number is None else f"in pass {mark.pass_number}"
        words += f" (the costliest set {where}{f' of rank {mark.rank}' if mark.rank else ''})"
    return words + (f", after they were {total.after}" if total.after else "")


def stay_words(span: Span) -> str:
    """A stay in the queue after the first one: why it was there again, and how long."""
    words = span.after or ""
    if span.by is not None:
        words += f" for {printable(span.by)}"
    if span.lost_pass is not None:
        words += f" in pass {span.lost_pass}"
    until = f", until pass {span.last_pass}" if span.left_as == "admitted" and span.last_pass is not None else ""
    return f"{words}, and {duration(span.ns)} in the queue again{until}"


def ledger_rows(ledger: RequestLedger) -> list[tuple[str, str, str, str, str]]:
    """The ledger as lines: time, share, cause, whom it is charged to, and where to look."""
    total = ledger.queued_ns
    groups: dict[tuple[str | None, str, str], list[Part]] = {}
    for part in ledger.parts:
        groups.setdefault((part.after, part.cause, cause_words(part)), []).append(part)
    rows = []
    for (after, _, words), parts in sorted(groups.items(), key=lambda item: -sum(part.ns for part in item[1])):
        ns = sum(part.ns for part in parts)
        cause = f"{words}, after it was {after}" if after is not None else words
        rows.append(
            (duration(ns), f"{ns / total:.0%}" if total else "", cause, _whom(ledger, parts), where_words(parts))
        )
    return rows


def _whom(ledger: RequestLedger, parts: Sequence[Part]) -> str:
    by: dict[str, tuple[int, int]] = {}
    for part in parts:
        if part.rid is not None:
            ns, times = by.get(part.rid, (0, 0))
            by[part.rid] = ns + part.ns, times + part.times
    most = sorted(by.items(), key=lambda item: -item[1][0])
    shown = [
        f"{'itself' if rid == ledger.rid else printable(rid)} {duration(ns)}" + (f" in {times:,}" if times > 1 else "")
        for rid, (ns, times) in most[:_NAMED]
    ]
    if len(most) > _NAMED:
        rest = sum(ns for _, (ns, _) in most[_NAMED:])
        shown.append(f"{len(most) - _NAMED:,} more {duration(rest)}")
    short = max((part.short for part in parts if part.short is not None), default=None)
    if short is not None:
        shown.append(f"short of {short:,} tokens")
    return ", ".join(shown)


def where_words(parts: Sequence[Part]) -> str:
    """The passes that decided so, or the steps in which a gate did; of a mark those that set it."""
    passes = _stretch("pass", "passes", [(part.first_pass, part.last_pass) for part in parts])
    steps = _stretch("step", "steps", [(part.first_step, part.last_step) for part in parts])
    if parts[0].cause == "batch_full":
        passes, steps = passes and f"set in {passes}", steps and f"set at {steps}"
    return ", ".join(filter(None, (passes, steps)))


def _stretch(one: str, many: str, spans: Iterable[tuple[int | None, int | None]]) -> str:
    known = [number for span in spans for number in span if number is not None]
    if not known:
        return ""
    first, last = min(known), max(known)
    return f"{one} {first}" if first == last else f"{many} {first} to {last}"


# ---- what a pass says about a place --------------------------------------------------------------------------


def against_words(against: Against) -> str:
    """Why a request stands behind the one before it."""
    who = printable(against.rid)
    own, other = against.own, against.other
    match against.field:
        case "negative_matched":
            if own == math.inf:
                return f"behind {who}, which is not held back"
            return f"behind {who}, which matched {number(-other)} tokens, it {number(-own)}"
        case "negative_ratio":
            if own == math.inf:
                return f"behind {who}, which is not held back"
            if other == -math.inf:
                return f"behind {who}, which has nothing to compute"
            return f"behind {who}, whose response ratio is {-other:.4g}, its own {-own + 0.0:.4g}"
        case "deprioritized":
            return f"behind {who}, which is not held back"
        case "work":
            return f"behind {who}, which has {number(other)} tokens to compute, it {number(own)}"
        case "signed_priority":
            return f"behind {who}, which has the more urgent priority ({abs(other)}, its own {abs(own)})"
        case "negative_max_new_tokens":
            return f"behind {who}, which asks for {number(-other)} output tokens, it for {number(-own)}"
        case "branches":
            return f"behind {who}, whose branch of the cache has more waiting requests, or comes first"
        case "draw":
            return f"behind {who}, which drew the smaller number"
        case "unknown":
            return f"behind {who}, whose routing key runs already"
        case "negative_count":
            return f"behind {who}, whose routing key runs {-other} times, its own {-own} times"
        case "key":
            return f"behind {who}, whose routing key comes first ({other!r}, its own {own!r})"
        case "entry_time":
            return f"behind {who}, which joined the queue earlier"
        case "rid":
            return f"behind {who}, whose name comes first"
        case _:
            return f"behind {who}, which stood before it already"


def match_words(place: Place) -> str:
    """What is cached of a request, and who brought it."""
    tokens = place.matched
    if place.is_stale:
        if place.verdict is None:
            return f"matched {number(tokens)} tokens when it was last looked up" if tokens else "not looked up"
        tokens = place.verdict.prefix_len
    if not tokens:
        return "nothing of it is cached"
    words = f"matched {number(tokens)} tokens"
    return words if place.origin is None else f"{words} <- {origin_words(place.origin)}"


def origin_words(origin: Origin) -> str:
    """Who brought a cached prefix."""
    if origin.rid is None:
        words = f"cached before pass {origin.known_since}"
    else:
        where = (
            f"in pass {origin.pass_number}" if origin.pass_number is not None else f"as it ended, in step {origin.step}"
        )
        words = f"inserted by {printable(origin.rid)} {where}"
        if not origin.exact:
            words += " at the latest"
    if origin.holders:
        words += f", held by {count(len(origin.holders), 'running request')}"
    return words


def place_words(place: Place, ending: Ending) -> str:
    """What became of a request, and why."""
    if place.verdict is not None:
        words = verdict_words(place.verdict)
        short = short_of(place.verdict)
        return f"{words}: short of {short:,}" if short is not None else words
    return f"not looked at: {ending_words(ending)}"


def held_words(place: Place) -> str | None:
    """Why it was held back."""
    if place.duplicate is None:
        return None
    if place.duplicate.partner is None:
        return "held back: the threshold asks for no shared token"
    partner = printable(place.duplicate.partner)
    return f"held back for {partner}: they share {number(place.duplicate.shared_len)} uncached tokens"


def ending_words(ending: Ending) -> str:
    """What ended the admission loop."""
    if ending.rid is not None and ending.stop == "budget":
        return f"the next chunk of {printable(ending.rid)} took all that the pass may compute"
    if ending.rid is None or ending.reason is None:
        return STOPS.get(ending.stop, ending.stop)
    who, reason = printable(ending.rid), Reason(ending.reason)
    if ending.admitted:
        return f"{ENDINGS[reason]} behind {who}"
    short = short_of(ending)
    match reason:
        case Reason.DELAYED:
            return "the prefill delayer said wait"
        case Reason.MEMORY | Reason.MEMORY_IGNORE_EOS | Reason.MEMORY_FUTURE:
            return f"{who} stands before it and did not fit into memory, short of {short:,} tokens"
        case Reason.INPUT_BUDGET:
            return f"{who} stands before it and did not fit into the prefill budget, short of {short:,} tokens"
        case Reason.PREFILL_MAX_REQUESTS:
            return "the prefill batch has as many requests as it may"
        case _:
            return f"{who} stands before it and did not fit into what was left of the chunk"


def pool_words(pool: Pool) -> str:
    """What the KV pool was full of."""
    words = (
        f"{pool.size:,} tokens: {pool.free:,} free, {pool.evictable:,} cached and unused, {pool.locked:,} cached and "
        f"in use, {pool.held:,} held by {count(pool.running, 'running request')} alone; "
        f"{number(math.ceil(pool.reserve))} are kept for their outputs"
    )
    if pool.holders:
        most = [f"{printable(h.rid)} {number(h.tokens)} + {number(math.ceil(h.reserve))}" for h in pool.holders]
        words += f" (most: {', '.join(most)})"
    return words


def mark_words(mark: Mark) -> str:
    """Where the mark that the batch is full came from, and how long it lasted."""
    if mark.set_in is None:
        words = "batch_is_full was set earlier"
    else:
        words = f"batch_is_full was set in pass {mark.set_in}"
        if mark.stop is not None:
            words += f" because {_why_marked(mark)}"
    if mark.until_pass is None:
        return words
    if not mark.steps:
        return f"{words}; pass {mark.until_pass} followed at once"
    time = f" ({duration(mark.ns)})" if mark.ns is not None else ""
    behind = count(mark.steps, "step")
    return f"{words}; {behind}{time} made no pass until a request had left, before pass {mark.until_pass}"


def _why_marked(mark: Mark) -> str:
    if mark.rid is not None and mark.short is not None:
        return f"{printable(mark.rid)} did not fit into memory, short of {mark.short:,} tokens"
    known = _WHY_MARKED.get(mark.reason or "") or _WHY_MARKED.get(mark.stop or "")
    return known or f"it ended with {mark.reason or mark.stop}"


# ---- what would have been otherwise --------------------------------------------------------------------------


def flip_words(flip: Flip) -> str:
    """What would have changed the outcome, how little of it, and what then."""
    change = _LEVERS[flip.lever]
    if flip.amount is not None:
        change = change.format(f"{flip.amount:,}")
        if flip.amount == 1:
            for many, one in (("tokens", "token"), ("slots", "slot"), ("more requests", "more request")):
                change = change.replace(many, one)
        if flip.amount > flip.unit:
            change += f" ({flip.amount - flip.unit:,} would not do)"
    if flip.goal is not None:
        outcome = f"put it at place {flip.fate.place}"
    else:
        outcome = "let it in"
        if flip.fate.verdict is not None and flip.fate.verdict.chunked:
            outcome += f", with a first chunk of {number(flip.fate.verdict.extend_len)} tokens"
    setting = f" (--set {flip.setting}={_setting(flip.value)})" if flip.setting is not None else ""
    return f"{change} would have {outcome}{setting}"


def _setting(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def elsewhere_words(place: Place, active: str) -> str | None:
    """Where other policies would have put a request."""
    if not place.elsewhere:
        return None
    own = place.place, place.verdict is not None and place.verdict.admitted
    groups: dict[tuple[int, bool], list[str]] = {}
    for each in place.elsewhere:
        if each.fate.place is not None:
            groups.setdefault((each.fate.place, each.fate.admitted), []).append(each.policy)
    same = groups.pop(own, [])
    shown = [
        f"{', '.join(policies)}: place {where}, {'let in' if admitted else 'not let in'}"
        for (where, admitted), policies in sorted(groups.items(), key=lambda group: (not group[0][1], group[0][0]))
    ]
    if same:
        shown.append(f"{', '.join(same)}: as under {active}")
    return f"under other policies: {'; '.join(shown)}"


# ---- whole explanations --------------------------------------------------------------------------------------

_WHY = {
    "worst": "cost it most",
    "admitted": "let it in",
    "last": "the last one it waited in",
    "grew": "its cached prefix grew most before it",
    "fell": "its cached prefix shrank most before it",
}


def look_title(look: Look) -> str:
    """Which pass this is, and why it is shown."""
    return f"pass {look.number} ({_WHY[look.why]}): place {look.place.place} of {look.queue_len}"


def look_lines(look: Look) -> list[str]:
    """What a pass says about the request."""
    place = look.place
    lines = [place_words(place, look.ending)]
    if look.fallback is not None:
        lines.append(f"sorted by {policy_words(look)}")
    if place.against is not None:
        lines.append(against_words(place.against))
    held = held_words(place)
    match = match_words(place)
    lines.append(match if held is None else f"{held}; {match}")
    if place.verdict is None or not place.verdict.admitted:
        if look.ending.stop == "NO_TOKEN":
            lines.append(f"pool of {pool_words(look.pool)}")
        if look.mark_after is not None:
            lines.append(mark_words(look.mark_after))
        lines += map(flip_words, place.flips)
        if not place.flips:
            lines.append("no single change of those tried would have let it in")
    lines += map(flip_words, place.ahead)
    elsewhere = elsewhere_words(place, look.active)
    if elsewhere is not None:
        lines.append(elsewhere)
    return lines


def change_words(change: Change) -> str:
    """How a request's cached prefix became another."""
    where = f"between passes {change.before_pass} and {change.pass_number}"
    words = f"{where} from {change.before:,} to {change.after:,} tokens"
    if change.origin is not None:
        return f"grew {words}: {origin_words(change.origin)}"
    if not change.evicted:
        return f"shrank {words}" if change.after < change.before else f"grew {words}"
    tokens = sum(eviction.tokens for eviction in change.evicted)
    whose = list(dict.fromkeys(rid for eviction in change.evicted for rid in eviction.for_rids))
    decoding = all(eviction.pass_number is None for eviction in change.evicted)
    doing = "decoding" if decoding else "the batch of"
    return f"shrank {words}: {tokens:,} tokens were evicted meanwhile to make room for {doing} {names(whose)}"


def pass_sentence(found: PassExplanation) -> str:
    """How a pass came out, in a sentence."""
    admitted = [p.rid for p in found.places if p.verdict is not None and p.verdict.admitted]
    left = len(found.places) - len(admitted)
    joined = f"admitted {names(admitted)}" if admitted else "admitted nobody"
    if found.chunk is not None:
        joined += f" and went on with the chunk of {printable(found.chunk.rid)}"
    if not left:
        return f"Pass {found.number} {joined}, which is all that waited."
    return f"Pass {found.number} {joined}; {count(left, 'request')} stayed behind: {_stopped(found.ending)}."


def pass_rows(found: PassExplanation) -> list[tuple[str, str, str, str, str]]:
    """The queue as lines: place, request, why it stands there, what is cached of it, what became of it.

    Requests in a row that stand there for the same reason and were not looked at share a line from the second one on.
    """
    rows = []
    if found.chunk is not None:
        rows.append(("chunk", printable(found.chunk.rid), "goes on before the queue", "", verdict_words(found.chunk)))
    for _, alike in groupby(found.places, _reason):
        places = list(alike)
        first = places[0]
        fold = len(places) >= FOLD_FROM
        rows += [_row(place, found.ending) for place in (places[:1] if fold else places)]
        if fold:
            span = f"{first.place + 1} … {places[-1].place}"
            rows.append((span, count(len(places) - 1, "request"), "each as the one before it", "", ""))
    return rows


def _reason(place: Place) -> object:
    if place.verdict is not None or place.against is None:
        return place.rid
    origin = None if place.origin is None or not place.matched else (place.origin.rid, place.origin.pass_number)
    return place.against.field, place.matched, place.duplicate, origin


def _row(place: Place, ending: Ending) -> tuple[str, str, str, str, str]:
    why = "first" if place.against is None else against_words(place.against)
    held = held_words(place)
    if held is not None:
        why += f"; {held}"
    moved = f"{place.place_before} -> {place.place}" if place.place_before != place.place else str(place.place)
    match = match_words(place).removeprefix("matched ")
    if match in {"nothing of it is cached", "not looked up"}:
        match = "-"
    became = "not looked at" if place.verdict is None else place_words(place, ending)
    return moved, printable(place.rid), why, match, became


def _stopped(ending: Ending) -> str:
    return ending_words(ending).replace("stands before it and did", "did")


def policy_words(found: PassExplanation | Look) -> str:
    """The policy that sorted, and why it was not the configured one."""
    if found.fallback is None:
        return found.active
    return f"{found.configured} running as {found.active} ({FALLBACKS[found.fallback]})"


def pass_policy(found: PassExplanation) -> str:
    """Policy and budgets."""
    left = found.budget
    chunk = "no chunking" if left.chunk is None else f"chunk {number(left.chunk)}"
    memory = f"memory {number(left.total)} after output reserves"
    return f"policy {policy_words(found)}; {memory}, prefill {number(left.input)}, {chunk}"


# ---- a run's ledger ------------------------------------------------------------------------------------------


def run_sentence(ledger: RunLedger) -> str:
    """What requests of a run waited for, in a sentence."""
    if not ledger.requests:
        return "No request of this run was in the queue."
    sums: Counter[tuple[str, str | None]] = Counter()
    for each in ledger.causes:
        sums[each.cause, each.after] += each.ns
    reasons = ", ".join(
        f"{ns / ledger.queued_ns:.0%} {_SENTENCES[cause]}" + (f", after they were {after}" if after else "")
        for (cause, after), ns in sums.most_common(_NAMED)
        if ns * 20 >= ledger.queued_ns
    )
    still = f" ({ledger.open:,} still wait)" if ledger.open else ""
    waited = f"{count(ledger.requests, 'request')}{still} waited {duration(ledger.queued_ns)} in all"
    return f"{waited}: {reasons}." if reasons else f"{waited}."
