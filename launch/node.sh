#!/usr/bin/env bash
# One node of a training run: one torchrun command, with the topology from the environment.
#
#   launch/node.sh recipe=quickstart data.train_dir=DIR model.path=MODEL              # this machine, all its GPUs
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=host0 launch/node.sh recipe=token_aware_pack …   # the same on each of 4 nodes
#   DRY_RUN=1 launch/node.sh …                                                        # print the line, start nothing
#
# docs/guides/launch/nodes.md lists the variables; those of torchrun (PET_…) are read too.
# After SIGTERM, SIGINT or SIGUSR1 the ranks of all nodes save at the end of their step, and this script ends with 75
# (EX_TEMPFAIL: run it again). A second signal ends the ranks at once; if there are no ranks yet, the first one does.
exec verl-ext launch "$@"
