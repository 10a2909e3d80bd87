#!/usr/bin/env bash
# Pretrain a small GPT with PipeDream-2BW on the sources of Python's standard library.
#
#   scripts/quickstart.sh                                   about five minutes the first time, two after that
#   scripts/quickstart.sh --train-iters 50                  any flag of Megatron or megatron_2bw; the last one wins
#   scripts/quickstart.sh --pipeline-schedule 1f1b-flush    to compare
#
# Needs Python >= 3.12; everything else goes into .venv/ and quickstart/. Two processes on the CPU, or one per GPU
# where there are two GPUs or more.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/scripts/lib/python.sh"
source "$ROOT/scripts/lib/training.sh"
WORK="$ROOT/quickstart"
DATA="$WORK/data"
STAGES=2
MICROBATCHES=2
MICROBATCH_SIZE=4

ensure_venv requirements.txt
text_data gpt "$DATA"

ranks=$STAGES
gpus=$(count_gpus)
if [ "$gpus" -ge "$STAGES" ]; then
    use_gpus
    ranks=$((gpus / STAGES * STAGES))
else
    use_cpu
fi

model=(
    --num-layers 5 --hidden-size 128 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128
    # The output layer costs about as much as a transformer layer: 3 layers, then 2 and the output layer.
    --account-for-loss-in-pipeline-split
    --attention-dropout 0 --hidden-dropout 0
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-rope-fusion
)
parallel=(
    --pipeline-model-parallel-size $STAGES
    --micro-batch-size $MICROBATCH_SIZE
    --global-batch-size $((ranks / STAGES * MICROBATCHES * MICROBATCH_SIZE))
    --pipeline-schedule 2bw
)
training=(
    --train-iters 280 --seed 1234
    --lr 5e-4 --min-lr 5e-5 --lr-decay-style cosine --lr-warmup-fraction 0.2
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --log-interval 1 --eval-interval 40 --eval-iters 5
)
data=(
    --data-path "$DATA/gpt_document" --split 95,5,0 --data-cache-path "$DATA/cache"
    --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "$DATA/gpt.model"
    --no-create-attention-mask-in-dataloader --num-workers 0
    --save "$WORK/checkpoint" --save-interval 1000000
)
trace="$WORK/timeline.json"
rm -f "$trace" "$WORK/train.log"
outputs=(--pipeline-trace "$trace")
case " $* " in
*"--pipeline-schedule megatron "* | *"--pipeline-schedule=megatron "*) outputs=() ;; # Nothing of ours to record.
esac

arguments=("${model[@]}" "${parallel[@]}" "${training[@]}" "${data[@]}" "${outputs[@]}" "$@")
printf '%s\n' "${arguments[@]}" >"$WORK/arguments"

echo "training on $ranks processes, full log in $WORK/train.log"
train "$WORK/train.log" --standalone --nproc-per-node "$ranks" -- "$ROOT/examples/pretrain_gpt.py" "${arguments[@]}"

echo
"$VENV/bin/python" "$ROOT/scripts/training_log.py" summary "$WORK/train.log" \
    ${outputs[@]:+--trace "$trace"} --checkpoint "$WORK/checkpoint"
