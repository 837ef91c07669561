"""Whole runs on gloo ranks: validation, metrics, checkpoints, exports, and failing steps."""

import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.ranks import run_ranks
from tests.tiny_model import VOCABULARY
from tests.tokenized_data import random_documents, write_tokenized
from tests.training import (
    MEASURED,
    SMALL,
    build,
    metrics,
    plain_losses,
    refusals,
    stopped_at,
    train,
    train_alone,
    train_each,
)
from verl_ext.config import compose
from verl_ext.trainer.distributed import limit_collectives
from verl_ext.trainer.hooks import TrackingHook
from verl_ext.trainer.setup import prepare
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
    folder, _ = data
    return [
        f"data.train_dir={folder / 'train'}",
        f"model.path={model}",
        f"trainer.default_local_dir={output}",
        *overrides,
    ]


LAYOUTS = {  # (ranks, ranks of a Ulysses group, groups that share a pack)
    "one_rank": (1, 1, 1),
    "two_data_parallel": (2, 1, 1),
    "two_groups_of_two": (4, 2, 2),
}


@pytest.fixture(scope="module")
def runs(data, tiny_model, tmp_path_factory):
    """Run the same two epochs on three layouts of ranks; return each output folder and metrics."""
    folder, _ = data
    results = {}
    for name, (ranks, ulysses, groups) in LAYOUTS.items():
        output = tmp_path_factory.mktemp("runs") / name
        overrides = run_of(
            data,
            tiny_model,
            output,
            f"data.val_dir={folder / 'val'}",
            f"engine.ulysses_sequence_parallel_size={ulysses}",
            f"parallel.context_parallel_size={groups}",
            "trainer.total_epochs=2",
            "checkpoint.save_contents=[hf_model]",
            *("data.balance_group=2", "data.cost=tokens"),  # their defaults would depend on the layout
        )
        run_ranks(train_alone, ranks, overrides)
        results[name] = output, metrics(output)
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_validation_is_exact_over_the_whole_set(runs, data, layout):
    output, logged = runs[layout]
    last = max(step for step, _ in logged)
    expected = plain_losses(output / f"global_step_{last}" / "huggingface", data[1])
    assert logged[last, "val/loss"] == pytest.approx(expected[0], rel=1e-5)
    assert logged[last, "val/maths_loss"] == pytest.approx(expected[1], rel=1e-5)
    assert logged[last, "val/code_loss"] == pytest.approx(expected[2], rel=1e-5)
    assert logged[last, "train/loss"] < logged[1, "train/loss"]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one_rank"])
def test_a_run_is_the_same_on_any_layout_of_ranks(runs, layout):
    _, alone = runs["one_rank"]
    _, logged = runs[layout]
    assert logged.keys() == alone.keys()
    for (step, name), value in alone.items():
        if not name.endswith(MEASURED):
            tolerance = 1e-5 if step == 1 else 1e-3  # Adam amplifies rounding from step to step
            assert logged[step, name] == pytest.approx(value, rel=tolerance), (step, name)


def test_the_export_generates_with_plain_transformers(runs):
    output, _ = runs["one_rank"]
    (export,) = output.glob("global_step_*/huggingface")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "w1 w2"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] > prompt["input_ids"].shape[1]


OTHER_PACKS = {  # a change, and the answer to it
    "data.train_batch_size=2": r"data\.train_batch_size is 2, but the run in .* was trained with 4",
    "data.balance=none": r"data\.balance is none, but the run in .* was trained with sorted",
    "data.cost=tokens": r"data\.cost is tokens, but the run in .* was trained with flops",
    "data.mixture={sources: {all: {tokens: 400}}}": r"data\.mixture is .*, but the run in .* was trained with None",
}


def test_a_resume_on_other_packs_is_refused(finished, data, tiny_model):
    overrides = run_of(data, tiny_model, finished, "trainer.total_epochs=3")
    ((told, *others),) = run_ranks(refusals, 1, overrides, [[], *([change] for change in OTHER_PACKS)])
    assert told == ""
    for line, expected in zip(others, OTHER_PACKS.values(), strict=True):
        assert re.match(expected, line)


