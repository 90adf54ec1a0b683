"""What a verification finds."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple


class Divergence(NamedTuple):
    """The first field of a rank that a re-run does not reproduce."""

    rank: int
    pass_number: int | None
    step: int
    table: str
    rid: str | None
    field: str
    recorded: Any
    replayed: Any

    def to_json(self) -> dict[str, Any]:
        """All fields, with `pass` for `pass_number`."""
        facts = self._asdict()
        return {"pass": facts.pop("pass_number"), **facts}

    def __str__(self) -> str:
        where = f"pass {self.pass_number}, step {self.step}" if self.pass_number is not None else f"step {self.step}"
        whose = f", request {self.rid}" if self.rid is not None else ""
        return (
            f"rank {self.rank}, {where}{whose}: {self.table}.{self.field}: "
            f"recorded {self.recorded!r}, replayed {self.replayed!r}"
        )


class Verdict(NamedTuple):
    """What a verification found on one rank."""

    rank: int
    passes: int
    """Passes that were compared."""
    decisions: int
    steps: int
    divergence: Divergence | None
    first_pass: int = 0
    """From here on it was compared; later than asked for if the log doesn't reach back so far."""
    open_pass: int | None = None
    """The last pass, if its step has not ended, so there is nothing to compare it with yet."""
    basis: Literal["start", "view"] = "start"
    """`start`: every state was rebuilt from what the scheduler was fed. `view`: each pass was decided again from what
    it was seen to read, whatever came before it."""
    lost: tuple[tuple[int, int | None], ...] = ()
    """Behind which pass records are missing, and the first pass that could be compared again; None: none could."""
