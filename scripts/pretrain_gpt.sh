#!/usr/bin/env bash
# Pretrain a GPT with any flags of Megatron and megatron_2bw; the same command run again goes on where it stopped.
#
#   scripts/pretrain_gpt.sh                                                  a small one, with 2BW on two stages
#   scripts/pretrain_gpt.sh $(.venv/bin/megatron-2bw plan ... --flags-only)   what the planner found
#   scripts/pretrain_gpt.sh --train-iters 2000 --lr 3e-4                      flags given here win over those below
#
# Without --pipeline-schedule it is 2bw; but Megatron's where the pipeline, micro-batch and global batch size are all
# given, as the planner prints a layout with that.
#
# From the environment:
#   DATA     folder written by examples/prepare_data.py --model gpt (default: made of Python's standard library)
#   OUTPUT   folder for checkpoints and log (default: $DATA/gpt, or runs/gpt)
#   RANKS    processes on this node (default: one per GPU; without GPUs, as many as one replica has)
#   NUM_NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   for more nodes than one; see scripts/pretrain.slurm
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/scripts/lib/python.sh"
source "$ROOT/scripts/lib/training.sh"
source "$ROOT/scripts/lib/pretrain.sh"
ensure_venv requirements.txt
pretrain gpt "$@"
