#!/usr/bin/env bash
# A training run on a Ray cluster: on a new cluster of these nodes, or as a job on a running cluster.
#
#   launch/ray.sh node recipe=… data.train_dir=DIR model.path=MODEL      # this machine, all its GPUs
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=host0 launch/ray.sh node recipe=…   # the same on each of 4 nodes
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=host0 launch/ray.sh node            # a cluster that waits for jobs
#   RAY_ADDRESS=http://host0:8265 launch/ray.sh submit recipe=…          # a run as a job on it, from anywhere
#   DRY_RUN=1 launch/ray.sh …                                            # print the lines, start nothing
#
# node: the variables of launch/node.sh, with 6379 as MASTER_PORT. Node 0 starts Ray's head and, with overrides, the run,
# whose exit code is that of the script; the cluster ends with it. The other nodes join the head, for as long as it
# lives. RAY_AUTH_MODE must be set, the same on every node: token (Ray's; each node needs the token) or disabled.
#
# submit: NNODES, NPROC_PER_NODE and MAX_RESTARTS become overrides where they are set. RUNTIME_ENV, a JSON text, and
# WORKING_DIR, a folder, go to `ray job submit`: variables of the ranks, files that Ray copies to every node.
#
# Every other argument is an override of conf/sft.yaml and goes through unchanged.
set -euo pipefail

# line COMMAND…: replace this process by it, or print it
line() {
    [[ "${DRY_RUN:-0}" != 0 ]] || exec "$@"
    printf '%q ' "$@"
    echo
}

# attend COMMAND…: run it in a process group of its own, pass signals on to it, and leave its exit code in `code`
attend() {
    local signalled=yes pid
    set -m
    "$@" &
    pid=$!
    set +m
    trap 'signalled=yes; kill -TERM "$pid"' TERM
    trap 'signalled=yes; kill -INT "$pid"' INT
    while [[ "$signalled" == yes ]]; do # a signal ends the wait
        signalled=no code=0
        wait "$pid" || code=$?
    done
}

mode=${1:-}
shift || true
run=(python -m verl_ext.fsdp_sft_trainer_ray)

if [[ "$mode" == submit ]]; then
    [[ -z "${NNODES:-}" ]] || run+=("trainer.nnodes=$NNODES")
    [[ -z "${NPROC_PER_NODE:-}" ]] || run+=("trainer.n_gpus_per_node=$NPROC_PER_NODE")
    [[ -z "${MAX_RESTARTS:-}" ]] || run+=("ray.max_restarts=$MAX_RESTARTS")
    line ray job submit ${WORKING_DIR:+"--working-dir=$WORKING_DIR"} ${RUNTIME_ENV:+"--runtime-env-json=$RUNTIME_ENV"} \
        -- "${run[@]}" "$@"
    exit
fi
if [[ "$mode" != node ]]; then
    echo "launch/ray.sh: the first argument must be node or submit; got '$mode'" >&2
    exit 2
fi

# shellcheck source=launch/topology.sh
source "$(dirname "${BASH_SOURCE[0]}")/topology.sh" 6379
MASTER_PORT=${MASTER_PORT:-6379}
start=(ray start --block --disable-usage-stats)
if [[ -n "$LOCAL_ADDR" ]]; then start+=("--node-ip-address=$LOCAL_ADDR"); fi
if command -v nvidia-smi >/dev/null || [[ -n "${CUDA_VISIBLE_DEVICES:-}" ]]; then start+=("--num-gpus=$NPROC_PER_NODE"); fi
if ((NNODES == 1 && $# > 0)); then # Ray itself makes a cluster of this machine for the run
    run+=("trainer.n_gpus_per_node=$NPROC_PER_NODE" "ray.max_restarts=$MAX_RESTARTS")
    line env -u RAY_ADDRESS "${run[@]}" "$@"
    exit
fi
if [[ "${RAY_AUTH_MODE:-}" != token && "${RAY_AUTH_MODE:-}" != disabled ]]; then
    fail "RAY_AUTH_MODE must be token or disabled, the same on every node; got '${RAY_AUTH_MODE:-}'"
fi
if [[ "${DRY_RUN:-0}" == 0 ]]; then
    command -v ray >/dev/null || fail "ray must be on PATH; activate the environment that verl-ext is installed in"
fi

head_listens() { (: <"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; }

# wait_for_head [PID]: PID is the head's process, if it is on this node
wait_for_head() {
    local began=$SECONDS # one try at an unreachable address may take minutes
    until head_listens; do
        if [[ -n "${1:-}" ]] && ! kill -0 "$1" 2>/dev/null; then fail "Ray's head has ended; its lines above say why"; fi
        ((SECONDS - began < ${PREFLIGHT_TIMEOUT:-600})) ||
            fail "Ray's head must listen at MASTER_ADDR:MASTER_PORT=$MASTER_ADDR:$MASTER_PORT; got no answer"
        sleep 1
    done
}

join=("${start[@]}" "--address=$MASTER_ADDR:$MASTER_PORT")
head=("${start[@]}" --head "--port=$MASTER_PORT")
run+=("trainer.nnodes=$NNODES" "trainer.n_gpus_per_node=$NPROC_PER_NODE" "ray.max_restarts=$MAX_RESTARTS" "$@")
if ((NODE_RANK == 0 && $# == 0)); then
    line "${head[@]}" --dashboard-host=0.0.0.0
    exit
fi
head+=(--include-dashboard=false)
run=(env "RAY_ADDRESS=$MASTER_ADDR:$MASTER_PORT" "${run[@]}")
if [[ "${DRY_RUN:-0}" != 0 ]]; then
    if ((NODE_RANK > 0)); then line "${join[@]}"; else line "${head[@]}" && line "${run[@]}"; fi
    exit
fi

if ((NODE_RANK > 0)); then
    wait_for_head
    attend "${join[@]}"
    if ((code != 0)) && head_listens; then fail "Ray has ended on this node, and not on $MASTER_ADDR"; fi
    echo "launch/ray.sh: Ray has ended" >&2
    exit 0
fi
if head_listens; then fail "MASTER_PORT=$MASTER_PORT must be free for Ray's head on $MASTER_ADDR; something listens there"; fi
set -m # a separate process group: Ctrl-C reaches the run alone
"${head[@]}" >/dev/null &
pid_of_head=$!
set +m
trap 'kill "$pid_of_head" 2>/dev/null; wait "$pid_of_head" || true' EXIT # only what this script started
wait_for_head "$pid_of_head"
attend "${run[@]}"
exit "$code"
