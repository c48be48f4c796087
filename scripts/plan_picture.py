"""Draw a plan's screen as docs/plan.svg, the picture of the README."""

from __future__ import annotations

import subprocess
import sys
from html import escape
from pathlib import Path

COMMAND = ["plan", "--model", "gpt2-10b", "--machine", "v100-32gb"]
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "plan.svg"
WIDTH, HEIGHT = 7.2, 17  # size of a character in pixels


def picture() -> str:
    command = [sys.executable, "-m", "offload_trainer", *COMMAND]
    screen = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [f"$ offload-train {' '.join(COMMAND)}", *screen.splitlines()]
    size = f'width="{102 * WIDTH:.0f}" height="{(len(lines) + 1) * HEIGHT}"'
    texts = [f'<text x="7" y="{(row + 1) * HEIGHT}">{escape(line)}</text>' for row, line in enumerate(lines)]
    style = 'font-family="monospace" font-size="12" fill="#ddd" xml:space="preserve"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>',
            '<rect width="100%" height="100%" fill="#222"/>',
            *texts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
