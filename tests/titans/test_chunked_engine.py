"""Training a model with long-term memory through the trainer: equal on any number of ranks, and its output."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.lib.babilong_data import write_babilong
from tests.lib.ranks import run_cases
from tests.lib.tiny_titans import perturb
from tests.lib.titans_run import TITANS, fresh_model
from tests.lib.training import MEASURED, build, into, metrics, train, train_alone
from verl_ext.data import BABILongDataset
from verl_ext.titans import (
    QwenTitansForCausalLM,
    load_memory_checkpoint,
    read_memory_checkpoint,
    save_memory_checkpoint,
)
from verl_ext.trainer.trainer import UpcomingStep

pytestmark = pytest.mark.slow


def _trained(options):
    """Train, and return rank 0's whole parameters."""
    trainer = train(options)
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
        for name, tensor in trainer.engine.module.named_parameters()
    }


def _first_gradients(options):
    """Return, on rank 0, (initial memory parameters, gradients of the first step, the step's packs)."""
    trainer = build(options)
    run = trainer.run
    batch = next(iter(trainer.batches(0, 1)))
    gradients = {}

    def kept() -> float:
        for name, parameter in trainer.engine.module.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.full_tensor().clone()
        return 0.0

    trainer.engine.optimizer_step = kept  # replaces the step, at whose end verl drops the gradients
    upcoming = UpcomingStep(batch, trainer.engine.is_mp_src_rank_with_outputs(), trainer.hosts)
    trainer.train_step(upcoming, summed=False)
    memory = {name: tensor.clone() for name, tensor in trainer.engine.memory_state_dict().items()}
    return memory, gradients, run.plan.packs(0).tolist()


def _evaluate(options):
    trainer = build(options)
    trainer.resume()
    trainer.evaluate_only()


def _loss_and_answers(options):
    """Return (a validation's loss, generated tokens by prompt)."""
    trainer = build(options)
    generate, answers = trainer.engine.generate_answers, {}

    def noted(prompts, sampling):
        generated = generate(prompts, sampling)
        answers.update(zip(map(tuple, prompts), generated, strict=True))
        return generated

    trainer.engine.generate_answers = noted
    return trainer.validate()["val/loss"], answers


def _chunks_read(options):
    """Return the chunks of every forward of a validation on this rank."""
    trainer = build(options)
    module, read = trainer.engine.module, []
    module.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    trainer.validate()
    return read


# Activations on the host, and tiles of 20 tokens, whose ends lie inside rows and chunks.
KEPT = ["model.activation_offload=true", "model.tile_tokens=20"]
FORMS = [({}, []), ({"depth": 1}, KEPT), ({"conv_tokens": 1}, KEPT[1:])]  # of the memory, and of what is kept


@pytest.fixture(scope="module")
def done(tiny_model, tmp_path_factory):
    """Execute everything below with one start for 1 and for 2 ranks; return the folder, the training file and the
    results by name on each rank."""
    folder = tmp_path_factory.mktemp("runs")

    def rows(name, count, sentences, **seed):
        return write_babilong(folder / "data" / name, count, sentences, **seed)

    files, memory = rows("qa1/1k.json", 13, 70), folder / "memory.pt"
    save_memory_checkpoint(memory, perturb(fresh_model(tiny_model)).memory_state_dict(), 0)  # an active memory
    options = [
        *(*TITANS, f"data.train_dir={files}", f"data.cache_dir={folder / 'cache'}", f"model.path={tiny_model}"),
        *("data.train_batch_size=4", "trainer.total_training_steps=3", "data.train_ratio=0.8"),
    ]

    def run(name, *more):
        return [*options, into(folder / name), *more]

    def measure(val, *more):
        return run("measured", "trainer.eval_only=true", f"data.val_dir=[{','.join(map(str, val))}]", *more)

    active = f"model.memory_checkpoint={memory}"
    forms = [[*kept, *(f"model.memory.{name}={value}" for name, value in form.items())] for form, kept in FORMS]
    lengths = [rows(f"{sentences}.json", 3, sentences) for sentences in (20, 90)]
    answers = measure(lengths, "data.max_length=192", "trainer.answer_tokens=6", active)
    short = rows("qa2/1k.json", 6, 20), "data.micro_batch_size_per_gpu=4", "trainer.answer_tokens=6", active
    uneven = [rows("short.json", 3, 20), rows("long.json", 1, 90)]
    again = ("trainer.eval_only=true", f"data.val_dir=[{rows('qa1/2k.json', 5, 150, seed=1)}]", "data.max_length=192")
    cases = {
        "two": (2, _trained, run("two")),
        **{f"gradients {n}": (2, _first_gradients, run(f"form{n}", *form)) for n, form in enumerate(forms)},
        "memory": (2, train_alone, run("memory", "model.train=memory", "checkpoint.save_contents=[hf_model]")),
        "answers": (2, _loss_and_answers, answers),
        "chunks": (2, _chunks_read, measure(uneven, "data.max_length=192", "trainer.answer_tokens=0")),
        "one": (1, _trained, run("one")),
        "logged": (1, metrics, folder / "one"),
        "report": (1, Path.write_text, folder / "one" / "data_report.json", "the run's"),
        "evaluated": (1, _evaluate, run("one", *again)),
        **{
            f"padded {n}": (1, _loss_and_answers, measure([short[0], files], *short[1:], f"data.max_length={n}"))
            for n in (96, 192)
        },
        "alone": (1, _loss_and_answers, answers),
    }
    return folder, files, run_cases(cases)


