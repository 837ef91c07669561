"""Loss spikes, and steps without a finite loss: every rank agrees, and the documents are named."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_from_disk

from tests.lib.failing_steps import overrides_of, poison_of
from tests.lib.pretrain_files import write_index
from tests.lib.ranks import run_cases
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import metrics, stopped_at, train, train_alone
from verl_ext.data import MultiDocDataset, SFTDataSet
from verl_ext.data.stream.megatron.index import TokenIndex
from verl_ext.trainer.hooks.spikes import worst_line
from verl_ext.trainer.hooks.stop import SkippedStepsHook
from verl_ext.trainer.loss import StepLoss

pytestmark = pytest.mark.slow

VOCABULARY, STEPS = 100, 11


ODD = 18  # the row of the unusual document, in the 10th step


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """Write repetitive documents, which are learned quickly, and a random one; each pack is a document."""
    documents = random_documents(np.random.default_rng(0), [12 + n % 3 for n in range(2 * STEPS)], VOCABULARY, 1)
    for number, document in enumerate(documents):
        if number != ODD:
            document["input_ids"][:] = 7 + np.arange(len(document["input_ids"])) % 2
    return write_tokenized(tmp_path_factory.mktemp("data") / "train", documents, {1: "maths"})


LAYOUTS = {"one rank": (1, 1), "two groups of two": (4, 2)}  # (ranks, ranks that share a pack)


def spikes(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "spikes.jsonl").read_text().splitlines()]


def skipped_and_parameters(overrides: list[str]) -> tuple[int, float]:
    trainer = train(overrides)
    parameters = [parameter.full_tensor().double() for parameter in trainer.engine.module.parameters()]
    (skipped,) = (hook.skipped_steps for hook in trainer.hooks if isinstance(hook, SkippedStepsHook))
    return skipped, sum(parameter.nansum().item() for parameter in parameters)


@pytest.fixture(scope="module")
def runs(data, tiny_model, tmp_path_factory) -> tuple[dict[str, Path], list[tuple[int, float]]]:
    """Return the folders of a run on each layout, one that resumes, and one with a loss that is no number on a rank;
    of this, also the skipped steps and the sum of the parameters on each rank."""
    folder = tmp_path_factory.mktemp("runs")
    folders = {name: folder / name for name in (*LAYOUTS, "resumed", "skipped")}

    def run(name: str, data: str = data, model: Path = tiny_model, *more: str) -> list[str]:
        ulysses = f"engine.ulysses_sequence_parallel_size={LAYOUTS.get(name, (1, 1))[1]}"
        return overrides_of(data, model, folders[name], "trainer.log_freq=11", "trainer.save_freq=9", ulysses, *more)

    whole = folders["one rank"]
    cases = {"one rank": (1, train_alone, run("one rank")), "stopped": (1, stopped_at, whole, folders["resumed"], 9)}
    cases |= {"resumed": (1, train_alone, run("resumed")), "two": (4, train_alone, run("two groups of two"))}
    documents = random_documents(np.random.default_rng(1), [10] * 8, VOCABULARY, 1)
    for number, document in enumerate(documents):
        document["input_ids"][document["input_ids"] == 5] = 6
        if number == 3:
            document["input_ids"][2] = 5
    poisoned = write_tokenized(folder / "data", documents), poison_of(tiny_model, folder / "model", 5)
    more = ("engine.ulysses_sequence_parallel_size=2", "trainer.save_freq=-1")
    cases["skipped"] = (4, skipped_and_parameters, run("skipped", *poisoned, *more))
    return folders, run_cases(cases)["skipped"]


@pytest.mark.parametrize("layout", [*LAYOUTS, "resumed"])
def test_a_spike_is_written_with_the_document_that_made_it_also_by_a_resumed_run(runs, data, layout):
    folders, _ = runs
    (found,) = spikes(folders[layout])
    assert (found["step"], found["reason"], found["packs"]) == (ODD // 2 + 1, "spike", [ODD, ODD + 1])
    worst, other = found["documents"]
    assert (worst["folder"], worst["row"], worst["start"], worst["category"]) == (data, ODD, 0, "maths")
    row = load_from_disk(data)[ODD]
    assert (worst["tokens"], worst["target_tokens"]) == (row["length"], sum(row["loss_mask"][1:]))
    assert worst["loss"] > found["loss"] > 2 * found["reference"]
    targets = np.array([worst["target_tokens"], other["target_tokens"]])
    mean = np.array([worst["loss"], other["loss"]]) @ targets / targets.sum()
    assert found["loss"] == pytest.approx(mean, rel=1e-6)
    (alone,) = spikes(folders["one rank"])
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-3)  # Adam amplifies rounding
    assert layout != "resumed" or found == alone
    logged = metrics(folders[layout])
    assert logged[STEPS, "train/spikes"] == 1
    assert {step for step, name in logged if name == "train/loss"} == {STEPS}  # whatever spike_factor needs


def test_a_loss_that_is_no_number_on_one_rank_skips_the_step_on_all(runs):
    folders, found = runs
    assert {skipped for skipped, _ in found} == {1}
    assert len({total for _, total in found}) == 1
    (line,) = spikes(folders["skipped"])
    assert (line["step"], line["reason"], line["loss"]) == (2, "skipped", "nan")
    assert [(document["row"], document["loss"] == "nan") for document in line["documents"]] == [(3, True), (2, False)]


@pytest.mark.parametrize(
    ("losses", "named"),
    [
        *(((np.nan, np.nan, None), False), ((np.inf, np.nan), False), ((2.0, 2.0), False), ((None,), False)),
        *(((), False), ((np.nan, 3.0), True), ((3.0, 2.0, None), True), ((np.nan, None), True)),
    ],
)
def test_no_row_is_the_worst_of_rows_that_are_alike(losses, named):
    line = worst_line([{"row": row, "folder": "data", "loss": loss} for row, loss in enumerate(losses)])
    assert line.startswith("; worst: row 0 of data, loss ") if named else line == ""


def test_an_infinite_loss_has_no_finite_gradient():
    logs = torch.tensor([-1.0, -torch.inf], requires_grad=True)
    offsets = torch.tensor([0, 2])
    columns = {"target_row": torch.arange(2), "target_coefficient": torch.ones(2, dtype=torch.float64)}
    data = {name: torch.nested.nested_tensor_from_jagged(column, offsets) for name, column in columns.items()}
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(logs, offsets)}
    loss, _ = StepLoss(1.0, 1, None)(output, data)
    loss.backward()
    assert logs.grad is not None
    assert logs.grad.isnan().all()


def test_the_documents_of_a_pack_are_its_tokens_in_any_folder_and_piece(tmp_path):
    rng = np.random.default_rng(2)
    folders = [
        write_tokenized(tmp_path / name, random_documents(rng, lengths, VOCABULARY, 1), num_shards=2)
        for name, lengths in (("a", [5, 30, 9, 1]), ("b", [40, 3, 8]))
    ]
    mixture = {"sources": {"all": {"tokens": 200}}}
    for more in ({}, {"mixture": mixture}):
        packs = SFTDataSet(folders, max_tokens=16, over_length="split", **more)
        for pack in range(len(packs)):
            places = packs.documents_of(pack)
            ids = [load_from_disk(p.folder)[p.row]["input_ids"][p.start : p.start + p.tokens] for p in places]
            assert np.concatenate(ids).tolist() == packs[pack]["input_ids"].tolist()


@pytest.mark.parametrize("sampling", ["document_stream", "in_order", "random_starts"])
def test_the_documents_of_a_sample_are_those_of_the_index(tmp_path, sampling):
    rng = np.random.default_rng(3)
    for name in ("a", "b"):
        write_index(tmp_path / name, [rng.integers(0, VOCABULARY, length) for length in rng.integers(0, 30, 20)])
    paths = [str(tmp_path / "a.idx"), str(tmp_path / "b.idx")]
    options = {"sampling": sampling, "cache_dir": str(tmp_path / "cache")}
    samples = MultiDocDataset(paths, None, 16, config=options)
    for pack in range(len(samples)):
        places = samples.documents_of(pack)
        ids = [TokenIndex(p.folder).tokens(p.row, p.start, p.start + p.tokens) for p in places]
        assert np.concatenate(ids).tolist() == samples[pack]["input_ids"].tolist()
