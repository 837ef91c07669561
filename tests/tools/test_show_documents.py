"""Documents, packs and differences in `verl-ext show`: the text of the tokens that the model really gets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.chat_templates import CHATML, tiny_tokenizer
from tests.lib.document_texts import write_lines
from tests.lib.errors import names
from tests.lib.shown import document, refused_line, show, view, write_data
from tests.lib.tokenized_data import random_documents, write_tokenized
from verl_ext.commands.tokenize import main as tokenize
from verl_ext.data import SFTDataSet
from verl_ext.tools.show.cells import cells_of
from verl_ext.tools.show.documents import Row

TOKENIZER = tiny_tokenizer(CHATML)


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@pytest.fixture
def data(tmp_path):
    """Write three documents of a tokenizer: two chats of different lengths, and one document without a target."""
    TOKENIZER.save_pretrained(tmp_path / "model")
    prompt, answer = ids_of("<|im_start|>user\n你好<|im_end|>\n"), ids_of("the cat sat<|im_end|>")
    targets = range(len(prompt), len(prompt) + len(answer))
    documents = [
        document(prompt + answer, targets),
        document(prompt, [], 2),
        document(prompt + answer + answer, targets, 2),
    ]
    return write_data(tmp_path / "data", documents, {"tokenizer": str(tmp_path / "model")})


@given(st.text(st.sampled_from("ab \n😀中é"), min_size=1, max_size=40), st.data())
def test_cells_hold_every_token_once_and_read_as_the_text(text, drawn):
    ids = ids_of(f"{text}<|im_end|>{text}")
    border = ids_of(text + "<|im_end|>")
    mask = np.arange(len(ids)) >= len(border)
    cells = cells_of(Row(np.array(ids), mask, None), TOKENIZER)
    assert [token for cell in cells for token in cell.ids] == ids
    assert "".join(cell.text for cell in cells) == f"{text}<|im_end|>{text}"
    assert [cell.is_target for cell in cells for _ in cell.ids] == mask.tolist()
    assert [cell.text for cell in cells if cell.is_special] == ["<|im_end|>"]


def test_a_document_is_shown_with_its_targets_or_the_ids_and_weights_of_its_tokens(tmp_path, data):
    shown = view(data, "row=0")
    assert "[[the cat sat]]" in shown
    assert "[[<|im_end|>]]" in shown
    assert "你好" in shown
    assert shown.count("[[") == 2
    assert "maths" in shown
    shown, end = show(data, "row=0", "tokens")[1], TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    assert f"*<|im_end|>·{end}" in shown
    assert f" <|im_end|>·{end}" in shown
    ids = ids_of("the cat sat")
    one = {**document(ids, [1, 2]), "loss_weight": np.full(len(ids), 0.5, np.float32)}
    folder = write_tokenized(tmp_path / "weighted", [one], {1: "maths"}, loss_weight=True)
    assert "target ×0.5" in show(folder, "row=0", f"model.path={tmp_path / 'model'}")[1]


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (("longest",), [2]),
        (("shortest",), [1]),
        (("category=code", "documents=9"), [2]),  # row 1 has no target, and so no category
        (("no_target", "documents=9"), [1]),
        ((r"matches=sat<\|im_end\|>the",), [2]),
        (("matches=sat", "documents=9", "category=maths"), [0]),
        (("longest", "documents=9"), [2, 0, 1]),
    ],
)
def test_documents_are_selected(data, words, rows):
    shown = view(data, *words)
    assert [int(line.split()[1]) for line in shown.splitlines() if line.startswith("row ")] == rows


def test_a_random_order_is_that_of_its_seed_and_a_selection_of_nothing_is_refused(data):
    assert show(data, "random=4", "documents=3")[1] == show(data, "random=4", "documents=3")[1]
    assert len({show(data, f"random={seed}")[1] for seed in range(8)}) > 1
    for words in (("matches=elephant",), ("cut",), ("category=poems",), ("row=3",)):
        refused_line(data, *words, code=2)


def test_a_pack_is_the_one_that_the_trainer_feeds(tmp_path):
    folder = write_data(tmp_path / "data", random_documents(np.random.default_rng(2), range(3, 40), 50, 2))
    dataset = SFTDataSet(folder, max_tokens=64, over_length="error", seed=7)
    for pack in (0, len(dataset) - 1):
        shown = view(folder, f"pack={pack}", "max_tokens=64", "seed=7")
        lines = [line.split() for line in shown.splitlines() if line.startswith("data row")]
        places = dataset.documents_of(pack)
        assert [int(line[2]) for line in lines] == [place.row for place in places]
        assert [int(line[4]) for line in lines] == [place.tokens for place in places]
        assert sum(int(line[5]) for line in lines) == int(dataset[pack]["loss_mask"].sum())
        assert [line[6] for line in lines] == [f"0..{place.tokens - 1}" for place in places]
    assert show(folder, f"pack={len(dataset)}", "max_tokens=64")[0] == 2


def test_a_pack_of_answers_that_are_too_long_for_it_is_refused_in_one_line(tmp_path, data):
    pair = {"prompt": "hello", "chosen": "the cat sat", "rejected": "the dog sat"}
    pairs = write_lines(tmp_path / "pairs.jsonl", [pair])
    words = [f"sources={{pairs:{pairs}}}", f"output_dir={tmp_path / 'pairs'}", f"model.path={tmp_path / 'model'}"]
    assert tokenize(words) == 0
    asked = (tmp_path / "pairs", "pack=0", "max_tokens=8", "share_prefixes=true")
    assert names(refused_line(*asked, code=1), "data.max_tokens", "got 8")


def test_views_stand_beside_each_other_and_on_a_page(tmp_path, data):
    words = [data, "pack=0", "max_tokens=64", "row=0", "require=no_target<=1", "documents=1"]
    shown = view(*words)
    parts = ("3 documents", "pack 0: ", "[[the cat sat]]")
    assert sorted(map(shown.index, parts)) == list(map(shown.index, parts))
    view(*words, f"html={tmp_path / 'page.html'}")
    page = (tmp_path / "page.html").read_text()
    assert all(part in page for part in ("3 documents", "pack 0: ", "the cat sat"))
    code, _, errors = show(*words[:4], "require=no_target=0")
    assert (code, names(errors, "no_target=0", "1 of 3")) == (1, True)


def test_two_sets_of_the_same_records_are_compared(tmp_path, data):
    documents = [document([*range(30, 40)], [4, 5]), document([*range(30, 40)], [4]), document([*range(30, 40)], [4])]
    one = write_data(tmp_path / "one", documents)
    documents[1] = document([*range(30, 40)], [4, 8])
    documents[2] = document([*range(30, 36), 60], [4])
    other = write_data(tmp_path / "other", documents)
    shown = view(one, f"against={other}", f"model.path={tmp_path / 'model'}")
    assert "3 rows compared: 1 equal, 1 with other tokens" in shown
    lines = [line.split()[:3] for line in shown.splitlines() if line[:1].isdigit()][1:]
    assert lines[0] == ["1", "8", "targets"]
    assert ["2", "6", "tokens"] in lines
