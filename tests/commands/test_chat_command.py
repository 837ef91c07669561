"""`verl-ext chat` answers as plain transformers does, over turns, and shows reasoning in a place of its own."""

import io
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

from tests.lib.errors import names
from tests.lib.tiny_model import write_scripted_model, write_tiny_model
from verl_ext.__main__ import main
from verl_ext.commands.chat import AnswerPrinter
from verl_ext.text.records.reasoning import split_reasoning


def plain_answer(model, folder, messages) -> str:
    """Return the most probable answer by transformers alone, which ends at the tokenizer's EOS."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False, **ends)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def chat(*words: str) -> int:
    return main(["chat", *words, "temperature=0", "max_new_tokens=8"])


def answers(capsys) -> list[str]:
    """Return the lines that were printed."""
    return capsys.readouterr().out.splitlines()


def test_each_turn_of_a_conversation_has_plain_transformers_answer(tiny_model, capsys, monkeypatch):
    turns = ["w3 w5", "w7", "w9 w1"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*turns[:2], "", "/new", turns[2]]) + "\n"))
    assert chat(str(tiny_model), "system=w2") == 0
    model, system = AutoModelForCausalLM.from_pretrained(tiny_model), {"role": "system", "content": "w2"}
    messages, expected = [system], []
    for turn in turns[:2]:
        messages.append({"role": "user", "content": turn})
        expected.append(plain_answer(model, tiny_model, messages))
        messages.append({"role": "assistant", "content": expected[-1]})
    expected.append(plain_answer(model, tiny_model, [system, {"role": "user", "content": turns[2]}]))
    assert answers(capsys) == expected


def test_an_adapter_folder_answers_as_peft_does(tiny_model, tmp_path, capsys):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(target_modules=["q_proj"]))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    assert chat(str(tmp_path / "adapter"), "prompt=w3 w5", f"base={tiny_model}") == 0
    messages = [{"role": "user", "content": "w3 w5"}]
    assert answers(capsys) == [plain_answer(model.eval(), tiny_model, messages)]


def test_a_mixture_whose_config_asks_for_a_router_loss_answers_as_without_it(tmp_path, capsys):
    folder = write_tiny_model(tmp_path, config_class=MixtralConfig, num_local_experts=4, output_router_logits=True)
    assert chat(str(folder), "prompt=w3 w5") == 0
    model = AutoModelForCausalLM.from_pretrained(folder, output_router_logits=False)
    assert answers(capsys) == [plain_answer(model, folder, [{"role": "user", "content": "w3 w5"}])]


def test_an_answer_ends_at_the_folders_end_tokens_and_a_model_without_a_template_continues_the_text(tmp_path, capsys):
    folder = write_scripted_model(tmp_path / "model", "one two <|im_end|>")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = [AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|im_end|>")]
    model.save_pretrained(folder)
    assert chat(str(folder), "prompt=two") == 0
    (folder / "chat_template.jinja").unlink()
    assert chat(str(folder), "prompt=on") == 0
    assert answers(capsys) == ["one two", " ".join(["on"] * 8)]


def test_an_answer_ends_at_the_models_last_position_and_a_longer_prompt_is_refused(tmp_path, capsys):
    folder = write_tiny_model(tmp_path, max_position_embeddings=16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = ([{"role": "user", "content": " ".join(["w3"] * count)}] for count in range(20))
    lengths = [len(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]) for chat in chats]
    fits = next(count for count, length in enumerate(lengths) if length > 10)
    assert chat(str(folder), f"prompt={' '.join(['w3'] * fits)}") == 0
    (answer,) = answers(capsys)
    assert len(answer.split()) == 16 - lengths[fits]
    assert chat(str(folder), f"prompt={' '.join(['w3'] * 16)}") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert names(line, "the conversation", lengths[16])


class Terminal(io.StringIO):
    """The lines that a user types, where ^C is Ctrl-C."""

    def isatty(self) -> bool:
        return True

    def readline(self, *size) -> str:
        if (line := super().readline(*size)) == "^C\n":
            raise KeyboardInterrupt
        return line


def test_a_conversation_goes_on_after_ctrl_c_and_after_a_turn_that_does_not_fit(tmp_path, capsys, monkeypatch):
    folder = write_tiny_model(tmp_path, max_position_embeddings=24)
    monkeypatch.setattr(sys, "stdin", Terminal("\n".join(["^C", " ".join(["w5"] * 24), "w7"]) + "\n"))
    assert chat(str(folder)) == 0
    printed = capsys.readouterr()
    assert names(printed.err, "the conversation", "24 positions")
    expected = plain_answer(AutoModelForCausalLM.from_pretrained(folder), folder, [{"role": "user", "content": "w7"}])
    assert printed.out.endswith(f"> {expected}\n> ")


parts = st.lists(st.sampled_from(["</th", "a", " b\n", "<", "é", "<b>", ":key:", "\tc", " " * 90]), max_size=5)


@given(parts, parts, st.sampled_from([("<think>", ""), ("", "<think>"), ("", "")]), st.booleans())
def test_an_answer_that_grows_token_by_token_is_printed_once_and_whole(thought, answer, tags, closes):
    opening, first = tags
    pieces = [*filter(None, [first]), *thought, *["</think>"] * (closes and any(tags)), *answer]
    printed = io.StringIO()
    printer, text = AnswerPrinter(Console(file=printed, width=10_000), opening), ""
    for piece in pieces:
        text += piece
        printer.tell(text)
    printer.tell(text, is_whole=True)
    thought, answer = split_reasoning(opening + text)
    between = "\n" if thought and answer else ""
    assert printed.getvalue() == thought + between + (answer.lstrip() if thought else answer)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["/none"], "path"),
        (["none"], "path"),
        ([], "path"),
        (["path=."], "path"),
        (["owner/name", "max_new_tokens=0"], "max_new_tokens"),
    ],
)
def test_a_path_without_a_model_is_refused_in_one_line(tmp_path, monkeypatch, capsys, words, part):
    monkeypatch.chdir(tmp_path)
    assert main(["chat", *words, "prompt=hi"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert names(line, part)
