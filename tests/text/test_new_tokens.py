"""New tokens in tokenizers, in tokenized folders and in the checks of a run."""

import json
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from tests.lib.checked import changed, checked, sound_run
from tests.lib.errors import names, refused
from tests.lib.small_models import model_config
from tests.lib.tiny_model import VOCABULARY, write_tiny_model
from tests.lib.training import SMALL
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.config.check import preference_problems
from verl_ext.config.compose import compose
from verl_ext.config.resolve import resolve_run
from verl_ext.config.run import Machine
from verl_ext.engines.new_rows import rows_with
from verl_ext.text.tokens.new_tokens import add_tokens
from verl_ext.text.tokens.tokenizer import ModelOptions, load_tokenizer, tokenizer_facts
from verl_ext.titans.kind import QwenTitansModel
from verl_ext.trainer.inputs import new_token_problem, open_sets
from verl_ext.trainer.report_lines import report_lines


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model")))


def test_a_new_token_is_one_id_and_keeps_the_ids_of_its_old_pieces(model):
    tokenizer = load_tokenizer(ModelOptions(model))
    assert add_tokens(tokenizer, ["w3 w5", "<a>"], ["w3 w5 w7"], model) == {128: [7, 9], 129: [], 130: [7, 9, 11]}
    assert tokenizer("w0 w3 w5 <a> w3 w5 w7")["input_ids"] == [4, 128, 129, 130]
    assert tokenizer.decode([128, 129, 130, 4], skip_special_tokens=True) == "w3 w5 <a> w0"


@pytest.mark.parametrize(
    ("tokens", "special", "things"),
    [
        (["<|im_end|>"], [], ("model.new_tokens", "<|im_end|>", "token 2")),
        ([], ["w0"], ("model.new_special_tokens", "w0", "token 4")),
        (["<a>", ""], [], ("model.new_tokens", "")),
        (["<a>", "<a>"], [], ("model.new_tokens", "model.new_special_tokens", "<a> twice")),
        (["<a>"], ["<a>"], ("model.new_tokens", "model.new_special_tokens", "<a> twice")),
    ],
)
def test_a_token_that_cannot_be_new_is_one_line(model, tokens, special, things):
    with refused(*things):
        add_tokens(AutoTokenizer.from_pretrained(model), tokens, special, model)


@pytest.mark.parametrize(
    ("rows", "ids", "then"),
    [(151_936, [151_669, 151_935], 151_936), (128_256, [128_256], 128_320), (50_257, [50_257, 50_258], 50_259)],
)
def test_free_rows_are_used_first_and_added_ones_keep_the_matrix_as_divisible(rows, ids, then):
    assert rows_with(rows, ids) == then


def tokenized(folder: Path, model: str, *words: str) -> str:
    (folder / "chats.jsonl").write_text(json.dumps({"text": "w0 w3 w5 <a> w1"}) + "\n")
    given = ["sources={a: " + str(folder / "chats.jsonl") + "}", f"output_dir={folder / 'data'}", f"model.path={model}"]
    tokenize(read_options(TokenizeOptions, [*given, *words]))
    return str(folder / "data")


def problem(data: str, model: str, *words: str) -> str | None:
    """Return the trainer's line about a folder's tokens."""
    given = [*SMALL, f"data.train_dir={data}", f"model.path={model}", *words]
    config = resolve_run(compose(given), Machine())
    return new_token_problem(config, open_sets(config)[0])


NEW = "model.new_tokens=['<a>','w3 w5']"


def test_a_folder_has_the_ids_of_new_tokens_and_is_refused_without_them(model, tmp_path):
    data = tokenized(tmp_path, model, NEW)
    report = json.loads((Path(data) / "report.json").read_text())
    assert report["new_tokens"] == {"<a>": 128, "w3 w5": 129}
    assert problem(data, model, NEW) is None
    for words, got in (([], "[]"), (["model.new_tokens=['w3 w5','<a>']"], "['w3 w5', '<a>']")):
        told = problem(data, model, *words) or ""
        assert names(told, "model.new_tokens", "data.train_dir", "['<a>', 'w3 w5']", f"{got} for {data}")


def test_a_folder_that_was_tokenized_without_new_tokens_is_refused_with_them(model, tmp_path):
    data = tokenized(tmp_path, model)
    assert problem(data, model) is None
    assert names(problem(data, model, NEW) or "", "model.new_tokens", "[]", f"['<a>', 'w3 w5'] for {data}")


