"""Whole runs on gloo ranks: validation, metrics, checkpoints, exports, and failing steps."""

import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.lib.errors import names
from tests.lib.failing_steps import poison_of
from tests.lib.ranks import run_cases, run_ranks
from tests.lib.tiny_model import VOCABULARY
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import (
    MEASURED,
    build,
    fit,
    heard,
    into,
    metrics,
    plain_losses,
    refusals,
    resume_run,
    settle,
    small_run,
    train,
    train_alone,
)
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.distributed import limit_collectives
from verl_ext.trainer.hooks import TrackingHook
from verl_ext.trainer.loader import pack_loader
from verl_ext.trainer.trainer import UpcomingStep

pytestmark = pytest.mark.slow

NAMES = {1: "maths", 2: "code"}
LENGTHS = (2, 3, 64, 17, 9, 30, 31, 5, 48, 12, 7, 22, 40, 11, 19, 26, 33, 8, 14, 61, 4, 27)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write training and validation folders with 13 validation documents, which no rank count divides."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    validation = random_documents(rng, LENGTHS[:13], VOCABULARY, 2)
    write_tokenized(folder / "train", random_documents(rng, LENGTHS, VOCABULARY, 2), NAMES)
    write_tokenized(folder / "val", validation, NAMES)
    return folder, validation


def run_of(data, model: Path, output: Path, *overrides: str) -> list[str]:
    return [f"data.train_dir={data[0] / 'train'}", f"model.path={model}", into(output), *overrides]


BINS = [9, 30, 100]  # 9 and 30 are lengths of documents; none is longer than 100

LAYOUTS = {  # (ranks, ranks of a Ulysses group, groups that share a pack)
    "one_rank": (1, 1, 1),
    "two_data_parallel": (2, 1, 1),
    "two_groups_of_two": (4, 2, 2),
}


@pytest.fixture(scope="module")
def done(data, tiny_model, tmp_path_factory):
    """Execute all runs on one, two and four ranks; return their folder and {name: its results}."""
    folder = tmp_path_factory.mktemp("runs")
    cases = {name: (its[0], train_alone, layout_of(data, tiny_model, folder, name)) for name, its in LAYOUTS.items()}
    cases |= {
        "other packs": (1, refusals, *other_packs(data, tiny_model, folder)),
        "fewer": (1, train_alone, [*groups_of_two(tiny_model, folder), into(folder / "fewer"), "trainer.save_freq=2"]),
        "mixture": (1, prepared, [[*mixture(data, tiny_model, folder), *MICRO]]),
        "weigh 0": (1, train_alone, weightless(tiny_model, folder)),
        **{f"poisoned {n}": (1, train_alone, run) for n, run in enumerate(poisoned(tiny_model, folder)[0])},
        "too many": (1, heard, fit, poisoned(tiny_model, folder)[1]),
        **{f"{name} categories": (1, count_waits, waits(tiny_model, folder, name)) for name in CATEGORIES},
        "order": (1, order_of_a_step, in_order(tiny_model, folder)),  # the last, which leaves its wrappers
        "refused": (2, refusals, groups_of_two(tiny_model, folder), [[into(folder / "new")]]),
        "mixtures": (2, prepared, [[*mixture(data, tiny_model, folder), *step] for step in GROUPED]),
    }
    resumed = (2, resume_run, groups_of_two(tiny_model, folder), folder / "fewer", folder / "more", 2)
    return folder, run_cases(cases, {"more": resumed})


def layout_of(data, model: Path, folder: Path, name: str) -> list[str]:
    """Return two epochs on a layout of ranks, in place of another run."""
    _, ulysses, groups = LAYOUTS[name]
    output = folder / name
    (output / "global_step_99").mkdir(parents=True)
    (output / "thesis.txt").write_text("mine")
    (output / "metrics.jsonl").write_text('{"step": 99, "data": {}}\n')
    return [
        *run_of(data, model, output, f"data.val_dir={data[0] / 'val'}", "trainer.total_epochs=2"),
        *("trainer.overwrite=true", f"trainer.length_bins={BINS}"),
        *(f"engine.ulysses_sequence_parallel_size={ulysses}", f"parallel.context_parallel_size={groups}"),
        "checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        *("data.balance_group=2", "data.cost=tokens"),  # their defaults would depend on the layout
    ]


