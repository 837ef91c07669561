"""Write the inputs of the runs: prose to hide facts in, a word-level tokenizer, and a tiny Qwen3 for each seed.

    python recipes/papers/babilong_cpu/make_inputs.py --output DIR --seeds 1 2 3

The prose has short sentences and few words, and none of bAbI's actors or places, so a model of 100,000 parameters
learns to read it in a minute. The tokenizer knows the words of the prose, facts and questions, and nothing else.
"""

import argparse
import os
import random
import re
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_ext.commands.command_line import read_options
from verl_ext.tools.babilong.stories import ACTORS, OBJECTS, PLACES, VERBS
from verl_ext.tools.init_model.command import InitModelOptions, init_model

# Hidden size 64, with the initializer range of narrow models. Tied embeddings would grow with the answers' logits,
# until the actor that attention adds to a token was a hundredth of the variance that the memory's keys see.
ARCHITECTURE = (
    "model=tiny",
    "config={hidden_size:64,intermediate_size:128,num_hidden_layers:LAYERS,num_attention_heads:2,"
    "num_key_value_heads:2,max_position_embeddings:512,initializer_range:0.08,tie_word_embeddings:false}",
)
PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"
WORDS = {
    "A": "old quiet small broad distant pale early heavy narrow gentle",
    "N": "river road bridge village market tower harbour forest field window lamp clock boat wagon dog wall gate",
    "V": "crossed passed reached followed faced held watched covered carried marked",
    "P": "near under behind beyond beside along",
    "D": "slowly often again quietly rarely soon",
}
SENTENCES = (
    "the A N V the A N P the N D .",
    "D the N V a A N P the old N .",
    "P the N the A N V the N D .",
    "many people said that the N P the N was A .",
    "it was a A day and the N was A again .",
    "no one knew why the A N V the A N .",
    "in those years the A N V every N D .",
    "when the rain came the N was A and A .",
)


def sentence(rng: random.Random) -> str:
    """Return one sentence of 10 words or more."""
    words = [rng.choice(WORDS[word].split()) if word in WORDS else word for word in rng.choice(SENTENCES).split()]
    return " ".join(words).replace(" .", ".").capitalize()


def vocabulary() -> list[str]:
    """Return every token of the prose, facts, questions and the layout around them."""
    prose = " ".join([*WORDS.values(), *SENTENCES])
    prose += " " + " ".join(
        text.split()[0].capitalize() for text in [*SENTENCES, *WORDS["D"].split(), *WORDS["P"].split()]
    )
    verbs = (verb for kind in ("move", "get", "drop") for verb in VERBS[kind])
    facts = " ".join([*ACTORS, *PLACES, *OBJECTS, *verbs, "to the there. Where is? Question: Answer:"])
    tokens = set(re.findall(r"\w+|[^\w\s]", f"{prose} {facts}")) - set(WORDS)
    return [PAD, END, UNKNOWN, *sorted(tokens)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of words and punctuation marks that drops white space."""
    ids = {token: number for number, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)


def main() -> None:
    """Write background/prose.txt, tokenizer/ and a model folder for each seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    rng = random.Random(0)
    (options.output / "background").mkdir(parents=True, exist_ok=True)
    prose = " ".join(sentence(rng) for _ in range(4000))
    (options.output / "background" / "prose.txt").write_text(prose, encoding="utf-8")
    make_tokenizer().save_pretrained(options.output / "tokenizer")
    for seed in options.seeds:
        output = [f"output_dir={options.output}/model_{seed}", "overwrite=true", f"seed={seed}"]
        tokenizer = f"tokenizer.path={options.output}/tokenizer"
        architecture = [value.replace("LAYERS", str(options.layers)) for value in ARCHITECTURE]
        init_model(read_options(InitModelOptions, [*architecture, *output, tokenizer]))


if __name__ == "__main__":
    main()
