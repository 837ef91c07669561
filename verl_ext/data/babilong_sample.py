"""A BABILong record as the tokens of one row: prompt, answer, and what is cut of a prompt that is too long.

    input \\n\\nQuestion: question\\nAnswer:     target         R = answer_reserve_tokens
    <bos> c0 c1 c2 c3 c4 q0 q1 q2            a0 [eos]       fits: at most max_length - R tokens before a0
    <bos> c0 c1 c2       q0 q1 q2            a0 [eos]       truncate=context: the last tokens of the input are gone
    <bos> c0 c1 c2 c3 c4                     a0 [eos]       truncate=right: the question is what is gone

Only the answer's tokens (and the EOS after them, where it is asked for) are targets. The prompt is tokenised whole and
then cut in tokens, so that a cut one has exactly max_length - R of them, whatever merges over the seam. A token that
holds the end of the input and the first line break (".\\n\\n") belongs to the question's side. Special tokens that the
tokenizer puts at either end stay.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.babilong_files import Record
from verl_ext.data.babilong_options import BABILongOptions
from verl_ext.tokenize.special_tokens import as_plain_text

LINE_BREAKS = 2  # tokens that the two line breaks before "Question:" may be


class SampleTokens(NamedTuple):
    """input_ids int32[T], T ≤ max_length; the last `targets` of them are the answer; full_tokens: T before cutting."""

    input_ids: NDArray[np.int32]
    targets: int
    full_tokens: int

    @property
    def loss_mask(self) -> NDArray[np.int8]:
        """int8[T]: 1 on the answer."""
        mask = np.zeros(len(self.input_ids), np.int8)
        mask[len(mask) - self.targets :] = 1
        return mask


def prompt_text(context: str, question: str) -> str:
    """What the model is given; `context` is the record's input."""
    return f"{context}\n\nQuestion: {question}\nAnswer:"


def answer_text(target: str) -> str:
    """What the model is to say."""
    return f" {target}"


class SampleTokenizer:
    """Tokenises records; a batch at a time, since fast tokenizers work on its texts in parallel."""

    def __init__(self, tokenizer: Any, options: BABILongOptions, key: str = "data.train_dir") -> None:
        """ValueError: `append_eos` with a tokenizer that has no EOS."""
        self.tokenizer, self.options, self.key = tokenizer, options, key
        if options.append_eos and tokenizer.eos_token_id is None:
            raise ValueError("data.append_eos=true needs a tokenizer with an eos_token; it has none")
        self._end = [tokenizer.eos_token_id] if options.append_eos else []

    def tokenise(self, records: Sequence[Record]) -> list[SampleTokens]:
        """One sample a record.

        Raises:
            ValueError: an answer without a token or longer than answer_reserve_tokens, a question that max_length has
                no room for; the record is named.
        """
        prompts = self._encoded([prompt_text(record.input, record.question) for record in records], special=True)
        answers = self._encoded([answer_text(record.target) for record in records], special=False)
        samples = []
        for number, record in enumerate(records):
            answer = self._checked_answer(answers["input_ids"][number], record)
            prompt = np.asarray(prompts["input_ids"][number], np.int32)
            cut = prompt
            if len(prompt) > self.options.prompt_tokens:
                encoding = prompts.encodings[number] if prompts.encodings is not None else None
                cut = self._cut(prompt, encoding, record)
            ids = np.concatenate([cut, np.asarray(answer, np.int32)])
            samples.append(SampleTokens(ids, len(answer), len(prompt) + len(answer)))
        return samples

    def _encoded(self, texts: list[str], special: bool) -> Any:
        return self.tokenizer(
            texts,
            add_special_tokens=special,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning that a text is longer than model_max_length
            **as_plain_text(self.tokenizer),
        )

    def _checked_answer(self, tokens: list[int], record: Record) -> list[int]:
        if not tokens or not record.target.strip():
            raise ValueError(f"{self.key} must hold an answer in every record; target of {record} is {record.target!r}")
        answer, reserve = [*tokens, *self._end], self.options.answer_reserve_tokens
        if len(answer) > reserve:
            eos = ", EOS included" if self._end else ""
            raise ValueError(
                f"data.answer_reserve_tokens must hold every answer; got {reserve}, but {record} has an answer of "
                f"{len(answer)} tokens{eos}"
            )
        return answer

    def _cut(self, prompt: NDArray[np.int32], encoding: Any, record: Record) -> NDArray[np.int32]:
        """`prompt` as exactly prompt_tokens tokens: its beginning, and what `truncate` keeps of its end."""
        if encoding is None:
            limit, kind = self.options.prompt_tokens, type(self.tokenizer).__name__
            raise ValueError(
                f"prompts over {limit} tokens need a fast tokenizer (tokenizer.is_fast) to be cut; got {kind}, and "
                f"{record} has {len(prompt)}"
            )
        special = encoding.special_tokens_mask
        size, leading, trailing = len(prompt), special.index(0), special[::-1].index(0)
        keep_from = size - trailing
        if self.options.truncate == "context":
            keep_from = self._question_begins(encoding, record, leading, keep_from)
        begin = self.options.prompt_tokens - (size - keep_from)
        if begin < leading:
            raise ValueError(
                f"data.max_length must hold the question and data.answer_reserve_tokens="
                f"{self.options.answer_reserve_tokens}; got {self.options.max_length}, but {record} needs at least "
                f"{leading + size - keep_from + self.options.answer_reserve_tokens}"
            )
        return np.concatenate([prompt[:begin], prompt[keep_from:]])

    def _question_begins(self, encoding: Any, record: Record, first: int, end: int) -> int:
        """The first token of what follows the input; first..end-1 are the tokens that are not special."""
        context = len(record.input)
        text = len(prompt_text(record.input, record.question))
        for character in range(context, text):
            token = encoding.char_to_token(character)
            if token is not None:
                break
        else:
            return end
        if character > context:  # offsets leave white space out; a tokenizer may still have tokens for it
            for _ in range(LINE_BREAKS):
                if token > first and self.tokenizer.decode([encoding.ids[token - 1]]).endswith("\n"):
                    token -= 1
        return token
