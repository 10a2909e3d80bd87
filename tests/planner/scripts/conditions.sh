#!/bin/bash
# Choices by argument, functions, += and a heredoc.
set -euo pipefail

MODEL=${1:-8b}
TP=${TP:-4}; PP=${PP:-2}
MBS=2
NODES=$((TP * PP / 4))
USE_SP="true"
ARGS=(--micro-batch-size ${MBS} --seq-length 8192 --max-position-embeddings 8192)

cat > /dev/null <<CONFIG
{ "it's": ( "not for us" ${TP}
CONFIG

case "$MODEL" in
    8b|8B)
        LAYERS=32; HIDDEN=4096; HEADS=32; FFN=14336 ;;
    70b)
        LAYERS=80
        HIDDEN=8192; HEADS=64; FFN=28672
        ;;
    *)
        echo "unknown model $MODEL" >&2
        exit 1
esac

add() {
    local flag=$1
    shift
    ARGS+=("$flag" "$@")
}

function finish {
    add --swiglu
    add --normalization RMSNorm
}

if [ ! -d "$HOME/no such folder" ] && command -v nvidia-smi; then
    GPUS=$(nvidia-smi -L | wc -l)
fi

if [ "$TP" -gt 1 ] && [[ "${USE_SP,,}" == t* ]]; then
    ARGS+=( --sequence-parallel )
elif [ -z "$TP" ]; then
    ARGS+=( --never )
else
    ARGS+=( --never-either )
fi
[ $PP -gt 1 ] && add --pipeline-model-parallel-size "$PP" --pipeline-schedule 2bw
[ $PP -gt 1 ] || add --never-again

for flag in disable-bias-linear untie-embeddings-and-output-weights; do
    add --$flag
done
while [ "$#" -gt 0 ]; do shift; done
finish

GLOBAL=$(( MBS * 16 ))
launch="torchrun --nproc-per-node=8 --nnodes=$NODES"
$launch -m megatron_2bw pretrain_gpt.py "${ARGS[@]}" --num-layers $LAYERS --hidden-size $HIDDEN \
    --num-attention-heads $HEADS --ffn-hidden-size $FFN --group-query-attention --num-query-groups 8 \
    --tensor-model-parallel-size $TP --global-batch-size $GLOBAL --bf16 --attention-dropout 0.0 --hidden-dropout 0.0 \
    --position-embedding-type rope --vocab-size 128256 --tokenizer-type NullTokenizer \
    --use-distributed-optimizer --recompute-granularity full --recompute-method block --recompute-num-layers 3 \
    --wandb-exp-name "llama $MODEL (tp $TP)" --save "$(mktemp -d)" > log.txt 2>&1
