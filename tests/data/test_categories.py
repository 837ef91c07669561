"""Categories by name: the table of one dataset, and one number for each name over several folders."""

import json

import numpy as np
import pytest

from tests.lib.errors import refused
from tests.lib.tokenized_data import random_documents, write_tokenized
from verl_ext.data import CategoryTable, SFTDataSet
from verl_ext.data.tokenized.categories import FolderCategories


def test_the_table_has_the_ids_of_the_file_and_of_the_data_which_are_named_by_their_number(tmp_path):
    (tmp_path / "categories.json").write_text('{"12": "code", "3": "gsm8k"}')
    table = CategoryTable.of(FolderCategories.read([str(tmp_path)]).names, (3, 7))
    assert table == CategoryTable((3, 7, 12), ("gsm8k", "7", "code"))
    assert table.index(np.asarray([[0, 12], [7, 3]])).tolist() == [[0, 3], [2, 1]]
    assert table.index([]).tolist() == []
    assert CategoryTable.of({}).index([0]).tolist() == [0]


def test_an_id_outside_the_table_is_an_error():
    with refused("(1, 3)", 2):
        CategoryTable((1, 3), ("a", "b")).index([1, 2])


@pytest.mark.parametrize(
    ("text", "things"),
    [
        ("{", ("JSON",)),
        ("[1]", ("object", "[1]")),
        ("3", ("object", 3)),
        ('{"a": "code"}', (4611686018427387903, "'a'")),
        ('{"0": "code"}', (4611686018427387903, "'0'")),
        ('{"9999999999999999999": "a"}', (4611686018427387903, "'9999999999999999999'")),
        ('{"1": 5}', ("category 1", 5)),
        ('{"1": " "}', ("category 1", "' '")),
        ('{"1": "a", "1": "b"}', ("JSON", "'1'", "once")),
        ('{"1": "a", "01": "b"}', ("'01'", "twice")),
        ('{"1": "a", "2": "a"}', ("'a'", "1 and 2")),
        ('{"1": "7"}', ("'7'", "1 and 7")),
    ],
)
def test_a_bad_categories_file_is_answered_with_one_line(tmp_path, text, things):
    (tmp_path / "categories.json").write_text(text)
    with refused("categories.json", *things):
        CategoryTable.of(FolderCategories.read([str(tmp_path)]).names, (7,))


def write_names(folder, names):
    folder.mkdir()
    if names is not None:
        (folder / "categories.json").write_text(json.dumps(names))
    return str(folder)


@pytest.mark.parametrize(
    ("files", "names", "read_as", "ambiguous"),
    [
        ([{"1": "code"}, {"1": "code"}], {1: "code"}, [None, None], [None, None]),
        ([{"1": "code"}, {"1": "math"}], {1: "code", 2: "math"}, [{1: 1}, {1: 2}], [{2: "math"}, {2: "math"}]),
        (
            [{"1": "a", "2": "b"}, {"1": "b", "2": "c"}, {"2": "a"}],
            {1: "a", 2: "b", 3: "c"},
            [{1: 1, 2: 2}, {1: 2, 2: 3}, {2: 1}],
            [{3: "c"}, {3: "c"}, {1: "a", 3: "c"}],
        ),
        (
            [{"1": "a"}, {"1": "b", "2": "c"}],
            {1: "a", 3: "b", 2: "c"},
            [{1: 1}, {1: 3, 2: 2}],
            [{2: "c", 3: "b"}, {3: "b"}],
        ),
        ([None, {"1": "a"}], {1: "a"}, [{}, None], [{1: "a"}, None]),
        ([{"3000000000": "a"}], {3000000000: "a"}, [None], [None]),
        ([None, None], {}, [None, None], [None, None]),
    ],
)
def test_a_categorys_name_has_one_number_in_all_folders(tmp_path, files, names, read_as, ambiguous):
    categories = FolderCategories.read([write_names(tmp_path / str(n), file) for n, file in enumerate(files)])
    assert categories.names == names
    for numbers, own, unclear in zip(categories.maps, read_as, ambiguous, strict=True):
        assert (numbers is None) == (own is None)
        for number, other in (own or {}).items():
            assert numbers(np.array([number])).tolist() == [other]
        for number, name in (unclear or {}).items():
            with refused(f"category {number}", f"'{name}'"):
                numbers(np.array([0, number]))


def test_numbers_of_any_size_are_looked_up(tmp_path):
    files = [{"1": "a"}, {"1": "b", "70000": "c", "3000000000": "a"}]
    (_, numbers) = FolderCategories.read([write_names(tmp_path / str(n), file) for n, file in enumerate(files)]).maps
    assert numbers(np.asarray([0, 1, 5, 1], np.int32)).tolist() == [0, 3000000001, 5, 3000000001]
    assert numbers(np.asarray([1, 70000, 3000000000, 70001, -2, 0])).tolist() == [3000000001, 70000, 1, 70001, -2, 0]
    assert numbers(np.asarray([], np.int64)).tolist() == []


@pytest.mark.parametrize(
    ("files", "of_data", "unclear"),
    [
        ([{"1": "a", "2": "b"}, {"1": "a"}], (2, 2), (1, 2, "b")),
        ([{"1": "a"}, None], (1, 1), (1, 1, "a")),
        ([None, {"1": "a"}], (1, 1), (0, 1, "a")),
        ([{"1": "a"}, {"1": "b"}], (2, 1), (0, 2, "b")),  # b's number becomes 2
        ([{"70001": "a"}, None], (70001, 70001), (1, 70001, "a")),
    ],
)
def test_a_number_that_only_another_folder_names_is_refused_where_it_is_read(tmp_path, files, of_data, unclear):
    folders = [
        write_tokenized(
            tmp_path / str(n), [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "category_ids": [category] * 3}], file
        )
        for n, (category, file) in enumerate(zip(of_data, files, strict=True))
    ]
    folder, number, name = unclear
    dataset = SFTDataSet(folders, max_tokens=3)
    with refused(f"{folders[folder]}/categories.json", f"category {number}", repr(name)):
        _ = dataset.scan()
    assert SFTDataSet(folders[folder], max_tokens=3).scan().category_ids == (of_data[folder],)


def test_folders_that_were_numbered_on_their_own_are_read_by_name(tmp_path):
    """The scan, the packs, the table and the over-length report identify a category by its name."""
    rng = np.random.default_rng(0)
    folders = []
    for name, categories in (("a", {1: "math", 2: "code"}), ("b", {1: "code", 2: "chat"})):
        documents = random_documents(rng, [5, 9, 7], vocab=50, categories=1)
        documents[1]["category_ids"] = 2 * documents[1]["category_ids"]
        folders.append(write_tokenized(tmp_path / name, documents, categories))
    dataset = SFTDataSet(folders, max_tokens=8, strategy="none", over_length="truncate")
    assert dataset.categories.names == ("math", "code", "chat")
    assert dataset.scan().category_ids == (1, 2, 3)
    of_pack = [int(dataset[pack]["category_ids"].max()) for pack in range(6)]
    assert of_pack == [1, 2, 1, 2, 3, 2]
    assert [row.category for row in dataset.omitted_documents()] == ["code", "chat"]
