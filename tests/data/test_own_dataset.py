"""The user's own dataset classes in the trainer: a PackDataset without options, and documents by three members."""

import json
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.checked import checked
from tests.lib.errors import names, refused
from tests.lib.ranks import run_cases
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import differences, into, metrics, refusals, resume_run, train_alone
from verl_ext.config.compose import compose
from verl_ext.data import CategoryTable, DocumentDataset, SFTDataSet
from verl_ext.data.tokenized.ranks import ONE_RANK
from verl_ext.packing import OVER_LENGTH_POLICIES, STRATEGIES

pytestmark = pytest.mark.slow

OWN = """
import json

import numpy as np
import torch

from verl_ext.data import CategoryTable, PackDataset, PackFacts
from verl_ext.packing import TOKENS


class OwnDataset(PackDataset):
    def __init__(self, parquet_files, tokenizer=None, config=None, processor=None, max_samples=-1, key=""):
        with open(parquet_files) as file:
            self.rows = json.load(file)
        self.path, self.key, self.max_tokens = parquet_files, key, config.max_tokens
        self.shift = config.custom_cls.shift  # an attribute of verl's own node

    categories = CategoryTable((1,), ("own",))
    digest = "0" * 16

    @property
    def folders(self):
        return (self.path,)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, pack):
        ids = torch.tensor(self.rows[pack]) + self.shift
        mask = torch.ones_like(ids)
        mask[0] = 0
        return {"input_ids": ids, "position_ids": torch.arange(len(ids)), "loss_mask": mask, "category_ids": mask}

    def facts(self, cost=TOKENS):
        tokens, documents = np.array([len(row) for row in self.rows]), np.ones(len(self), np.int64)
        return PackFacts(tokens, tokens - 1, documents, cost.documents(tokens), token_range=(1, 99), longest_document=6)
"""


DOCUMENTS = """
import json
from functools import cached_property

from verl_ext.data import CategoryTable, DocumentDataset


class Documents(DocumentDataset):
    categories = CategoryTable((1, 2, 7), ("one", "two", "of no document"))

    @cached_property
    def documents(self):
        with open(self.paths[0]) as file:
            return json.load(file)

    @property
    def lengths(self):
        return [len(document["input_ids"]) for document in self.documents]

    def row(self, document):
        return self.documents[document]
"""


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory):
    """Return the folder of runs on a class of ours, on documents of ours, on the tokenized folder of them, and of one
    that resumes; and the lines on a resume on changed documents and on a class that is not there."""
    folder = tmp_path_factory.mktemp("runs")
    documents = random_documents(np.random.default_rng(3), [9, 40, 3, 64, 100, 17, 23, 31, 8, 12, 50, 28], 100, 2)
    rows = [{name: np.asarray(values).tolist() for name, values in document.items()} for document in documents]
    (folder / "documents.json").write_text(json.dumps(rows))
    (folder / "rows.json").write_text(json.dumps([[5, 6, 7], [8, 9, 10, 11, 12, 13], [3, 4], [1, 2, 3, 4]]))
    for name, code in (("own", OWN), ("documents", DOCUMENTS)):
        (folder / f"{name}.py").write_text(code)
    names = {1: "one", 2: "two", 7: "of no document"}
    tokenized = write_tokenized(folder / "folder", documents, names, loss_weight=True)

    def run(data, output: str, file: str | None = None, name: str = "", *more: str) -> list[str]:
        own = [f"data.custom_cls.path={folder / file}", f"data.custom_cls.name={name}"] if file else []
        paths = [f"data.train_dir={data}", f"data.val_dir={data}", f"model.path={tiny_model}", into(folder / output)]
        return [*own, *paths, *more]

    usual = ("data.over_length=split", "trainer.total_epochs=2", "trainer.save_freq=1", "loss=sequence")
    usual += ("loss.category_weights={one: 2}", "trainer.test_freq=2")
    own = run(folder / "documents.json", "own", "documents.py", "Documents", *usual)
    rows[3]["input_ids"][5] += 1
    shifted = run(folder / "rows.json", "rows", "own.py", "OwnDataset", "+data.custom_cls.shift=1")
    longer = [*own, "trainer.total_training_steps=4"]
    changes = [["trainer.total_epochs=3"], ["data.custom_cls.name=Documants", into(folder / "new")]]
    cases = {
        "run": (2, train_alone, run(tokenized, "run", None, "", *usual)),
        "own": (2, train_alone, own),
        "rows": (1, train_alone, shifted),
        "resumed": (1, resume_run, longer, folder / "own", folder / "stopped", 2),
        "changed": (1, Path.write_text, folder / "documents.json", json.dumps(rows)),
        "told": (1, refusals, own, changes),
    }
    return folder, run_cases(cases)["told"][0]


