"""The pages of `verl-ext show` in headless Chromium: no errors, drawn figures, the metrics' numbers, escaped text."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.lib.chat_templates import CHATML, tiny_tokenizer
from tests.lib.shown import document, page_data, view, write_data, write_metrics

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")
SCRIPT = "<script>document.title='run by a document'</script>"


def browse(page: Path, *options: str) -> tuple[str, list[str]]:
    """Return the page's DOM once drawn, and the lines of its console."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", *options]
    command += ["--virtual-time-budget=20000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@needs_browser
@pytest.mark.parametrize(("scheme", "width"), [("dark", 400), ("light", 1300)])
def test_figures_of_runs_are_drawn_without_an_error(tmp_path, scheme, width):
    runs = [write_metrics(tmp_path / name, 60, ["maths", f"a {SCRIPT}"]) for name in ("one", "two")]
    page = tmp_path / "page.html"
    view(*runs, f"html={page}")
    preferred = {"dark": 0, "light": 1}[scheme]
    dom, console = browse(page, f"--window-size={width},900", f"--blink-settings=preferredColorScheme={preferred}")
    assert console == []
    charts = len(page_data(page)["charts"])
    assert charts == 6  # all categories, loss, two categories, learning rate, throughput
    assert f'data-drawn="{charts}"' in dom
    assert dom.count("<canvas") == charts
    assert "run by a document" not in re.search("<title>(.*?)</title>", dom)[1]


def test_the_numbers_of_a_page_are_those_of_the_json(tmp_path):
    run, page, numbers = write_metrics(tmp_path / "run", 30), tmp_path / "page.html", tmp_path / "curves.json"
    view(run, f"html={page}", f"json={numbers}")
    assert [one["curves"] for one in page_data(page)["runs"]] == [
        one["curves"] for one in json.loads(numbers.read_text())
    ]


def test_shares_of_experts_are_a_heat_map_of_layers(tmp_path):
    run, page = write_metrics(tmp_path / "run", 3), tmp_path / "page.html"
    shares = [[0.5, 0.25, 0.25, 0], [0.25, 0.25, 0.25, 0.25]]
    (run / "experts.jsonl").write_text(json.dumps({"step": 3, "layers": [1, 2], "shares": shares}) + "\n")
    view(run, f"html={page}")
    chart = page_data(page)["charts"][-1]
    assert chart["title"] == "run: experts of each layer at step 3, over an even share"
    cells = [(cell["layer"], cell["expert"], cell["times an even share"]) for cell in chart["values"]]
    assert cells == [(1, 0, 2), (1, 1, 1), (1, 2, 1), (1, 3, 0), *((2, expert, 1) for expert in range(4))]


@needs_browser
def test_long_curves_are_drawn_by_their_lowest_and_highest_points_and_the_page_holds_all(tmp_path):
    run, page = write_metrics(tmp_path / "run", 6000), tmp_path / "page.html"
    view(run, f"html={page}")
    text, data = page.read_text(), page_data(page)
    assert len(data["runs"][0]["curves"]["train/loss"]["steps"]) == 6000
    data["runs"][0]["curves"]["train/loss"]["values"][3333] = 99.0  # a spike
    body = f'id="data">{json.dumps(data)}</script>'
    text = text[: text.index('id="data">')] + body + text[text.index("</script>", text.index('id="data">')) + 9 :]
    ask = "document.body.dataset.rows = JSON.stringify(rows(page.charts[1]).filter(row => row.kind === 'train'));"
    page.write_text(text.replace("\ndraw();", f"\n{ask}\ndraw();"))
    dom, console = browse(page)
    assert console == []
    rows = json.loads(html.unescape(re.search('data-rows="([^"]*)"', dom)[1]))
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    assert 1000 < len(rows) <= 2000
    assert max(rows, key=lambda row: row["value"]) == {"step": 3334, "value": 99.0, "series": "train", "kind": "train"}
    assert "Curves of more than 2,000 points" in dom


@needs_browser
def test_documents_of_a_page_are_escaped(tmp_path):
    tokenizer = tiny_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path / "model")
    ids = tokenizer(f"<s>{SCRIPT} the cat", add_special_tokens=False)["input_ids"]
    folder = write_data(tmp_path / "data", [document(ids, range(1, len(ids)))] * 3)
    page = tmp_path / "page.html"
    view(folder, "documents=9", "longest", f"html={page}", f"model.path={tmp_path / 'model'}")
    dom, console = browse(page)
    assert console == []
    assert dom.count('class="document"') == 3
    assert SCRIPT.replace("<", "&lt;").replace(">", "&gt;") in re.sub("</?span[^>]*>", "", dom)
    assert "run by a document" not in re.search("<title>(.*?)</title>", dom)[1]
    assert SCRIPT not in page.read_text()
