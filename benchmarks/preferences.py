"""Preferences beside SFT on the same rows, with a shared prompt, and TRL 1.16's DPOTrainer.

`heads`: the heads `fused`, of SFT, and `pairs` of the benchmark `head`, all tokens targets.

`steps`: a training step on pairs, with a prompt of 95 % of each row, or of a ninth:

| name | trains with |
|---|---|
| `sft` | the token loss on both answers of each pair, rows whole |
| `whole` | DPO on the same rows |
| `shared` | DPO, a pair's prompt computed once (`data.share_prefixes`) |
| `trl` | TRL's DPOTrainer, all pairs in a batch that needs no padding, reference precomputed |

The first three take turns in one process. TRL cannot be imported beside verl 0.9.1: `pip install --no-deps --target DIR
trl==1.16.0`, then `trl=DIR`; its steps follow in a process of their own, so that processor time is compared. The
reference's sums are 0 for all, whose losses must agree; a learning rate of 1e-30 moves no weight.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Value, load_from_disk

from benchmarks import head
from benchmarks.cells import in_own_process, on_ranks
from benchmarks.documents import Document, write_documents
from benchmarks.harness import Row, Sizes, equal, option, table
from benchmarks.models import VOCABULARY, write_qwen3
from benchmarks.training import NO_LEARNING, measured_rows, ratios

PROMPT_SHARE = 0.95  # of a row
QUICK = ["head_tokens=[128]", "vocabulary=1000", "hidden=128", "layers=1", "prompts=[256]", "answers=[]", "repeats=1"]


class Options(Sizes):
    head_tokens: list[int] = option([8192], "heads: target tokens, a row each")
    head_hidden: int = option(256, "heads: hidden size")
    vocabulary: int = option(151_936, "heads: size of the vocabulary", least=2)
    hidden: int = option(256, "steps: hidden size, a multiple of 128", least=128)
    layers: int = option(2, "steps: layers")
    prompts: list[int] = option([512, 1024, 2048, 4096], "steps: tokens of a prompt, 95 % of its documents, a row each")
    answers: list[int] = option([512], "steps: tokens of an answer to a prompt of an eighth of it, a row each")
    pairs: int = option(2, "steps: pairs of a step")
    repeats: int = option(3, "steps: measured steps")
    trl: str | None = option(None, "steps: folder that holds TRL alone; null: without TRL")
    threads: int = option(1, "threads of torch")


@table(head.heads.columns)
def heads(options: Options, folder: Path) -> Iterable[Row]:
    """One forward and backward of head and loss, of SFT and of pairs."""
    sizes = {"tokens": options.head_tokens, "hidden": options.head_hidden, "vocabulary": options.vocabulary}
    of_head = head.Options(**sizes, targets=[1.0], heads=["fused", "pairs"], threads=options.threads)
    yield from head.heads.rows(of_head, folder)


@table(
    "tokens of a prompt {prompt:,} | of an answer {answer:,} | {name} | tokens {tokens[0]:,} | "
    "computed {computed:.0%} | s/step {wall.median:.2f} | cpu s/step {cpu.median:.2f} | × sft, cpu {× sft, cpu:.3f} | "
    "× whole, wall {× whole, wall:.2f} | × whole, cpu {× whole, cpu:.2f} | "
    "× trl, cpu {× trl, cpu:.2f} | loss {loss[0]:.6f}"
)
def steps(options: Options, folder: Path) -> Iterable[Row]:
    """Speed of a step on the same pairs."""
    cases = [(prompt, max(round(prompt * (1 / PROMPT_SHARE - 1)), 8)) for prompt in options.prompts]
    for prompt, answer in [*cases, *((max(answer // 8, 1), answer) for answer in options.answers)]:
        place = options, prompt, answer, folder / f"{prompt}_{answer}"
        rows = on_ranks(1, compete, *place, threads=options.threads)[0]["rows"]
        if options.trl:
            found = in_own_process(train_with_trl, *place, packages=options.trl)
            rows.append({**{name: rows[1][name] for name in ("tokens", "ran")}, "name": "trl", **found})
        equal(rows[1:3], ("loss",), 1e-5)
        equal(rows[1:], ("loss",), 1e-4)  # TRL adds up log-probabilities in fp32
        for row in ratios(rows, *(row["name"] for row in rows if "cpu" in row)):
            yield {"prompt": prompt, "answer": answer, "computed": sum(row["ran"]) / sum(row["tokens"]), **row}


def pairs_of(options: Options, prompt: int, answer: int) -> list[Document]:
    """Draw the rows of a step: the preferred answer to each prompt, then the rejected one."""
    rng, documents = np.random.default_rng(0), []
    mask = np.repeat([0, 1], [prompt, answer])
    for _ in range(options.pairs):
        read, *said = (rng.integers(2, VOCABULARY, count) for count in (prompt, answer, answer))
        ids = (np.concatenate([read, each]) for each in said)
        documents += [{"input_ids": each, "loss_mask": mask, "category_ids": mask} for each in ids]
    return documents


def compete(options: Options, prompt: int, answer: int, folder: Path) -> Row:
    """Return our contestants' rows; a turn is a step on the same pairs."""
    from benchmarks.contestants import Setting

    documents = pairs_of(options, prompt, answer)
    write_qwen3(folder / "model", options.hidden, options.layers, 2 * (prompt + answer))
    write_documents(documents, folder / "rows")
    pairs: Any = load_from_disk(str(folder / "rows"))
    columns = {"unit": ([2, 0], "int32"), "answer": ([1, -1], "int8"), "pair_weight": ([1, 1], "float32")}
    for name, (values, kind) in columns.items():
        pairs = pairs.add_column(name, np.tile(values, options.pairs), feature=Value(kind))
    pairs.save_to_disk(folder / "pairs")
    ways: dict[str, Any] = {}
    for name, data in (("sft", "rows"), ("whole", "pairs"), ("shared", "pairs")):
        files = folder / "model", folder / data, folder
        setting = Setting(*files, 2 * (prompt + answer), options.repeats + 2, (NO_LEARNING,))
        kind = () if name == "sft" else ("data=preference", "loss=dpo")
        one = setting.packed(name, *kind, f"data.share_prefixes={str(name == 'shared').lower()}")
        ways[name] = one, [[one.load(documents, setting.data)]] * (options.repeats + 1)
    return {"rows": measured_rows(ways, options.repeats, folder / "model", np.inf)}  # SFT's loss is another


