"""Losses, gradients, metrics and tokens of preferences beside the code of TRL's own trainers: `make test-trl`.

The trainers' loss runs in float64 on given log-probabilities of tokens, without a model.
"""

import random
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_ext.losses import (
    PreferenceOptions,
    Units,
    preference_slopes,
    preference_values,
    target_coefficients,
    target_scales,
    total_weight,
)
from verl_ext.metrics import StepSums
from verl_ext.text.chat.options import ChatOptions
from verl_ext.text.encoder_chats import ChatEncoder
from verl_ext.text.read.readers import Chunk
from verl_ext.trainer.objective import PreferenceObjective

trl = pytest.importorskip("trl")

PROMPT, CHOSEN, REJECTED = 3, (9, 4, 6, 7), (5, 12, 11, 7)
LENGTHS = (*CHOSEN, *REJECTED)


class GivenModel:
    """A model whose outputs are given log-probabilities."""

    training, is_gradient_checkpointing = True, False

    def __init__(self, log_probs):
        self.log_probs = log_probs

    def __call__(self, labels, **_):
        zeros = torch.zeros_like(self.log_probs)
        facts = {"entropy": zeros, "mean_logits": zeros, "is_top1": zeros.bool()}
        return SimpleNamespace(log_probs=self.log_probs, **facts)


