"""Each published command of verl's trains by the one line that its refusal ends with: equal steps, rows and rates."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from tests.lib.errors import names, refused
from tests.lib.project import ROOT
from tests.lib.verl_commands import COMMANDS, RANKS, ROWS, course_of
from verl_ext.commands import train
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions
from verl_ext.config.check import batch_problem
from verl_ext.config.compose import compose, compose_run, prepare_overrides
from verl_ext.config.keys import RENAMED, is_of_old
from verl_ext.config.resolve import resolve_run
from verl_ext.config.run import Machine, RunConfig
from verl_ext.config.translation import translate
from verl_ext.options import UsageError
from verl_ext.overrides import Item
from verl_ext.trainer.step_plan import StepPlan

PAGE = ROOT / "docs" / "reference" / "verl_published.md"


def words_of(command: str) -> list[str]:
    """Return the options of a published command as a shell passes them on, with a model."""
    words = shlex.split(COMMANDS[command])
    old = any(map(is_of_old, options_of_words(words)))
    return [*words, "model.partial_pretrain=M"] if old and "model.partial" not in str(words) else words


def options_of_words(words: list[str]) -> dict[str, str]:
    return {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in words)}


def expected(command: str) -> Any:
    options = options_of_words(words_of(command))
    return course_of(options, any(map(is_of_old, options)))


def refusal(words: list[str]) -> list[str]:
    with pytest.raises(ValueError, match="verl-ext train") as raised:
        prepare_overrides(words)
    return str(raised.value).splitlines()


class Texts:
    """Stands for the tokenized sources of `verl-ext train`, which are not read."""

    made: ClassVar[list["Texts"]] = []
    are_tokenized, folder, command, categories = True, Path("data"), ["verl-ext", "tokenize"], ()

    def __init__(self, node: str, words: list[str], root: Path) -> None:
        self.node = node  # the model's folder does not exist
        self.words = [word for word in words if not word.startswith("model.")]
        self.made.append(self)

    def tokenize(self) -> None: ...


@pytest.fixture
def trained(monkeypatch):
    """Return a function from words of `verl-ext train` to (tokenizing options by key, the run on 8 GPUs)."""
    lines: list[list[str]] = []
    monkeypatch.setattr(train, "run_torchrun", lambda arguments, *_, **__: lines.append(list(arguments)) or 0)
    monkeypatch.setattr(train, "Texts", Texts)

    def run(words: list[str]) -> tuple[dict[str, TokenizeOptions], RunConfig]:
        Texts.made = []
        train.tokenize_and_train([*words, f"nproc={RANKS}"])
        line = lines.pop()
        config = compose(line[line.index("verl_ext.fsdp_sft_trainer") + 1 :])
        assert batch_problem(config, RANKS) is None
        texts = {
            each.node: read_options(TokenizeOptions, [*each.words, "model.path=.", "output_dir=out"])
            for each in Texts.made
        }
        return texts, resolve_run(config, Machine(RANKS, "cuda", (9, 0)))

    return run


@pytest.mark.slow
@pytest.mark.parametrize("share", ["data.val_share=0.1", "val_share=0.1"])
def test_a_share_takes_the_place_of_verls_default_validation_files(trained, share):
    old = ["data.train_files=/d/train.parquet", "model.partial_pretrain=M", "data.prompt_key=q", "data.response_key=a"]
    old.append("optim.lr=1e-5")
    texts, run = trained([*old, share])
    assert texts.keys() == {"data.sources"}
    assert texts["data.sources"].val_share == 0.1
    assert run.data.val_dir.endswith("/val")


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_published_command_makes_verls_steps_at_verls_rates(command, trained):
    words, course = words_of(command), expected(command)
    lines = refusal(words)
    assert len(lines) == 3  # what is asked for, what is learnt of a reply, and the command that does it
    assert ("eos_token" in lines[1]) == ("prompt_key" in str(words))
    one_line = shlex.split(lines[-1])
    assert one_line[:2] == ["verl-ext", "train"]
    texts, run = trained(one_line[2:])
    assert texts.keys() == {"data.sources", *(["data.val_sources"] if "data.val_files" in str(words) else [])}
    rate = [word for word in one_line if word.startswith("optim.lr=")]
    if not any(word.startswith("optim.lr=") for word in words):
        with refused("optim.lr", None, error=UsageError):
            trained(words)
        words += rate
    again, same = trained(words)  # verl-ext train takes the old command itself
    assert (again, same.values) == (texts, run.values)

    data = run.data
    assert (data.train_batch_size, run.dataset.max_tokens) == (course.rows, course.length)
    assert (run.dataset.strategy, data.drop_last, run.loss.mode) == ("none", True, "token")
    plan = StepPlan(ROWS, data.train_batch_size, seed=1, drop_last=data.drop_last)
    steps, span = plan.run_steps(
        run.trainer.total_epochs, run.trainer.total_training_steps, run.optim.lr_schedule_span, None
    )
    assert steps == course.steps
    run.optim.total_training_steps = span
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=run.optim.lr)
    engine: Any = SimpleNamespace(optimizer_config=run.optim, rank=1)
    schedule = FSDPEngine._build_lr_scheduler(engine, optimizer)
    for step in range(min(steps, 200)):
        assert schedule.get_last_lr()[0] == pytest.approx(course.rate(step), rel=1e-9, abs=1e-20)
        optimizer.step()
        schedule.step()


def test_columns_template_truncation_and_lengths_come_from_the_keys(trained):
    words = (
        "data.train_files=[/d/mine/a.parquet,/d/mine/b.parquet] data.messages_key=prompt data.truncation=right "
        "data.max_length=100 data.max_token_len_per_gpu=450 data.train_batch_size=16 model.path=M "
        "data.tools_key=functions data.apply_chat_template_kwargs={a:1} data.enable_thinking_default=false "
        "model.use_shm=true optim.lr=1e-5"
    )
    texts, run = trained([*words.split(), "model.custom_chat_template='{{ messages }}'"])
    options = texts["data.sources"]
    assert options.sources == {"mine": ["/d/mine/a.parquet", "/d/mine/b.parquet"]}
    assert options.columns == {"messages": "prompt", "tools": "functions"}
    assert options.apply_chat_template_kwargs == {"a": 1, "enable_thinking": False}
    assert options.chat_template == "{{ messages }}"
    assert (run.dataset.max_tokens, run.dataset.over_length) == (100, "truncate")
    assert run.data.micro_batch_size_per_gpu == 2  # 16 rows of 8 ranks, 450 tokens hold 4
    for old in ("data.prompt_key=q", "data.pad_mode=right"):
        line, *_ = refusal(["data.train_files=x", "data.truncation=left", old])
        assert names(line, "data.truncation", "left")


SPELLINGS = {
    **{old: "1" for old in RENAMED if old != "model.partial_pretrain"},
    "model.partial_pretrain": "M",
    "model.fsdp_config.model_dtype": "fp32",
    "data.micro_batch_size": "4",
}


@pytest.mark.parametrize("old", SPELLINGS)
def test_the_records_fields_tell_a_commands_age_and_not_the_spelling_of_another_key(old):
    later = ["data.train_files=a.parquet", "data.messages_key=m", f"{old}={SPELLINGS[old]}"]
    assert {"columns.messages=m", "trainer.total_epochs=4"} <= {*shlex.split(refusal(later)[-1])}
    assert not {"optim.betas=[0.9,0.95]", "columns.prompt=question"} & {*shlex.split(refusal(later)[-1])}
    earlier = ["data.train_files=a.parquet", "data.prompt_key=q", "engine.strategy=fsdp2", "data.pad_mode=right"]
    assert {"columns.prompt=q", "optim.betas=[0.9,0.95]"} <= {*shlex.split(refusal(earlier)[-1])}


@pytest.mark.parametrize("old", ["data.prompt_key=q", "data.multiturn.enable=true", "data.response_dict_keys=[a]"])
@pytest.mark.parametrize("new", ["data.messages_key=m", "data.tools_key=t", "data.enable_thinking_default=false"])
def test_fields_of_two_ages_are_refused_or_named_where_the_program_tells_the_age(old, new):
    lines = refusal(["data.train_files=a.parquet", new, old])
    assert any(names(line, new.partition("=")[0], old.partition("=")[0]) for line in lines)
    items = [Item.read(word) for word in ("data.train_files=a.parquet", new, old)]
    for is_old, unread in ((True, new), (False, old)):
        found = translate(items, own_class=False, packed=True, is_old=is_old)
        assert found.problems == []
        assert [line for line in found.notices if line.startswith(f"{unread} is left out: verl ")]


def test_the_later_trainer_with_fields_of_the_earlier_one_alone_is_read_by_its_fields():
    items = [Item.read(word) for word in ("data.train_files=a.parquet", "data.prompt_key=q", "model.path=M")]
    words = [str(item) for item in translate(items, own_class=False, packed=True, is_old=False).sources]
    assert "columns.prompt=q" in words


def test_a_field_that_the_kind_of_records_does_not_read_is_named():
    turns = "data.train_files=a.parquet data.multiturn.enable=true data.prompt_key=q model.partial_pretrain=M"
    found = translate([Item.read(word) for word in turns.split()], own_class=False, packed=True)
    assert [line.partition(": ")[0] for line in found.notices if "data.prompt_key" in line] == [
        "data.prompt_key=q is left out"
    ]
    whole = ["data.train_files=a.parquet", "data.multiturn={enable: true}"]
    assert translate(list(map(Item.read, whole)), own_class=False, packed=True).problems[0].startswith("data.multiturn")


def test_steps_that_only_end_a_run_of_packs_leave_verls_rates_or_are_named_with_its_defaults():
    old = ["data.train_dir=d", "data.max_tokens=64", "optim.lr_scheduler=cosine", "trainer.total_training_steps=4"]
    config, _ = compose_run([*old, "trainer.total_epochs=4", "model.path=M"])
    assert config.optim.lr_schedule_span == "epochs"
    config, notices = compose_run([*old, "model.path=M"])
    assert config.optim.lr_schedule_span == "run"
    assert notices[-2].startswith("not given, and another default in verl: ")
    assert "optim.lr_schedule_span=epochs" in notices[-2]


def test_what_asks_for_nothing_and_arguments_that_are_false_are_told_apart(trained, capsys):
    words = "data.train_files=/d/mine/a.parquet data.val_files=[] data.train_batch_size=16 model.path=M "
    words += "data.apply_chat_template_kwargs.enable_thinking=false data.enable_thinking_default=true optim.lr=1e-5"
    texts, _ = trained(words.split())
    assert [*texts] == ["data.sources"]
    assert texts["data.sources"].apply_chat_template_kwargs == {"enable_thinking": False}
    assert "enable_thinking=false is left out" not in "".join(capsys.readouterr())


def test_packs_are_made_where_their_budget_is_given():
    _, notices = prepare_overrides(["data.train_dir=d", "data.max_tokens=64", "data.max_length=9", "optim.lr=1"])
    assert [notice.partition(" is left out")[0] for notice in notices[:-1]] == ["data.max_length"]
    assert notices[-1].startswith(
        "not given, and another default in verl: data.train_batch_size=256 trainer.total_epochs=4"
    )


@pytest.mark.parametrize("name", ["automodel", "megatron", "torchtitan", "veomni"])
def test_another_engine_is_refused_in_one_line_with_its_keys(name):
    words = f"data.train_dir=d model=hf_model engine={name} optim={name} engine.tp_size=2 optim.min_lr=1e-6"
    with refused("engine", "fsdp", name, "engine.tp_size, optim.min_lr"):
        prepare_overrides(words.split())


def table() -> str:
    """Return the table of docs/reference/verl_published.md."""
    rows = ["| verl, command | steps of rows | tokens of a row | rate: first, highest, last |", "|---|---|---|---|"]
    for command in COMMANDS:
        course = expected(command)
        rates = [course.rate(step) for step in range(course.steps)]
        shown = ", ".join(f"{rate:.3g}" for rate in (rates[0], max(rates), rates[-1]))
        rows.append(f"| {command} | {course.steps:,} of {course.rows} | {course.length:,} | {shown} |")
    return "\n".join(rows)


def test_the_page_has_the_table_of_these_commands():
    assert f"\n{table()}\n" in PAGE.read_text(encoding="utf-8")
