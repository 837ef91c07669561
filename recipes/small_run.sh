# Functions for the recipes on two CPU ranks, which source this file: name a stage, open a run's folder, show the run.

say() { printf '\n[%3ds] %s\n' "$SECONDS" "$1"; }

# open_run RECIPE FOLDER: make or reuse the folder, which must be new, empty or from an earlier run of the same recipe.
# Sets run and data, and the environment variables that CPU ranks need.
open_run() {
    local recipe=$1
    run=$2
    if [[ -e "$run" && ! -e "$run/.$recipe" && -n "$(ls -A "$run" 2>/dev/null || echo file)" ]]; then
        echo "recipes/$recipe/run.sh: FOLDER must be new, empty or of an earlier run; got $run" >&2
        exit 2
    fi
    if ! python -c 'import verl_ext, vl_convert' 2>/dev/null; then
        echo "recipes/$recipe/run.sh: python on PATH must have verl-ext[test]; got $(command -v python || echo none)" >&2
        exit 2
    fi
    mkdir -p "$run"
    touch "$run/.$recipe"
    run=$(cd "$run" && pwd)
    data=$run/data
    export CUDA_VISIBLE_DEVICES=        # CPU ranks, even if there is a GPU
    export TOKENIZERS_PARALLELISM=false # the tokenize command has processes of its own
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
}

# open_small RECIPE FOLDER NAME=RECORDS …: open the folder of a recipe's small form, with its YAML files, data by
# small_data.py, and in model/ a Qwen3 of 0.6M random weights with a tokenizer that was trained on the data. A folder
# that has them keeps them, so that a second start with other overrides begins with its training.
open_small() {
    open_run "$1" "$2"
    cp "$recipes/$1"/*.yaml "$run/"
    find "$recipes/$1" -name '*.jinja' -exec cp {} "$run/" \;
    [[ ! -e "$run/model" ]] || return 0
    say "Data, a tokenizer and a small model with random weights."
    python "$recipes/small_data.py" "$data" "${@:3}"
    verl-ext init-model "model=${small_model:-tiny}" "config=${small_config:-$two_layers}" "output_dir=$run/model" \
        "tokenizer.train_on=[${texts//DATA/$data}]" tokenizer.vocab_size=1024 tokenizer.bos_token=null
}

# train_base: train $run/model on the chats, as the model $run/base that a recipe then starts from.
train_base() {
    [[ ! -e "$run/base" ]] || return 0
    say "A base model: the small model learns the chats."
    verl-ext train "data.sources={chats:$data/chats.jsonl}" "model.path=$run/model" nproc=2 parallel=cpu \
        model.enable_gradient_checkpointing=false data.max_tokens=512 data.train_batch_size=4 optim.lr=4e-3 \
        optim.lr_scheduler_type=cosine optim.lr_warmup_steps=8 trainer.total_epochs=2 'trainer.logger=[file]' \
        'checkpoint.save_contents=[hf_model]' "trainer.default_local_dir=$run/base_run" trainer.overwrite=true
    mv "$(last_export "$run/base_run")" "$run/base"
}
recipes=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
texts='DATA/*.jsonl' # that the tokenizer is trained on
two_layers='{num_hidden_layers:2,hidden_size:128,intermediate_size:384,initializer_range:0.09}'

# show_run: show the curves of the run in $run/checkpoints, as text here and as figures in run.html.
show_run() {
    verl-ext show "$run/checkpoints"
    verl-ext show "$run/checkpoints" "html=$run/run.html"
}

# start_server SCRIPT [ARGUMENT …]: run a script of recipes/ that serves a model until the recipe ends. Sets url.
servers=()
start_server() {
    local port="$run/${1%.py}.port"
    rm -f "$port"
    python "$(dirname "${BASH_SOURCE[0]}")/$1" "$port" "${@:2}" &
    servers+=($!)
    trap 'kill "${servers[@]}" 2>/dev/null || true' EXIT
    while [[ ! -e "$port" ]]; do
        kill -0 $! 2>/dev/null || { echo "recipes/$1 ended before it listened" >&2; exit 1; }
        sleep 0.1
    done
    url=http://127.0.0.1:$(<"$port")/v1
}

# open_server: use the server of BASE_URL and MODEL, or recipes/scripted_model.py. Sets server_url and server_model.
open_server() {
    if [[ -n "${BASE_URL:-}" ]]; then
        server_url=$BASE_URL
        server_model=${MODEL:?MODEL must name a model of BASE_URL}
        return
    fi
    start_server scripted_model.py
    server_url=$url
    server_model=scripted
}

# last_export RUN: print the folder of a run's last exported model.
last_export() { printf '%s\n' "$1"/global_step_*/huggingface | sort -V | tail -n 1; }