def given(seed):
    """Return a padded batch's log-probabilities by row, 0 where no target is, and its mask of targets."""
    draw, width = torch.Generator().manual_seed(seed), PROMPT + max(LENGTHS)
    mask = torch.zeros(len(LENGTHS), width, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        mask[row, PROMPT : PROMPT + length] = 1
    return -2 * torch.rand(len(LENGTHS), width - 1, generator=draw, dtype=torch.float64) * mask[:, 1:], mask


def trainer_of(log_probs, reference, **settings):
    """Return what a trainer's `_compute_loss` reads of itself."""
    from accelerate import Accelerator

    own = {
        "model": GivenModel(log_probs),
        "ref_model": GivenModel(reference),
        "accelerator": Accelerator(cpu=True),
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
        "f_divergence_type": "reverse_kl",
        "loss_weights": [1.0],
        "_metrics": {"train": defaultdict(list)},
        **{"_total_train_tokens": 0, "_tp_size": 1, "ld_alpha": None},
        **dict.fromkeys(("aux_loss_enabled", "precompute_ref_logps", "use_weighting"), False),
        **settings,
    }
    return SimpleNamespace(**own)


def ours(log_probs, reference, mask, unit, answer, o, baseline=0.0):
    """Return the loss, its gradient by log-probability, and the metrics."""
    at = mask[:, 1:].bool()
    targets = at.sum(1).numpy()
    documents = torch.from_numpy(np.repeat(np.arange(len(targets)), targets))
    scales = torch.from_numpy(target_scales(targets, unit, o.chosen_length, o.tail_weight))

    def sums_of(values, scale):
        return torch.zeros(len(targets), dtype=torch.float64).index_add(0, documents, scale * values[at])

    sums, of_reference = sums_of(log_probs.detach(), scales), sums_of(reference, scales)
    units = Units.of_rows(unit, answer, np.ones(len(unit)), targets, of_reference.numpy())
    z = total_weight(units, o)
    terms, slopes = preference_slopes(sums, units, o, z, baseline)
    gradient = torch.zeros_like(reference)
    gradient[at] = -target_coefficients(slopes, scales, documents)
    total = StepSums.zeros(1, "cpu", PreferenceObjective(o).measures)
    values = preference_values(terms, sums, sums_of(log_probs.detach(), torch.ones(len(scales))), units, o)
    total.add_terms(values, torch.zeros(len(terms.losses), dtype=torch.int64))
    return float(terms.weighted_sum / z), gradient, total.report("train", ())


@pytest.mark.parametrize(
    ("theirs", "settings", "options"),
    [
        ("sigmoid", {"beta": 0.1}, {}),
        ("sigmoid", {"beta": 0.3, "ld_alpha": 0.4}, {"beta": 0.3, "length": "common", "tail_weight": 0.4}),
        ("robust", {"beta": 0.1, "label_smoothing": 0.1}, {"mode": "robust", "label_smoothing": 0.1}),
        ("ipo", {"beta": 0.2}, {"mode": "ipo", "beta": 0.2}),
        ("hinge", {"beta": 0.1}, {"mode": "hinge"}),
        ("apo_zero", {"beta": 0.1}, {"mode": "apo_zero"}),
        ("apo_down", {"beta": 0.1}, {"mode": "apo_down"}),
        ("sigmoid_norm", {"beta": 5.0}, {"mode": "dpo_norm"}),
    ],
)
def test_losses_gradients_and_metrics_are_those_of_the_dpo_trainer(theirs, settings, options):
    from trl import DPOTrainer

    (log_probs, mask), (reference, _) = given(0), given(1)
    log_probs.requires_grad_()
    trainer = trainer_of(log_probs, reference, loss_types=[theirs], label_smoothing=0.0)
    vars(trainer).update(settings)
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    loss = DPOTrainer._compute_loss(trainer, trainer.model, inputs, return_outputs=False)
    gradient = torch.autograd.grad(loss, log_probs)[0] * mask[:, 1:]  # its head gives other tokens 0
    # TRL's batch has all preferred answers first; here the two answers of a pair follow each other.
    order = [row for pair in range(4) for row in (pair, 4 + pair)]
    unit, answer = np.tile([2, 0], 4), np.tile([1, -1], 4)
    o = PreferenceOptions.read(options)
    mine, by_token, metrics = ours(log_probs[order], reference[order], mask[order], unit, answer, o)
    # The trainer divides by a completion mask whose first column is the prompt's, so its lengths are ours.
    assert mine == pytest.approx(float(loss), rel=1e-12)
    assert torch.allclose(by_token, gradient[order], rtol=1e-10, atol=1e-14)
    if o.chosen_length != "mean":  # TRL reports the rewards of sums where the loss takes means
        logged = {name: values[0] for name, values in trainer._metrics["train"].items()}
        for name, of_trl in {
            "chosen": "chosen",
            "rejected": "rejected",
            "margin": "margins",
            "accuracy": "accuracies",
        }.items():
            assert metrics[f"train/reward_{name}"] == pytest.approx(logged[f"rewards/{of_trl}"], rel=1e-6)


@pytest.mark.parametrize(("theirs", "mode"), [("kto", "kto"), ("apo_zero_unpaired", "apo_zero")])
def test_labels_give_the_loss_and_gradient_of_the_kto_trainer(theirs, mode):
    from trl import KTOTrainer

    (log_probs, mask), (reference, _) = given(2), given(3)
    log_probs.requires_grad_()
    labels = torch.tensor([True, False, False, True, True, False, True, False])
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.8} if mode == "kto" else {}
    settings = {"beta": 0.2, **weights}
    both = {"desirable_weight": 1.0, "undesirable_weight": 1.0, **settings}
    trainer = trainer_of(log_probs, reference, loss_type=theirs, calculate_KL=mode == "kto", **both)
    of_model = {trainer.model: 4.0, trainer.ref_model: 3.0}
    trainer._compute_kl_logps = lambda model, batch: torch.full((8,), of_model[model]).double()
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask)}
    loss = KTOTrainer._compute_loss(
        trainer, trainer.model, {**inputs, "completion_mask": mask, "label": labels}, return_outputs=False
    )
    gradient = torch.autograd.grad(loss, log_probs)[0] * mask[:, 1:]  # its head gives other tokens 0
    o, answer = PreferenceOptions.read({"mode": mode, **settings}), np.where(labels.numpy(), 1, -1)
    mine, by_token, _ = ours(log_probs, reference, mask, np.ones(8, int), answer, o, baseline=0.2 * 1.0)
    assert mine == pytest.approx(float(loss), rel=1e-12)
    assert torch.allclose(by_token, gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("mode", ["simpo", "cpo", "orpo"])
def test_losses_without_a_reference_are_those_of_the_experimental_trainers(mode):
    (log_probs, mask), o = given(4), PreferenceOptions(mode)
    order = [row for pair in range(4) for row in (pair, 4 + pair)]
    means = log_probs.sum(1) / mask.sum(1)
    unit, answer = np.tile([2, 0], 4), np.tile([1, -1], 4)
    mine, _, _ = ours(log_probs[order], torch.zeros_like(log_probs), mask[order], unit, answer, o)
    own = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), beta=o.scale, alpha=0.0, label_smoothing=0.0)
    if mode != "orpo":
        from trl.experimental.cpo.cpo_trainer import CPOTrainer

        own.loss_type, own.simpo_gamma = {"simpo": "simpo", "cpo": "sigmoid"}[mode], o.margin
        values = means if mode == "simpo" else log_probs.sum(1)
        losses, tolerance = CPOTrainer.cpo_loss(own, values[:4], values[4:])[0], 1e-12
    else:
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer

        losses, tolerance = -ORPOTrainer.odds_ratio_loss(own, means[:4], means[4:])[0], 1e-6  # in float32 there
    assert mine == pytest.approx(float(losses.mean()), rel=tolerance)


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
TEMPLATES = {
    "chatml": f"{{% for m in messages %}}{TURN}{{% endfor %}}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "trimmed, after BOS": "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}",
    "two tokens before an answer": "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant<s>\n"
    "{{ m.content }}<|im_end|>{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<s>\n{% endif %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_tokens_of_prompts_and_answers_are_those_of_the_dpo_trainer(tmp_path, template):
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from trl import DPOTrainer

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = ["the cat sat on the mat, and said: hello!"] * 4
    bpe.train_from_iterator(
        words, trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, vocab_size=300)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", bos_token="<s>", chat_template=template
    )
    tokenizer.save_pretrained(tmp_path / "model")

    draw = random.Random(0)

    def text():
        return " ".join(draw.choice(words[0].split()) for _ in range(draw.randrange(1, 12)))

    records = []
    for number in range(200):
        turns = [{"role": ("user", "assistant")[at % 2], "content": text()} for at in range(1 + 2 * draw.randrange(3))]
        answers = [[{"role": "assistant", "content": f"{text()} {side}{number}"}] for side in "ab"]
        records.append({"prompt": turns, "chosen": answers[0], "rejected": answers[1]})
    own = SimpleNamespace(_tokenizer=tokenizer, _is_vision_dataset=False)
    args = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    theirs = DPOTrainer._prepare_dataset(own, Dataset.from_list(records), tokenizer, args, "train")

    encoder = ChatEncoder(ChatOptions.read({"model": {"path": str(tmp_path / "model")}}), ["a"])
    places = [(str(number), record) for number, record in enumerate(records)]
    documents = encoder.encode(Chunk(1, places, 0))
    assert documents.failure is None
    assert documents.units is not None
    assert documents.units["answer"].tolist() == [1, -1] * 200
    starts = [*documents.starts.tolist(), len(documents.input_ids)]
    for number, row in enumerate(theirs):
        for side, name in enumerate(("chosen_ids", "rejected_ids")):
            place = slice(*starts[2 * number + side : 2 * number + side + 2])
            ids, mask = documents.input_ids[place].tolist(), documents.loss_mask[place]
            assert ids == row["prompt_ids"] + row[name]
            assert mask.argmax() == len(row["prompt_ids"])
            learnt = [token for token, bit in zip(ids, mask, strict=True) if bit]
            # TRL also learns what the template prints after the end of turn.
            assert learnt == row[name][: row[name].index(tokenizer.eos_token_id) + 1]
