"""What a client hears of its request: text as it becomes certain, stop texts held back until they can't be one."""

from __future__ import annotations

from collections.abc import Callable

from schedscope.engine.protocol import Output
from schedscope.engine.tokenizer import IncrementalDecoder, Tokenizer

Deliver = Callable[[Output], None]


class Talk:
    """What a client has been told of one request."""

    def __init__(self, deliver: Deliver, tokenizer: Tokenizer, stops: tuple[str, ...], arrived: float) -> None:
        self.deliver = deliver
        self.arrived = arrived
        self.admitted: float | None = None
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = stops
        # A stop text may come in pieces: so much is never sent before more follows.
        self._hold = max((len(stop) for stop in stops), default=1) - 1
        self._pending = ""

    def hear(self, token: int) -> str | None:
        """Take a token in. Returns the stop text that is complete with it."""
        self._pending += self._decoder.push([token])
        found = [(self._pending.find(stop), stop) for stop in self._stops if stop in self._pending]
        if not found:
            return None
        at, stop = min(found)
        self._pending = self._pending[:at]
        return stop

    def say(self, *, last: bool) -> str:
        """The text to send now."""
        if last:
            text, self._pending = self._pending, ""
            return text
        cut = len(self._pending) - self._hold
        if cut <= 0:
            return ""
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text

    def end(self, *, stopped: bool) -> None:
        """No more tokens will come."""
        if not stopped:
            self._pending += self._decoder.flush()
