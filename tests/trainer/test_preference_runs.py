"""Runs with losses of preferences: the reference, layouts, sharing, resume, adapters, documents beside pairs."""

import json
import math
import os
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.lib.errors import names
from tests.lib.ranks import run_cases
from tests.lib.tiny_model import write_tiny_model
from tests.lib.tokenized_data import random_documents, random_units, write_tokenized, write_units
from tests.lib.training import (
    build,
    differences,
    heard,
    into,
    metrics,
    refusals,
    resume_run,
    stopped_at,
    train_alone,
    train_twice,
)
from verl_ext.checkpoint.layout import BEST, step_of
from verl_ext.config.schema import options as choices
from verl_ext.data.tokenized.ranks import arrays_of_ranks
from verl_ext.losses import PREFERENCE_MODES
from verl_ext.trainer import reference

pytestmark = pytest.mark.slow

DPO = ("data=preference", "loss=dpo", "data.train_batch_size=2", "trainer.total_training_steps=4")
SHARED = ("data.share_prefixes=true", "data.share_least=2")
LORA = ("model.lora_rank=4", "model.lora_alpha=8", "model.target_modules=all-linear")
# All packs are one step, so that runs with more or fewer packs take the same steps.
WHOLE = ("data.train_batch_size=64", "trainer.total_epochs=3", "trainer.total_training_steps=null")


@pytest.fixture(scope="module")
def units():
    return random_units(np.random.default_rng(2), [2, 3, 2, 1, 2, 2, 4, 2, 1, 2, 2, 2, 3])


@pytest.fixture(scope="module")
def options(tiny_model, units, tmp_path_factory):
    data = write_units(tmp_path_factory.mktemp("data") / "units", units, {1: "maths", 2: "code"})
    return [f"data.train_dir={data}", f"data.val_dir={data}", f"model.path={tiny_model}", "trainer.test_freq=2", *DPO]


def numbers(found, *names):
    """Return the values of metrics by step."""
    return {key: value for key, value in found.items() if key[1].endswith(names)}


VARIANTS = {
    "one": (),
    "shared": SHARED,
    "adapters": LORA,
    "norm": ("loss=dpo_norm",),
    "packs of two": ("data.micro_batch_size_per_gpu=2", "data.train_batch_size=4"),
    "tiles": ("model.tile_tokens=16", "model.activation_offload=true", *SHARED),
    "steps below an epoch": ("trainer.total_training_steps=1",),
    "part of a balanced epoch": ("data.balance=sorted", "data.drop_last=true", "trainer.total_training_steps=2"),
    "units drawn twice": ("data.mixture={sources: {all: {tokens: 900}}}", "trainer.total_training_steps=3"),
    "answers": ("loss=kto",),
    "best": (
        *("checkpoint.keep_best=val/reward_margin", "trainer.early_stop.metric=val/reward_accuracy"),
        *("trainer.test_freq=1", "optim.lr=3e-2"),
    ),
}


def resumed_without_reference(options, whole, folder):
    stopped_at(whole, folder, 2)
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder / "reference")
    torch.distributed.barrier()
    with without_cache():
        train_alone([*options, into(folder)])


def without_cache():
    """Let this rank compute sums that are not kept with a run."""

    def found(ranks, name, make, root=None):
        return make() if root is None else arrays_of_ranks(ranks, name, make, root)

    return mock.patch.object(reference, "arrays_of_ranks", found)


def measured(overrides):
    trainer = build(overrides)
    trainer.resume()
    trainer.evaluate_only()


def with_wrong_reference(overrides):
    """Train with sums that are off, as those of other weights would be."""
    right = reference.ReferenceScorer.measured

    def measured(self, each):
        return {name: values + 0.5 for name, values in right(self, each).items()}

    wrong = mock.patch.object(reference.ReferenceScorer, "measured", measured)
    with without_cache(), wrong:
        return heard(train_alone, overrides)


MISTAKES = [
    (["loss=token"], ("loss", "dpo", "data=preference", "loss.mode=token")),
    (["data=chosen", "data.share_prefixes=false"], ("data", "preference", "loss.mode=dpo", "ChosenDataSet")),
    (["loss.margin=0.5"], ("loss.margin", "simpo", 0.5, "loss.mode=dpo")),
    (["data.over_length=truncate"], ("data.over_length", "error, drop", "truncate")),
    (["data.max_tokens=8"], ("data.max_tokens", "data.train_dir", 8)),
    (["trainer.eval_only=true"], ("reference.path", "trainer.eval_only=true", None)),
    (["loss=simpo", "reference.path=elsewhere"], ("reference.path", "loss.mode=simpo", "elsewhere")),
    (["reference.path=./nowhere"], ("reference.path", "./nowhere")),
    (["reference.path=nowhere"], ("reference.path", "config.json", "nowhere")),
    (["loss=kto", "data.train_max_samples=1"], ("data.max_tokens", "two prompts", "kto", 64)),
    (["loss=kto", "loss.answers=mean"], ("loss.answers", "sum", "loss.mode=kto", "mean")),
]


