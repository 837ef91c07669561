"""New tokens of a tokenizer, and the pieces that each of them was before.

    model.new_tokens=[<call>]      <call>   before: the ids of `<`, `call`, `>`      after: one id, the next free one

The pieces decide how the token's rows of the embeddings and of the head begin (verl_ext/engines/new_rows.py).
"""

from collections.abc import Sequence
from typing import Any

from verl_ext.options import UsageError, must, spell

KEYS = ("model.new_tokens", "model.new_special_tokens")


# What the options mean in both nodes that have them, `tokenize`'s and the trainer's.
NEW_TOKENS = "tokens added to the tokenizer, whose rows begin as the mean of those of their old pieces ([<call>])"
NEW_SPECIAL_TOKENS = (
    "the same for special tokens, such as a chat template's: words where a text holds them, left out of decoded answers"
)


def add_tokens(tokenizer: Any, new: Sequence[str], special: Sequence[str], path: str) -> dict[int, list[int]]:
    """Add tokens to a tokenizer, in place; return {id: the ids that its text had before}.

    Args:
        tokenizer: a tokenizer of transformers.
        new: the value of `model.new_tokens`, whose ids come first.
        special: the value of `model.new_special_tokens`.
        path: where the tokenizer is from, for messages.

    Raises UsageError if a token is empty, given twice or known, or if the tokenizer takes none; one line a mistake.
    """
    if not new and not special:
        return {}
    from tokenizers import AddedToken  # here, because the help of commands needs none of it

    given = [(key, token) for key, tokens in zip(KEYS, (new, special), strict=True) for token in tokens]
    vocabulary, problems = tokenizer.get_vocab(), []
    for number, (key, token) in enumerate(given):
        if not token:
            problems.append(must(key, "hold texts of at least a character", ""))
        elif token in (earlier for _, earlier in given[:number]):
            problems.append(must(" and ".join(KEYS), "name each token once", f"{token} twice"))
        elif token in vocabulary:
            problems.append(
                must(key, "name tokens that the tokenizer lacks", f"{token}, its token {vocabulary[token]}")
            )
    if problems:
        raise UsageError("\n".join(dict.fromkeys(problems)))
    # All pieces first: a later token may hold the text of an earlier one.
    pieces = [tokenizer(token, add_special_tokens=False)["input_ids"] for _, token in given]
    try:
        for tokens, is_special in ((new, False), (special, True)):
            added = [AddedToken(token, normalized=False, special=is_special) for token in tokens]
            tokenizer.add_tokens(added, special_tokens=is_special)
        ids = [tokenizer.convert_tokens_to_ids(token) for _, token in given]
        alone = [tokenizer(token, add_special_tokens=False)["input_ids"] for _, token in given]
    except (AttributeError, NotImplementedError) as error:  # mistral-common's tokenizers have no added tokens
        kind = type(tokenizer).__name__
        raise UsageError(must(given[0][0], f"be [] with a {kind}, which takes none", given[0][1])) from error
    for (key, token), number, read in zip(given, ids, alone, strict=True):
        if read.count(number) != 1 or number in vocabulary.values():
            got = f"{spell(token)}, which {path} reads as {read}"
            raise UsageError(must(key, "hold tokens that the tokenizer reads as one", got))
    unknown = tokenizer.unk_token_id
    return {number: [id_ for id_ in old if id_ != unknown] for number, old in zip(ids, pieces, strict=True)}


def tokens_of(tokenizer: Any, model: Any) -> dict[str, int]:
    """Return {token: id} of a model node's new tokens, which its tokenizer has."""
    return {token: tokenizer.convert_tokens_to_ids(token) for token in (*model.new_tokens, *model.new_special_tokens)}
