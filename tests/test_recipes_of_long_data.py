"""recipes/longalign and recipes/longwriter: the small forms, from scratch to a judged model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


@pytest.mark.parametrize(
    ("recipe", "records", "score"),
    [("longalign", "longalign.jsonl", "rating"), ("longwriter", "agentwrite.jsonl", "S_l")],
)
def test_the_small_form_ends_with_a_trained_model_judged_beside_the_one_before(recipe, records, score, tmp_path):
    done = subprocess.run(
        [RECIPES / recipe / "run.sh", tmp_path / "run", "trainer.total_training_steps=8"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = (tmp_path / "run" / "synthesized" / records).read_text().splitlines()
    assert len(lines) > 50
    assert json.loads(lines[0])["provenance"]["models"] == ["scripted"]
    models = json.loads((tmp_path / "run" / "judged" / "results.json").read_text())["models"]
    assert list(models) == ["before", "after"]
    assert all(of["figures"]["all"][score]["cases"] >= 4 for of in models.values())
    assert "verdict 1, done" in (tmp_path / "run" / "judged" / "page.html").read_text()
