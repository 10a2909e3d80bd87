"""examples/pretrain_bert.py on text that was prepared for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

VOCAB_SIZE = 320
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --train-iters 6 "
    "--log-interval 1 --eval-interval 6 --eval-iters 1 --num-workers 0 --seed 1 --split 80,20,0"
).split()


@pytest.fixture(scope="module")
def data(load, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    lines = [[f"line {number} of text {text} says {number * text}" for number in range(40)] for text in range(30)]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": "\n".join(text)}) + "\n" for text in lines))
    load("examples/prepare_data.py").prepare([corpus], folder, model="bert", key="text", size=VOCAB_SIZE)
    return folder


def test_both_losses_are_learned_from_and_evaluated(run_on_two, data):
    done = run_on_two(
        *("examples/pretrain_bert.py", *MODEL, "--data-path", str(data / "bert_sentence")),
        *("--data-cache-path", str(data / "cache"), "--tokenizer-model", str(data / "bert.model")),
        *("--pipeline-schedule", "2bw"),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = re.findall(r"iteration +\d+/.*lm loss: (\S+) \| sop loss: (\S+)", done.stdout)
    assert len(lines) == 6
    first = [float(loss) for loss in lines[0]]
    assert first[0] == pytest.approx(5.77, abs=0.5), "about log(VOCAB_SIZE)"
    assert first[1] == pytest.approx(0.69, abs=0.3), "about log(2)"
    assert re.search(r"validation loss at iteration 6 .*lm loss value: .*sop loss value:", done.stdout)


def test_a_vocabulary_marks_words_or_is_refused(root, data, tmp_path, load):
    """Pieces that go on with a word carry the mark of WordPiece, which Megatron's dataset looks for."""
    other = tmp_path / "gpt.model"
    texts = iter([f"line {number}" for number in range(300)])
    load("examples/prepare_data.py").train_vocabulary(texts, other, size=VOCAB_SIZE, model="gpt")
    code = f"""
import sys
sys.path.insert(0, {str(root / "examples")!r})
import pretrain_bert
from megatron.core.tokenizers import MegatronTokenizer
def tokenizer(path):
    return MegatronTokenizer.from_pretrained(path, metadata_path={{"library": "sentencepiece"}})
known = tokenizer({str(data / "bert.model")!r})
vocabulary = pretrain_bert.BertVocabulary(known)
words = known.tokenize("text says line")
print(sum(not vocabulary.inv_vocab[token].startswith("##") for token in words), len(words) >= 3)
print(vocabulary.pad, vocabulary.inv_vocab[vocabulary.mask])
try:
    pretrain_bert.BertVocabulary(tokenizer({str(other)!r}))
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    *_, words, special, refusal = done.stdout.splitlines()
    assert (words, special) == ("3 True", "0 [MASK]")
    assert refusal.startswith("--tokenizer-model holds no vocabulary for BERT: [PAD] has to be token 0")


def test_experts_are_refused(run_on_two, data):
    """Megatron-Core's BERT has none, and would train without them."""
    done = run_on_two(
        *("examples/pretrain_bert.py", *MODEL, "--data-path", str(data / "bert_sentence"), "--num-experts", "4"),
        *("--tokenizer-model", str(data / "bert.model"), "--pipeline-schedule", "2bw"),
    )
    assert done.returncode != 0
    assert "--num-experts: BERT has no such thing here; leave it out" in done.stderr
