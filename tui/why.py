"""Why a request stands where it stands: one sentence, then the chain of what it follows from, every value a link.

Plain functions from what was recorded and what other modules explain to lines; nothing is worked out here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from schedscope.engine.verdict import Reason, Verdict
from schedscope.replay.describe import FALLBACKS, number, printable, verdict_words
from schedscope.replay.explain_words import (
    against_words,
    cause_words,
    flip_words,
    mark_words,
    origin_words,
    pool_words,
    where_words,
)
from schedscope.replay.explanation import PassExplanation
from schedscope.replay.explanation import Place as ExplainedPlace
from schedscope.replay.ledger import Part, RequestLedger
from schedscope.replay.page import Candidate, Page
from schedscope.replay.palette import CAUSES, GATES, GREY, POLICIES, VERDICTS
from schedscope.replay.provenance import Origin
from schedscope.tui.cursor import Cursor, Place
from schedscope.tui.linked import Line, Link, Span
from schedscope.tui.look import Look, seconds

_PARTS = 6
"""Causes of a ledger that are listed."""
_NAMED = 3
"""Requests that each of them names."""
_OF_MEMORY = {str(Reason.MEMORY), str(Reason.MEMORY_IGNORE_EOS), str(Reason.MEMORY_FUTURE), str(Reason.TOTAL_SPENT)}


class Known(NamedTuple):
    """What is known so far of what is selected; the rest comes while one reads."""

    page: Page
    rid: str | None
    identical: bool | None = None
    replaying: bool = True
    problem: str | None = None
    """Why the pass can't be re-run."""
    explained: PassExplanation | None = None
    ledger: RequestLedger | None = None
    gates: tuple[tuple[str, int, float], ...] = ()
    """Gates since the pass before: what, steps, seconds."""


def why_lines(known: Known, look: Look) -> list[Line]:
    """Everything there is to say, the answer first."""
    page = known.page
    candidate = page.find(known.rid)
    lines: list[Line] = []
    place = None if known.explained is None or known.rid is None else known.explained.place_of(known.rid)
    if candidate is not None:
        lines += _of_candidate(page, candidate, place, look)
    elif known.rid is not None:
        lines += _of_absent(page, known.rid, look)
    if known.explained is not None and place is not None:
        lines += flip_lines(place, look)
        lines += elsewhere_lines(place, page, look)
    if known.ledger is not None:
        lines += [(), *ledger_lines(known.ledger, look)]
    if known.explained is not None and place is not None:
        lines += memory_lines(known.explained, place, page)
    lines += [*([()] if lines else []), *_of_pass(known, look)]
    return lines


def jump(page: Page, rid: str | None, number_: int | None = None, view: str = "pass") -> Link:
    """A link to a request of a pass."""
    facts = page.facts
    return Link(Place(Cursor(facts.rank, facts.number if number_ is None else number_, rid), view))


def sentence(page: Page, candidate: Candidate) -> str:
    """What became of a request, in one sentence."""
    rid, place = printable(candidate.rid), candidate.after
    queue = len(page.candidates)
    if candidate.verdict is not None:
        return f"{rid}, at place {place} of {queue}, was {verdict_words(candidate.verdict)}."
    if candidate.held_back and candidate.partner is not None:
        return (
            f"{rid} waits at place {place} of {queue}, held back because {printable(candidate.partner)} "
            f"brings the same {number(candidate.shared_len)} tokens first."
        )
    return f"{rid} waits at place {place} of {queue}; the pass ended before it: {page.end}."


def _of_candidate(page: Page, candidate: Candidate, place: ExplainedPlace | None, look: Look) -> list[Line]:
    """The answer, and what it follows from; what was explained instead of what was recorded, as soon as it is there."""
    label = look.hue(GREY)
    fate = look.of(VERDICTS, candidate.fate)
    lines: list[Line] = [(Span(f"{_glyph(candidate.fate)} ", fate), Span(sentence(page, candidate), "bold"))]
    before = candidate.before
    if before is not None:
        moved = before - candidate.after
        words = f"{before} → {candidate.after}" + (f", {abs(moved)} {'up' if moved > 0 else 'down'}" if moved else "")
        lines.append((Span("  place    ", label), Span(words)))
    names = ", ".join(page.key_names) or "place in the queue"
    key = "  ".join(candidate.key) or str(before)
    lines.append((Span("← key      ", label), Span(key), Span(f"  ({names})", label)))
    against = None if place is None else place.against
    if against is not None:
        words = against_words(against).removeprefix(f"behind {printable(against.rid)}")
        lines.append(
            (Span("  behind   ", label), Span(printable(against.rid), "", jump(page, against.rid)), Span(words))
        )
    elif candidate.after:
        ahead = page.candidates[candidate.after - 1]
        lines.append((Span("  behind   ", label), Span(printable(ahead.rid), "", jump(page, ahead.rid))))
    if candidate.matched is not None:
        matched = Span(f"{candidate.matched:,} tokens", "", jump(page, candidate.rid, view="cache"))
        line = [Span("← matched  ", label), matched]
        if place is not None and place.origin is not None:
            line += [Span(" ← "), *_origin(page, place.origin)]
        lines.append(line)
    if candidate.held_back and candidate.partner is not None:
        lines.append(
            (
                Span("← held back for ", label),
                Span(printable(candidate.partner), "", jump(page, candidate.partner)),
                Span(f", which shares {number(candidate.shared_len)} uncached tokens"),
            )
        )
    elif candidate.held_back:
        lines.append((Span("← held back: the threshold asks for no shared token", label),))
    last = next((c for c in reversed(page.candidates) if c.verdict is not None), None)
    if candidate.verdict is None and last is not None and last.rid != candidate.rid:
        lines.append((Span("  ended by ", label), Span(printable(last.rid), "", jump(page, last.rid))))
    return lines


