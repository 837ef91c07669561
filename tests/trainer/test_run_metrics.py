"""A run's numbers besides its loss: totals over a resume, FLOPs, accuracy and entropy of a validation set."""

import numpy as np
import pytest
from datasets import load_from_disk
from transformers import AutoModelForCausalLM

from tests.lib.ranks import run_ranks
from tests.lib.reference import Document, Reference, load_eager
from tests.lib.training import metrics, small_run, train_twice
from verl_ext.flops import train_flops

pytestmark = pytest.mark.slow

PEAK = 0.5  # TFLOP/s
LENGTHS = [20, 31, 9, 40, 25, 13, 38, 22, 17, 30, 11, 28]


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory):
    """Return the folder of the data, of a run of 4 steps on 2 ranks, and of one that resumes it after step 2."""
    folder = tmp_path_factory.mktemp("runs")
    steps = ("data.train_batch_size=2", "optim.lr=1e-30", "trainer.total_training_steps=4", "trainer.save_freq=2")
    more = (*steps, f"data.val_dir={folder / 'data'}", f"trainer.gpu_peak_tflops={PEAK}")
    run = small_run(folder, tiny_model, LENGTHS, *more, categories=2)
    whole, resumed = folder / "whole", folder / "resumed"
    run_ranks(train_twice, 2, run, whole, resumed, 2)
    return folder / "data", whole, resumed


@pytest.mark.parametrize("kind", ["tokens", "target_tokens"])
def test_totals_are_sums_over_all_steps_also_those_before_a_resume(runs, kind):
    for logged in map(metrics, runs[1:]):
        of_steps = [logged[step, f"train/{kind}"] for step in range(1, 5)]
        assert [logged[step, f"train/total_{kind}"] for step in range(1, 5)] == np.cumsum(of_steps).tolist()
        assert of_steps[0] > 0


def test_mfu_is_that_of_the_documents_lengths(runs, tiny_model):
    """FLOPs per token, which no clock affects, lie between those of the shortest and the longest document."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    flops = train_flops(model, model.config)
    by_length = {length: flops.documents([length])[0] / length for length in LENGTHS}
    logged = metrics(runs[1])
    for step in range(1, 5):
        per_token = logged[step, "perf/mfu"] * PEAK * 1e12 / logged[step, "perf/tokens_per_second_per_gpu"]
        assert min(by_length.values()) < per_token < max(by_length.values())
        assert logged[step, "perf/tokens_per_second_per_gpu"] == logged[step, "train/tokens_per_second"] / 2


def test_a_validation_has_the_accuracy_and_entropy_of_plain_transformers(runs, tiny_model):
    rows = load_from_disk(str(runs[0]))
    columns = zip(rows["input_ids"], rows["loss_mask"], rows["category_ids"], strict=True)
    listed = [Document(ids, mask, categories, [1.0] * len(ids)) for ids, mask, categories in columns]
    want = Reference(load_eager(str(tiny_model)), listed).step([listed], "token", {})
    logged = metrics(runs[1])
    for kind, values in (("token_accuracy", want.accuracy), ("entropy", want.entropy)):
        found = {None: logged[4, f"val/{kind}"]}
        found |= {category: logged[4, f"val/{name}_{kind}"] for category, name in ((1, "maths"), (2, "code"))}
        assert found == pytest.approx(values, rel=1e-5)