def mistakes(folder, model):
    """Return changes of a run, and what the line on each names; write the models that some of them name."""
    write_tiny_model(folder / "small", vocab_size=8)
    (folder / "bare").mkdir(exist_ok=True)
    shutil.copy(model / "config.json", folder / "bare")
    return [
        *MISTAKES,
        ([f"reference.path={folder}/small"], ("reference.path", "data.train_dir", f"8 in {folder}/small")),
        ([f"reference.path={folder}/bare"], ("reference.path", "model.safetensors", f"{folder}/bare")),
    ]


RESUMED = {"plain": (), "shared adapters": (*SHARED, *LORA)}
ELASTIC = {"shared": SHARED, "balanced": ("data.balance=sorted",)}
LAYOUTS = {
    "whole": (),
    "shared": SHARED,
    "ulysses": ("engine.ulysses_sequence_parallel_size=2", *SHARED),
    "heads": ("loss.head=plain", *SHARED),
}
MEASURES = ("trainer.eval_only=true", "trainer.length_bins=[9]")  # the sums of both bins are those of one


@pytest.fixture(scope="module")
def runs(options, tiny_model, tmp_path_factory):
    """Return the folder of all runs, the lines on a wrong reference by rank, and those on MISTAKES."""
    folder = tmp_path_factory.mktemp("runs")
    other = write_tiny_model(folder / "other model", seed=5)
    documents = random_documents(np.random.default_rng(1), [9, 12, 7], 128, 1)
    extra = write_tokenized(folder / "extra", documents, {1: "maths"})
    beside = [*options, *WHOLE, f"data.train_dir=[{options[0].partition('=')[2]},{extra}]"]
    saves = [*options, "trainer.save_freq=2"]
    cases = {f"variant {name}": (2, train_alone, [*options, *more]) for name, more in VARIANTS.items()}
    cases |= {name: (2, train_alone, [*options, *WHOLE, *more]) for name, more in LAYOUTS.items()}
    cases |= {f"elastic {name}": (2, train_alone, [*saves, *more]) for name, more in ELASTIC.items()}
    cases["measured"] = (2, measured, [*options, f"reference.path={other}", *MEASURES])
    third = write_tiny_model(folder / "third model", seed=6, num_hidden_layers=1)
    parts = ("model.freeze=[layers.1.mlp]", "optim.lr_of={layers.1.self_attn: 2}", f"reference.path={third}")
    cases["parts"] = (2, train_alone, [*options, "trainer.total_training_steps=1", *parts])
    cases |= {"wrong": (2, with_wrong_reference, options), "alone": (1, train_alone, [*options, *WHOLE])}
    cases |= {f"{weight}": (1, train_alone, [*beside, f"loss.sft_weight={weight}"]) for weight in (0.0, 0.5)}
    cases = {name: (*call, [*given, into(folder / name)]) for name, (*call, given) in cases.items()}
    for name, more in RESUMED.items():
        whole, kept, scored = (folder / f"{name} {kind}" for kind in ("whole", "kept", "scored again"))
        cases[f"{name} kept"] = (2, train_twice, [*saves, *more], whole, kept, 2)
        cases[f"{name} scored"] = (2, resumed_without_reference, [*saves, *more], whole, scored)
    for name, more in ELASTIC.items():
        resumed = folder / f"elastic {name}", folder / f"alone {name}"
        cases[f"alone {name}"] = (1, resume_run, [*saves, *more], *resumed, 2)
    changes = [change for change, _ in mistakes(folder, tiny_model)]
    found = run_cases({**cases, "mistakes": (1, refusals, [*options, into(folder / "run")], changes)})
    return folder, found["wrong"], found["mistakes"][0]


def test_the_first_step_has_the_rewards_of_the_reference_to_the_bit(runs):
    for name in VARIANTS:
        found = metrics(runs[0] / f"variant {name}")
        if name != "answers":
            assert found[0, "val/reward_accuracy"] == 0.5
            assert found[1, "train/preference"] == pytest.approx(math.log(2), rel=1e-14)
        assert found[1, "train/reward_margin"] == found[1, "train/reward_chosen"] == found[1, "train/chosen_drop"] == 0
        assert found[0, "val/reward_margin"] == 0
        assert all(math.isfinite(value) for (_, metric), value in found.items() if metric.endswith("margin"))
        last = max(step for step, _ in found)
        assert last == 1 or found[last, "val/reward_margin"] > 0


def test_the_best_step_is_that_of_the_highest_margin(runs):
    folder = runs[0] / "variant best"
    margins = {step: value for (step, name), value in metrics(folder).items() if name == "val/reward_margin" and step}
    assert step_of(folder / os.readlink(folder / BEST)) == max(margins, key=margins.__getitem__)
    assert len({*margins.values()}) == len(margins) > 2


