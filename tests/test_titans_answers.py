"""Greedy answers of a Qwen with a memory: those of recomputing every sequence, on any rows and ranks."""

import pytest
import torch

from tests.tiny_titans import CHUNK, random_tokens, tiny_titans
from verl_ext.models.qwen_titans import VARIANTS, generate_greedily

pytestmark = pytest.mark.slow

each_variant = pytest.mark.parametrize("variant", VARIANTS)


def _recomputed(model, ids: torch.Tensor, length: int, steps: int) -> list[int]:
    """Greedy tokens of one row, the whole sequence run again for each."""
    row = ids[:length].tolist()
    for _ in range(steps):
        row.append(model(torch.tensor([row]), logits_to_keep=1).logits[0, -1].argmax().item())
    return row[length:]


@each_variant
def test_answers_are_what_recomputing_each_whole_sequence_gives(variant):
    model = tiny_titans(variant=variant, layers=[0, 2])
    lengths = (3, CHUNK - 2, 2 * CHUNK, 2 * CHUNK + 1, 45)  # answers that cross a boundary, and prompts that end on one
    ids = random_tokens(len(lengths), 50)
    mask = torch.arange(50) < torch.tensor(lengths)[:, None]
    answers = generate_greedily(model, ids, mask.long(), max_new_tokens=6)
    assert answers.tolist() == [_recomputed(model, row, n, 6) for row, n in zip(ids, lengths, strict=True)]


def test_a_prompt_is_read_once_and_its_last_chunk_again():
    model = tiny_titans()
    read = []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, inputs: read.append(tuple(inputs[0].shape)))
    ids = random_tokens(1, 4 * CHUNK + 5)
    generate_greedily(model, ids, torch.ones_like(ids), max_new_tokens=3)
    assert read == [(1, CHUNK)] * 4 + [(1, 5), (1, 6), (1, 7)]


def test_an_answer_ends_with_its_end_token_and_the_rest_is_padding():
    model = tiny_titans()
    ids = random_tokens(2, 20)
    free = generate_greedily(model, ids, torch.ones_like(ids), 6)
    ends = {free[0, 1].item(), free[1, 3].item()}
    answers = generate_greedily(model, ids, torch.ones_like(ids), 6, eos_token_ids=ends, pad_token_id=7)
    for row, answer in zip(free.tolist(), answers.tolist(), strict=True):
        stop = min(place for place, token in enumerate(row) if token in ends) + 1
        assert answer == row[:stop] + [7] * (len(answer) - stop)
    assert answers.shape[1] < 6


def test_ranks_that_agree_run_the_longest_ones_chunks_and_answer_alike():
    model = tiny_titans()
    ids = random_tokens(1, 40)
    alone = generate_greedily(model, ids, torch.ones_like(ids), 3)
    calls = []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, inputs: calls.append(inputs[0].shape[1]))

    def all_max(values: torch.Tensor) -> torch.Tensor:  # as if another rank had 4 whole chunks and a tail of 15 tokens
        return values.maximum(torch.tensor([4, 15])) if len(values) == 2 else values

    assert torch.equal(generate_greedily(model, ids, torch.ones_like(ids), 3, all_max=all_max), alone)
    assert calls == [CHUNK] * 4 + [15] + [16] + [16, 1]


def test_an_answer_goes_on_while_another_rank_is_not_done():
    model = tiny_titans()
    ids = random_tokens(1, 20)
    first = generate_greedily(model, ids, torch.ones_like(ids), 1).item()
    options = {"max_new_tokens": 3, "eos_token_ids": [first], "pad_token_id": 5}
    stopped = generate_greedily(model, ids, torch.ones_like(ids), **options)
    waiting = generate_greedily(model, ids, torch.ones_like(ids), **options, all_max=lambda values: values.clamp(min=1))
    assert stopped.tolist() == [[first]]
    assert waiting.tolist() == [[first, 5, 5]]


@pytest.mark.parametrize("options", [{}, {"use_cache": False}])
def test_transformers_generate_gives_the_same_tokens(options):
    model = tiny_titans()
    ids = random_tokens(2, 2 * CHUNK - 2)
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, **options)
    assert torch.equal(generated[:, ids.shape[1] :], generate_greedily(model, ids, torch.ones_like(ids), 5))


@pytest.mark.parametrize("row", [[0, 1, 1], [1, 0, 1], [0, 0, 0]])
def test_padding_before_a_token_is_refused_where_a_model_generates(row):
    model = tiny_titans()
    ids, mask = random_tokens(2, 3), torch.tensor([[1, 1, 1], row])
    with pytest.raises(ValueError, match="attention_mask must be tokens first"):
        generate_greedily(model, ids, mask, 2)
    with pytest.raises(ValueError, match="attention_mask must be tokens first"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2)
