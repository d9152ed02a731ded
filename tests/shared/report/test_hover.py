"""What pointing at a task shows, in a real browser, where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from protwin.shared.records.waits import waits_of
from tests.shared.laid_out import laid_out
from tests.shared.report_pages import html_report, parse

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium to open the page with")]


def opened(html: str, folder: Path) -> str:
    """The page as the browser has it once it is open and its scripts have run."""
    page = folder / "page.html"
    page.write_text(html, encoding="utf-8")
    assert BROWSER is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
    done = subprocess.run(
        [BROWSER, *options, f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if not done.stdout.strip():
        pytest.skip(f"the browser does not run here: {done.stderr[-200:]}")
    return done.stdout


def test_the_policy_lets_the_pages_own_script_run_and_no_other(tmp_path: Path) -> None:
    example = laid_out(3)
    html = html_report(title="t", predicted=example.predicted, schedule=example.schedule)
    assert 'tabindex="0"' in opened(html, tmp_path)
    foreign = html.replace("</main>", "<script>document.title = 'taken over'</script></main>")
    assert "<title>taken over" not in opened(foreign, tmp_path)
    assert 'tabindex="0"' not in opened(html.replace('"use strict";', '"use strict"; 1;'), tmp_path)


def test_pointing_at_a_task_shows_what_it_waits_for(tmp_path: Path) -> None:
    example = laid_out(4)
    html = html_report(title="t", predicted=example.predicted, schedule=example.schedule)
    waits = waits_of(example.predicted, example.schedule)
    task = max(example.schedule.tasks, key=lambda t: (len(waits[t.id].after) + len(waits[t.id].earlier), t.id))
    point = (
        "<script>for (const bar of document.querySelectorAll('svg.lanes .bar'))"
        f" if (bar.textContent.startsWith('{task.name}\\n'))"
        " bar.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));</script></body>"
    )
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html).replace("</body>", point)
    page = parse(opened(html, tmp_path).replace("<!DOCTYPE html>", ""))
    bars = [e for e in page.elements if "bar" in (e.attributes.get("class") or "").split()]

    def lit(name: str) -> set[str]:
        return {bar.words.split("\n")[0] for bar in bars if name in (bar.attributes["class"] or "").split()}

    def shown(tasks: set[int]) -> set[str]:
        words = {"gradient_offload": "gradient offload", "cpu_adam": "CPU Adam", "device_adam": "device Adam"}
        names = (example.schedule.tasks[other].name for other in tasks)
        return {" ".join([words.get(name.split(" ")[0], name.split(" ")[0]), *name.split(" ")[1:]]) for name in names}

    assert lit("chosen") == shown({task.id})
    assert lit("waited-for") == shown({*task.after, *task.after_previous})
    waiting = {other.id for other in example.schedule.tasks if task.id in {*other.after, *other.after_previous}}
    assert lit("waiting") == shown(waiting)
    (told,) = [e.words for e in page.named("p") if "told" in (e.attributes.get("class") or "")]
    assert all(name in told for name in shown(set(task.after)))
