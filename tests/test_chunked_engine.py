"""Training a model with long-term memory through the trainer: equal on any number of ranks, and its output."""

import json
import math

import pytest
import torch
from transformers import AutoTokenizer

from tests.babilong_data import write_babilong
from tests.ranks import run_ranks
from tests.tiny_titans import perturb
from tests.titans_run import TITANS, fresh_model
from tests.training import MEASURED, build, metrics, train, train_alone
from verl_ext.data import BABILongDataset
from verl_ext.models.qwen_titans import (
    QwenTitansForCausalLM,
    load_memory_checkpoint,
    read_memory_checkpoint,
    save_memory_checkpoint,
)
from verl_ext.trainer.trainer import UpcomingStep

pytestmark = pytest.mark.slow


@pytest.fixture
def files(tmp_path):
    return write_babilong(tmp_path / "data" / "qa1" / "1k.json", 13, 70)


@pytest.fixture
def options(tmp_path, files, tiny_model):
    return [
        *TITANS,
        *(f"data.train_dir={files}", f"data.cache_dir={tmp_path / 'cache'}", f"model.path={tiny_model}"),
        *("data.train_batch_size=4", "trainer.total_training_steps=3", "data.train_ratio=0.8"),
    ]


def _trained(options):
    """Train, and return rank 0's whole parameters."""
    trainer = train(options)
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
        for name, tensor in trainer.engine.module.named_parameters()
    }


@pytest.fixture
def two_ranks_and_one(options, tmp_path):
    """Return (parameters of a run on 2 ranks, of one on 1 rank); with 13 samples, a rank idles in the last step."""
    output = [[*options, f"trainer.default_local_dir={tmp_path / name}"] for name in ("two", "one")]
    return run_ranks(_trained, 2, output[0])[0], run_ranks(_trained, 1, output[1])[0]


def test_two_ranks_train_as_one_and_validate_alike(two_ranks_and_one, tmp_path):
    two, one = two_ranks_and_one
    for name, ours in one.items():
        torch.testing.assert_close(two[name], ours, rtol=2e-4, atol=3e-5, msg=name)  # with steps of 1e-2
    first, second = metrics(tmp_path / "two"), metrics(tmp_path / "one")
    for (step, key), value in second.items():
        if not key.endswith((*MEASURED, "grad_norm", "perplexity")):  # exp(loss), which is compared
            assert first[step, key] == pytest.approx(value, rel=1e-4), key
    assert {"val/qa1_1k_exact_match", "val/qa1_1k_accuracy", "val/qa1_1k_loss"} <= {key for _, key in first}
    saved = [read_memory_checkpoint(tmp_path / name / "final_memory_checkpoint.pt") for name in ("two", "one")]
    assert [entry["global_step"] for entry in saved] == [3, 3]
    for name, ours in saved[1]["memory_state_dict"].items():
        assert "long_term_memory" in name or "memory_gate" in name
        torch.testing.assert_close(ours, one[name])
        torch.testing.assert_close(saved[0]["memory_state_dict"][name], ours, rtol=2e-4, atol=3e-5)


def _rows(tiny_model, files, tmp_path):
    """Open the run's training set by itself."""
    return BABILongDataset(
        str(files),
        AutoTokenizer.from_pretrained(tiny_model),
        96,
        answer_reserve_tokens=4,
        cache_dir=str(tmp_path / "cache"),
        split="train",
        train_ratio=0.8,
    )


def _first_gradients(options):
    """Return, on rank 0, (initial memory parameters, gradients of the first step, the step's packs)."""
    trainer = build(options)
    run = trainer.run
    batch = next(iter(trainer.rank.batches(run.train_set, run.plan, 0, 1)))
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


# Activations on the host, and tiles of 20 tokens, whose ends lie inside rows and chunks.
KEPT = ["model.activation_offload=true", "model.tile_tokens=20"]


@pytest.mark.parametrize(
    ("form", "kept"),
    [({}, []), ({"depth": 1}, KEPT), ({"conv_tokens": 1}, KEPT[1:])],
    ids=str,
)
def test_gradients_of_a_step_are_plain_transformers(form, kept, options, tiny_model, files, tmp_path):
    more = [*kept, *(f"model.memory.{name}={value}" for name, value in form.items())]
    memory, gradients, packs = run_ranks(
        _first_gradients, 2, [*options, *more, f"trainer.default_local_dir={tmp_path / 'out'}"]
    )[0]
    rows = _rows(tiny_model, files, tmp_path)
    model = fresh_model(tiny_model, **form)
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


