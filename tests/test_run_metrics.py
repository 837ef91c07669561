"""A run's numbers besides its loss: totals over a resume, FLOPs, accuracy and entropy of a validation set."""

from itertools import product

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.ranks import run_ranks
from tests.reference import Document, Reference, load_eager
from tests.tiny_model import VOCABULARY
from tests.tokenized_data import random_documents, write_tokenized
from tests.training import metrics, stopped_at, train_alone
from verl_ext.flops import train_flops

pytestmark = pytest.mark.slow

PEAK = 0.5  # TFLOP/s
LENGTHS = [20, 31, 9, 40, 25, 13, 38, 22, 17, 30, 11, 28]


@pytest.fixture(scope="module")
def documents():
    return random_documents(np.random.default_rng(0), LENGTHS, VOCABULARY, 2)


@pytest.fixture(scope="module")
def overrides(tiny_model, documents, tmp_path_factory):
    folder = write_tokenized(tmp_path_factory.mktemp("data") / "data", documents, {1: "maths", 2: "code"})
    steps = ("data.train_batch_size=2", "optim.lr=1e-30", "trainer.total_training_steps=4", "trainer.save_freq=2")
    paths = (f"data.train_dir={folder}", f"data.val_dir={folder}", f"model.path={tiny_model}")
    return [*paths, *steps, f"trainer.gpu_peak_tflops={PEAK}"]


@pytest.fixture(scope="module")
def run(overrides, tmp_path_factory):
    """Execute a run of 4 steps on 2 ranks."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run_ranks(train_alone, 2, [*overrides, f"trainer.default_local_dir={folder}"])
    return folder


def test_totals_are_sums_over_all_steps_also_those_before_a_resume(run, overrides, tmp_path):
    resumed = stopped_at(run, tmp_path / "resumed", 2)
    run_ranks(train_alone, 1, [*overrides, f"trainer.default_local_dir={resumed}"])
    for folder, kind in product((run, resumed), ("tokens", "target_tokens")):
        logged = metrics(folder)
        of_steps = [logged[step, f"train/{kind}"] for step in range(1, 5)]
        assert [logged[step, f"train/total_{kind}"] for step in range(1, 5)] == np.cumsum(of_steps).tolist()
        assert of_steps[0] > 0


def test_mfu_is_that_of_the_documents_lengths(run, tiny_model):
    """FLOPs per token, which no clock affects, lie between those of the shortest and the longest document."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    flops = train_flops(model, model.config)
    by_length = {length: flops.documents([length])[0] / length for length in LENGTHS}
    logged = metrics(run)
    for step in range(1, 5):
        per_token = logged[step, "perf/mfu"] * PEAK * 1e12 / logged[step, "perf/tokens_per_second_per_gpu"]
        assert min(by_length.values()) < per_token < max(by_length.values())
        assert logged[step, "perf/tokens_per_second_per_gpu"] == logged[step, "train/tokens_per_second"] / 2


def test_a_validation_has_the_accuracy_and_entropy_of_plain_transformers(run, tiny_model, documents):
    columns = ("input_ids", "loss_mask", "category_ids")
    listed = [
        Document(*([int(x) for x in each[name]] for name in columns), [1.0] * len(each["input_ids"]))
        for each in documents
    ]
    want = Reference(load_eager(str(tiny_model)), listed).step([listed], "token", {})
    logged = metrics(run)
    for kind, values in (("token_accuracy", want.accuracy), ("entropy", want.entropy)):
        found = {None: logged[4, f"val/{kind}"]}
        found |= {category: logged[4, f"val/{name}_{kind}"] for category, name in ((1, "maths"), (2, "code"))}
        assert found == pytest.approx(values, rel=1e-5)
