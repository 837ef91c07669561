"""Raw files, the records behind documents, and a run's answers in `verl-ext show`."""

import json

import pytest

from tests.lib.chat_templates import CHATML, tiny_tokenizer
from tests.lib.errors import names
from tests.lib.shown import audit_of, page_data, refused_line, show, view, write_metrics
from verl_ext.commands.tokenize import main as tokenize
from verl_ext.text.chat.options import ChatOptions
from verl_ext.text.encoder_chats import ChatEncoder
from verl_ext.text.read.readers import read_chunks
from verl_ext.text.read.sources import find_source_files
from verl_ext.text.tokens.tokenizer import ModelOptions

THOUGHT = "<think>\nadd them\n</think>\n\nIt is four."
CHATS = [
    {
        "messages": [
            {"role": "system", "content": "You are kind."},
            {"role": "user", "content": "你好 what is 2+2?"},
            {"role": "assistant", "content": THOUGHT},
            {"role": "user", "content": "and 3+3?"},
            {"role": "assistant", "content": "Six."},
        ]
    },
    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the cat sat"}], "extra": 1},
    {"text": "plain words"},
    {"nothing": "that is known"},
]
THINKS_FIRST = CHATML.replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n",
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n",
)


@pytest.fixture
def model(tmp_path):
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    return f"model.path={tmp_path / 'model'}"


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in CHATS))
    return path


@pytest.fixture
def folder(tmp_path, chats, model, monkeypatch):
    """Tokenize with relative paths; tests look at the folder from another one."""
    monkeypatch.chdir(tmp_path)
    words = [f"sources={{chats:{chats.name}}}", "output_dir=data", "model.path=model", "on_bad_record=skip"]
    assert tokenize(words) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "data"


def test_raw_chats_have_the_audit_of_their_tokenized_folder(tmp_path, chats, folder, model):
    raw, tokenized = audit_of(tmp_path, chats, model), audit_of(tmp_path, folder, model)
    assert raw.pop("paths") == [str(chats)]
    tokenized.pop("paths")
    places = [finding.pop("rows") for audit in (raw, tokenized) for finding in audit["findings"].values()]
    assert any(places)
    assert raw == tokenized
    assert raw["findings"]["bad_records"]["count"] == raw["findings"]["unused_fields"]["count"] == 1
    assert "4 documents" in show(chats, model, "tokenize={turns: each}")[1]  # tokenize's options decide


def test_roles_and_kinds_stand_beside_the_text(folder):
    shown = show(folder, "row=0")[1]
    names = [line[18:31].strip() for line in shown.splitlines()[1:] if line[:8].strip()]
    kinds = ["reasoning", "answer", "end of turn"]
    assert names == ["system", "user", "assistant", *kinds, "assistant", "user", "assistant", *kinds[1:], "assistant"]
    assert "你好" in shown
    text = show(folder, "row=2")[1].splitlines()[1:]
    assert [line.split()[2] for line in text if line] == ["context", "target"]


def test_the_record_of_a_document_is_found_with_what_inference_gives(folder, chats):
    shown = view(folder, "row=1", "record")
    assert f"record {chats}:2" in shown
    assert '"extra": 1' in shown
    assert "message 1 at inference: the document begins with its" in shown
    shown = show(folder, "row=0", "record")[1]
    assert f"record {chats}:1" in shown
    assert shown.count("the document begins with its") == 2


def test_prompts_are_those_of_transformers(chats, model):
    encoder = ChatEncoder(ChatOptions(model=ModelOptions(model.partition("=")[2])), ["chats"])
    (file,) = find_source_files({"chats": [str(chats)]})
    (chunk,) = read_chunks(file)
    texts = [text for _, raw in chunk.records[:3] for text in encoder.shown(raw)]
    assert [len(text.prompts) for text in texts] == [2, 1, 0]
    for text, record in zip(texts, CHATS, strict=False):
        for turn, prompt in text.prompts:
            given = encoder.tokenizer.apply_chat_template(
                record["messages"][:turn], add_generation_prompt=True, tokenize=False
            )
            assert prompt == given


def test_a_prompt_that_training_does_not_show_and_two_templates_are_marked_where_they_differ(chats, tmp_path, model):
    (tmp_path / "other.jinja").write_text(CHATML.replace("<|im_start|>", "<|im_start|> "))
    shown = view(chats, model, f"against={{chat_template: {tmp_path / 'other.jinja'}}}")
    assert "3 rows compared: 1 equal, 2 with other tokens" in shown
    assert THINKS_FIRST != CHATML
    (tmp_path / "thinks.jinja").write_text(THINKS_FIRST)
    shown = show(chats, model, f"tokenize={{chat_template: {tmp_path / 'thinks.jinja'}}}", "row=1", "record")[1]
    assert "differ from the document's at token" in shown
    (given, trained) = (line for line in shown.splitlines() if line.startswith(("  given", "  trained")))
    assert "» <think>" in given
    assert "» the cat" in trained


