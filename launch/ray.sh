#!/usr/bin/env bash
# A training run on a Ray cluster: on a new cluster of these nodes, or as a job on a running cluster.
#
#   launch/ray.sh node recipe=… data.train_dir=DIR model.path=MODEL      # this machine, all its GPUs
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=host0 launch/ray.sh node recipe=…   # the same on each of 4 nodes
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=host0 launch/ray.sh node            # a cluster that waits for jobs
#   RAY_ADDRESS=http://host0:8265 launch/ray.sh submit recipe=…          # a run as a job on it, from anywhere
#   DRY_RUN=1 launch/ray.sh …                                            # print the lines, start nothing
#
# launch/ray.sh --help says what each reads from the environment.
exec verl-ext launch-ray "$@"
