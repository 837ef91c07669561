"""A small Qwen3 with random weights, and if asked its own byte-level BPE tokenizer with a ChatML template.

    python recipes/quickstart/make_model.py --output DIR --train-on data/*.train.jsonl --vocab-size 2048
    python recipes/quickstart/make_model.py --output DIR --tokenizer FOLDER --hidden 320 --layers 6

The folder that it writes is an ordinary Hugging Face one (`architectures: [Qwen3ForCausalLM]`, safetensors, tokenizer):
the trainer and plain transformers load it like any other. The same seed writes the same weights.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def texts(files: list[Path]) -> Iterator[str]:
    """Every message of every conversation."""
    for path in files:
        with path.open(encoding="utf-8") as file:
            for line in file:
                yield from (message["content"] for message in json.loads(line)["messages"])


def train_tokenizer(files: list[Path], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most `vocab_size` tokens: any text is encoded, none is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(files), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerBase, sizes: argparse.Namespace) -> Qwen3ForCausalLM:
    """Random weights for the tokenizer's vocabulary, with input and output embeddings tied."""
    torch.manual_seed(sizes.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate or 3 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.hidden // sizes.heads,
        max_position_embeddings=sizes.positions,
        initializer_range=sizes.hidden**-0.5,  # Qwen3's 0.02 is for wide models: small ones learn slowly from it
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--train-on", type=Path, nargs="+", metavar="JSONL", help="train a tokenizer on these chats")
    source.add_argument("--tokenizer", metavar="FOLDER", help="use this tokenizer, which must have a chat template")
    parser.add_argument("--vocab-size", type=int, default=2048, help="of a tokenizer trained here")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--intermediate", type=int, help="default: 3 times hidden")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    transformers.utils.logging.disable_progress_bar()
    if arguments.train_on:
        tokenizer = train_tokenizer(arguments.train_on, arguments.vocab_size)
    else:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    model = make_model(tokenizer, arguments)
    tokenizer.save_pretrained(arguments.output)
    model.save_pretrained(arguments.output)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"  tokenizer of {len(tokenizer):,} tokens, Qwen3 of {count / 1e6:.1f}M parameters in {arguments.output}")


if __name__ == "__main__":
    main()
