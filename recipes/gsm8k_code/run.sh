#!/usr/bin/env bash
# Two categories from your files: hold out, make a 10M-parameter Qwen3, tokenize, train on 2 CPU ranks, report.
#
#   recipes/gsm8k_code/run.sh GSM8K.jsonl CODE.json TOKENIZER_FOLDER [FOLDER] [override …]
#
# GSM8K.jsonl       lines of {"question", "answer"}
# CODE.json         a list of {"instruction", "input", "output"}
# TOKENIZER_FOLDER  a Hugging Face tokenizer with a chat template
# FOLDER            gsm8k_code_run by default; a folder that this script made is reused
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if (($# < 3)); then
    sed -n '/^#   recipes/s/^#   /usage: /p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
gsm8k=$1 code=$2 tokenizer=$3 folder=${4:-gsm8k_code_run}
shift $(($# < 4 ? $# : 4))
source "$here/../small_run.sh"
open_run gsm8k_code "$folder"

say "1/5  Holding out a part of each file."
python "$here/hold_out.py" --output "$data" "gsm8k=$gsm8k" "code=$code"

say "2/5  Making a Qwen3 with random weights for the tokenizer."
verl-ext init-model model=small_10m "output_dir=$run/model" overwrite=true "tokenizer.path=$tokenizer"

say "3/5  Tokenizing once."
for split in train val; do
    verl-ext tokenize "output_dir=$run/tokenised/$split" "model.path=$run/model" overwrite=true \
        "sources={gsm8k:$data/gsm8k.$split.jsonl,code:$data/code.$split.jsonl}"
done

say "4/5  Training on 2 ranks that share every pack (Ulysses)."
NPROC_PER_NODE=2 verl-ext launch recipe=gsm8k_code \
    "data.train_dir=$run/tokenised/train" "data.val_dir=$run/tokenised/val" "model.path=$run/model" \
    "trainer.default_local_dir=$run/checkpoints" trainer.overwrite=true "$@"

say "5/5  Results."
show_run
python "$recipes/answer.py" --checkpoints "$run/checkpoints" --ask "$data/gsm8k.val.jsonl" --max-new-tokens 96
say "Done. Everything is in $run"