@pytest.fixture(scope="module")
def runs(done):
    return {name: (done[0] / name, metrics(done[0] / name)) for name in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_validation_is_exact_over_the_whole_set(runs, data, layout):
    output, logged = runs[layout]
    last = max(step for step, _ in logged)
    expected = plain_losses(output / f"global_step_{last}" / "huggingface", data[1])
    assert logged[last, "val/loss"] == pytest.approx(expected[0], rel=1e-5)
    assert logged[last, "val/maths_loss"] == pytest.approx(expected[1], rel=1e-5)
    assert logged[last, "val/code_loss"] == pytest.approx(expected[2], rel=1e-5)
    assert logged[last, "train/loss"] < logged[1, "train/loss"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_validation_by_length_is_exact_and_its_parts_are_the_whole(runs, data, layout):
    output, logged = runs[layout]
    last = max(step for step, _ in logged)
    targets = 0
    for low, high in pairwise([0, *BINS]):
        of_bin = [document for document in data[1] if low < len(document["input_ids"]) <= high]
        expected = plain_losses(output / f"global_step_{last}" / "huggingface", of_bin)
        assert logged[last, f"val/loss_{low}_{high}"] == pytest.approx(expected[0], rel=1e-5)
        targets += logged[last, f"val/target_tokens_{low}_{high}"]
    assert targets == logged[last, "val/target_tokens"]
    assert logged[last, "val/target_tokens_100_inf"] == 0
    assert (last, "val/loss_100_inf") not in logged


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one_rank"])
def test_a_run_is_the_same_on_any_layout_of_ranks(runs, layout):
    _, alone = runs["one_rank"]
    _, logged = runs[layout]
    assert logged.keys() == alone.keys()
    for (step, name), value in alone.items():
        if not name.endswith(MEASURED):
            tolerance = 1e-5 if step == 1 else 1e-3  # Adam amplifies rounding from step to step
            assert logged[step, name] == pytest.approx(value, rel=tolerance), (step, name)


OTHER_PACKS = {  # a change, and what the answer to it names
    "data.train_batch_size=2": ("data.train_batch_size", 2, 4),
    "data.balance=none": ("data.balance", "none", "sorted"),
    "data.cost=flops": ("data.cost", "flops", "tokens"),
    "data.mixture={sources: {all: {tokens: 400}}}": ("data.mixture", "None"),
}


def other_packs(data, model: Path, folder: Path) -> tuple[list[str], list[list[str]]]:
    """Return a run that goes on from that of one rank, and its changes."""
    documents = random_documents(np.random.default_rng(0), [10] * 4, VOCABULARY, 1)
    for document in documents[1:]:
        document["loss_mask"][:] = document["category_ids"][:] = 0
    without = [f"data.train_dir={write_tokenized(folder / 'data_of_step', documents)}", into(folder / "of_step")]
    overrides = run_of(data, model, folder / "one_rank", "trainer.total_epochs=3")
    overrides += ["data.balance_group=2", "data.cost=tokens"]
    of_step = [*without, *ONE_DOCUMENT_A_STEP, "data.balance_group=1"]
    return overrides, [[], *([change] for change in OTHER_PACKS), of_step]


def test_a_resume_on_other_packs_and_a_step_without_a_target_are_refused(done):
    ((told, *others, of_step),) = done[1]["other packs"]
    assert told == ""
    for line, things in zip(others, OTHER_PACKS.values(), strict=True):
        assert names(line, *things), line
    assert names(of_step, "target token")
    assert not (done[0] / "of_step").exists()


def groups_of_two(model: Path, folder: Path) -> list[str]:
    """Grouped for two ranks, documents 4 and 5, which have no targets, would share a step."""
    documents = random_documents(np.random.default_rng(0), range(5, 13), VOCABULARY, 1)
    for number in (4, 5, 7):
        documents[number]["loss_mask"][:], documents[number]["category_ids"][:] = 0, 0
    if not (folder / "train").is_dir():
        write_tokenized(folder / "train", documents, {1: "maths"})
    overrides = run_of((folder, None), model, folder / "new", "data.strategy=none", "data.cost=tokens")
    return [*overrides, "data.train_batch_size=2", "trainer.total_training_steps=4"]


def test_a_resume_on_more_ranks_checks_the_steps_of_the_groups_that_it_keeps(done):
    assert all(names(line, "target token") for (line,) in done[1]["refused"])
    assert (done[0] / "more" / "global_step_4").is_dir()


MICRO, PROFILED = ("data.micro_batch_size_per_gpu=2",), "trainer.profile_interval=[1,2]"
GROUPED = (
    ("data.train_batch_size=4", *MICRO),
    ("data.train_batch_size=2", PROFILED),
    ("data.train_batch_size=2", "data.balance=none", PROFILED, "profiler.enable=true"),
)


def mixture(data, model: Path, folder: Path) -> list[str]:
    of_training = ("data.mixture={sources: {all: {tokens: 200}}}", f"data.val_dir={data[0] / 'val'}")
    return run_of(data, model, folder / "mixed", *of_training)


def test_a_mixture_is_of_training_alone_and_a_group_is_a_pack_for_each_rank(done, data):
    """Groups are not micro-batches: one rank has none to wait for, and a one-group step would have one cost level."""
    told = (2, False, False), (2, True, True), (None, False, False)
    assert done[1]["mixtures"] == ([(1, 0, len(data[1]), *facts) for facts in told],) * 2
    assert done[1]["mixture"][0][0][3] == 1


def prepared(runs: list[list[str]]) -> list[tuple]:
    """Return by run the rows of both mixtures, validation documents, a group's packs, and whether notices are given."""
    found = []
    for overrides in runs:
        run = settle(overrides)
        assert run.validation is not None
        validation = run.validation.dataset
        told = [any(words in notice for notice in run.notices) for words in ("is one group", "no profile is written")]
        rows = len(run.train_set.mixture_report), len(validation.mixture_report)
        documents = int(validation.facts().documents.sum())
        found.append((*rows, documents, run.grouping.get("group_size"), *told))
    return found


def test_overwrite_replaces_what_a_run_wrote_and_nothing_else(runs):
    output, logged = runs["one_rank"]
    assert (output / "thesis.txt").read_text() == "mine"
    assert not (output / "global_step_99").exists()
    assert 99 not in {step for step, _ in logged}


ONE_DOCUMENT_A_STEP = ("data.strategy=none", "data.train_batch_size=1", "trainer.max_skipped_steps=2")


def weightless(model: Path, folder: Path) -> list[str]:
    documents = random_documents(np.random.default_rng(3), [10] * 6, VOCABULARY, 1)
    for index, document in enumerate(documents):
        document["category_ids"] = document["loss_mask"].astype(np.int32) * (1 + index % 2)
    data = write_tokenized(folder / "data_of_weights", documents, NAMES)
    overrides = [f"data.train_dir={data}", f"model.path={model}", into(folder / "weightless")]
    return [*overrides, *ONE_DOCUMENT_A_STEP, "loss.category_weights={code:0}"]


def test_a_step_whose_targets_all_weigh_0_moves_nothing_and_is_counted(done):
    logged = metrics(done[0] / "weightless")
    trained = {step for step, name in logged if name == "train/loss"}
    assert len(trained) == 3
    assert all(np.isfinite(logged[step, "train/loss"]) for step in trained)
    last = max(trained)
    assert logged[last, "train/skipped_steps"] == sum(step < last for step in set(range(1, 7)) - trained)


def poisoned(model: Path, folder: Path) -> tuple[list[list[str]], list[str]]:
    """Return runs of which some steps have no finite gradient, and one that ends for that."""
    documents = random_documents(np.random.default_rng(1), [10] * 6, VOCABULARY, 1)  # one a step, in order
    for index, document in enumerate(documents):
        document["input_ids"][document["input_ids"] == 5] = 6
        if index in (1, 2, 4):
            document["input_ids"][2] = 5
    if not (folder / "poison").is_dir():
        poison_of(model, folder / "poison", 5)
        write_tokenized(folder / "data_of_poison", documents, {1: "maths"})
    in_order = ("data.shuffle=false", "data.balance=none", "trainer.total_epochs=2")

    def run(output: str, steps: int, *more: str) -> list[str]:
        where = (
            f"data.train_dir={folder / 'data_of_poison'}",
            f"model.path={folder / 'poison'}",
            into(folder / output),
        )
        return [*where, *ONE_DOCUMENT_A_STEP, *in_order, f"trainer.total_training_steps={steps}", *more]

    runs = [run("poisoned", 6), run("resumed", 2), run("resumed", 6), run("ended", 2)]
    return runs, run("ended", 6, "trainer.max_skipped_steps=1")


def test_steps_without_a_finite_gradient_are_counted_and_too_many_end_the_run_also_over_a_resume(done):
    assert "after step 3: 2 consecutive steps had a non-finite gradient" in done[1]["too many"][0]
    whole, resumed = metrics(done[0] / "poisoned"), metrics(done[0] / "resumed")
    skipped = [resumed[step, "train/skipped_steps"] for step in range(1, 7)]
    assert skipped == [whole[step, "train/skipped_steps"] for step in range(1, 7)] == [0, 1, 2, 2, 3, 3]
    finite = [bool(np.isfinite(whole[step, "train/loss"] or np.nan)) for step in range(1, 7)]
    assert finite == [True, False, False, True, False, True]  # steps after a skipped one train on sound parameters


def wait_alone(group: dist.ProcessGroup | None = None) -> None:
    """Let rank 0 start a sum that no other rank joins."""
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1), group=group)
    signal.pause()  # until run_ranks ends this rank


