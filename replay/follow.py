"""Who follows a recording while it is sealed, depending on whose it is."""

from __future__ import annotations

from schedscope.engine.config import SchedulerConfig
from schedscope.recorder.frame import Rows
from schedscope.recorder.manifest import Manifest
from schedscope.recorder.sealer import Follow, Follower
from schedscope.replay.derive import Deriver
from schedscope.replay.shadow import ALONE_S, Shadow


def follow(alone_s: float = ALONE_S) -> Follow:
    """Followers for the ranks of a run, where anything can be re-run: with token ids or hashes.

    Args:
        alone_s: see `schedscope.replay.shadow`.
    """

    def follower(manifest: Manifest, rank: int) -> Follower | None:
        detail, source = manifest.detail, manifest.source
        if source is None or not (source.is_own or source.is_observed):
            return None
        if detail.level == "steps" or detail.tokens == "none":
            return None
        config = SchedulerConfig.from_dict(manifest.config_of(rank))
        shadow = Shadow(config, alone_s=alone_s)
        if source.is_own:
            return shadow.advance
        deriver = Deriver(config, rank)

        def advance(rows: Rows) -> Rows:
            return {**shadow.advance(rows), **deriver.advance(rows)}

        return advance

    return follower
