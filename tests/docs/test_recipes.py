"""recipes with a run.sh: their data, tokenizer, model, and whole runs of their small forms."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lib.errors import names, refused
from tests.lib.recipe_runs import RECIPES, run_recipe, values
from verl_ext.commands.command_line import read_options
from verl_ext.tools.init_model.command import InitModelOptions, init_model

pytestmark = pytest.mark.slow

CATEGORIES = ("arithmetic", "ordering", "documents")


def run(script: str, *arguments: object) -> str | None:
    """Run a script in this process; return the error with which it exits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        try:
            runpy.run_path(str(RECIPES / script), run_name="__main__")
        except SystemExit as ended:
            return ended.code
    return None


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    assert not run("quickstart/make_data.py", "--output", folder)
    return folder


@pytest.fixture(scope="module")
def model(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    options = ["tokenizer.vocab_size=2048", "tokenizer.bos_token=null", f"tokenizer.train_on={data}/*.train.jsonl"]
    init_model(read_options(InitModelOptions, ["model=tiny", f"output_dir={folder}", *options]))
    return folder


def conversations(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_category_has_both_files_every_conversation_alternates_and_no_validation_question_is_trained_on(data):
    for category in CATEGORIES:
        splits = [conversations(data / f"{category}.{split}.jsonl") for split in ("train", "val")]
        for chats in splits:
            assert chats
            for messages in chats:
                assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
                assert all(message["content"] for message in messages)
        training, held_out = ({chat[0]["content"] for chat in chats} for chats in splits)
        assert not training & held_out


def test_the_same_seed_writes_the_same_bytes_and_another_does_not(data, tmp_path):
    run("quickstart/make_data.py", "--output", tmp_path / "again")
    run("quickstart/make_data.py", "--output", tmp_path / "other", "--seed", 1)
    for path in data.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
        assert path.read_bytes() != (tmp_path / "other" / path.name).read_bytes()


def test_answers_are_right(data):
    for split in ("train", "val"):
        for chat in conversations(data / f"arithmetic.{split}.jsonl"):
            left, sign, right, _, result = chat[1]["content"].split(".")[0].split()
            expected = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
            assert int(result) == expected[sign]
        for chat in conversations(data / f"documents.{split}.jsonl"):
            assert all(answer["content"] in chat[0]["content"] for answer in chat[1::2])


def test_lengths_in_tokens_vary_by_more_than_twenty_times(data, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    for split in ("train", "val"):
        chats = [chat for category in CATEGORIES for chat in conversations(data / f"{category}.{split}.jsonl")]
        texts = tokenizer.apply_chat_template(chats, tokenize=False)
        lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
        assert max(lengths) >= 20 * min(lengths)
        assert max(lengths) <= 1024  # the recipe's data.max_tokens


def test_the_tokenizer_gives_back_any_text_and_writes_chatml_and_a_small_qwen3_fits_it(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "Ada has 12 apples.\n\tUnseen: ñ, 漢字, 🙂 <|im_start|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    turns = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == turns
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert loaded.config.architectures == ["Qwen3ForCausalLM"]
    assert loaded.config.vocab_size == len(tokenizer)
    assert loaded.config.num_attention_heads % 2 == 0  # two sequence-parallel ranks
    assert 1.5e6 < loaded.num_parameters() < 5e6


def test_both_recipes_refuse_a_folder_that_is_not_theirs(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    for script, *arguments in (["quickstart/run.sh", tmp_path], ["gsm8k_code/run.sh", "a", "b", "c", tmp_path]):
        result = subprocess.run(["bash", RECIPES / script, *arguments], capture_output=True, text=True)
        assert result.returncode == 2
        assert names(result.stderr, "FOLDER", tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_hold_out_splits_both_file_kinds_without_loss(tmp_path):
    records = [{"question": f"q{i}", "answer": str(i)} for i in range(50)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "b.json").write_text(json.dumps(records))
    sources = [f"first={tmp_path / 'a.jsonl'}", f"second={tmp_path / 'b.json'}"]
    assert not run("gsm8k_code/hold_out.py", "--output", tmp_path / "out", "--val", 10, *sources)
    for category in ("first", "second"):
        parts = [
            [json.loads(line) for line in (tmp_path / "out" / f"{category}.{split}.jsonl").read_text().splitlines()]
            for split in ("train", "val")
        ]
        assert [len(part) for part in parts] == [40, 10]
        assert sorted((*parts[0], *parts[1]), key=lambda record: int(record["answer"])) == records
    refusal = run("gsm8k_code/hold_out.py", "--output", tmp_path / "out", "--val", 50, *sources)
    assert names(str(refusal), "--val", "50 records")


def test_the_answer_is_that_of_the_last_export(tmp_path):
    report = runpy.run_path(str(RECIPES / "answer.py"))
    for step in (5, 40, 100):
        (tmp_path / f"global_step_{step}" / "huggingface").mkdir(parents=True)
    assert report["last_export"](tmp_path) == tmp_path / "global_step_100" / "huggingface"
    with refused(tmp_path / "none", "global_step_N/huggingface"):
        report["last_export"](tmp_path / "none")


def test_the_quickstart_ends_with_curves_a_page_and_an_answer(tmp_path):
    results = run_recipe("quickstart/run.sh", tmp_path / "run", "trainer.total_training_steps=12").split("Results.")[1]
    assert all(category in results for category in CATEGORIES)
    assert "Answered" in results
    assert "loss of arithmetic" in (tmp_path / "run" / "run.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("recipe", "records", "score"),
    [("papers/longalign", "longalign.jsonl", "rating"), ("papers/longwriter", "agentwrite.jsonl", "S_l")],
)
def test_the_small_form_ends_with_a_trained_model_judged_beside_the_one_before(recipe, records, score, tmp_path):
    run_recipe(f"{recipe}/run.sh", tmp_path / "run", "trainer.total_training_steps=8")
    lines = (tmp_path / "run" / "synthesized" / records).read_text().splitlines()
    assert len(lines) > 50
    assert json.loads(lines[0])["provenance"]["models"] == ["scripted"]
    models = json.loads((tmp_path / "run" / "judged" / "results.json").read_text())["models"]
    assert list(models) == ["before", "after"]
    assert all(of["figures"]["all"][score]["cases"] >= 4 for of in models.values())
    assert "verdict 1, done" in (tmp_path / "run" / "judged" / "page.html").read_text()


def assert_learnt(run: Path, margin: float) -> None:
    """Require that preferences begin at chance and end with margins of this sum."""
    margins, accuracies = (values(run / "checkpoints", f"train/reward_{name}") for name in ("margin", "accuracy"))
    assert margins[0] == 0
    assert accuracies[0] == 0.5
    assert sum(margins[-4:]) > margin
    assert sum(accuracies[-4:]) > 3.2


def test_preferences_for_a_length_are_learned_and_answers_of_unseen_subjects_have_it(tmp_path):
    run_recipe("papers/longwriter_dpo/run.sh", tmp_path / "run")
    run = tmp_path / "run"
    for line in (run / "pairs" / "preferences.jsonl").read_text().splitlines():
        assert json.loads(line)["score_chosen"] > json.loads(line)["score_rejected"]
    assert_learnt(run, 4)
    models = json.loads((run / "judged" / "results.json").read_text())["models"]
    before, after = (models[name]["figures"]["all"]["S_l"]["mean"] for name in ("before", "after"))
    assert after > before + 15


def test_preferences_by_question_and_answer_alone_bring_the_fact_of_the_text_into_answers(tmp_path):
    run_recipe("papers/glm_long_dpo/run.sh", tmp_path / "run")
    run = tmp_path / "run"
    assert len((run / "pairs" / "preferences.jsonl").read_text().splitlines()) > 40
    assert_learnt(run, 2)
    before, after = values(run / "checkpoints", "val/answer")
    assert after > before + 0.3
