#!/usr/bin/env bash
# From nothing to a trained model: data, tokenizer and model, tokenized folders, training on 2 CPU ranks, report.
#
#   recipes/quickstart/run.sh [FOLDER [override …]]
#
# FOLDER: quickstart_run by default; a folder that this script made is reused. Overrides apply to the training run.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
overrides=("${@:2}")
source "$here/../small_run.sh"
open_run quickstart "${1:-quickstart_run}"

say "1/5  Writing chats of three categories; the longest is more than 20 times the shortest."
python "$here/make_data.py" --output "$data"

say "2/5  Training a tokenizer on them and making a small Qwen3 with random weights."
verl-ext init-model model=tiny "output_dir=$run/model" overwrite=true \
    "tokenizer.train_on=$data/*.train.jsonl" tokenizer.vocab_size=2048 tokenizer.bos_token=null

say "3/5  Tokenizing once: every assistant turn is a target, every target has a category."
for split in train val; do
    verl-ext tokenize "output_dir=$run/tokenised/$split" "model.path=$run/model" overwrite=true \
        "sources={arithmetic:$data/arithmetic.$split.jsonl,ordering:$data/ordering.$split.jsonl,documents:$data/documents.$split.jsonl}"
done

say "4/5  Training on 2 ranks that share every pack (Ulysses)."
NPROC_PER_NODE=2 verl-ext launch recipe=quickstart \
    "data.train_dir=$run/tokenised/train" "data.val_dir=$run/tokenised/val" "model.path=$run/model" \
    "trainer.default_local_dir=$run/checkpoints" trainer.overwrite=true "${overrides[@]}"

say "5/5  Results."
show_run
python "$recipes/answer.py" --checkpoints "$run/checkpoints" --ask "$data/arithmetic.val.jsonl"
say "Done. Everything is in $run"