def test_babilongs_samples_are_audited_as_rows(tmp_path, model):
    sample = {"input": "Mary went to the garden.", "question": "Where is Mary?", "target": "garden"}
    (tmp_path / "qa1_0k.json").write_text(json.dumps([sample] * 3))
    shown = show(tmp_path / "qa1_0k.json", model, "max_tokens=128")[1]
    assert "3 documents" in shown
    assert "qa1_0k" in shown


def test_a_folder_is_shown_by_its_kind_alone_or_named(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    named = show("data", "data", "row=1")[1]  # the folder's name is that of its kind
    assert named == show("data", "row=1")[1] == show("data", "paths=[data]", "row=1")[1]
    assert "the cat sat" in named
    for kind in ("data", "run"):
        code, told, _ = show(kind, "--help")
        assert (code, told.startswith(f"usage: verl-ext show {kind} ")) == (0, True)


def answers(folder, torn=""):
    folder.mkdir(exist_ok=True)
    common = {"prompt": "[red]question " + "long " * 40, "expected": "4"}
    rows = [
        {"step": step, "category": category, "answer": answer, "score": float(answer == "4"), **common}
        for step, answer in ((0, "five"), (10, "4"))
        for category in ("maths", "code")
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    return folder


def test_answers_of_a_run_are_shown_by_step_and_category(tmp_path):
    run = answers(write_metrics(tmp_path / "run", 3), torn='{"step": 11, "cat')
    shown = show(run, "answers")[1]
    assert "2 answers of step 10" in shown
    assert "mean score 1" in shown
    assert "[red]question" in shown
    shown = show(run, "answers", "step=0", "category=code")[1]
    assert "1 answers of step 0" in shown
    assert "five" in shown
    assert "maths" not in shown
    path = run / "answers.jsonl"
    path.write_text(path.read_text().replace('"category"', '"question": "and 3+3?", "category"'))
    path.write_text(path.read_text().replace('"five"', '"fi\u2028ve"'))  # which ends no line of JSON
    assert "2 answers of step 0" in show(run, "answers", "step=0")[1]
    shown = show(run, "answers")[1]  # the last user message
    assert "and 3+3?" in shown
    assert "[red]question" not in shown


def babilong_run(folder):
    folder.mkdir()
    shares = {f"val/qa{task}_{length}k_accuracy": task / 10 for task in (1, 2) for length in (0, 4, 32)}
    lines = [{"step": step, "data": {name: step * share / 2 for name, share in shares.items()}} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_babilongs_scores_are_a_table_of_tasks_by_lengths_and_a_figure_of_the_page(tmp_path):
    run, page = babilong_run(tmp_path / "run"), tmp_path / "page.html"
    shown = show(run)[1].splitlines()
    first = next(number for number, line in enumerate(shown) if "right answers" in line)
    assert shown[first].split()[-3:] == ["0k", "4k", "32k"]
    assert [line.split()[0] for line in shown[first + 1 : first + 3]] == ["qa1", "qa2"]
    assert shown[first + 2].split()[-1] == "20%"
    pytest.importorskip("vl_convert")
    view(run, f"html={page}")
    cells = [(cell["task"], cell["length"], cell["value"]) for cell in page_data(page)["charts"][-1]["values"]]
    assert cells[:3] == [("qa1", length, 0.1) for length in ("0k", "4k", "32k")]


@pytest.mark.parametrize(
    ("words", "things"),
    [
        (["chats.jsonl"], ("model.path",)),
        (["chats.jsonl", "model.path=model", "tokenize={turn: each}"], ("tokenize", "turn")),
        (["data", "row=0", "tokenize={turns: each}"], ("tokenize", "raw files")),
        (["data", "against={turns: each}"], ("against", "paths")),
        (["data", "answers"], ("answers", "`verl-ext show run`", True)),
        (["run", "pack=3"], ("pack", "`verl-ext show data`", 3)),
        (["run", "tokenize.turns=each"], ("tokenize.turns", "`verl-ext show data`", "each")),
        (["data", "run"], ("error: paths", "state.json")),
        (["run", "category=maths"], ("answers", "category", False)),
        (["run", "paths=[run]", "rank=1"], ("step", "rank", None)),
        (["run", "answers"], ("answers.jsonl",)),
        (["asked", "answers", "step=7"], ("step", "0, 10", 7)),
        (["asked", "answers", "category=math"], ("category", "maths")),
    ],
)
def test_a_mistake_is_one_line(tmp_path, folder, chats, monkeypatch, words, things):
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "run", 3)
    answers(write_metrics(tmp_path / "asked", 3))
    assert names(refused_line(*words), *things)


def test_a_record_whose_source_has_changed_or_gone_is_one_line(folder, chats):
    chats.write_text(chats.read_text().replace("cat", "dog"))
    assert names(refused_line(folder, "row=1", "record", code=1), "record", "sources")
    chats.unlink()
    refused_line(folder, "row=1", "record")
