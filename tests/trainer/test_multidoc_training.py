"""Streams of documents through the trainer equal plain Hugging Face, sample by sample."""

import itertools
import json
import re
import shutil
from itertools import pairwise
from math import exp
from pathlib import Path

import pytest
import torch

from tests.lib.document_texts import random_words, write_jsonl
from tests.lib.errors import names
from tests.lib.pretrain_files import write_index
from tests.lib.ranks import run_cases
from tests.lib.reference import load_eager
from tests.lib.training import build, heard, into, metrics, refusals, train, train_alone

pytestmark = pytest.mark.slow

WINDOW = ("data.seq_len=16", "data.max_tokens=16")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Write two texts as records whose documents cross samples; a is about twice as long as b."""
    folder = tmp_path_factory.mktemp("sources")
    a = write_jsonl(folder / "a.jsonl", random_words((7, 1, 30, 12, 15, 16, 40, 3, 9) * 3, seed=1))
    b = write_jsonl(folder / "b.jsonl", random_words((5, 20, 2, 33, 16, 1) * 2, seed=2))
    return a, b


def options(model, sources, folder, *more):
    a, b = sources
    data = ["data=multidoc", f"data.blend=[[0.7,{a}],[0.3,{b}]]", "data.train_ratio=0.8"]
    steps = ["trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.save_freq=-1"]
    places = [f"data.cache_dir={folder}/cache", f"model.path={model}", into(folder / "run")]
    return [*data, *WINDOW, *steps, *places, *more]


def _rows_and_metrics(overrides):
    """Return the rows of the first step and of validation, and the run's metrics."""
    trainer = train(overrides)
    run = trainer.run
    first = [run.train_set[int(pack)] for pack in run.plan.packs(0)]
    validation = [run.validation.dataset[k] for k in range(len(run.validation.dataset))]
    return first, validation, metrics(Path(run.output))


def _sums(model, rows):
    """Return (Σ ℓ_t, targets) by category of rows, with attention that stops where positions restart, and the gradient
    of the mean over all."""
    sums: dict[int, list] = {}
    for row in rows:
        ids, category, mask = row["input_ids"], row["category_ids"], row["loss_mask"]
        begins = [*torch.nonzero(row["position_ids"] == 0).flatten().tolist(), len(ids)]
        for begin, end in pairwise(begins):
            if end - begin < 2:
                continue
            logits = model(ids[None, begin:end]).logits[0, :-1].double()
            nll = torch.nn.functional.cross_entropy(logits, ids[begin + 1 : end], reduction="none")
            assert mask[begin + 1 : end].all()
            sums.setdefault(int(category[begin + 1]), []).append(nll)
    return {name: torch.cat(parts) for name, parts in sums.items()}


PLAIN = [(1, 1, "true"), *itertools.product([2], [1, 2], ["true", "false"])]


