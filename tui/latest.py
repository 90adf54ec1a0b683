"""Questions that take time, answered behind the screen: only the newest of a kind counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from schedscope.engine.errors import SchedscopeError

Answer = TypeVar("Answer")


class _Question(NamedTuple):
    ask: Callable[[], Any]
    done: Callable[[Any], None]
    failed: Callable[[str], None]


class Latest:
    """A thread for one kind of question. One that is overtaken is never begun, or its answer is dropped.

    Args:
        name: of the thread.
        deliver: has a function called on the screen's own thread.
        rest_s: a question is begun when none has overtaken it for so long.
    """

    def __init__(self, name: str, deliver: Callable[[Callable[[], None]], object], rest_s: float = 0.0) -> None:
        self._deliver = deliver
        self._rest_s = rest_s
        self._changed = threading.Condition()
        self._waiting: _Question | None = None
        self._newest = 0
        self._delivered = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come."""
        return self._delivered < self._newest

    def ask(
        self, question: Callable[[], Answer], done: Callable[[Answer], None], failed: Callable[[str], None]
    ) -> None:
        """Have a question answered instead of any before it.

        Args:
            question: runs on the thread.
            done: gets the answer, on the screen's thread.
            failed: gets the text of a SchedscopeError. Any other error is raised on the screen's thread.
        """
        with self._changed:
            self._waiting = _Question(question, done, failed)
            self._newest += 1
            self._changed.notify()

    def forget(self) -> None:
        """Answers to what was asked so far are no longer wanted."""
        with self._changed:
            self._waiting = None
            self._newest += 1
            self._delivered = self._newest

    def close(self) -> None:
        """End the thread after what it is doing."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting is not None)
                while not self._closed and self._overtaken(self._newest):
                    pass
                if self._closed:
                    return
                question, self._waiting = self._waiting, None
                number = self._newest
            if question is not None:
                self._answer(question, number)

    def _overtaken(self, number: int) -> bool:
        """Wait for so long as a question has to rest; whether another one came meanwhile."""
        return bool(self._rest_s) and self._changed.wait_for(
            lambda: self._closed or self._newest != number, self._rest_s
        )

    def _answer(self, question: _Question, number: int) -> None:
        try:
            answer = question.ask()
        except SchedscopeError as error:
            words = str(error)
            self._hand_over(number, lambda: question.failed(words))
        except Exception as error:
            raised = error
            self._hand_over(number, lambda: _raise(raised))
        else:
            self._hand_over(number, lambda: question.done(answer))

    def _hand_over(self, number: int, tell: Callable[[], None]) -> None:
        def deliver() -> None:
            if number == self._newest:
                self._delivered = number
                tell()

        self._deliver(deliver)


def _raise(error: Exception) -> None:
    raise error
