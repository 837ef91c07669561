"""Files of the user: executed once in a process, and their objects unpickled by another one."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.lib.checked import changed, checked, sound_run
from tests.lib.errors import refused
from tests.lib.project import ROOT
from verl_ext.checkpoint.layout import remove_run_files, remove_unfinished
from verl_ext.config.compose import compose
from verl_ext.config.run import dataset_class
from verl_ext.custom import custom_object, named_object
from verl_ext.data import BABILongDataset
from verl_ext.data.tokenized.ranks import ONE_RANK
from verl_ext.plugin import select_engine
from verl_ext.trainer.hooks import HOOKS, hook_classes

FILE = """
from pathlib import Path

from verl_ext.data import CategoryTable, DocumentDataset, PackDataset

with Path(__file__).with_suffix(".log").open("a") as log:
    log.write("executed\\n")


class Documents(DocumentDataset):
    categories = CategoryTable((1,), ("a",))
    lengths = [3, 4]

    def row(self, document):
        return {"input_ids": [5 + document] * self.lengths[document], "loss_mask": 1, "category_ids": 1}


class Lacking(PackDataset):
    def __len__(self):
        return 1


def loss(nll):
    return nll
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path / "own.py"


@pytest.mark.parametrize(
    ("path", "name", "key", "things"),
    [
        (None, "loss", "path", ("node.name", None)),
        ("FILE", None, "name", ("node.path", None)),
        ("no/such.py", "loss", "path", ("pkg://module", "no/such.py")),
        ("pkg://numpi", "loss", "path", ("'numpi'",)),
        ("BROKEN", "loss", "path", ("broken.py", "ZeroDivisionError in line 2")),
        ("UNREADABLE", "loss", "path", ("unreadable.py", "SyntaxError in line 1")),
        ("FILE", "losss", "name", ("own.py", "losss", "nearest: loss")),
    ],
)
def test_what_is_not_named_rightly_or_cannot_be_executed_is_one_line(path, name, key, things, file):
    broken, unreadable = file.with_name("broken.py"), file.with_name("unreadable.py")
    broken.write_text("\n1 / 0\n")
    unreadable.write_text("def own(:")
    files = {"FILE": str(file), "BROKEN": str(broken), "UNREADABLE": str(unreadable)}
    with refused(f"node.{key}", *things):
        custom_object("node", files.get(str(path), path), name)


def _first_pack(pickled: bytes) -> tuple[str, list[int]]:
    dataset = pickle.loads(pickled)
    return type(dataset).__module__, dataset[0]["input_ids"].tolist()


def test_a_file_that_several_options_name_is_executed_once_and_its_objects_pickle(file, monkeypatch):
    documents = custom_object("data.custom_cls", str(file), "Documents")
    monkeypatch.chdir(file.parent)
    assert named_object("eval.score", f"{file.name}:Documents") is documents
    loss = custom_object("loss.custom_cls", f"file://{file}", "loss")
    assert pickle.loads(pickle.dumps((documents, loss))) == (documents, loss)
    assert file.with_suffix(".log").read_text() == "executed\n"
    dataset = documents("unread", max_tokens=8)
    assert _first_pack(pickle.dumps(dataset)) == (documents.__module__, dataset[0]["input_ids"].tolist())


@pytest.mark.slow
def test_a_dataset_of_ones_own_is_loaded_by_processes_that_are_spawned(file: Path) -> None:
    dataset = custom_object("data.custom_cls", str(file), "Documents")("unread", max_tokens=4)
    dataset.read_together(ONE_RANK)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    for pack, expected in zip(loader, dataset, strict=True):
        assert all(torch.equal(pack[name], values) for name, values in expected.items())


def test_a_dataset_class_without_all_members_is_refused_in_one_line(file: Path) -> None:
    config: Any = compose([f"data.custom_cls.path={file}", "data.custom_cls.name=Lacking"])
    with refused("data.custom_cls.name", "Lacking", "__getitem__, categories, digest, facts, folders"):
        dataset_class(config)


def test_the_module_that_an_older_configuration_names_for_a_class_of_ours_is_still_known() -> None:
    config: Any = {"data": {"custom_cls": {"path": "pkg://verl_ext.data.families.babilong", "name": "BABILongDataset"}}}
    assert dataset_class(config) is BABILongDataset


def test_a_kind_of_model_of_the_user_brings_its_engine_hooks_and_results(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "extend" / "engine.md").read_text().partition("# own_kind.py")[2].partition("```")[0]
    (tmp_path / "own_kind.py").write_text(f"# {page}    engine_vendor, engine_module = 'own', 'own_engine'\n")
    (tmp_path / "own_engine.py").write_text("is_registered = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "")
    kind = checked(changed(sound_run(tmp_path), ["model._target_=own_kind.Model"]), 1).kind
    select_engine(kind.engine_vendor, kind.engine_module)
    assert os.environ["VERL_ENGINE_VENDOR"] == "own"
    assert sys.modules["own_engine"].is_registered
    (own,) = [hook for hook in hook_classes(kind.hooks) if hook not in HOOKS]
    for name in (*own.files, f"{own.files[0]}.x-1.partial", "others.txt"):
        (tmp_path / name).touch()
    remove_unfinished(tmp_path, own.files)
    remove_run_files(tmp_path, own.files)
    assert [path.name for path in tmp_path.glob("*.*") if path.suffix != ".py"] == ["others.txt"]