@pytest.mark.parametrize("case", PLAIN, ids="{0[0]} ranks, {0[1]} of a pack, across {0[2]}".format)
def test_a_step_and_validation_are_those_of_plain_hugging_face(case, tiny_model, runs):
    model, (rows, validation, said) = load_eager(str(tiny_model)), runs[1][case][0]
    losses = _sums(model, rows)
    mean = torch.cat(list(losses.values())).mean()
    mean.backward()
    norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm().item()
    assert said[1, "train/loss"] == pytest.approx(mean.item(), rel=1e-5)
    assert said[1, "train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert said[1, "train/target_tokens"] == sum(len(part) for part in losses.values())
    for category, name in ((1, "a"), (2, "b")):
        assert said[1, f"train/{name}_loss"] == pytest.approx(losses[category].mean().item(), rel=1e-5)

    with torch.no_grad():
        measured = _sums(model, validation)
    whole = torch.cat(list(measured.values()))
    assert said[2, "val/loss"] == pytest.approx(whole.mean().item(), rel=1e-5)
    assert said[2, "val/perplexity"] == pytest.approx(exp(whole.mean().item()), rel=1e-4)
    for category, name in ((1, "a"), (2, "b")):
        assert said[2, f"val/{name}_tokens"] == len(measured[category])
        assert said[2, f"val/{name}_perplexity"] == pytest.approx(exp(measured[category].mean().item()), rel=1e-4)


CHANGES = {
    "data.attend_across_documents=false": r"attend_across_documents is False, but the run in .* was trained with",
    # more than an epoch needs another order
    "trainer.total_training_steps=20": r"number of samples of the run \(.*\) is 80, but .* with 8",
    "data.blend_rule=megatron": r"data\.blend_rule is megatron, but the run in .* with tijdeman",
    "data.blend=[[0.5,{a}],[0.5,{b}]]": r"the weights of data\.blend is \[0\.5, 0\.5\], but .* \[0\.7, 0\.3\]",
    "data.blend=[[0.7,{moved}],[0.3,{b}]]": "^$",  # the same documents by another path
}


def _evaluate(overrides):
    trainer = build(overrides)
    trainer.resume()
    trainer.evaluate_only()


@pytest.fixture(scope="module")
def runs(tiny_model, sources, tmp_path_factory):
    """Return the folder of all runs, and each rank's results."""
    folder, (a, b) = tmp_path_factory.mktemp("runs"), sources
    cases = {}
    for ranks, sharing, across in PLAIN:
        run = options(tiny_model, sources, folder / f"{ranks}-{sharing}-{across}", "optim.lr=1e-12")
        run += [f"data.attend_across_documents={across}", f"engine.ulysses_sequence_parallel_size={sharing}"]
        cases[ranks, sharing, across] = (ranks, _rows_and_metrics, run)  # validation follows the last step

    # One rank: a run that is extended, one of epochs, measurements.
    constant = options(tiny_model, sources, folder, "optim.lr_scheduler_type=constant")
    parts, longer = [*constant, "trainer.save_freq=2"], [*constant, "trainer.total_training_steps=4"]
    changes = [[each.format(a=a, b=b, moved=a.replace("/a.jsonl", "/./a.jsonl"))] for each in CHANGES]
    epochs = [word for word in options(tiny_model, sources, folder / "epochs") if "total_training_steps" not in word]
    epochs += ["data.sampling=document_stream", "trainer.total_epochs=2", "trainer.test_freq=after_each_epoch"]
    blend = options(tiny_model, sources, folder / "blend", "trainer.eval_only=true")
    short = [word for word in blend if not word.startswith(("data.blend", "data.train_ratio"))]
    words = write_jsonl(folder / "short.jsonl", random_words((5,)))
    short += [f"data.val_dir={{short: {words}}}", into(folder / "short")]
    cases |= {"run": (1, train_alone, parts), "copy": (1, shutil.copytree, folder / "run", folder / "extended")}
    cases |= {"changes": (1, refusals, parts, changes), "epochs": (1, train_alone, epochs)}
    cases |= {name: (1, train_alone, [*longer, into(folder / name)]) for name in ("extended", "whole")}
    cases |= {"blend": (1, heard, _evaluate, blend), "short": (1, heard, _evaluate, short)}

    # Two ranks: indices with tokens beyond the vocabulary, and with a cache that cannot be written.
    beyond = write_index(folder / "beyond", [[5, 6, 128] * 30])
    words = write_index(folder / "words", [[5 + number] * 9 for number in range(20)])
    (folder / "file").write_text("")
    asked = ["data=multidoc", f"model.path={tiny_model}", *WINDOW, into(folder / "indexed")]
    uncached = [f"data.train_dir={{words: {words}}}", "data.sampling=in_order", f"data.cache_dir={folder}/file/cache"]
    uncached += ["trainer.total_training_steps=1", "trainer.save_freq=-1"]
    asked_beyond = [*asked, f"data.train_dir={beyond}", f"data.cache_dir={folder}/of_beyond"]
    cases |= {"beyond": (2, refusals, asked_beyond, [[]]), "uncached": (2, train_alone, [*asked, *uncached])}
    return folder, run_cases(cases)


def test_a_stream_that_is_extended_goes_on_as_if_it_had_been_as_long_from_the_start(runs):
    first, second = (metrics(runs[0] / name) for name in ("whole", "extended"))
    assert [second[step, "train/loss"] for step in (1, 2, 3, 4)] == [first[step, "train/loss"] for step in (1, 2, 3, 4)]
    assert second[4, "val/loss"] == first[4, "val/loss"]


def test_a_resume_on_other_samples_is_refused(runs):
    for line, expected in zip(runs[1]["changes"][0], CHANGES.values(), strict=True):
        assert re.search(expected, line)


def test_an_epoch_of_a_stream_is_as_many_tokens_as_it_has(runs):
    said = metrics(runs[0] / "epochs" / "run")
    last = max(step for step, _ in said)
    assert said[last, "train/epoch"] == pytest.approx(2, rel=0.2)
    assert len([step for step, name in said if name == "val/loss"]) >= 2


def test_evaluation_alone_measures_a_split_blend_and_a_set_shorter_than_a_sample(runs):
    told = json.loads((runs[0] / "blend" / "run" / "evaluation.json").read_text())
    assert told["data.train_ratio"] == 0.8
    assert [weight for weight, _ in told["data.blend"]] == [0.7, 0.3]
    assert told["val/a_tokens"] > 0
    told = json.loads((runs[0] / "short" / "evaluation.json").read_text())
    assert told["data.val_dir"] == {"short": str(runs[0] / "short.jsonl")}
    assert told["val/short_tokens"] == 5


def test_tokens_beyond_the_models_vocabulary_are_refused_before_it_is_loaded(runs):
    for (told,) in runs[1]["beyond"]:
        assert names(told, "data.train_dir", "0..127", "5 to 128")


def test_an_index_is_trained_on_where_the_cache_cannot_be_written(runs):
    assert metrics(runs[0] / "indexed")[1, "train/words_tokens"] > 0
