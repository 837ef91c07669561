#!/usr/bin/env bash
# From nothing to a trained model: data, tokenizer and model, tokenised folders, training on 2 CPU ranks, report.
#
#   recipes/quickstart/run.sh [FOLDER [override …]]
#
# FOLDER: quickstart_run unless given; a folder of this script's is reused. Overrides are of the training run.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
run=${1:-quickstart_run}
overrides=("${@:2}")

say() { printf '\n[%3ds] %s\n' "$SECONDS" "$1"; }

if [[ -e "$run" && ! -e "$run/.quickstart" && -n "$(ls -A "$run" 2>/dev/null || echo file)" ]]; then
    echo "recipes/quickstart/run.sh: FOLDER must be new, empty or of an earlier quickstart; got $run" >&2
    exit 2
fi
if ! python -c 'import verl_ext, matplotlib' 2>/dev/null; then
    echo "recipes/quickstart/run.sh: python on PATH must have verl-ext[test] installed; got $(command -v python || echo none)" >&2
    exit 2
fi
mkdir -p "$run"
touch "$run/.quickstart"
run=$(cd "$run" && pwd)
data=$run/data

export CUDA_VISIBLE_DEVICES=        # CPU ranks, also where there is a GPU
export TOKENIZERS_PARALLELISM=false # the tokenise command has processes of its own
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export VERL_FILE_LOGGER_PATH="$run/metrics.jsonl"

say "1/5  Writing chats of three categories; the longest is more than 20 times the shortest."
python "$here/make_data.py" --output "$data"

say "2/5  Training a tokenizer on them and making a small Qwen3 with random weights."
python "$here/make_model.py" --output "$run/model" --train-on "$data"/*.train.jsonl --layers 3

say "3/5  Tokenising once: every assistant turn is a target, every target has a category."
for split in train val; do
    python -m verl_ext.tokenize "output_dir=$run/tokenised/$split" "model.path=$run/model" overwrite=true \
        "sources={arithmetic:$data/arithmetic.$split.jsonl,ordering:$data/ordering.$split.jsonl,documents:$data/documents.$split.jsonl}"
done

say "4/5  Training on 2 ranks that share every pack (Ulysses)."
NPROC_PER_NODE=2 "$here/../../launch/node.sh" recipe=quickstart \
    "data.train_dir=$run/tokenised/train" "data.val_dir=$run/tokenised/val" "model.path=$run/model" \
    "trainer.default_local_dir=$run/checkpoints" trainer.overwrite=true "${overrides[@]}"

say "5/5  What came of it."
python "$here/report.py" --metrics "$VERL_FILE_LOGGER_PATH" --checkpoints "$run/checkpoints" --output "$run" \
    --ask "$data/arithmetic.val.jsonl"
say "Done. Everything is in $run"