def test_a_dataset_class_without_options_trains_and_validates(runs):
    logged = metrics(runs[0] / "rows")
    assert logged[1, "train/target_tokens"] == 11
    assert logged[1, "val/own_loss"] > 0


def test_documents_of_ones_own_train_validate_and_resume_as_a_tokenized_folder_of_them(runs):
    folder, _ = runs
    assert metrics(folder / "own")[4, "val/two_loss"] > 0
    assert differences(folder / "own", folder / "run", 4) == []
    found, whole = metrics(folder / "stopped"), metrics(folder / "run")
    for key in ((step, name) for step in (3, 4) for name in ("train/loss", "train/one_loss", "val/loss")):
        assert key not in whole or found[key] == pytest.approx(whole[key], rel=1e-5)


def test_a_resume_on_changed_documents_and_a_class_that_is_not_there_are_refused_and_leave_nothing_behind(runs):
    folder, (changed, not_there) = runs
    assert names(changed, "content", "data.train_dir")
    assert names(not_there, "data.custom_cls.name")
    assert not (folder / "new").exists()


class Own(DocumentDataset):
    """A dataset of the documents in its config."""

    categories = CategoryTable((1, 2), ("one", "two"))

    @cached_property
    def lengths(self):
        return np.array([len(document["input_ids"]) for document in self.config["documents"]])

    def row(self, document):
        return self.config["documents"][document]


@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda lengths: max(lengths) > 1),
    over_length=st.sampled_from(OVER_LENGTH_POLICIES[1:]),
    strategy=st.sampled_from(list(STRATEGIES)),
    pads=st.booleans(),
    weighted=st.booleans(),
    first=st.integers(-1, 9),
)
def test_packs_are_those_of_the_tokenized_folder(
    tmp_path_factory, lengths, over_length, strategy, pads, weighted, first
):
    documents = random_documents(np.random.default_rng(len(lengths)), lengths, 100, 2)
    if not weighted:
        documents = [{name: document[name] for name in document if name != "loss_weight"} for document in documents]
    folder = write_tokenized(tmp_path_factory.mktemp("folder"), documents, {1: "one", 2: "two"}, loss_weight=weighted)
    padding = "right" if pads else "no_padding"
    node = {"max_tokens": 16, "over_length": over_length, "strategy": strategy, "pad_mode": padding}
    try:
        wanted = SFTDataSet(parquet_files=folder, config=node, max_samples=first)
        targets = wanted.facts().targets
    except ValueError as error:  # nothing left, or no target: the same refusal
        with refused(str(error).split(";")[0]):
            Own("x", config={**node, "documents": documents}, max_samples=first).facts()
        return
    found = Own("x", config={**node, "documents": documents}, max_samples=first)
    assert found.facts().targets.tolist() == targets.tolist()
    assert found.omitted_documents() == wanted.omitted_documents()
    assert (found.digest, found.facts().token_range) == (wanted.digest, wanted.facts().token_range)
    assert len(found) == len(wanted)
    for pack, other in zip((found[n] for n in range(len(found))), (wanted[n] for n in range(len(wanted))), strict=True):
        assert pack.keys() == other.keys()
        assert all(torch.equal(pack[name], other[name]) and pack[name].dtype == other[name].dtype for name in pack)
    places = [place for n in range(len(found)) for place in found.documents_of(n)]
    assert [place[1:] for place in places] == [p[1:] for n in range(len(wanted)) for p in wanted.documents_of(n)]