def _origin(page: Page, origin: Origin) -> list[Span]:
    """Who brought a cached prefix, with a link to the pass in which that was."""
    words = origin_words(origin)
    if origin.rid is None or origin.pass_number is None:
        return [Span(words)]
    who = printable(origin.rid)
    before, _, after = words.partition(who)
    return [Span(before), Span(who, "", jump(page, origin.rid, origin.pass_number)), Span(after)]


def _of_absent(page: Page, rid: str, look: Look) -> list[Line]:
    verdict = next((v for v in page.verdicts if v.rid == rid), None)
    if verdict is not None:
        return [(Span("◆ ", look.of(VERDICTS, "chunk")), Span(f"{printable(rid)}: {verdict_words(verdict)}.", "bold"))]
    life = Link(Place(Cursor(page.facts.rank, page.facts.number, rid), "request"))
    return [(Span(f"{printable(rid)} is not in the queue of this pass. ", "bold"), Span("Its whole life", "", life))]


def flip_lines(place: ExplainedPlace, look: Look) -> list[Line]:
    """The smallest changes that would have admitted it, or put it further in front."""
    label = look.hue(GREY)
    if not place.flips and not place.ahead:
        if place.verdict is not None:
            return []
        return [(Span("  no single change of those tried would have let it in", label),)]
    lines: list[Line] = [(), (Span("What would have helped", "bold"), Span("  checked by deciding again", label))]
    lines += [(Span("  · ", label), Span(flip_words(flip))) for flip in place.flips]
    return lines + [(Span("  ↑ ", label), Span(flip_words(flip))) for flip in place.ahead]


def memory_lines(explained: PassExplanation, place: ExplainedPlace, page: Page) -> list[Line]:
    """What the pool was full of, and the mark under which the pass began, where that kept it out."""
    lines: list[Line] = []
    if place.verdict is not None and place.verdict.admitted:
        return lines
    if explained.ending.reason in _OF_MEMORY:
        lines += [(), (Span("The pool", "bold"), Span(f"  {pool_words(explained.pool)}"))]
    mark = explained.mark_before
    if mark is not None:
        where = None if mark.set_in is None else jump(page, mark.rid, mark.set_in)
        lines += [(), (Span("The mark", "bold"), Span("  "), Span(mark_words(mark), "", where))]
    return lines


def elsewhere_lines(place: ExplainedPlace, page: Page, look: Look) -> list[Line]:
    """Where it would have stood, policy by policy; each opens the pass under it, beside this one."""
    row: list[Span] = []
    for each in place.elsewhere:
        if each.policy == page.facts.active or each.fate.place is None:
            continue
        mark = " ✓" if each.fate.admitted else ""
        row += [
            Span(each.policy, look.of(POLICIES, each.policy), Link(command=f"other({each.policy!r})")),
            Span(f" {each.fate.place}{mark}   "),
        ]
    if not row:
        return []
    head = (Span("Its place under another policy", "bold"), Span("  ✓ admitted", look.hue(GREY)))
    return [(), head, row]