def test_two_ranks_train_as_one_and_validate_alike(done):
    """With 13 samples, a rank idles in the last step."""
    folder, _, found = done
    two, one = found["two"][0], found["one"][0]
    for name, ours in one.items():
        torch.testing.assert_close(two[name], ours, rtol=2e-4, atol=3e-5, msg=name)  # with steps of 1e-2
    first, second = metrics(folder / "two"), metrics(folder / "one")
    for (step, key), value in second.items():
        if not key.endswith((*MEASURED, "grad_norm", "perplexity")):  # exp(loss), which is compared
            assert first[step, key] == pytest.approx(value, rel=1e-4), key
    assert {"val/qa1_1k_exact_match", "val/qa1_1k_accuracy", "val/qa1_1k_loss"} <= {key for _, key in first}
    saved = [read_memory_checkpoint(folder / name / "final_memory_checkpoint.pt") for name in ("two", "one")]
    assert [entry["global_step"] for entry in saved] == [3, 3]
    for name, ours in saved[1]["memory_state_dict"].items():
        assert "long_term_memory" in name or "memory_gate" in name
        torch.testing.assert_close(ours, one[name])
        torch.testing.assert_close(saved[0]["memory_state_dict"][name], ours, rtol=2e-4, atol=3e-5)


@pytest.mark.parametrize("number", range(len(FORMS)), ids=[str(form) for form, _ in FORMS])
def test_gradients_of_a_step_are_plain_transformers(number, done, tiny_model):
    folder, files, found = done
    memory, gradients, packs = found[f"gradients {number}"][0]
    more = {"answer_reserve_tokens": 4, "cache_dir": str(folder / "cache"), "split": "train", "train_ratio": 0.8}
    rows = BABILongDataset(str(files), AutoTokenizer.from_pretrained(tiny_model), 96, **more)
    model = fresh_model(tiny_model, **FORMS[number][0])
    model.load_state_dict(memory, strict=False)
    chosen = [rows[pack] for pack in packs]
    targets = sum(int((row["labels"] != -100).sum()) for row in chosen)
    for row in chosen:
        output = model(row["input_ids"][None], row["attention_mask"][None], labels=row["labels"][None])
        (output.loss * (row["labels"] != -100).sum() / targets).backward()
    reached = {name for name, tensor in model.named_parameters() if tensor.grad is not None and tensor.grad.any()}
    assert {name for name, grad in gradients.items() if grad.any()} == reached
    for name in reached:
        ours, theirs = gradients[name], model.get_parameter(name).grad
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6 * theirs.abs().max().item() + 1e-9, msg=name)


def test_the_base_stays_as_it_was_and_the_memory_file_gives_the_same_logits(done, tiny_model):
    output = done[0] / "memory"
    exported = QwenTitansForCausalLM.from_pretrained(output / "global_step_3" / "huggingface", dtype=torch.float32)
    fresh = fresh_model(tiny_model)
    assert load_memory_checkpoint(fresh, output / "final_memory_checkpoint.pt") == 3
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(exported.get_parameter(name), tensor), name
    ids = torch.randint(4, 128, (2, 96))
    assert torch.equal(fresh(ids).logits, exported(ids).logits)
    assert not torch.equal(fresh_model(tiny_model)(ids).logits, fresh(ids).logits)


def test_evaluation_alone_reads_the_last_checkpoint_and_longer_rows(done):
    folder, _, found = done
    facts = json.loads((folder / "one" / "evaluation.json").read_text())
    assert facts["global_step"] == 3
    assert facts["val/answers"] == 5
    assert math.isfinite(facts["val/qa1_2k_loss"])
    assert (folder / "one" / "data_report.json").read_text() == "the run's"
    assert metrics(folder / "one") == found["logged"][0]


def test_padding_changes_no_answer_and_no_loss(done):
    (loss, answers), (padded_loss, padded_answers) = (done[2][f"padded {length}"][0] for length in (96, 192))
    assert len(answers) == 19
    assert len(set(map(tuple, answers.values()))) > 4  # answers depend on their prompts
    assert padded_answers == answers
    assert padded_loss == pytest.approx(loss, rel=1e-6)


def test_two_ranks_with_prompts_of_other_lengths_answer_as_one(done):
    ((_, first), (_, second)), ((_, alone),) = done[2]["answers"], done[2]["alone"]
    assert {**first, **second} == alone
    assert len(alone) == 6


def test_chunks_that_are_padding_on_every_rank_are_not_read(done):
    first, second = done[2]["chunks"]
    assert first == second == [96, 32]  # the long row's rank comes first; the other rank reads just as far
