"""The `schedscope` command. Each sub-command is imported only when it is called."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Sequence

import cyclopts
from schedscope.cli.help import HelpLayout
from schedscope.engine.errors import SchedscopeError
from schedscope.replay.garbage import collecting_less

app = cyclopts.App(
    name="schedscope",
    help="Flight recorder, replay debugger and what-if lab for LLM-serving schedulers.",
    version_flags=["--version"],
    help_formatter=HelpLayout(),
)
COMMANDS = {
    "demo": ("demo:demo", "Serve and record a small workload, replay every pass, and show what to type next."),
    "record": ("record:record", "Run a server and record every scheduling pass of it."),
    "serve": ("serve:serve", "Serve a model with schedscope's own engine."),
    "load": ("load:load", "Send a recorded workload to a server and measure it."),
    "replay": ("replay:app", "Re-run recorded passes and compare them, or decide them differently."),
    "doctor": ("doctor:doctor", "Find what makes a run's requests wait, what it costs, and what to try."),
    "explain": ("explain:app", "Say why a request waited, or why a pass came out as it did."),
    "tui": ("tui:tui", "Walk through a run in the terminal and ask why."),
    "dashboard": (
        "dashboard:dashboard",
        "Show runs in a browser: hit rate and TTFT over time, down to every decision.",
    ),
    "report": ("report:report", "Write a run down as one HTML file: charts, findings and their evidence."),
    "query": ("query:query", "Ask a run anything in SQL."),
    "scenario": ("scenario:app", "Run and check hand-written scheduling scenarios."),
    "runs": ("runs:runs", "List recorded runs."),
    "inspect": ("inspect:inspect", "Show what a run takes on disk, by table and column, and what it is missing."),
    "upload": ("upload:upload", "Upload what recordings could not."),
}
for _name, (_target, _help) in COMMANDS.items():
    app.command(f"schedscope.cli.{_target}", name=_name, help=_help)

USAGE = 2
EXTRAS = {
    "engine": {"h11", "httpx", "numpy", "starlette", "tokenizers", "torch", "transformers", "uvicorn"},
    "tui": {"textual"},
    "dashboard": {"dash", "flask", "waitress", "werkzeug"},
}
"""What the extras bring."""
INTERRUPTED = 130
BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks an arrow gets a question mark.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with collecting_less():  # the command is imported here
            command, given, _ = app.parse_args(words, exit_on_error=False, print_error=False)
        result = command(*given.args, **given.kwargs)
        sys.stdout.flush()
    except SchedscopeError as error:
        print(f"schedscope: {error}", file=sys.stderr)
        return error.exit_code
    except cyclopts.CycloptsError as error:
        print(f"schedscope: {_first_line(error)}", file=sys.stderr)
        if words[:1] == ["record"] and "--" not in words:
            print("The command to record stands after --, such as: schedscope record -- serve", file=sys.stderr)
        print(f"Try: {' '.join(['schedscope', *_command_words(words), '--help'])}", file=sys.stderr)
        return USAGE
    except ImportError as error:
        package = _missing_package(error)
        extra = next((name for name, packages in EXTRAS.items() if package in packages), None)
        if extra is None:
            raise
        print(f"schedscope: this command needs {package}: pip install 'schedscope[{extra}]'", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    if argv is None:
        gc.freeze()  # the program ends: no one needs its memory back piece by piece
    return result if isinstance(result, int) else 0


def _missing_package(error: BaseException | None) -> str:
    """The package that isn't there. Importing a command's module may wrap the error that says so."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__ or error.__context__
    return "" if error is None else (error.name or "").partition(".")[0]


def _first_line(error: cyclopts.CycloptsError) -> str:
    return " ".join(str(error).split())


def _command_words(words: Sequence[str]) -> list[str]:
    """The leading words that name a command, for the hint."""
    named: list[str] = []
    for word in words[:2]:
        if word.startswith("-") or (named and named[0] not in {"explain", "replay", "scenario"}):
            break
        if not named and word not in app:
            break
        named.append(word)
    return named


if __name__ == "__main__":
    sys.exit(main())
