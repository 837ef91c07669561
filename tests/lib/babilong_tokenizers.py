"""Small tokenizers for samples of BABILong."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from verl_ext.tools.babilong.samples import filler_sentences

CORPUS = [*filler_sentences(150), "Mary went back to the kitchen. John took the apple there. The office is south."]


def byte_level(vocabulary: int = 600) -> PreTrainedTokenizerFast:
    """Like GPT-2's and Qwen's tokenizer: it splits at spaces and adds no special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<s>")


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of one token a word, all unknown but one."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
