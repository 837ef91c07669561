"""The tokenizer of a new model, trained on text: a byte-level BPE."""

from collections.abc import Iterable, Sequence
from typing import Any

from verl_ext.init_model.chat_template import read_chat_template
from verl_ext.init_model.tokenizer_config import TokenizerConfig


def trained_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> Any:
    """A transformers tokenizer trained on `texts`: any text is encoded, none is unknown.

    It has fewer than `config.vocab_size` tokens where the text has too few pairs to merge, and no merges without text.
    """
    from transformers import PreTrainedTokenizerFast

    template = read_chat_template(config.chat_template)
    bpe = train_bpe(texts, config.vocab_size, config.all_special_tokens())
    named = {"bos_token": config.bos_token, "eos_token": config.eos_token, "pad_token": config.pad_token}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in named.items() if token is not None},
    )


def train_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]) -> Any:
    """A `tokenizers.Tokenizer` of at most `vocab_size` tokens: special ones from id 0, the 256 bytes, merges.

    The pieces that merges stay inside are GPT-2's: words with the space before them, numbers, signs, white space. Words
    are counted as the texts come; the same texts in the same order give the same tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
