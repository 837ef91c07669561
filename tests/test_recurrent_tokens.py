"""Memory tokens passed between chunks give the values, gradients and answers of a plain loop over chunks."""

import torch
from transformers import Qwen3ForCausalLM

from tests.tiny_titans import CHUNK, random_tokens, tiny_base, tiny_titans

TOKENS = 3


def _model(**memory):
    return tiny_titans(kind="recurrent_tokens", tokens=TOKENS, **memory).double()


def _plain_loop(model, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a plain Qwen3 whose input is each chunk between its memory tokens, as embeddings."""
    plain = Qwen3ForCausalLM(tiny_base()).double()
    own = dict(model.named_parameters())
    state = own["memory.recurrent_tokens.initial"].expand(len(ids), -1, -1)
    logits = []
    for chunk in ids.split(CHUNK, 1):
        embedded = torch.nn.functional.embedding(chunk, own["model.embed_tokens.weight"])
        weights = {name: own[name] for name, _ in plain.named_parameters()}
        inputs = {"inputs_embeds": torch.cat([state, embedded, state], 1), "use_cache": False}
        output = torch.func.functional_call(plain, weights, (), {**inputs, "output_hidden_states": True})
        logits.append(output.logits[:, TOKENS:-TOKENS])
        state = output.hidden_states[-1][:, -TOKENS:]
    return torch.cat(logits, 1)


def test_values_and_gradients_are_those_of_a_plain_loop():
    model, ids = _model(), random_tokens(2, 3 * CHUNK + 5)
    logits, expected = model(ids).logits, _plain_loop(model, ids)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    names, parameters = zip(*model.named_parameters(), strict=True)
    own, exact = (torch.autograd.grad(x[:, -9:].square().sum(), parameters) for x in (logits, expected))
    for name, gradient, other in zip(names, own, exact, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
        assert gradient.any()


def test_gradients_reach_the_first_tokens_through_as_many_chunks_as_asked_for():
    for chunks, reached in ((1, False), (3, True)):
        model = _model(bptt_chunks=chunks)
        model(random_tokens(1, 3 * CHUNK)).logits[:, -3:].sum().backward()
        gradient = model.memory["recurrent_tokens"].initial.grad
        assert (gradient is not None and bool(gradient.any())) is reached


@torch.no_grad()
def test_logits_token_by_token_are_those_of_one_reading():
    model, ids = _model(), random_tokens(2, 2 * CHUNK + 5)
    whole = model(ids).logits
    for cuts in ([1] * ids.shape[1], [5, 1, 20, 3, 8]):
        cache, parts = None, []
        for part in ids.split(cuts, 1):
            output = model(part, past_key_values=cache, use_cache=True)
            cache, parts = output.past_key_values, [*parts, output.logits]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)


def test_padded_rows_are_answered_as_each_alone():
    model = _model()
    lengths, steps = (3, CHUNK - 1, 2 * CHUNK, 39), CHUNK + 5
    rows = [random_tokens(length, seed=number) for number, length in enumerate(lengths)]
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": steps}
    ids, mask = (
        torch.nn.utils.rnn.pad_sequence(of_rows, batch_first=True, padding_side="left")
        for of_rows in (rows, [torch.ones_like(row) for row in rows])
    )
    answers = model.generate(ids, attention_mask=mask, **options)[:, -steps:]
    for row, answer in zip(rows, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.cat([row, answer])[None], logits_to_keep=steps + 1).logits[0, :-1]
        assert torch.equal(answer, logits.argmax(-1))


def test_the_first_chunk_reaches_the_last_through_the_tokens():
    model, ids = _model(), random_tokens(1, 3 * CHUNK)
    changed = ids.clone()
    changed[:, 3] += 1
    with torch.no_grad():
        assert (model(changed % 48).logits != model(ids).logits)[:, 2 * CHUNK :].any(-1).all()


def test_a_saved_model_and_the_memory_alone_come_back(tmp_path):
    model, ids = _model(), random_tokens(1, 2 * CHUNK + 3)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert again.config.memory["kind"] == "recurrent_tokens"
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    assert list(model.memory_state_dict()) == ["memory.recurrent_tokens.initial"]
