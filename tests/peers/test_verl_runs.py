"""Commands of verl's with raw files train by `verl-ext train`: verl's steps and rates, plain transformers' loss."""

import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lib.ranks import run_ranks
from tests.lib.tiny_model import init_model
from tests.lib.training import metrics, train_as_programs
from tests.lib.verl_commands import course_of
from verl_ext.__main__ import main
from verl_ext.commands import train
from verl_ext.config.keys import is_of_old

pytestmark = pytest.mark.slow

ROWS = 22
# An example of each way in which verl's commands name their data, with their other options.
COMMANDS = {
    "a pair in fields below others, LoRA": (
        "data.prompt_key=extra_info data.response_key=extra_info data.prompt_dict_keys=['question'] "
        "+data.response_dict_keys=['answer'] data.micro_batch_size_per_gpu=11 optim.lr=1e-4 trainer.total_epochs=2 "
        "model.partial_pretrain=MODEL model.lora_rank=4 model.lora_alpha=16 model.target_modules=all-linear"
    ),
    "turns, the schedule over four epochs": (
        "data.multiturn.enable=true data.multiturn.messages_key=prompt data.micro_batch_size=4 "
        "data.micro_batch_size_per_gpu=2 trainer.total_training_steps=3 model.partial_pretrain=MODEL "
        "model.strategy=fsdp use_remove_padding=true"
    ),
    "turns of today's verl": (
        "data.messages_key=prompt data.max_length=64 data.truncation=left data.max_token_len_per_gpu=300 "
        "model=hf_model model.path=MODEL model.use_remove_padding=False engine=fsdp engine.strategy=fsdp optim=fsdp "
        "optim.lr=2e-3 optim.lr_warmup_steps_ratio=0.2 optim.warmup_style=cosine optim.min_lr_ratio=0.1 "
        "trainer.total_epochs=2 trainer.total_training_steps=9"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Make rows/train.parquet in the form of verl's GSM8K file, and MODEL with a tokenizer trained on its texts."""
    folder = tmp_path_factory.mktemp("verl")
    rows = []
    for n in range(ROWS):
        question, answer = f"What is {n} + {n}?", f"It is {2 * n}, for {n} and {n} are " + " ".join(["that"] * n)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"prompt": turns, "extra_info": {"question": question, "answer": answer}})
    (folder / "rows").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows" / "train.parquet")
    init_model(folder, (turn["content"] for row in rows for turn in row["prompt"]))
    return folder


def plain_loss(folder: Path, length: int) -> float:
    """Return the mean loss of all answers' tokens up to their end, by plain transformers, row by row."""
    model = AutoModelForCausalLM.from_pretrained(folder / "MODEL", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "MODEL")
    total, targets = 0.0, 0
    for row in pq.read_table(folder / "rows" / "train.parquet").to_pylist():
        prompt = tokenizer.apply_chat_template(row["prompt"][:1], add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(row["prompt"], tokenize=False).rstrip("\n")
        start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        ids = torch.tensor([tokenizer(whole, add_special_tokens=False)["input_ids"][:length]])
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        total += losses[start - 1 :].double().sum().item()
        targets += len(losses[start - 1 :])
    return total / targets


CASES = [*((name, ROWS) for name in COMMANDS), ("turns of today's verl", 4)]


@pytest.fixture(scope="module")
def courses(folder, tmp_path_factory):
    """Return {case: (what verl makes of the command, what was logged of its run)}."""
    lines: list[list[str]] = []
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(train, "run_torchrun", lambda line, work, **_: work() or lines.append(list(line)) or 0)
        for name, batch in CASES:
            files = ("data.train_files=rows/train.parquet", "data.val_files=null", f"data.train_batch_size={batch}")
            words = [*files, *shlex.split(COMMANDS[name])]
            options = dict(word.lstrip("+").split("=", 1) for word in words)
            output = tmp_path_factory.mktemp("run")
            found[name, batch] = course_of(options, any(map(is_of_old, options)), ROWS), output
            if "optim.lr" not in options:
                words.append("optim.lr=1e-5")  # verl's default, which a run must be given
            here = [f"trainer.default_local_dir={output}", "trainer.logger=[file]", "parallel=cpu", "nproc=1"]
            assert main(["train", *words, *here, "data.cache_dir=cache", "data.num_workers=0"]) == 0
        run_ranks(train_as_programs, 1, lines)
    return {case: (course, metrics(output)) for case, (course, output) in found.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_command_of_verls_trains_verls_steps_at_its_rates_with_the_loss_of_its_rows(case, folder, courses):
    course, logged = courses[case]
    rates = [value for (_, key), value in sorted(logged.items()) if key == "train/lr"]
    assert rates == pytest.approx([course.rate(step) for step in range(course.steps)], rel=1e-6, abs=1e-12)
    if case[1] == ROWS:  # the first step has every row
        assert logged[1, "train/loss"] == pytest.approx(plain_loss(folder, course.length), rel=1e-5)
