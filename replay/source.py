"""Whose decisions a run records, and what a scheduler that is not ours doesn't tell of them."""

from __future__ import annotations

from collections.abc import Mapping

from schedscope.recorder.manifest import Manifest

UNTOLD: Mapping[str, frozenset[str]] = {
    "decisions": frozenset({"key", "key_names", "partner", "shared_len", "reason", "need", "have"}),
    "passes": frozenset(
        {
            "decide_ns",
            "decision_hash",
            "divergence",
            "delayer_slot_condition",
            "delayer_queue_condition",
        }
    ),
    "requests": frozenset({"end_detail"}),
}
"""Columns that an observed scheduler doesn't fill, by table: the core does, where a recording is sealed."""


def is_observed(manifest: Manifest) -> bool:
    """Whether the scheduler was one that we only watched."""
    return manifest.source is not None and manifest.source.is_observed
