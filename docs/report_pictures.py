"""Takes the pictures of reports in the documents: ``python docs/report_pictures.py``, after ``make demo``.

They are the tops of the demo's report (``out/demo/report.html``), of a search's and of a sweep's.  It needs Chromium,
and a machine that did nothing else while the demo ran: the picture shows its noise.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

ROOT: Final = Path(__file__).parents[1]
DEMO: Final = ROOT / "out" / "demo" / "report.html"
QUESTION: Final = ["--model", "llama-3-8b", "--hardware", "rtx-3090", "--batch-size", "1", "--sequence-length", "2048"]
SWEEP: Final = ["--sequence-length", "2048:131072", "--batch-size", "1:16"]
WIDTH_PX: Final = 1100
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")


def take(page: Path, picture: Path, *, height_px: int, browser: str) -> None:
    """Write the top of ``page`` as PNG."""
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1")
    size = f"--window-size={WIDTH_PX},{height_px}"
    command = (browser, *options, size, f"--screenshot={picture}", page.resolve().as_uri())
    subprocess.run(command, check=True, capture_output=True)


def main() -> int:
    """Take them; gives the exit code."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None or not DEMO.exists():
        missing = "no Chromium on the path: install it" if browser is None else f"no {DEMO}: run make demo"
        sys.stderr.write(f"{missing}.\n")
        return 2
    take(DEMO, ROOT / "docs" / "report.png", height_px=2230, browser=browser)
    with TemporaryDirectory() as folder:
        page = Path(folder) / "search.html"
        protwin = Path(sys.executable).with_name("protwin")
        subprocess.run((protwin, "search", *QUESTION, "--report", page), check=True, capture_output=True)
        take(page, ROOT / "docs" / "search.png", height_px=1300, browser=browser)
        asked = ("--model", "llama-3-8b", "--hardware", "h100-80gb", *SWEEP)
        subprocess.run((protwin, "sweep", *asked, "--report", page), check=True, capture_output=True)
        take(page, ROOT / "docs" / "sweep.png", height_px=1680, browser=browser)
    return 0


if __name__ == "__main__":
    sys.exit(main())
