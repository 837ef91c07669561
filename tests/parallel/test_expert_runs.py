"""Whole runs whose ranks share experts: numbers of ranks agree, resume from each other, and answer prompts alike."""

import json

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

from tests.lib.ranks import run_cases
from tests.lib.tiny_model import write_tiny_model
from tests.lib.tokenized_data import random_units, write_units
from tests.lib.training import differences, exact_metrics, into, metrics, resume_run, small_run, tensors_of, train_alone
from verl_ext.__main__ import main
from verl_ext.commands.export import main as export

pytestmark = pytest.mark.slow

STEPS = 3
EXPERTS = "parallel.expert_parallel="
SIZES = {  # whole runs: (ranks, overrides)
    "one": (4, (f"{EXPERTS}1",)),
    "two": (4, (f"{EXPERTS}2",)),
    "four": (4, (f"{EXPERTS}4",)),
    "eight bits": (4, (f"{EXPERTS}2", "optim.optimizer=AdamW8bit")),
    "eight bits of one": (4, (f"{EXPERTS}1", "optim.optimizer=AdamW8bit")),
}
RESUMED = {  # from step 2 of a run: (run, ranks, overrides)
    "the same": ("two", 4, (f"{EXPERTS}2",)),
    "two at four": ("two", 4, (f"{EXPERTS}4",)),
    "two at one": ("two", 4, (f"{EXPERTS}1",)),
    "one at two": ("one", 4, (f"{EXPERTS}2",)),
    "on two ranks": ("two", 2, (f"{EXPERTS}2",)),
}
PREFERENCES = {
    "dpo": ("loss=dpo", "data.share_prefixes=true", "data.share_least=2"),
    "kto": ("loss=kto", "data.share_prefixes=false"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    fields = {"num_local_experts": 4, "intermediate_size": 24}
    return write_tiny_model(tmp_path_factory.mktemp("model"), config_class=MixtralConfig, **fields)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """Execute all runs; return the folder with theirs."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "asked.jsonl").write_text(
        "".join(json.dumps({"question": f"w{n}", "answer": "w0"}) + "\n" for n in (1, 9, 30))
    )
    options = small_run(
        folder,
        model,
        [40, 9, 30, 25, 60, 8, 33] * 4,
        *(f"trainer.total_training_steps={STEPS}", "trainer.total_epochs=9", "trainer.save_freq=1"),
        *("trainer.test_freq=1", "data.train_batch_size=8", "trainer.max_ckpt_to_keep=null", "optim.clip_grad=0.1"),
        "optim.override_optimizer_config={eps: 1e-4}",
        *(f"eval.prompts={folder / 'asked.jsonl'}", "eval.freq=1", "eval.max_new_tokens=4", "eval.table_rows=3"),
        "trainer.log_experts=true",
    )
    options.append(options[0].replace("train_dir", "val_dir"))
    units = write_units(
        folder / "units", random_units(np.random.default_rng(2), [2, 3, 2, 1, 2, 2, 4, 2]), {1: "maths", 2: "code"}
    )
    pairs = [f"data.train_dir={units}", f"model.path={model}", "data=preference", "data.train_batch_size=2"]
    pairs += ["trainer.total_training_steps=2", "trainer.total_epochs=9"]
    first = {
        name: (ranks, train_alone, [*options, *more, into(folder / name)]) for name, (ranks, more) in SIZES.items()
    }
    for name, more in PREFERENCES.items():
        for size in (1, 2):
            given = [*pairs, *more, f"{EXPERTS}{size}", into(folder / f"{name} {size}")]
            first[f"{name} {size}"] = (2, train_alone, given)
    then = {
        name: (ranks, resume_run, [*options, *more], folder / run, folder / name, 2)
        for name, (run, ranks, more) in RESUMED.items()
    }
    even = AutoModelForCausalLM.from_pretrained(model)
    for layer in even.model.layers:
        layer.mlp.gate.weight.data.zero_()  # so that each token chooses the same two experts of four
    even.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(model).save_pretrained(folder / "model")
    given = [f"model.path={folder / 'model'}", "trainer.total_training_steps=1", f"{EXPERTS}4", into(folder / "uneven")]
    first["uneven"] = (4, train_alone, [*options, *given])
    run_cases(first)
    run_cases(then)  # in new processes: torch keeps meshes of two dimensions, whose groups have ended, for equal ones
    return folder


def agree(folder, expected, tolerance=1e-5):
    """Compare the metrics of two runs, and the weights after their last step."""
    found, wanted = (
        {k: v for k, v in exact_metrics(run).items() if "expert_rows" not in k[1]} for run in (folder, expected)
    )
    assert found.keys() == wanted.keys()
    tolerance_of = {key: 1e-5 if "reward" in key[1] else 1e-7 for key in wanted}  # rewards are differences of sums
    assert {
        key: value
        for key, value in found.items()
        if value != pytest.approx(wanted[key], rel=tolerance, abs=tolerance_of[key])
    } == {}
    step = max(step for step, _ in wanted)
    tensors, others = (tensors_of(run / f"global_step_{step}") for run in (folder, expected))
    assert tensors.keys() == others.keys()
    for name, tensor in others.items():
        if name.startswith("model."):
            assert float((tensors[name] - tensor).norm()) <= tolerance * float(tensor.norm()), name


@pytest.mark.parametrize(("name", "other"), [("two", "one"), ("four", "one"), ("eight bits", "eight bits of one")])
def test_losses_norms_answers_and_weights_are_those_of_ranks_with_all_experts(name, other, folder):
    agree(folder / name, folder / other, 2e-4 if "bits" in name else 1e-5)  # a code of 8 bits beside a border moves
    assert (folder / name / "answers.jsonl").read_text() == (folder / other / "answers.jsonl").read_text()


def test_a_resume_on_the_same_ranks_is_equal_in_every_bit(folder):
    assert differences(folder / "the same", folder / "two", STEPS) == []


@pytest.mark.parametrize("name", [name for name in RESUMED if name != "the same"])
def test_a_checkpoint_is_resumed_by_other_numbers_of_ranks(name, folder):
    agree(folder / name, folder / "one")


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_with_a_reference_are_those_of_ranks_with_all_experts(name, folder):
    agree(folder / f"{name} 2", folder / f"{name} 1")


def test_an_export_is_a_plain_model(folder):
    assert export([f"checkpoint={folder / 'two'}", f"output_dir={folder / 'plain'}"]) == 0
    plain = AutoModelForCausalLM.from_pretrained(folder / "plain")
    saved = tensors_of(folder / "two" / f"global_step_{STEPS}")
    for name, tensor in plain.state_dict().items():
        assert tensor.equal(saved[f"model.{name}"]), name
    assert "expert_parallel" not in (folder / "plain" / "config.json").read_text()


def shares(folder):
    return [json.loads(line) for line in (folder / "experts.jsonl").read_text().splitlines()]


def test_the_rows_of_the_fullest_rank_and_the_shares_of_experts_are_those_of_a_constructed_routing(folder):
    found = metrics(folder / "uneven")
    assert found[1, "train/expert_rows_max"] == 2.0  # two of four ranks have all rows
    (line,) = shares(folder / "uneven")
    assert (line["step"], line["layers"]) == (1, [0, 1])
    assert [sorted(of_layer) for of_layer in line["shares"]] == [[0, 0, 0.5, 0.5]] * 2


def test_shares_of_experts_do_not_depend_on_who_holds_them(folder):
    one, four = (shares(folder / name) for name in ("one", "four"))
    assert [line["step"] for line in one] == [1, 2, 3] == [line["step"] for line in shares(folder / "the same")]
    assert one[0] == four[0]
    assert not any("expert_rows" in name for _, name in metrics(folder / "one"))


def test_shares_are_shown_by_layer(folder, capsys):
    assert main(["show", "run", str(folder / "uneven")]) == 0
    told = capsys.readouterr().out
    assert "experts of each layer at step 1" in told
    assert told.count("██") >= 2