def test_a_later_run_on_a_model_that_has_the_tokens_takes_the_same_folder(model, tmp_path):
    data = tokenized(tmp_path, model, NEW)
    later = write_tiny_model(tmp_path / "later", vocab_size=VOCABULARY + 2)
    tokenizer = AutoTokenizer.from_pretrained(later)
    add_tokens(tokenizer, ["<a>", "w3 w5"], [], str(later))
    tokenizer.save_pretrained(later)
    assert problem(data, str(later)) is None


def test_a_tokenizer_with_new_tokens_has_other_facts_so_that_cached_tokens_are_made_again(model):
    plain, more = (load_tokenizer(ModelOptions(model, new_tokens=tokens)) for tokens in ([], ["<a>"]))
    assert tokenizer_facts(plain) != tokenizer_facts(more)


@pytest.fixture(scope="module")
def good(tmp_path_factory, model):
    """Return a run that passes, whose model has a tokenizer."""
    folder = tmp_path_factory.mktemp("run")
    run = changed(sound_run(folder), [f"model.tokenizer_path={model}", f"model.path={folder / 'model'}"])
    return changed(run, ["model.new_tokens=['<a>']", "model.lora_rank=4"])


SHAPE = {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 8}
REFUSED = {  # the words, the model's config and what the line names
    "adapter of the head": (
        ["model.target_modules=[q_proj,lm_head]"],
        Qwen3Config(**SHAPE),
        ("model.target_modules", "lm_head", "model.new_tokens"),
    ),
    "one of tied ends": (
        ["model.modules_to_save=[embed_tokens]"],
        Qwen3Config(**SHAPE, tie_word_embeddings=True),
        ("model.modules_to_save", "model.embed_tokens and lm_head", "tied"),
    ),
    "frozen": (
        ["model.lora_rank=0", "model.freeze=[embed_tokens]"],
        Qwen3Config(**SHAPE),
        ("model.freeze", "model.embed_tokens", "model.new_tokens", "['embed_tokens']"),
    ),
    "bias": ([], model_config("phi"), ("model.new_tokens", "PhiForCausalLM", "bias")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_train_the_rows_of_new_tokens_is_one_line(good, name):
    words, config, things = REFUSED[name]
    with refused(*things):
        checked(changed(good, words), 1, hf_config=config)


def test_a_given_adapter_must_train_the_rows_of_new_tokens(good, tmp_path):
    rows = {"embed_tokens": [VOCABULARY], "lm_head": [VOCABULARY]}
    runs = {}
    for name, trained in {"without": None, "with": rows}.items():
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE))
        model.resize_token_embeddings(VOCABULARY + 64)
        lora = LoraConfig(target_modules=["q_proj"], trainable_token_indices=trained)
        get_peft_model(model, lora).save_pretrained(tmp_path / name)
        runs[name] = changed(good, [f"model.lora_adapter_path={tmp_path / name}"])
    with pytest.raises(ValueError, match=r"model\.lora_adapter_path") as raised:
        checked(runs["without"], 1, hf_config=Qwen3Config(**SHAPE))
    for line, end in zip(str(raised.value).splitlines(), ("model.embed_tokens", "lm_head"), strict=True):
        assert names(line, "model.lora_adapter_path", "model.new_tokens", end, f"row {VOCABULARY}")
    checked(runs["with"], 1, hf_config=Qwen3Config(**SHAPE))


@pytest.mark.parametrize("config", [Qwen3Config(**SHAPE), Qwen3Config(**SHAPE, tie_word_embeddings=True)])
def test_a_plan_knows_the_rows_of_new_tokens(good, config):
    config.vocab_size = VOCABULARY
    facts = checked(good, 1, hf_config=config)
    assert facts.new_token_facts == {"new_tokens": {"tokens": 1, "rows": VOCABULARY, "rows_with": VOCABULARY + 64}}
    assert [len(facts.module.get_input_embeddings().weight), facts.source.vocab_size] == [VOCABULARY + 64, VOCABULARY]
    told = list(report_lines(facts.new_token_facts))
    assert told == ["model: new tokens: 1; embeddings and head grow from 128 to 192 rows"]


def test_a_model_with_memory_and_a_reference_take_no_new_tokens(model):
    given = ["parallel=cpu", "data.train_dir=D", f"model.path={model}", "model.new_tokens=[w]"]
    config = resolve_run(compose([*given, "data=babilong", "model=qwen_titans"]), Machine())
    lines = [*filter(None, QwenTitansModel.config_problems(config))]
    assert any(names(line, "model.new_tokens", "model=qwen_titans") for line in lines)
    preferences = [*given, "data=preference", "data.max_tokens=64", "loss=dpo", f"reference.path={model}"]
    config = resolve_run(compose(preferences), Machine())
    (line,) = preference_problems(config)
    assert names(line, "reference.path", "model.new_tokens=['w']", model)
