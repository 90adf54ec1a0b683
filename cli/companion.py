"""`python -m schedscope.cli.companion FOLDER`: what a server starts that records itself."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from schedscope.engine.errors import SchedscopeError
from schedscope.recorder.companion import Companion
from schedscope.recorder.salvage import salvage
from schedscope.recorder.upload import begin_run
from schedscope.replay.shadow import follow


def main(folder: str, *command: str) -> int:
    """Record into a new run, for as long as standard input is open or there is someone to record."""
    logging.basicConfig(format="schedscope: %(message)s")
    try:
        salvage()
        run_dir, uploader = begin_run(folder, Path(command[0]).name if command else "run", command)
        with Companion.start(run_dir, follow=follow()) as companion:
            print(json.dumps(companion.environment()), flush=True)
            sys.stdin.read()
            companion.wait_until_left()
        if uploader is not None and (left := uploader.finish()) is not None:
            logging.warning("%s", left)
    except SchedscopeError as error:
        print(f"schedscope: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