def wait_alone_in_a_run(overrides: list[str]) -> None:
    build(overrides)
    wait_alone()


def wait_alone_in_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    limit_collectives(1, [mesh])
    wait_alone(mesh["sp"].get_group())


def test_a_rank_that_nobody_joins_gives_up_after_the_time_out_of_training(data, tiny_model, tmp_path):
    overrides = run_of(data, tiny_model, tmp_path / "run", "trainer.nccl_timeout=1")
    with pytest.raises(AssertionError, match=r"rank 0 failed(.|\n)*1000ms"):
        run_ranks(wait_alone_in_a_run, 2, overrides)
    with pytest.raises(AssertionError, match=r"rank 0 failed(.|\n)*1000ms"):
        run_ranks(wait_alone_in_a_mesh, 4)


def test_metrics_are_named_as_promised(runs):
    names = {name for _, name in runs["one_rank"][1]}
    promised = {"loss", "grad_norm", "lr", "tokens_per_second", "memory_gib", "target_tokens", "pack_fill"}
    promised |= {"token_accuracy", "entropy", "total_tokens", "total_target_tokens"}
    kinds = ("loss", "tokens", "token_accuracy", "entropy")
    promised |= {f"{name}_{what}" for name in NAMES.values() for what in kinds}
    perf = {f"perf/{name}" for name in ("tokens_per_second_per_gpu", "max_memory_reserved_gb")}
    assert {f"train/{name}" for name in promised} | perf <= names
    assert "perf/mfu" not in names  # the device's peak is not known