def test_the_base_stays_as_it_was_and_the_memory_file_gives_the_same_logits(options, tiny_model, tmp_path):
    output = tmp_path / "out"
    more = ["model.train=memory", f"trainer.default_local_dir={output}", "checkpoint.save_contents=[hf_model]"]
    run_ranks(train_alone, 2, [*options, *more])
    exported = QwenTitansForCausalLM.from_pretrained(output / "global_step_3" / "huggingface", dtype=torch.float32)
    fresh = fresh_model(tiny_model)
    assert load_memory_checkpoint(fresh, output / "final_memory_checkpoint.pt") == 3
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(exported.get_parameter(name), tensor), name
    ids = torch.randint(4, 128, (2, 96))
    assert torch.equal(fresh(ids).logits, exported(ids).logits)
    assert not torch.equal(fresh_model(tiny_model)(ids).logits, fresh(ids).logits)


def test_evaluation_alone_reads_the_last_checkpoint_and_longer_rows(options, tmp_path):
    output = f"trainer.default_local_dir={tmp_path / 'out'}"
    run_ranks(train_alone, 1, [*options, output])
    trained = metrics(tmp_path / "out")
    longer = write_babilong(tmp_path / "data" / "qa1" / "2k.json", 5, 150, seed=1)
    report = tmp_path / "out" / "data_report.json"
    report.write_text("the run's")
    again = ["trainer.eval_only=true", f"data.val_dir=[{longer}]", "data.max_length=192"]
    run_ranks(_evaluate, 1, [*options, output, *again])
    facts = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert facts["global_step"] == 3
    assert facts["val/answers"] == 5
    assert math.isfinite(facts["val/qa1_2k_loss"])
    assert report.read_text() == "the run's"
    assert metrics(tmp_path / "out") == trained


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


def test_padding_changes_no_answer_and_no_loss(options, files, tiny_model, tmp_path):
    memory = tmp_path / "memory.pt"
    save_memory_checkpoint(memory, perturb(fresh_model(tiny_model)).memory_state_dict(), 0)  # an active memory
    short = write_babilong(tmp_path / "data" / "qa2" / "1k.json", 6, 20)
    again = [
        *("trainer.eval_only=true", f"data.val_dir=[{short},{files}]", f"model.memory_checkpoint={memory}"),
        *("data.micro_batch_size_per_gpu=4", "trainer.answer_tokens=6"),
        f"trainer.default_local_dir={tmp_path / 'out'}",
    ]
    measured = [run_ranks(_loss_and_answers, 1, [*options, *again, f"data.max_length={n}"])[0] for n in (96, 192)]
    (loss, answers), (padded_loss, padded_answers) = measured
    assert len(answers) == 19
    assert len(set(map(tuple, answers.values()))) > 4  # answers depend on their prompts
    assert padded_answers == answers
    assert padded_loss == pytest.approx(loss, rel=1e-6)


def test_two_ranks_with_prompts_of_other_lengths_answer_as_one(options, tiny_model, tmp_path):
    memory = tmp_path / "memory.pt"
    save_memory_checkpoint(memory, perturb(fresh_model(tiny_model)).memory_state_dict(), 0)
    files = [write_babilong(tmp_path / f"{sentences}.json", 3, sentences) for sentences in (20, 90)]
    again = [
        *("trainer.eval_only=true", f"data.val_dir=[{files[0]},{files[1]}]", "data.max_length=192"),
        *("trainer.answer_tokens=6", f"model.memory_checkpoint={memory}"),
        f"trainer.default_local_dir={tmp_path / 'out'}",
    ]
    ((_, alone),) = run_ranks(_loss_and_answers, 1, [*options, *again])
    (_, first), (_, second) = run_ranks(_loss_and_answers, 2, [*options, *again])
    assert {**first, **second} == alone
    assert len(alone) == 6


def _chunks_read(options):
    """Return the chunks of every forward of a validation on this rank."""
    trainer = build(options)
    module, read = trainer.engine.module, []
    module.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    trainer.validate()
    return read


def test_chunks_that_are_padding_on_every_rank_are_not_read(options, tmp_path):
    long = write_babilong(tmp_path / "long.json", 1, 90)
    short = write_babilong(tmp_path / "short.json", 3, 20)
    again = [
        "trainer.eval_only=true",
        f"data.val_dir=[{short},{long}]",
        "data.max_length=192",
        "trainer.answer_tokens=0",
    ]
    read = run_ranks(_chunks_read, 2, [*options, f"trainer.default_local_dir={tmp_path / 'out'}", *again])
    assert read[0] == read[1] == [96, 32]  # the long row's rank comes first; the other rank reads just as far
