#!/bin/bash
# Start it on every machine, with the address of one of them: HEAD=10.0.0.1 bash torchrun.sh
# A rank that fails ends the others; all are started again, and go on from the newest checkpoint.
# With --nnodes=1:%{machines} instead the run goes on with the machines that are left; set global_batch_size to keep its batch.
set -euo pipefail
: "${HEAD:?the address of one machine}"
# Who joins later asks for an address that torch writes in each round only so.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
%{command}