def count_waits(overrides: list[str]) -> list[tuple[int, int]]:
    """Count the reductions and host reads of a step that is not logged and of one that is, by wrappers of the calls."""
    trainer = train(overrides)
    collate = StepCollator.of_dataset(trainer.run.objective, trainer.run.train_set)
    counts, found = {"all_reduce": 0, "reads": 0}, []
    reduce, item, to_list = dist.all_reduce, torch.Tensor.item, torch.Tensor.tolist

    def counted(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for logged in (False, True):
        batch = next(iter(pack_loader(trainer.run.train_set, trainer.run.plan, 0, 1, 0, 1, collate, 0)))
        counts.update(all_reduce=0, reads=0)
        dist.all_reduce = counted("all_reduce", reduce)
        torch.Tensor.item, torch.Tensor.tolist = counted("reads", item), counted("reads", to_list)
        try:
            outcome = trainer.train_step(UpcomingStep(batch, True, trainer.hosts), summed=logged)
            for hook in trainer.hooks if logged else ():
                if isinstance(hook, TrackingHook):
                    hook.post_step(1, outcome)
        finally:
            dist.all_reduce, torch.Tensor.item, torch.Tensor.tolist = reduce, item, to_list
        found.append((counts["all_reduce"], counts["reads"]))
    return found


def order_of_a_step(overrides: list[str]) -> list[str]:
    """Return rank 0's operations in the second step of a run and at the end of the first, in order."""
    trainer, acts = build(overrides), []

    def noted(name, function):
        def call(*args, **kwargs):
            acts.append(name)
            return function(*args, **kwargs)

        return call

    batches = trainer.batches
    trainer.batches = lambda *given: (noted("batch", lambda batch: batch)(batch) for batch in batches(*given))
    trainer.engine.accumulate = noted("backward", trainer.engine.accumulate)
    trainer.engine.optimizer_step = noted("optimizer", trainer.engine.optimizer_step)
    TrackingHook.post_step = noted("hooks", TrackingHook.post_step)
    dist.all_reduce = noted("sum", dist.all_reduce)
    UpcomingStep.normalisers = noted("sum is read", UpcomingStep.normalisers)
    trainer.fit()
    first, second = (number for number, act in enumerate(acts) if act == "backward")
    return acts[first : second + 1]


CATEGORIES = {"few": 2, "many": 20}


def waits(model: Path, folder: Path, name: str) -> list[str]:
    options = ("trainer.logger=[console]", "trainer.total_training_steps=1", into(folder / f"run_of_{name}"))
    return small_run(folder / f"data_of_{name}", model, LENGTHS, *options, categories=CATEGORIES[name])


def in_order(model: Path, folder: Path) -> list[str]:
    options = ("trainer.total_training_steps=2", "engine.use_torch_compile=false", "trainer.log_freq=1")
    return small_run(folder / "data_in_order", model, LENGTHS, *options, into(folder / "in_order"), categories=2)


def test_a_step_waits_for_two_sums_where_it_is_logged_and_for_none_before_the_next_is_loaded(done):
    """The reductions and reads of a logged step are as many for any number of categories."""
    (of_few,), (of_many,), (acts,) = (done[1][name] for name in ("few categories", "many categories", "order"))
    (silent_reductions, silent_reads), logged = of_few
    assert of_many == of_few
    assert logged == (silent_reductions + 2, silent_reads + 2)  # for the sums, and for the memory peaks
    assert acts[:3] == ["backward", "batch", "optimizer"]
    read = acts.index("sum is read")
    assert acts.index("hooks") < read
    assert "sum" in acts[3 : acts.index("hooks")]
    assert acts[read:] == ["sum is read", "backward"]
