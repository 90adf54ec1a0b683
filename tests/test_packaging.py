"""What a user gets with pip, and what a command costs before it does anything."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "recorder", "replay", "tui", "dashboard", "dashboard/assets", "cli")


def test_the_wheel_holds_the_tree(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("schedscope-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    for package in PACKAGES:
        for file in (ROOT / package).iterdir():
            if file.is_file():
                assert f"schedscope/{package}/{file.name}" in held


def test_what_the_documentation_imports_is_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    imports = [found for page in pages for found in re.findall(r"from (schedscope\S+) import (.+)", page.read_text())]
    assert imports
    for module, names in imports:
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_help_imports_nothing_heavy() -> None:
    heavy = (
        "torch",
        "transformers",
        "textual",
        "pyarrow",
        "duckdb",
        "numpy",
        "httpx",
        "starlette",
        "yaml",
        "dash",
        "plotly",
        "flask",
    )
    code = (
        "import sys; from schedscope.cli.main import main; main(['--help']); "
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_recording_and_replay_need_no_torch() -> None:
    code = (
        "import sys; import schedscope.recorder.companion, schedscope.replay.verify, schedscope.replay.scenario_check; "
        "print([name for name in ('torch', 'transformers', 'starlette', 'httpx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("package", "extra", "words"),
    [
        (
            "httpx",
            "engine",
            ["load", "sample_logs/traces/mooncake_conversation_300.jsonl", "--url", "http://127.0.0.1:9"],
        ),
        ("textual", "tui", ["tui"]),
        ("dash", "dashboard", ["dashboard"]),
        ("dash", "dashboard", ["report", "--help"]),
    ],
)
def test_a_missing_extra_is_named(package: str, extra: str, words: list[str]) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\nfrom schedscope.cli.main import main\nsys.exit(main({words!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert f"schedscope[{extra}]" in done.stderr
    assert "Traceback" not in done.stderr
