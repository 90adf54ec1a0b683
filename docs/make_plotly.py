"""Makes dashboard/assets/plotly.min.js, plotly.js with the traces that charts are made of: python docs/make_plotly.py

A quarter of the whole library, and a browser has read it in a quarter of the time. Needs npm.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

PLOTLY = "4.1.1"
ESBUILD = "0.28.2"
TRACES = ("bar", "heatmap", "icicle")
"""Beside scatter, which is always there."""
MADE = Path(__file__).parent.parent / "dashboard" / "assets" / "plotly.min.js"


def main() -> None:
    """Fetch, bundle, and say how large it is."""
    with tempfile.TemporaryDirectory() as folder:
        entry = Path(folder, "entry.js")
        traces = ", ".join(f'require("plotly.js/lib/{name}")' for name in TRACES)
        entry.write_text(
            f'const Plotly = require("plotly.js/lib/core");\nPlotly.register([{traces}]);\nmodule.exports = Plotly;\n'
        )
        Path(folder, "package.json").write_text("{}")
        packages = (f"plotly.js@{PLOTLY}", f"esbuild@{ESBUILD}")
        subprocess.run(["npm", "install", "--ignore-scripts", "--no-audit", *packages], cwd=folder, check=True)
        banner = f"// plotly.js {PLOTLY}, {', '.join(('scatter', *TRACES))}. Copyright Plotly, Inc. MIT license."
        command = [
            *("npx", "esbuild", entry.name, "--bundle", "--minify", "--format=iife", "--global-name=Plotly"),
            *("--target=es2020", "--define:global=window", "--loader:.css=empty", f"--banner:js={banner}"),
            *("--legal-comments=eof", f"--outfile={MADE}"),
        ]
        subprocess.run(command, cwd=folder, check=True)
    print(f"{MADE}: {MADE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
