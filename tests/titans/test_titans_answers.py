"""Answers of transformers' `generate` from a Qwen with a memory equal those of recomputing every sequence."""

import logging

import pytest
import torch
from transformers import StoppingCriteriaList
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.lib.tiny_titans import CHUNK, VOCABULARY, each_form, random_tokens, tiny_titans

pytestmark = pytest.mark.slow

STEPS = 2 * CHUNK + 3  # tokens of an answer that crosses chunks and their sub-chunks
LENGTHS = (3, CHUNK - 2, 2 * CHUNK, 2 * CHUNK + 1, 45)  # of prompts; one ends on a border of chunks


def _prompts(lengths=LENGTHS, padding: str = "left") -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return the rows, and the rows padded to one length with their mask."""
    rows = [random_tokens(length, seed=number) for number, length in enumerate(lengths)]
    ids, mask = (
        torch.nn.utils.rnn.pad_sequence(of_rows, batch_first=True, padding_side=padding)
        for of_rows in (rows, [torch.ones_like(row) for row in rows])
    )
    return rows, ids, mask


def _answers(model, ids: torch.Tensor, mask: torch.Tensor | None = None, steps: int = STEPS, **options) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask  # else transformers treats pad_token_id as padding
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    return model.generate(ids, attention_mask=mask, max_new_tokens=steps, **options)[:, ids.shape[1] :]


@torch.no_grad()
def _likeliest(model, row: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token at each place of an answer, from one forward of the whole text without a cache."""
    return model(torch.cat([row, answer])[None], logits_to_keep=len(answer) + 1).logits[0, :-1].argmax(-1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@each_form
def test_every_token_is_the_likeliest_after_the_whole_text_before_it(form, attention):
    model = tiny_titans(**form, layers=[0, 2], attention=attention).double()
    rows, ids, mask = _prompts()
    for row, answer in zip(rows, _answers(model, ids, mask), strict=True):
        assert torch.equal(answer, _likeliest(model, row, answer))


def test_attention_that_takes_no_mask_answers_as_sdpa_does(monkeypatch):
    def flash_like(module, query, key, value, attention_mask, **options):
        assert attention_mask is None, "flash kernels take no mask of places"
        return sdpa_attention_forward(module, query, key, value, None, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_like", flash_like)
    model = tiny_titans(layers=[0, 2]).double()
    _, ids, mask = _prompts()
    expected = _answers(model, ids, mask)
    model.model.config._attn_implementation = "flash_like"
    assert torch.equal(_answers(model, ids, mask), expected)
    assert model.model.config._attn_implementation == "flash_like"


@each_form
def test_logits_token_by_token_are_those_of_one_reading(form):
    model = tiny_titans(**form, layers=[0, 2]).double()
    ids = random_tokens(2, 2 * CHUNK + 5)
    whole = model(ids).logits
    for cuts in ([1] * ids.shape[1], [5, 1, 20, 3, 8]):
        cache, parts = None, []
        for part in ids.split(cuts, 1):
            output = model(part, past_key_values=cache, use_cache=True)
            cache, parts = output.past_key_values, [*parts, output.logits]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("padding", ["left", "right"])
@each_form
def test_padding_on_either_side_leaves_each_row_as_it_is_alone(form, padding):
    model = tiny_titans(**form, layers=[0, 2]).double()
    rows, ids, mask = _prompts(padding=padding)
    for row, answer in zip(rows, _answers(model, ids, mask, 20), strict=True):
        assert torch.equal(answer, _answers(model, row[None], steps=20)[0])


def _read(model) -> list[tuple[int, ...]]:
    """Return a list of the shapes of the tokens that the model reads from now on."""
    shapes: list[tuple[int, ...]] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    return shapes


def test_a_prompt_is_read_once_and_then_each_token_alone():
    model = tiny_titans()
    shapes = _read(model)
    _answers(model, random_tokens(1, 4 * CHUNK + 5), steps=15)
    assert shapes == [(1, CHUNK)] * 4 + [(1, 5)] + [(1, 1)] * 14


def test_no_warning_of_a_maximum_length_that_a_reader_of_chunks_does_not_have(caplog, monkeypatch):
    model = tiny_titans()
    most = model.config.max_position_embeddings
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    _answers(model, random_tokens(1, most + 1), steps=2)
    assert caplog.text == ""


def test_rows_with_fewer_chunks_join_later():
    model = tiny_titans()
    shapes = _read(model)
    _, ids, mask = _prompts((3, 2 * CHUNK + 4))
    _answers(model, ids, mask, steps=3)
    assert shapes == [(2, CHUNK), (2, CHUNK), (2, 4), (2, 1), (2, 1)]


def test_the_cache_stays_that_of_a_chunk_however_much_was_read():
    model = tiny_titans(layers=[0, 2])
    with torch.no_grad():
        caches = [model(random_tokens(1, n * CHUNK + 5), use_cache=True).past_key_values for n in (1, 9)]
    sizes = [
        sum(t.numel() for pair in c.keys.values() for t in pair)
        + sum(t.numel() for memory in c.memories.values() for t in vars(memory).values() if t is not None)
        for c in caches
    ]
    assert sizes[0] == sizes[1] > 0
    assert [c.get_seq_length() for c in caches] == [CHUNK + 5, 9 * CHUNK + 5]


def test_a_conversation_goes_on_from_its_cache():
    model = tiny_titans().double()
    _, ids, mask = _prompts((5, 20))
    first = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    more = torch.cat([first.sequences, random_tokens(2, 7, seed=9)], 1)
    whole_mask = torch.cat([mask, mask.new_ones(2, 11)], 1)
    shapes = _read(model)
    went_on = _answers(model, more, whole_mask, 6, past_key_values=first.past_key_values)
    assert shapes[0] == (2, 8)  # 7 new tokens, and the last token of the first answer, which was not read yet
    assert torch.equal(went_on, _answers(model, more, whole_mask, 6))


def test_an_answer_ends_with_one_of_several_end_tokens_and_the_rest_is_padding():
    model = tiny_titans()
    ids = random_tokens(2, 20)
    free = _answers(model, ids, steps=6)
    ends = {free[0, 1].item(), free[1, 3].item()}
    answers = _answers(model, ids, steps=6, eos_token_id=list(ends), pad_token_id=7)
    for row, answer in zip(free.tolist(), answers.tolist(), strict=True):
        stop = min(place for place, token in enumerate(row) if token in ends) + 1
        assert answer == row[:stop] + [7] * (len(answer) - stop)
    assert answers.shape[1] < 6


class _Streamer:
    def __init__(self):
        self.put_, self.ended = [], False

    def put(self, tokens):
        self.put_ += tokens.flatten().tolist()

    def end(self):
        self.ended = True


def test_streamers_stopping_criteria_and_no_cache_are_transformers_own():
    model = tiny_titans()
    ids, streamer = random_tokens(1, 20), _Streamer()
    answer = _answers(model, ids, steps=9, streamer=streamer)
    assert streamer.put_ == [*ids[0].tolist(), *answer[0].tolist()]
    assert streamer.ended
    assert torch.equal(_answers(model, ids, steps=9, use_cache=False), answer)
    four = StoppingCriteriaList([lambda ids, scores, **_: torch.tensor([ids.shape[1] >= 24])])
    assert torch.equal(_answers(model, ids, steps=9, stopping_criteria=four), answer[:, :4])


def test_drawn_tokens_and_beams_with_the_cache_are_those_without_it():
    model = tiny_titans(layers=[0, 2]).double()
    _, ids, mask = _prompts((9, 20))
    for options in ({"do_sample": True, "temperature": 0.7, "top_k": 5}, {"num_beams": 3}):
        given = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            given.append(_answers(model, ids, mask, 2 * CHUNK, use_cache=use_cache, **options))
        assert torch.equal(*given)


def test_a_rank_with_fewer_chunks_runs_as_many_passes_as_the_others():
    model = tiny_titans()
    ids = random_tokens(1, 20)
    alone = _answers(model, ids, steps=3)
    shapes = _read(model)
    model.agree_passes = lambda passes: max(passes, 4)
    assert torch.equal(_answers(model, ids, steps=3), alone)
    assert shapes == [(1, 1)] * 2 + [(1, CHUNK), (1, 4), (1, 1), (1, 1)]


def test_decoding_that_takes_tokens_back_is_refused():
    with pytest.raises(ValueError, match="stateful"):
        _answers(tiny_titans(), random_tokens(1, 5), assistant_model=tiny_titans())


def test_a_last_token_is_not_one_of_a_row_without_tokens():
    model = tiny_titans()
    mask = torch.tensor([[0, 0, 0], [1, 1, 1]])
    logits = model(random_tokens(2, 3), attention_mask=mask, use_cache=True, logits_to_keep=1).logits
    assert logits.shape == (2, 1, VOCABULARY)
    assert logits.isfinite().all()
