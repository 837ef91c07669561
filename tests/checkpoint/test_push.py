"""The model card of an export says what its run measured, and `push_to` sends the folder as it is, or keeps it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.lib.errors import names, refused
from tests.lib.hub_server import FORBIDDEN, hub_server
from tests.lib.ranks import run_ranks
from tests.lib.training import SMALL, into, metrics, small_run
from verl_ext.__main__ import main
from verl_ext.config.compose import compose
from verl_ext.fsdp_sft_trainer import train_composed

pytestmark = pytest.mark.slow

TOKEN = "hf_" + "A1b2C3d4" * 4


def train_whole(words):
    """Train as the program does, with the run's report."""
    os.environ.pop("VERL_FILE_LOGGER_PATH", None)  # set by a previous run
    train_composed(compose([*SMALL, "trainer.logger=[file]", *words]))


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model):
    """Return the folder of a run of 3 steps with validation, a checkpoint each, and a secret among its options."""
    folder = tmp_path_factory.mktemp("pushed")
    words = small_run(
        folder, tiny_model, [20, 30, 40, 90] * 3, "data.over_length=drop", "optim.betas=[0.9,0.99]", categories=2
    )
    words += ["loss=sequence", "loss.category_weights={code: 2}", "trainer.test_freq=2", "trainer.save_freq=1"]
    words += [f"data.val_dir={folder / 'data'}", f"trainer.project_name={TOKEN}", "trainer.total_training_steps=3"]
    run_ranks(train_whole, 1, [*words, into(folder / "run")])
    return folder / "run"


@pytest.fixture
def hub(monkeypatch):
    """Serve a hub, and let huggingface_hub use it with a token, over LFS."""
    with hub_server() as served:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("logging.raiseExceptions", False)  # a handler of another test has a closed stream
        for name, value in {"ENDPOINT": served.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        yield served


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_card_has_the_numbers_of_the_runs_files(run, tmp_path):
    words = ["export", f"checkpoint={run / 'global_step_2'}", f"output_dir={tmp_path / 'out'}"]
    assert main(words) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    logged = metrics(run)
    for name in ("train/loss", "val/loss", "val/code_loss"):
        assert f"| {name} | 2 | {logged[2, name]:.4f} |" in card
    assert not re.search(r"\| \w+/\S+ \| 3 \|", card)  # of the checkpoint's step, not of later ones
    report = json.loads((run / "data_report.json").read_text())["train"]
    assert f"Data: {report['documents']:,} documents, {report['tokens']:,} tokens, " in card
    # Without the license that the user gives, none is stated; neither are secrets and folders of this machine.
    header = yaml.safe_load(card.split("---\n")[1])
    assert header == {"library_name": "transformers"}
    assert TOKEN not in card
    assert str(run.parent) not in card
    assert main([*words, "overwrite=true", "license=apache-2.0"]) == 0
    assert "license: apache-2.0" in (tmp_path / "out" / "README.md").read_text()
    assert "No license" not in (tmp_path / "out" / "README.md").read_text()


def test_a_checkpoint_without_the_files_of_its_run_has_a_card_that_claims_nothing_of_them(run, tmp_path):
    (tmp_path / "global_step_1").symlink_to(run / "global_step_1")
    assert main(["export", f"checkpoint={tmp_path / 'global_step_1'}", f"output_dir={tmp_path / 'out'}"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "step 1 of a run" in card
    assert "##" not in card


def test_the_hub_gets_the_bytes_of_the_export_in_a_private_repository_and_no_file_holds_the_token(run, tmp_path):
    with hub_server() as served:
        environment = {**os.environ, "HF_ENDPOINT": served.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        environment |= {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        line = ["export", f"checkpoint={run}", f"output_dir={tmp_path / 'out'}", "push_to=me/model"]
        done = subprocess.run(
            [sys.executable, "-m", "verl_ext", *line], env=environment, capture_output=True, text=True, timeout=400
        )
    assert done.returncode == 0, done.stderr
    assert f"pushed to {served.url}/me/model" in done.stdout
    assert served.files["me/model"] == contents(tmp_path / "out")
    assert served.visibility == {"me/model": "private"}
    assert f"Bearer {TOKEN}" in served.tokens
    written = [*contents(tmp_path).values(), done.stdout.encode(), done.stderr.encode()]
    assert not any(TOKEN.encode() in content for content in written)


def test_a_later_push_leaves_no_weights_of_an_earlier_one_and_keeps_files_of_others(hub, run, tmp_path):
    hub.visibility["me/model"] = "private"
    hub.files["me/model"] = {"model-00001-of-00002.safetensors": b"old", "LICENSE": b"mine"}
    line = ["export", f"checkpoint={run}", f"output_dir={tmp_path / 'out'}", "push_to=me/model"]
    assert main(line) == 0
    assert hub.files["me/model"] == contents(tmp_path / "out") | {"LICENSE": b"mine"}


@pytest.mark.parametrize(
    ("repo", "code", "things"),
    [
        ("model", 2, ["push_to", "owner/name", "got model"]),
        ("me/mo del", 2, ["push_to", "owner/name", "me/mo del"]),
        ("no/token", 2, ["push_to=no/token", "token", "none"]),
        (f"{FORBIDDEN}/model", 1, [403, "You don't have the rights", "hf upload other/model"]),
        ("down/model", 1, ["push_to=down/model", "kept"]),
        ("me/public", 1, ["private", "me/public", "public"]),
    ],
)
def test_what_cannot_be_pushed_is_one_line_and_the_export_is_kept(
    hub, run, tmp_path, monkeypatch, capfd, repo, code, things
):
    hub.visibility["me/public"], hub.files["me/public"] = "public", {"README.md": b"public"}
    if repo.startswith("no/"):
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    if repo.startswith("down/"):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    out = tmp_path / "out"
    assert main(["export", f"checkpoint={run}", f"output_dir={out}"]) == 0
    before = contents(out)
    capfd.readouterr()
    assert main(["export", f"checkpoint={run}", f"output_dir={out}", "overwrite=true", f"push_to={repo}"]) == code
    error = capfd.readouterr().err
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in error
    assert names(line, *things), line
    assert TOKEN not in line
    assert contents(out) == before
    assert hub.files == {"me/public": {"README.md": b"public"}}


def test_an_export_that_lacks_a_file_is_not_pushed(hub, run, tmp_path):
    from verl_ext.checkpoint.hub import push

    assert main(["export", f"checkpoint={run}", f"output_dir={tmp_path / 'out'}"]) == 0
    for name in ("README.md", "model.safetensors", "export.json"):
        held = Path(tmp_path / "out" / name).read_bytes()
        (tmp_path / "out" / name).unlink()
        with refused(tmp_path / "out", f"no {name}"):
            push(tmp_path / "out", "me/model", True)
        (tmp_path / "out" / name).write_bytes(held)
    assert not hub.files
