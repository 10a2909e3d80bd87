#!/usr/bin/env bash
# One array per group of flags, torchrun at the end.
export CUDA_DEVICE_MAX_CONNECTIONS=1

NODES=16  # of eight GPUs
PER_NODE=8
GPUS=$(($NODES*$PER_NODE))
OUT=$1 #<folder for checkpoints>
CORPUS=$2

LAUNCH=(
    --nnodes $NODES 
    --nproc_per_node $PER_NODE 
    --rdzv-endpoint $HEAD_NODE:29500
)

SIZES=(
    --num-layers 96 
    --hidden-size 12288 
    --num-attention-heads 96 
    --seq-length 2048 
    --max-position-embeddings 2048 
    --attention-backend auto # (flash/fused/unfused) are the others
)

SPREAD=(
	--pipeline-model-parallel-size 16 
	--tensor-model-parallel-size 8 
)

LEARNING=(
    --micro-batch-size 1 
    --global-batch-size 1536 
    --rampup-batch-size 32 32 1000000 
    --train-samples 10000000 
    --lr 6.0e-5 --min-lr 6e-6 
    --lr-warmup-fraction .01 
    --bf16
)

TEXT=(
    --data-path $CORPUS 
    --tokenizer-type GPT2BPETokenizer
    --split 99,1,0
)

echo "training on $GPUS GPUs"
torchrun ${LAUNCH[@]} pretrain_gpt.py \
    ${SIZES[@]} \
    ${SPREAD[@]} \
    ${LEARNING[@]} \
    ${TEXT[@]} \
    --save $OUT