def test_documents_of_ones_own_share_their_beginnings():
    rows = [{"input_ids": [5, 6, 7, 8, last], "loss_mask": 1, "category_ids": 1} for last in (9, 10)]
    dataset = Own("x", config={"max_tokens": 8, "documents": rows, "share_prefixes": True, "share_least": 2})
    dataset.read_together(ONE_RANK)
    assert sorted(dataset[0]["input_ids"].tolist()) == [5, 6, 7, 8, 8, 9, 10]
    assert dataset[0]["position_ids"].tolist() == [0, 1, 2, 3, 4, 3, 4]


def test_a_number_in_a_row_stands_for_all_of_its_tokens():
    rows = [
        {"input_ids": [5, 6, 7], "loss_mask": 1, "category_ids": 2},
        {"input_ids": [8], "loss_mask": 0, "category_ids": 1},
    ]
    dataset = Own("x", config={"max_tokens": 8, "documents": rows})
    pack = {name: values.tolist() for name, values in dataset[0].items()}
    assert pack["loss_mask"] == [0, 1, 1, 0]
    assert pack["category_ids"] == [0, 2, 2, 0]


ROW = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "category_ids": 1}


@pytest.mark.parametrize(
    ("change", "things"),
    [
        ({"input_ids": [5, 6]}, ("input_ids of 3 numbers in row 1", "int64 of shape (2,)")),
        ({"input_ids": [5.5, 6, 7]}, ("input_ids of 3 numbers in row 1", "float64")),
        ({"loss_mask": [0, 2, 1]}, ("loss_mask", "2 in row 1")),
        ({"category_ids": 3}, ("category_ids", "(1, 2)", 3)),
        ({"category_ids": -3}, ("category_ids", "-3 in row 1")),
        ({"loss_weight": 1}, ("input_ids, loss_mask, category_ids", "loss_weight in row 1")),
        ({"loss_mask": None}, ("input_ids, loss_mask, category_ids", "input_ids, category_ids in row 1")),
    ],
)
def test_a_row_that_cannot_be_used_is_one_line_with_its_number(change, things):
    row = {name: values for name, values in {**ROW, **change}.items() if values is not None}

    class Changed(Own):
        lengths = (3, 3)

    dataset = Changed("x", config={"max_tokens": 8, "documents": [ROW, row]})
    with refused("data.train_dir", *things):
        dataset.read_together(ONE_RANK)


@pytest.mark.parametrize("lengths", [[], [3.0], [[3]], [-1, 3]])
def test_lengths_that_are_no_whole_numbers_are_refused(lengths):
    class Changed(Own):
        pass

    Changed.lengths = lengths
    with refused("data.train_dir", "lengths"):
        Changed("x", config={"max_tokens": 8, "documents": [ROW]})


def test_a_class_that_lacks_a_member_and_a_mixture_are_refused():
    class Half(DocumentDataset):
        lengths = (3,)

    with refused("data.custom_cls.name", "Half lacks row, categories"):
        Half("x", config={"max_tokens": 8})
    with refused("data.mixture", None):
        Own("x", config={"max_tokens": 8, "documents": [ROW], "mixture": {"sources": {}}})


@pytest.mark.parametrize(
    ("name", "word", "things"),
    [
        ("Documants", "data.seed=1", ("data.custom_cls.name", "Documants", "nearest: Documents")),
        ("json", "data.seed=1", ("data.custom_cls.name", "json", "verl_ext.data.PackDataset")),
        ("Documents", "data.train_dir=null", ("data.train_dir", "dataset class", None)),
    ],
)
def test_a_class_that_is_not_there_and_one_without_data_are_one_line(name, word, things, tmp_path, tiny_model):
    (tmp_path / "documents.py").write_text(DOCUMENTS)
    keys = [f"data.custom_cls.path={tmp_path / 'documents.py'}", f"data.custom_cls.name={name}", word]
    own = [f"model.path={tiny_model}", f"data.train_dir={tmp_path}", "trainer.device=cpu", "optim.lr=1e-3"]
    config = compose([*own, *keys])
    with refused(*things):
        checked(config, 1)