def test_a_group_is_one_pack_for_each_data_parallel_rank(data, tiny_model, tmp_path):
    """Groups are not micro-batches: one rank has none to wait for, and a one-group step would have one cost level."""
    overrides = run_of(data, tiny_model, tmp_path / "run", "data.micro_batch_size_per_gpu=2")
    assert run_ranks(group_size, 1, overrides) == [1]
    assert run_ranks(group_size, 2, overrides) == [2, 2]


def test_a_resume_on_more_ranks_checks_the_steps_of_the_groups_that_it_keeps(tiny_model, tmp_path):
    """Grouped for two ranks, documents 4 and 5, which have no targets, would share a step."""
    documents = random_documents(np.random.default_rng(0), range(5, 13), VOCABULARY, 1)
    for number in (4, 5, 7):
        documents[number]["loss_mask"][:], documents[number]["category_ids"][:] = 0, 0
    write_tokenized(tmp_path / "train", documents, {1: "maths"})
    overrides = run_of((tmp_path, None), tiny_model, tmp_path / "run", "data.strategy=none", "data.cost=tokens")
    overrides += ["data.train_batch_size=2", "trainer.total_training_steps=4"]
    new = [*overrides, f"trainer.default_local_dir={tmp_path / 'new'}"]
    assert all("has no target token" in line for (line,) in run_ranks(refusals, 2, new, [[]]))
    run_ranks(train_alone, 1, [*overrides, "trainer.save_freq=2"])
    stopped_at(tmp_path / "run", tmp_path / "resumed", 2)
    run_ranks(train_alone, 2, [*overrides, f"trainer.default_local_dir={tmp_path / 'resumed'}"])
    assert (tmp_path / "resumed" / "global_step_4").is_dir()


def test_a_mixture_is_of_training_alone_and_a_step_of_one_group_is_told(data, tiny_model, tmp_path):
    folder, documents = data
    overrides = run_of(
        data,
        tiny_model,
        tmp_path / "run",
        f"data.val_dir={folder / 'val'}",
        "data.mixture={sources: {all: {tokens: 200}}}",
    )
    profiled = "trainer.profile_interval=[1,2]"
    steps = (
        ["data.train_batch_size=4"],
        ["data.train_batch_size=2", profiled],
        ["data.train_batch_size=2", "data.balance=none", profiled, "profiler.enable=true"],
    )
    said = run_ranks(prepared, 2, [[*overrides, *step] for step in steps])
    told = (False, False), (True, True), (False, False)
    assert said == [[(1, 0, len(documents), *notices) for notices in told]] * 2


def prepared(runs: list[list[str]]) -> list[tuple[int, int, int, bool, bool]]:
    """Return by run the rows of both mixtures, validation documents, and if groups and profile have a notice."""
    found = []
    for overrides in runs:
        run = prepare(compose([*SMALL, *overrides]))
        assert run.validation is not None
        validation = run.validation.dataset
        told = [any(words in notice for notice in run.notices) for words in ("is one group", "no profile is written")]
        mixtures = len(run.train_set.mixture_report), len(validation.mixture_report)
        found.append((*mixtures, int(validation.facts().documents.sum()), *told))
    return found


def group_size(overrides: list[str]) -> int:
    return prepare(compose([*SMALL, *overrides])).grouping["group_size"]


@pytest.fixture(scope="module")
def finished(data, tiny_model, tmp_path_factory):
    """Return the folder of a run on one rank that replaced another; tests must not change it."""
    output = tmp_path_factory.mktemp("finished") / "run"
    (output / "global_step_99").mkdir(parents=True)
    (output / "thesis.txt").write_text("mine")
    (output / "metrics.jsonl").write_text('{"step": 99, "data": {}}\n')
    more = ("trainer.overwrite=true", "trainer.total_epochs=2", "trainer.log_freq=2")
    run_ranks(train_alone, 1, run_of(data, tiny_model, output, *more))
    return output