def train_with_trl(options: Options, prompt: int, answer: int, folder: Path) -> Row:
    """Return the times and losses of TRL's steps on the same pairs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    torch.set_num_threads(options.threads)
    clocks: list[tuple[float, float]] = []  # wall and processor time at the beginning of each step
    losses: list[float] = []

    class OnTokens(DPOTrainer):
        """TRL's trainer on tokens and sums of the reference as they are given."""

        def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
            return dataset

        def _precompute_ref_logps(self, dataset: Dataset, *_: Any) -> Dataset:
            return dataset

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            clocks.append((time.perf_counter(), time.process_time()))
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    ids = [document["input_ids"].tolist() for document in pairs_of(options, prompt, answer)]
    columns = {
        "prompt_ids": [each[:prompt] for each in ids[::2]],
        **{f"{side}_ids": [each[prompt:] for each in ids[at::2]] for at, side in enumerate(("chosen", "rejected"))},
        **{f"ref_{side}_logps": [0.0] * options.pairs for side in ("chosen", "rejected")},
    }
    config = DPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=options.pairs,
        max_steps=options.repeats + 2,
        max_length=None,
        learning_rate=1e-30,
        precompute_ref_log_probs=True,
        **{"bf16": False, "use_cpu": True, "gradient_checkpointing": False, "optim": "adamw_torch"},
        **{"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"},
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    OnTokens(model, args=config, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer).train()
    wall, cpu = np.diff(clocks, axis=0)[1:].T.tolist()  # without the first step
    return {"wall": wall, "cpu": cpu, "loss": losses[1:-1]}