@pytest.mark.parametrize("name", ["one", "answers"])
def test_every_mean_that_a_validation_logs_may_keep_a_checkpoint_and_no_other_name(runs, options, tmp_path, name):
    logged = {key: value for (_, key), value in metrics(runs[0] / f"variant {name}").items() if key.startswith("val/")}
    means = sorted(key for key, value in logged.items() if isinstance(value, float) and not key.endswith("_length"))
    assert {"val/loss", "val/maths_loss", "val/preference", "val/reward_margin", "val/entropy"} <= {*means}
    others = ["val/tokens", "val/pairs", "val/chosen_length", "val/maths_los"]
    run = [*options, *VARIANTS[name], into(tmp_path)]
    told = refusals(run, [[f"checkpoint.keep_best={key}"] for key in (*means, *others)])
    assert told[: len(means)] == [""] * len(means)
    for key, line in zip(others, told[len(means) :], strict=True):
        assert names(line, "checkpoint.keep_best", key)


def test_layouts_and_sharing_change_no_loss(runs):
    names = ("loss", "grad_norm", "preference", "margin", "accuracy", "pairs", "_nll", "/tokens", "chosen", "rejected")
    whole = numbers(metrics(runs[0] / "whole"), *names)
    assert whole[3, "train/loss"] < whole[1, "train/loss"]
    assert whole[1, "train/document_nll"] > 0
    for name in (*LAYOUTS, "alone"):
        assert numbers(metrics(runs[0] / name), *names) == pytest.approx(whole, rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("kind", ["kept", "scored again"])
def test_a_resumed_run_has_the_bits_of_the_whole_one(runs, name, kind):
    assert differences(runs[0] / f"{name} {kind}", runs[0] / f"{name} whole", 4) == []


@pytest.mark.parametrize("name", ELASTIC)
def test_a_run_goes_on_with_other_ranks(runs, name):
    names = ("loss", "grad_norm", "margin", "accuracy")
    whole = numbers(metrics(runs[0] / f"elastic {name}"), *names)
    assert numbers(metrics(runs[0] / f"alone {name}"), *names) == pytest.approx(whole, rel=1e-5, abs=1e-6)


@torch.no_grad()
def plain_rewards(units, policy, reference, beta=0.1):
    """Return the rewards of all answers by plain transformers in float64, one document at a time."""
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval() for path in (policy, reference)]
    rewards = []
    for document in units:
        ids, mask = torch.as_tensor(document["input_ids"]).long(), torch.as_tensor(document["loss_mask"][1:]).bool()
        logs = [model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[mask, 0] for model in models]
        rewards.append(beta * float(logs[0].sum() - logs[1].sum()))
    return rewards


def plain_margins(units, policy, reference):
    """Return the margin and the weight of each pair."""
    rewards, weights, margins = plain_rewards(units, policy, reference), [], []
    for row, document in enumerate(units):
        if document["answer"] < 0:
            first = max(at for at in range(row) if units[at]["unit"])
            margins.append(rewards[first] - rewards[row])
            weights.append(document["pair_weight"])
    return margins, weights


def test_a_measurement_compares_with_the_model_of_reference_path(runs, units, tiny_model):
    found = json.loads((runs[0] / "measured" / "evaluation.json").read_text())
    margins, weights = plain_margins(units, str(tiny_model), str(runs[0] / "other model"))
    assert found["val/pairs"] == len(margins)
    assert found["val/reward_margin"] == pytest.approx(np.average(margins, weights=weights), rel=1e-4)
    assert found["val/reward_accuracy"] == pytest.approx(np.average(np.array(margins) > 0, weights=weights))
    loss = np.average(np.log1p(np.exp(-np.array(margins))), weights=weights)
    assert found["val/preference"] == pytest.approx(loss, rel=1e-5)


def test_a_reference_needs_no_parts_that_options_of_the_policy_name(runs, units, tiny_model):
    margins, weights = plain_margins(units, str(tiny_model), str(runs[0] / "third model"))
    found = metrics(runs[0] / "parts")[0, "val/reward_margin"]
    assert found == pytest.approx(np.average(margins, weights=weights), rel=1e-4)


def test_a_reference_that_is_not_the_model_ends_the_run_at_its_first_step(runs):
    for line in runs[1]:
        assert names(line, "reference.tolerance", "step 1", "0.5 nats")


def test_documents_of_another_folder_are_learnt_beside_the_pairs(runs):
    with_none, with_half = (metrics(runs[0] / name) for name in ("0.0", "0.5"))
    assert with_none[1, "train/document_nll"] == with_half[1, "train/document_nll"]
    expected = math.log(2) + 0.5 * with_half[1, "train/document_nll"]
    assert with_half[1, "train/loss"] == pytest.approx(expected, rel=1e-12)
    assert with_half[3, "train/document_nll"] < with_none[3, "train/document_nll"]


def test_mistakes_are_one_line_each(runs, tiny_model):
    for (change, things), got in zip(mistakes(runs[0], tiny_model), runs[2], strict=True):
        assert names(got.partition("\n")[0], *things), (change, got)


def test_every_loss_has_a_file_of_its_group():
    assert PREFERENCE_MODES.keys() <= set(choices("loss"))
