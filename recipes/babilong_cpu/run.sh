#!/usr/bin/env bash
# From nothing to the table of README.md: prose, tokenizer, models, samples, runs with and without memory, report.
#
#   recipes/babilong_cpu/run.sh [FOLDER [override …]]
#
# FOLDER: babilong_cpu_run unless given; a folder of this script's is reused. Overrides are of every training run.
# SEEDS="1 2 3" names the seeds, of weights, memory and order. TOKENS=1 trains model.memory.kind=recurrent_tokens, too.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
overrides=("${@:2}")
read -ra seeds <<< "${SEEDS:-1 2 3}"
source "$here/../small_run.sh"
open_run babilong_cpu "${1:-babilong_cpu_run}"

# samples FOLDER SIZE NUMBER SEED [override …]: a file of qa1 whose facts lie in the first half.
samples() {
    verl-ext babilong "output_dir=$run/$1" overwrite=true "sizes=$2" "samples=$3" "seed=$4" \
        "model.path=$run/inputs/model_${seeds[0]}" "background=$run/inputs/background" reserve_tokens=0 \
        "${@:5}"
}

say "1/4  Prose to hide facts in, a tokenizer, a Qwen3 with random weights for each seed."
python "$here/make_inputs.py" --output "$run/inputs" --seeds "${seeds[@]}"

say "2/4  Samples: two facts alone; two facts a chunk before the question; one to five facts up to three chunks before it."
samples facts "[0k]" 25600 1 story.questions=1
samples near "[53]" 6400 2 story.questions=1 facts_within=0.5
samples far "[117]" 16000 3
samples long "[495]" 3840 5
samples val "[117,495]" 250 4

# train NAME SEED [override …]
train() {
    say "     $1"
    VERL_FILE_LOGGER_PATH="$run/$1/metrics.jsonl" NPROC_PER_NODE=2 "$here/../../launch/node.sh" recipe=babilong_cpu \
        "data.train_dir=[$run/facts,$run/near,$run/far,$run/long]" "data.val_dir=$run/val" "data.cache_dir=$run/cache" \
        "model.path=$run/inputs/model_$2" "trainer.seed=$2" "trainer.default_local_dir=$run/$1" \
        trainer.overwrite=true "${@:3}" "${overrides[@]}"
}

say "3/4  Training on 2 ranks, each seed with memory and without; TOKENS=1: with memory tokens as well."
for seed in "${seeds[@]}"; do
    train "memory_$seed" "$seed"
    [[ -z "${TOKENS:-}" ]] || train "tokens_$seed" "$seed" model.memory.kind=recurrent_tokens
    train "plain_$seed" "$seed" "model.memory.layers=[]"
done

say "4/4  Results."
python "$here/report.py" --run "$run"
verl-ext show "$run"/{memory,plain}_* "html=$run/run.html"
say "Done. Everything is in $run"
