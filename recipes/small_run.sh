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

# show_run: show the curves of the run in $run/checkpoints, as text here and as figures in run.html.
show_run() {
    verl-ext show "$run/checkpoints"
    verl-ext show "$run/checkpoints" "html=$run/run.html"
}

# open_server: use the server of BASE_URL and MODEL, or run recipes/scripted_model.py until the recipe ends. Sets
# server_url and server_model.
open_server() {
    if [[ -n "${BASE_URL:-}" ]]; then
        server_url=$BASE_URL
        server_model=${MODEL:?MODEL must name a model of BASE_URL}
        return
    fi
    rm -f "$run/port"
    python "$(dirname "${BASH_SOURCE[0]}")/scripted_model.py" "$run/port" &
    # shellcheck disable=SC2064  # the process of now
    trap "kill $! 2>/dev/null || true" EXIT
    while [[ ! -e "$run/port" ]]; do
        kill -0 $! 2>/dev/null || { echo "recipes/scripted_model.py ended before it listened" >&2; exit 1; }
        sleep 0.1
    done
    server_url=http://127.0.0.1:$(<"$run/port")/v1
    server_model=scripted
}
