"""Compare outcomes with the ``expect`` of scenarios, by the rules of the conformance format.

Usage::

    python compare.py SCENARIOS OUTCOMES

SCENARIOS is anything ``run_sglang.py`` reads (JSON lines or YAML, optionally gzipped); OUTCOMES holds lines
``{"id": ..., "expect": {...}}``.  Prints each difference as ``id: path: expected X, got Y``.  Exit code 1 if
anything differs.  Only the standard library is needed, and PyYAML for YAML files.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]

SETS = {"deprioritized", "preempted"}
TOLERANCE = 1e-6


def differences(expected: Any, got: Any, path: str = "") -> Iterator[str]:
    """Where ``got`` does not have what ``expected`` asks for; keys that are not expected are not compared."""
    name = path.rpartition(".")[2]
    if isinstance(expected, dict) and isinstance(got, dict):
        for key, value in expected.items():
            yield from _member(key, value, got, f"{path}.{key}" if path else key)
    elif isinstance(expected, list) and isinstance(got, list):
        if name in SETS:
            expected, got = sorted(expected), sorted(got)
        if len(expected) != len(got):
            yield f"{path}: expected {len(expected)} items {expected}, got {len(got)} items {got}"
            return
        for index, (one, other) in enumerate(zip(expected, got, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif not _same(expected, got):
        yield f"{path}: expected {expected!r}, got {got!r}"


def _member(key: str, value: Any, got: Json, path: str) -> Iterator[str]:
    if key == "waiting_after" and isinstance(got.get(key), list):
        # The preempted are at the end, in any order among themselves.
        tail = len(got.get("preempted", []))
        keep = len(value) - tail
        value = value[:keep] + sorted(value[keep:])
        found = got[key]
        yield from differences(value, found[: len(found) - tail] + sorted(found[len(found) - tail :]), path)
    elif key == "error" and isinstance(got.get(key), dict):
        if value.get("type") != got[key].get("type"):
            yield f"{path}.type: expected {value.get('type')}, got {got[key].get('type')}"
        elif value.get("contains", "").lower() not in got[key].get("contains", "").lower():
            yield f"{path}.contains: {value.get('contains')!r} is not in {got[key].get('contains')!r}"
    elif key in ("order_head", "order_tail"):
        order = got.get("order", [])
        part = order[: len(value)] if key == "order_head" else order[len(order) - len(value) :]
        yield from differences(value, part, path)
    elif key == "prefix_len" and isinstance(value, dict):
        # Lists only what differs from the matched length.
        whole = got.get("matched", {}) | got.get("prefix_len", {})
        yield from differences(value, whole, path)
    elif key not in got:
        yield f"{path}: missing, expected {value!r}"
    else:
        yield from differences(value, got[key], path)


def _same(expected: Any, got: Any) -> bool:
    numbers = (int, float)
    if isinstance(expected, bool) or isinstance(got, bool):
        return expected is got
    if isinstance(expected, numbers) and isinstance(got, numbers):
        return abs(expected - got) <= TOLERANCE
    return bool(expected == got)


def read(path: str) -> Iterator[Json]:
    """The JSON lines or YAML documents of a file."""
    data = Path(path).read_bytes()
    if path.endswith(".gz"):
        data, path = gzip.decompress(data), path.removesuffix(".gz")
    if path.endswith((".yaml", ".yml")):
        import yaml

        yield from (document for document in yaml.safe_load_all(data) if document)
    else:
        yield from (json.loads(line) for line in data.splitlines() if line.strip())


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Compare outcomes with the expect of scenarios.")
    parser.add_argument("scenarios", nargs="+", help="scenario files")
    parser.add_argument("outcomes", help="file of outcomes")
    args = parser.parse_args()
    outcomes = {line["id"]: line for line in read(args.outcomes)}
    compared = differing = 0
    for path in args.scenarios:
        for scenario in read(path):
            if scenario.get("kind") == "check":
                continue
            line = outcomes.get(scenario["id"], {"unsupported": "no outcome"})
            compared += 1
            if "expect" not in line:
                found = [line.get("unsupported", "no outcome")]
            else:
                found = list(differences(scenario["expect"], line["expect"]))
            differing += bool(found)
            for text in found:
                print(f"{scenario['id']}: {text}")
    print(f"{compared} compared, {differing} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