def ledger_lines(ledger: RequestLedger, look: Look, most: int = _PARTS) -> list[Line]:
    """What it waited for, the largest cause first, with whom it is charged to and the pass that cost most of it."""
    total = ledger.queued_ns
    head = f"It waited {seconds(total / 1e9)} in the queue" + (" so far" if ledger.waits else "")
    lines: list[Line] = [(Span(head, "bold"),)]
    groups: dict[tuple[str | None, str], list[Part]] = {}
    for part in ledger.parts:
        groups.setdefault((part.after, cause_words(part)), []).append(part)
    largest = sorted(groups.items(), key=lambda group: -sum(part.ns for part in group[1]))
    for (after, words), parts in largest[:most]:
        ns = sum(part.ns for part in parts)
        spans = [
            Span(f"{ns / total if total else 0.0:>5.0%} ", look.of(CAUSES, parts[0].cause)),
            Span(f"{seconds(ns / 1e9):>8}  ", look.hue(GREY)),
            Span(words if after is None else f"{words} ({after} before)"),
            *_charged(ledger, parts),
        ]
        worst = max(parts, key=lambda part: part.ns)
        if worst.worst_pass is not None:
            place = Place(Cursor(ledger.rank, worst.worst_pass, ledger.rid), "pass")
            spans += [Span(", most in "), Span(f"pass {worst.worst_pass}", "", Link(place))]
        elif where := where_words(parts):
            spans.append(Span(f", {where}"))
        lines.append(spans)
    if len(largest) > most:
        lines.append((Span(f"      and {len(largest) - most} smaller ones", look.hue(GREY)),))
    return lines


def _charged(ledger: RequestLedger, parts: Sequence[Part]) -> Iterator[Span]:
    """Whom time is charged to, as links."""
    named = [part for part in sorted(parts, key=lambda part: -part.ns) if part.rid not in {None, ledger.rid}]
    for place, part in enumerate(named[:_NAMED]):
        whom = Cursor(ledger.rank, part.worst_pass or part.first_pass or 0, part.rid)
        yield Span(": " if place == 0 else ", ")
        yield Span(printable(part.rid or ""), "", Link(Place(whom, "request")))
    if len(named) > _NAMED:
        yield Span(f" and {len(named) - _NAMED} more")


def _of_pass(known: Known, look: Look) -> list[Line]:
    page, facts = known.page, known.page.facts
    label = look.hue(GREY)
    lines: list[Line] = [(Span(f"Pass {facts.number}", "bold"), Span(f"  {_proof(known)}", label))]
    policy = facts.active
    if facts.fallback is not None:
        policy = f"{facts.configured} running as {facts.active}: {FALLBACKS.get(facts.fallback, facts.fallback)}"
    lines.append((Span("policy     ", label), Span(policy)))
    last = next((c for c in reversed(page.candidates) if c.verdict is not None), None)
    end: list[Span] = [Span("ended      ", label), Span(page.end)]
    if last is not None and facts.stop not in {"queue_end"}:
        end += [Span("  "), Span(printable(last.rid), "", jump(page, last.rid))]
    lines.append(end)
    if page.admitted:
        spans = [Span("admitted   ", label)]
        for verdict in page.admitted[:12]:
            spans += [_named(page, verdict), Span(" ")]
        if len(page.admitted) > 12:
            spans.append(Span(f"and {len(page.admitted) - 12} more"))
        lines.append(spans)
    lines += [
        (Span("preempted  ", label), Span(printable(rid), "", jump(page, rid, view="request")))
        for rid in facts.preempted
    ]
    for what, steps, took in known.gates:
        words = f"gate {what}, {steps} step{'s' * (steps > 1)}, {seconds(took)}"
        lines += [(Span("before it  ", label), Span(words, look.of(GATES, what)))]
    if facts.delayer_allow is not None:
        verdict_ = "lets it prefill" if facts.delayer_allow else "says wait"
        reason = facts.delayer_reason or "no rank can prefill"
        lines.append((Span("delayer    ", label), Span(f"{verdict_}: {reason}")))
        for place, report in enumerate(page.reports):
            told = [
                "can prefill" if report["prefillable"] else "nothing to prefill",
                f"{report['running_batch']} running",
                f"{report['waiting_queue_len']} waiting",
                *(["below the watermark"] if report["force_allow"] else []),
                *(["waited too long"] if report["queue_timeout_expired"] else []),
            ]
            whose_ = "this rank" if place == 0 else f"other {place}"
            lines.append((Span(f"  {whose_:<9}", label), Span(", ".join(told))))
    return lines


def _named(page: Page, verdict: Verdict) -> Span:
    return Span(printable(verdict.rid), "", jump(page, verdict.rid))


def _proof(known: Known) -> str:
    if known.problem is not None:
        return f"not re-run: {known.problem}"
    if known.identical is None:
        return "re-running …" if known.replaying else "re-run; its decisions were not recorded"
    return "✓ re-run, identical" if known.identical else "✗ re-run, and it differs: schedscope replay pass"


def _glyph(fate: str) -> str:
    return {"admitted": "●", "refused": "✗", "held_back": "◌", "waiting": "○"}[fate]