def test_overwrite_replaces_what_a_run_wrote_and_nothing_else(finished):
    assert (finished / "thesis.txt").read_text() == "mine"
    assert not (finished / "global_step_99").exists()
    assert 99 not in {step for step, _ in metrics(finished)}


def poison_of(tiny_model: Path, folder: Path, token: int) -> Path:
    """Write the tiny model with a NaN embedding for one token; a step that reads it has no finite gradient."""
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def poisoned_data(folder: Path, poisoned: set[int], count: int = 6) -> str:
    """Write ``count`` documents, one a step in order, of which exactly those in ``poisoned`` contain token 5."""
    rng = np.random.default_rng(1)
    documents = random_documents(rng, [10] * count, VOCABULARY, 1)
    for index, document in enumerate(documents):
        document["input_ids"][document["input_ids"] == 5] = 6
        if index in poisoned:
            document["input_ids"][2] = 5
    return write_tokenized(folder, documents, {1: "maths"})


ONE_DOCUMENT_A_STEP = ("data.strategy=none", "data.train_batch_size=1", "trainer.max_skipped_steps=2")


def test_a_step_whose_targets_all_weigh_0_moves_nothing_and_is_counted(tiny_model, tmp_path):
    documents = random_documents(np.random.default_rng(3), [10] * 6, VOCABULARY, 1)
    for index, document in enumerate(documents):
        document["category_ids"] = document["loss_mask"].astype(np.int32) * (1 + index % 2)
    folder = write_tokenized(tmp_path / "data", documents, NAMES)
    overrides = [
        f"data.train_dir={folder}",
        f"model.path={tiny_model}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    run_ranks(train_alone, 1, [*overrides, *ONE_DOCUMENT_A_STEP, "loss.category_weights={code:0}"])
    logged = metrics(tmp_path / "run")
    trained = {step for step, name in logged if name == "train/loss"}
    assert len(trained) == 3
    assert all(np.isfinite(logged[step, "train/loss"]) for step in trained)
    last = max(trained)
    assert logged[last, "train/skipped_steps"] == sum(step < last for step in set(range(1, 7)) - trained)


def test_steps_without_a_finite_gradient_are_counted_and_too_many_end_the_run_also_over_a_resume(tiny_model, tmp_path):
    model = poison_of(tiny_model, tmp_path / "model", 5)
    folder = poisoned_data(tmp_path / "data", {1, 2, 4})
    in_order = ("data.shuffle=false", "data.balance=none", "trainer.total_epochs=2")

    def run(output: str, steps: int, *overrides: str) -> list[str]:
        where = (f"data.train_dir={folder}", f"model.path={model}", f"trainer.default_local_dir={tmp_path / output}")
        return [*where, *ONE_DOCUMENT_A_STEP, *in_order, f"trainer.total_training_steps={steps}", *overrides]

    run_ranks(train_each, 1, [run("whole", 6), run("resumed", 2)])
    run_ranks(train_alone, 1, run("resumed", 6))
    whole, resumed = metrics(tmp_path / "whole"), metrics(tmp_path / "resumed")
    skipped = [resumed[step, "train/skipped_steps"] for step in range(1, 7)]
    assert skipped == [whole[step, "train/skipped_steps"] for step in range(1, 7)] == [0, 1, 2, 2, 3, 3]
    finite = [bool(np.isfinite(whole[step, "train/loss"] or np.nan)) for step in range(1, 7)]
    assert finite == [True, False, False, True, False, True]  # steps after a skipped one train on sound parameters
    stopped_at(tmp_path / "resumed", tmp_path / "ended", 2)
    with pytest.raises(AssertionError, match="after step 3: 2 consecutive steps had a non-finite gradient"):
        run_ranks(train_alone, 1, run("ended", 6, "trainer.max_skipped_steps=1"))


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


def test_metrics_are_logged_every_log_freq_steps_and_named_as_promised(finished):
    logged = metrics(finished)
    steps = {step for step, _ in logged}
    assert steps == {step for step in range(1, max(steps) + 1) if step % 2 == 0}
    promised = {"loss", "grad_norm", "lr", "tokens_per_second", "memory_gib", "target_tokens", "pack_fill"}
    promised |= {"token_accuracy", "entropy", "total_tokens", "total_target_tokens"}
    kinds = ("loss", "tokens", "token_accuracy", "entropy")
    promised |= {f"{name}_{what}" for name in NAMES.values() for what in kinds}
    perf = {f"perf/{name}" for name in ("tokens_per_second_per_gpu", "max_memory_reserved_gb")}
    assert {f"train/{name}" for name in promised} | perf <= {name for _, name in logged}
    assert "perf/mfu" not in {name for _, name in logged}  # the device's peak is not known


def count_waits(overrides: list[str]) -> list[tuple[int, int]]:
    """Count the reductions and host reads of a step that is not logged and of one that is, by wrappers of the calls."""
    from verl_ext.trainer.batch import StepCollator
    from verl_ext.trainer.loader import pack_loader

    trainer = train(overrides)
    collate = StepCollator(trainer.run.loss_for(trainer.run.train_set), trainer.run.train_set.categories)
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

    batches = trainer.rank.batches
    trainer.rank.batches = lambda *given: (noted("batch", lambda batch: batch)(batch) for batch in batches(*given))
    trainer.engine.accumulate = noted("backward", trainer.engine.accumulate)
    trainer.engine.optimizer_step = noted("optimizer", trainer.engine.optimizer_step)
    TrackingHook.post_step = noted("hooks", TrackingHook.post_step)
    dist.all_reduce = noted("sum", dist.all_reduce)
    UpcomingStep.normaliser = noted("sum is read", UpcomingStep.normaliser)
    trainer.fit()
    first, second = (number for number, act in enumerate(acts) if act == "backward")
    return acts[first : second + 1]


def test_the_next_step_is_loaded_and_agreed_on_before_the_device_waits_for_it(data, tiny_model, tmp_path):
    options = ["trainer.total_training_steps=2", "engine.use_torch_compile=false", "trainer.log_freq=1"]
    (acts,) = run_ranks(order_of_a_step, 1, run_of(data, tiny_model, tmp_path / "run", *options))
    assert acts[:3] == ["backward", "batch", "optimizer"]
    read = acts.index("sum is read")
    assert acts.index("hooks") < read
    assert "sum" in acts[3 : acts.index("hooks")]
    assert acts[read:] == ["sum is read", "backward"]


def test_a_logged_step_costs_two_reductions_and_two_reads_whatever_the_categories(data, tiny_model, tmp_path):
    short = ("trainer.logger=[console]", "trainer.total_training_steps=1")
    few = run_of(data, tiny_model, tmp_path / "few", *short)
    rng = np.random.default_rng(0)
    folder = write_tokenized(tmp_path / "many", random_documents(rng, LENGTHS, VOCABULARY, 20))
    many = [f"data.train_dir={folder}", *run_of(data, tiny_model, tmp_path / "many_run", *short)[1:]]
    (of_few,), (of_many,) = (run_ranks(count_waits, 1, overrides) for overrides in (few, many))
    (silent_reductions, silent_reads), logged = of_few
    assert of_many == of_few
    assert logged == (silent_reductions + 2, silent_reads + 2)  # for the sums, and for the memory peaks


def test_a_step_without_a_target_is_refused_before_the_model_loads(tiny_model, tmp_path):
    documents = random_documents(np.random.default_rng(0), [10] * 4, VOCABULARY, 1)
    for document in documents[1:]:
        document["loss_mask"][:] = document["category_ids"][:] = 0
    folder = write_tokenized(tmp_path / "data", documents)
    overrides = [
        f"data.train_dir={folder}",
        f"model.path={tiny_model}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    with pytest.raises(AssertionError, match="SystemExit: 2"):
        run_ranks(train_alone, 1, [*overrides, *ONE_DOCUMENT_A_STEP])
    assert not (tmp_path / "run").exists()
