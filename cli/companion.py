"""`python -m schedscope.cli.companion FOLDER`: what a server starts that records itself."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys

import cyclopts
from schedscope.cli.record import How, alone_s, run_name
from schedscope.engine.errors import SchedscopeError, UsageError
from schedscope.recorder.companion import Companion
from schedscope.recorder.options import Options
from schedscope.recorder.salvage import salvage
from schedscope.recorder.standalone import OPTIONS_VARIABLE
from schedscope.recorder.upload import begin_run
from schedscope.replay.follow import follow


def main(folder: str, *command: str) -> int:
    """Record into a new run, for as long as standard input is open or there is someone to record."""
    logging.basicConfig(format="schedscope: %(message)s")
    try:
        options = options_of(os.environ.get(OPTIONS_VARIABLE, ""))
        salvage()
        run_dir, uploader = begin_run(folder, run_name(command) if command else "server", command)
        with Companion.start(run_dir, options, follow(alone_s(options))) as companion:
            print(json.dumps(companion.environment()), flush=True)
            logging.warning("recording into %s", run_dir)
            sys.stdin.read()
            companion.wait_until_left()
        if uploader is not None and (left := uploader.finish()) is not None:
            logging.warning("%s", left)
    except SchedscopeError as error:
        print(f"schedscope: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def options_of(words: str) -> Options:
    """Options as `schedscope record` takes them. Raises UsageError."""
    app = cyclopts.App(version_flags=[], help_flags=[])

    @app.default
    def read(*, how: How = How()) -> Options:  # noqa: B008
        return how.options()

    try:
        found = app(shlex.split(words), exit_on_error=False, print_error=False, result_action="return_value")
    except (cyclopts.CycloptsError, ValueError) as error:
        raise UsageError(f"{OPTIONS_VARIABLE}: {' '.join(str(error).split())}") from None
    assert isinstance(found, Options)
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
