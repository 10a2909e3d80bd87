"""Launch scripts are read as bash would run them, and nothing of them runs."""

from __future__ import annotations

import dataclasses
import random
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_2bw.planner.bash.flow import Flow
from megatron_2bw.planner.bash.scope import is_gone, is_known, settled, shown
from megatron_2bw.planner.bash.script import followed
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.flags import Configuration, read
from megatron_2bw.planner.flags.launch import agreed, read_script
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.specs.layout import Layout, Precision, Recompute, RecomputeMethod
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.models import MODELS

SCRIPTS = Path(__file__).parent / "scripts"

EXPECTED: dict[str, tuple[Model, Layout]] = {
    "arrays.sh": (
        Model(num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048, vocab_size=50257),
        Layout(schedule="megatron", pipeline=16, tensor=8, data=1, microbatch=1, global_batch=1536),
    ),
    "slurm.sh": (
        dataclasses.replace(MODELS["bert-355m"], name=""),
        Layout(
            schedule="1f1b-flush",
            pipeline=4,
            tensor=2,
            data=4,
            microbatch=4,
            global_batch=256,
            precision=Precision.FP16,
            recompute=Recompute.SELECTIVE,
            distributed_optimizer=True,
        ),
    ),
    "container.sh": (
        Model(num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=1024, vocab_size=50257),
        Layout(
            schedule="2bw",
            pipeline=2,
            tensor=4,
            data=2,
            microbatch=2,
            global_batch=32,
            recompute=Recompute.SELECTIVE,
            distributed_optimizer=True,
            overlap_gradients=True,
        ),
    ),
    "conditions.sh": (
        dataclasses.replace(MODELS["llama3-8b"], name=""),
        Layout(
            schedule="2bw",
            pipeline=2,
            tensor=4,
            data=2,
            microbatch=2,
            global_batch=32,
            recompute=Recompute.FULL,
            recompute_method=RecomputeMethod.BLOCK,
            recompute_layers=3,
            sequence_parallel=True,
            distributed_optimizer=True,
        ),
    ),
}


def configuration(file: Path, environment: dict[str, str] | None = None) -> Configuration:
    found = []
    for launch in read_script(file, environment=environment or {}):
        options = Options.parse(launch.words, explain=shown, is_known=is_known, notes=launch.notes)
        found.append(read(options, gpus=launch.gpus, kind=launch.kind))
    return agreed(found, file=file)


@pytest.mark.parametrize("name", EXPECTED)
def test_scripts_as_people_write_them(name: str):
    found = configuration(SCRIPTS / name)
    assert (found.model, found.layout) == EXPECTED[name]


def test_the_environment_sets_what_the_script_leaves_open():
    layout = configuration(
        SCRIPTS / "conditions.sh", {"TP": "1", "PP": "8", "MODEL": "ignored: the script sets it"}
    ).layout
    assert (layout.tensor, layout.pipeline, layout.data, layout.sequence_parallel) == (1, 8, 2, False)


def test_arguments_of_the_script():
    (launch,) = read_script(SCRIPTS / "conditions.sh", environment={}, arguments=["70b"])
    model = read(Options.parse(launch.words), gpus=launch.gpus).model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (80, 8192, 28672)
    exits = r'before it exits at line 25 \(if "\$MODEL" is \*\); give the variables or arguments \(--script-args\)'
    with pytest.raises(PlanError, match=exits):
        read_script(SCRIPTS / "conditions.sh", environment={}, arguments=["7x"])


def test_a_path_that_is_known_at_its_beginning_is_no_flags(tmp_path: Path):
    """As in NVIDIA's examples/multimodal, where a placeholder with a blank is not quoted."""
    (file := tmp_path / "run.sh").write_text(f'OUT="<Your dir>/x-$(date)"\n{ALONE} --save $OUT --micro-batch-size 1\n')
    assert configuration(file).layout.microbatch == 1


def test_a_script_that_trains_to_generate_trains(tmp_path: Path):
    (tmp_path / "run.sh").write_text(ALONE.replace("pretrain_gpt", "finetune_generation"))
    assert len(read_script(tmp_path / "run.sh", environment={})) == 1


def test_only_training_is_priced(tmp_path: Path):
    """Of a script that converts a checkpoint first and evaluates last."""
    around = ALONE.replace("num-layers 4", "num-layers 2")
    lines = [around.replace("pretrain_gpt", "convert"), ALONE, around.replace("pretrain_gpt", "evaluate_gpt")]
    (tmp_path / "run.sh").write_text("\n".join(lines))
    (launch,) = read_script(tmp_path / "run.sh", environment={})
    assert launch.words[launch.words.index("--num-layers") + 1] == "4"


def test_what_is_noted():
    assert configuration(SCRIPTS / "arrays.sh").notes == (
        "no --vocab-size: priced with 50,257 tokens, those of GPT2BPETokenizer as published; give yours",
        "--rampup-batch-size: not priced, as Megatron no longer reads it",
    )


TRAINING = "python pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
ALONE = f"{TRAINING.replace('python', 'mpirun -np 1 python')} --vocab-size 9"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (re.sub("(?<=[a-z])-", "_", TRAINING), "give another file, or write the flags with hyphens"),
        (
            ALONE.replace("gpt", "t5"),
            "pretrain_t5.py: the cost model covers GPT and BERT alone; give the flags of one as",
        ),
        (
            ALONE.replace("pretrain_gpt", "tools/run_text_generation_server"),
            "run_text_generation_server.py trains nothing; give the script that trains the model",
        ),
        (ALONE.replace("pretrain_gpt", "tools/checkpoint/convert"), "convert.py trains nothing"),
        (ALONE.replace("pretrain_gpt", "deepseek_v3_hf_to_mg"), "deepseek_v3_hf_to_mg.py trains nothing"),
        (ALONE.replace("pretrain_gpt", "hf2mcore_qwen"), "hf2mcore_qwen.py trains nothing"),
        (f"{ALONE} --target-tensor-parallel-size 2", "--target-tensor-parallel-size trains nothing"),
        (f"{ALONE} --task RACE".replace("pretrain_gpt", "tasks/main"), "--task: the cost model covers GPT and BERT"),
        (ALONE.replace("pretrain_gpt.py", "-m examples.gpt_inference"), "gpt_inference.py trains nothing"),
        ("echo hello", "no command with Megatron's flags, such as --num-layers"),
        (f"{TRAINING} --vocab-size 9 --micro-batch-size $MBS", "--micro-batch-size $MBS: nothing sets it"),
        (
            f"source env.sh; {ALONE} --micro-batch-size $MBS",
            "line 1: source env.sh is not there; what it sets counts as not set, perhaps MBS",
        ),
        ("\nif [ $# -lt 2 ]; then echo usage; exit 1; fi; train", "before it exits at line 2 (if [ $# -lt 2 ]); give"),
        (
            "[[ -n $A ]] || exit\ntrain",
            "before it exits at line 1 (unless [[ -n $A ]]); give the variables or arguments",
        ),
        ("f() {\nexit 1\n}\n! ((N)) && f; train", "before it exits at line 2 (if ! ((N))); give the variables or"),
        (
            "source exits.sh; train",
            "before it exits at exits.sh, line 2 (if [ -z $A ]); give the variables or arguments",
        ),
        ("(exit); true; if ! tool; then exit; fi; train; exit 0", "such as --num-layers; give another file"),
        (
            "A='--num-layers 2 --hidden-size 4'; B=(--lr 1); C=(--seq-length 8); train ${B[@]}",
            "--num-layers (no command uses A and C, which hold some); give the script that sources this file",
        ),
        (
            "A=(--num-layers 2); echo $A",
            "(no command uses A, which holds some); give the script that sources this file",
        ),
        ("A='train --num-layers 2'; ssh host \"$A\"", "such as --num-layers; give another file"),
        (
            "source env.sh; $RUN",
            "give another file; line 1: source env.sh is not there; what it sets counts as not set",
        ),
        (f"{TRAINING} --vocab-size 9 --micro-batch-size $(cores)", "--micro-batch-size $(cores): nothing sets it"),
        (
            f"MBS=${{12}}; {ALONE} --micro-batch-size $MBS",
            "--micro-batch-size ${12}: argument 12 of the script; give --script-args with at least 12 words, or "
            "--micro-batch-size N behind the script",
        ),
        (
            f"A=$(cores); B=$((A * 2)); C=$((B / 4)); {ALONE} --micro-batch-size $C",
            "--micro-batch-size $((B / 4)) from A=$(cores): nothing sets it, for commands are not run; give "
            "--micro-batch-size N behind the script",
        ),
        (f"A=`cores`; {ALONE} --micro-batch-size ${{A%x}}", "${A%x} from A=`cores`: nothing sets it, for commands are"),
        (f"A=($(hosts)); {ALONE} --micro-batch-size ${{#A[@]}}", "${#A[@]} from A=$(hosts): nothing sets it, for"),
        (
            f"for t in 1 2; do {ALONE} --micro-batch-size $t; done",
            "2 different training commands, microbatch 1 or 2; leave one",
        ),
        (f"for i in 0 1; do [ -f $i ] && A=2; {ALONE} --micro-batch-size $A; done", "--micro-batch-size $A: nothing"),
        ("ARGS=(--num-layers 4", "run.sh: line 1: the array that begins here has no closing bracket"),
        ('\n\necho "never closed', 'line 3: the quotation " that begins here has no end'),
        ("\necho ${TP", "line 2: the bracket { that begins here has no end"),
        ("if true; then echo x", "the script ends within an if, for, while, case or function"),
        ("f() { f; }\nf", "more than 20 levels deep"),
        (f"{TRAINING} --vocab-size 9 --micro-batch-size 2", "the number of GPUs is not known; give --gpus N"),
        (f"{TRAINING} --micro-batch-size 2", "--vocab-size is missing"),
        (f"A='{TRAINING}'; srun sh -c '$A'", "give another file, or export the variables that the quoted command uses"),
        (f"{TRAINING} --bf16 $(cat flags) --vocab-size 9", "$(cat flags) may hold flags that only running it would"),
        (
            f"{TRAINING} --grad-reduce-in-bf16 $(cat flags)",
            "$(cat flags) may hold flags that only running it would tell",
        ),
        (f"{TRAINING} --bf16 $(cat {'flags ' * 99}) --vocab-size 9", "flags [...] may hold flags that only running it"),
        (f'A="{TRAINING} --vocab-size 9 --micro-batch-size $MBS"; eval $A', "--micro-batch-size $MBS: nothing sets it"),
        (
            f"[ -f x ] && A=--bf16; while tool; do A='--fp16 --swiglu'; done; {TRAINING} --bf16 $A",
            "$A may hold flags that only running it would tell; write them instead, or give the variables and",
        ),
        (f"declare -A A=([x]='--bf16'); {TRAINING} ${{A[x]}}", "${A} may hold flags that only running it would tell"),
        (f"A=(1); A[0]=2; {TRAINING} --vocab-size 9 --micro-batch-size $A", "--micro-batch-size ${A}: nothing sets it"),
        ("set -- -t 2; while getopts t: o; do A=$OPTARG; done", "getopts, which reads the arguments, is not followed"),
        ("i=0; while :; do ((i++)); done", "line 1: the script takes more than 100000 steps"),
        (f"[ -f x ] && A=2; {ALONE} --micro-batch-size $A", "--micro-batch-size $A: nothing sets it"),
        (f"A=1; [ -f x ] && A=2; {ALONE} --micro-batch-size $A", "2 different training commands, microbatch 2 or 1"),
        (f"while read x; do A=2; done < x; {TRAINING} --bf16 $A --vocab-size 9", "$A may hold flags that only running"),
        (
            f"A='{ALONE} --micro-batch-size 1'; if tool; then $A; else $A --bf16; fi",
            "2 different training commands, precision fp32 or bf16",
        ),
        (f"f() {{ tool && return; A=2; }}; f; {TRAINING} --vocab-size 9 --micro-batch-size $A", "$A: nothing sets it"),
        (f"tool && set -- --bf16; {ALONE} --micro-batch-size 1 $@", "2 different training commands, precision bf16 or"),
        (f"while tool; do set -- $@ --bf16; done; {TRAINING} $@", "$@ may hold flags that only running it would tell"),
        (f"{TRAINING} --bf16 {{'a b',c}} --vocab-size 9", "{'a b',c} may hold flags that only running it would tell"),
        (
            f"A=2; B=2; while tool; do A=$B; B=3; done; {TRAINING} --vocab-size 9 --micro-batch-size $A",
            "$A: nothing sets",
        ),
        (
            f"read A B <<< $(cores); {TRAINING} --vocab-size 9 --micro-batch-size $B",
            "--micro-batch-size $B: nothing sets",
        ),
        (
            "A=$(cat <<E\n--num-layers 2 --hidden-size 4\nE\n)\ntorchrun pretrain_gpt.py $A --micro-batch-size 1",
            "$(cat <<E --num-layers 2 --hidden-size 4 E ) may hold flags that only running it would tell",
        ),
        ("f() { cat flags; }; torchrun pretrain_gpt.py $(f) --micro-batch-size 1", "$(f) may hold flags that only"),
        ("while tool; do f() { a; }; done; f", "only running the script would tell what a function does"),
        ("case a in a) b;& esac", "line 1: ';&' in a place where bash does not take it"),
        ("\nif a; then b; fi fi", "line 2: 'fi' in a place where bash does not take it"),
        ("for i in 1; do for j in 1; do tool && break 2; done; done", "would tell whether break is reached"),
        (
            f"((A = $(cores) + 1)); {TRAINING} --vocab-size 9 --micro-batch-size $A",
            "((A = $(cores) + 1)): nothing sets it",
        ),
        ("$(" * 3000, "it is nested too deeply; give a simpler script"),
    ],
)
def test_what_cannot_be_read_gets_one_clear_message(script: str, message: str, tmp_path: Path):
    (tmp_path / "exits.sh").write_text("\nif [ -z $A ]; then exit 1; fi")
    file = tmp_path / "run.sh"
    file.write_text(script)
    with pytest.raises(PlanError) as refusal:
        configuration(file)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    "script",
    [
        'if [ -f last ]; then A="--load x"; fi; {} $A --bf16',
        'A=(--bf16 --seed 1); if [ -f last ]; then A+=(--load "a b"); else A+=(--finetune); fi; {} "${A[@]}"',
        'A=--bf16; [ -d tb ] && A="$A --tensorboard-dir tb" || B="--seed 2"; tool && C=--seed; {} $A ${C:+$C 3} $B',
        'tool && set -- --seed 3; {} "$@" --bf16',
        "tool && f() { {} --bf16; } || f() { {} --bf16 --seed 3; }; f",
        "if tool; then {} --bf16; else {} --seed 1 --bf16; fi",
        "case $(tool) in a) A=1;; b) A=2;; *) A=3; esac; {} --seed $A --bf16",
        'A=(--seed $(tool) --bf16); B="{} ${A[@]}"; echo $B; eval $B',
    ],
)
def test_what_only_running_the_script_would_tell_may_differ_where_it_costs_nothing(script: str, tmp_path: Path):
    file = tmp_path / "run.sh"
    file.write_text(script.replace("{}", f"{ALONE} --micro-batch-size 2"))
    found = configuration(file)
    assert (found.layout.microbatch, found.layout.precision, found.layout.gpus) == (2, Precision.BF16, 1)


def test_many_ways():
    """More than are followed one by one."""
    script = "".join(f"tool && A{i}=1; " for i in range(12)) + "train $A1 $A11"
    found = followed(script, file=Path("run.sh"), environment={}).commands
    trains = {tuple(map(shown, words)) for words in found if words[0] == "train"}
    assert trains == {("train", "1", "$A11"), ("train", "$A1", "$A11")}


@pytest.mark.parametrize(
    ("launcher", "gpus"),
    [
        ("torchrun --nproc_per_node 8 --nnodes=2", 16),
        ("torchrun --nproc_per_node gpu --nnodes=2", None),
        ("srun -N2 --ntasks-per-node 4", 8),
        ("srun -N2 --ntasks-per-node 1 torchrun --nproc_per_node gpu", None),
        ("mpirun -np 64 -N 8", 64),
        ("mpiexec -n 32", 32),
        ("deepspeed --num_gpus 8 --num_nodes 2", 16),
        ('srun -N2 --ntasks-per-node 4 --container-image a:b sh -c "{}"', 8),
        ("srun --ntasks=8 --export=ALL,A=1 bash -lc 'cd /mnt; {}'", 8),
        ("GPUS=4; mpirun -np 2 bash -c 'torchrun --nproc-per-node $GPUS --nnodes 2 {}'", None),
        ("sbatch -N 2 --ntasks-per-node=4 --wrap '{}'", 8),
        ("N=2; cat > job.sh <<E\n#SBATCH -N 2 --ntasks-per-node 4\nsrun {}\nE\nsbatch job.sh", 8),
        ("sbatch <<E\n#SBATCH -N 2\n#SBATCH --ntasks-per-node 4\nsrun {}\nE", 8),
        (
            "#SBATCH -N 2 --gpus-per-node=4\ntorchrun --nnodes $SLURM_NNODES --nproc-per-node $SLURM_GPUS_ON_NODE",
            8,
        ),
        ('#SBATCH -N 2 --ntasks-per-node 4\nif [ -z $SLURM_JOB_ID ]; then sbatch "$0"; exit; fi\nsrun {}', 8),
        ('[ -n "$SLURM_JOBID" ] || exec sbatch -N 2 --ntasks-per-node 4 $0\nsrun {}', 8),
        ("NODES=($(hosts)); torchrun --nproc_per_node 8 --nnodes ${#NODES[@]}", None),
        ("set -- $(hosts); torchrun --nproc_per_node 8 --nnodes $#", None),
        ("", None),
    ],
)
def test_the_number_of_gpus(launcher: str, gpus: int | None, tmp_path: Path):
    file = tmp_path / "run.sh"
    file.write_text(launcher.format(TRAINING) if "{}" in launcher else f"{launcher} {TRAINING}")
    (launch,) = read_script(file, environment={})
    assert launch.gpus == gpus


def test_a_job_begins_in_the_folder_that_it_is_submitted_from(tmp_path: Path):
    (tmp_path / "env.sh").write_text("MBS=4")
    (file := tmp_path / "run.sh").write_text(
        f"#SBATCH -N 1\nsource $SLURM_SUBMIT_DIR/env.sh\n{ALONE} --micro-batch-size $MBS"
    )
    assert configuration(file, {"PWD": str(tmp_path)}).layout.microbatch == 4


def test_nothing_runs(tmp_path: Path):
    trace = tmp_path / "trace"
    (tmp_path / "more.sh").write_text(f"touch {trace}; WIDTH=`touch {trace}`\nDEPTH=4")
    script = f"""
        source more.sh
        touch {trace}; A=$(touch {trace}); eval "touch {trace}"; bash -c "touch {trace}"; ( touch {trace} )
        if touch {trace}; then touch {trace}; fi
        echo x > {trace}
        train --depth $DEPTH
    """
    found = followed(script, file=tmp_path / "run.sh", environment={}).commands
    assert found[-1] == ["train", "--depth", "4"]
    assert not trace.exists()


@pytest.mark.parametrize(
    ("before", "file"),
    [
        ("", "$(dirname $0)/more/common.sh"),
        ("", "$(cd $(dirname ${BASH_SOURCE[0]}) && pwd)/more/common.sh"),
        ("", '$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd )/more/common.sh'),
        ("", '$(dirname "$(readlink -f "$0")")/more/common.sh'),
        ("FILE=$(readlink -f $0); FOLDER=`dirname $FILE`", "$FOLDER/more/common.sh"),
        ('FILE=$(realpath "$0"); FOLDER=$(dirname "${FILE}")', '"${FOLDER}"/more/common.sh'),
        ('FOLDER="$(cd "$(dirname "$0")" >/dev/null 2>&1; pwd -P)"', "$FOLDER/more/common.sh"),
        ('cd "$(dirname "$0")"', "./more/common.sh"),
        ("cd /x/y; cd ..", "`pwd`/more/common.sh"),
        ("", "$PWD/more/common.sh"),
        ("", "more/common.sh"),
        ("cd $(dirname $0)/..; cd -P other/", "$PWD/common.sh"),
        ("", "$(dirname $(dirname $0))/other/common.sh"),
        ("", "more/nested.sh"),
    ],
)
def test_files_beside_the_script(before: str, file: str, tmp_path: Path):
    for name, text in {
        "run/more/common.sh": "TP=4",
        "other/common.sh": "TP=4",
        "run/more/nested.sh": "source $(dirname ${BASH_SOURCE[0]})/common.sh",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    script = f"{before}\nsource {file}\ntrain $TP $BASH_SOURCE"
    found = followed(script, file=tmp_path / "run" / "run.sh", environment={"PWD": "/x"}).commands
    assert found[-1] == ["train", "4", str(tmp_path / "run" / "run.sh")]


@pytest.mark.parametrize(
    "file", ["$PWD/$(pwd)/common.sh", "$(dirname $(dirname $0))/common.sh", "$(tool; pwd)/common.sh", "$A/common.sh"]
)
def test_files_that_are_not_beside_the_script(file: str, tmp_path: Path):
    (tmp_path / "common.sh").write_text("TP=4")
    found = followed(f"source {file}\ntrain $TP", file=tmp_path / "run.sh", environment={"PWD": "/x"}).commands
    assert shown(found[-1][-1]) == "$TP"


NOT_THERE = "is not there; what it sets counts as not set"


@pytest.mark.parametrize(
    ("script", "notes"),
    [
        ("source env.sh\n{} --micro-batch-size ${MBS:-1}", [f"line 1: source env.sh {NOT_THERE}, perhaps MBS"]),
        ("\n. $CONF\n{} --micro-batch-size $((N + 1))", [f"line 2: source $CONF {NOT_THERE}, perhaps N"]),
        (
            "[ -f x ] && . ./x; [ -z $A ] && A=1; {} --micro-batch-size $A",
            [f"line 1: source ./x {NOT_THERE}, perhaps A"],
        ),
        (
            "for i in a b c d a; do source $i; done; {} --micro-batch-size 1 --seed $E $F $G $H",
            [
                "line 1: source a, line 1: source b, line 1: source c and 1 more are not there; what they set counts "
                "as not set, perhaps E, F, G or others"
            ],
        ),
        ("source more.sh\n{} --micro-batch-size ${C:-1}", [f"more.sh, line 2: source b.sh {NOT_THERE}, perhaps C"]),
        ("bash more.sh\n{} --micro-batch-size ${C:-1}", [f"more.sh, line 2: source b.sh {NOT_THERE}, perhaps C"]),
        ("\neval '. b.sh'\n{} --micro-batch-size ${C:-1}", [f"line 2: source b.sh {NOT_THERE}, perhaps C"]),
        ("MBS=1; source env.sh\n{} --micro-batch-size $MBS", []),
        ("A=${MBS:-1}; source env.sh\n{} --micro-batch-size $A", []),
        ("source venv/bin/activate\n{} --micro-batch-size ${MBS:-1}", []),
    ],
)
def test_files_that_are_not_there_are_noted(script: str, notes: list[str], tmp_path: Path):
    (tmp_path / "more.sh").write_text("\nsource b.sh")
    (file := tmp_path / "run.sh").write_text(script.replace("{}", ALONE))
    (launch,) = read_script(file, environment={})
    assert list(launch.notes) == notes


SNIPPETS = {
    "leading blanks": 'A=" x y "; show a$A b${A}c $A$A "$A"$A',
    "splitting": 'A="x  y "; B=; show a$A"$A"b $B "$B" c$B',
    "arrays": 'A=(1 "2 3" $(( 2 * 2 ))); A+=(5); show ${A[@]} "${A[@]}" x"${A[@]}"y ${#A[@]} ${A[1]} ${A[-1]} $A',
    "elements in brackets": "A=(--freq [0]*3+[1]*5 [x] [a b]); show ${A[@]}",
    "empty array": 'A=(); show "${A[@]}" ${A[@]} end',
    "defaults": "X=; show ${X:-a} ${X-b} ${Y:-c} ${Y-'d e'} ${X:+f} ${Y+g} ${Z:=h} $Z ${W:-${Z}i} x${V-a b}c",
    "cutting": "F=/a/b.c.d; show ${F##*/} ${F#*/} ${F%.*} ${F%%.*} ${F/b/x} ${F//\\//_} ${F:3} ${F:1:2} ${#F} ${F^^}",
    "quotes": """show 'a $b' "a 'b' \\"c\\" \\$d" a\\ b $'t' "x"'y'z "" ''""",
    "arithmetic": "A=7; B=2; show $((A/B)) $(( -A / B )) $((A%B)) $((A**B)) $(( (A+1)*B )) $((A>B&&B>A)) $((!A))",
    "tests": "A=8; if [ $A -gt 7 ] && [[ $A == 8* && -n $A ]]; then show yes; elif true; then show b; else show c; fi",
    "more tests": '[ "$N" = 1 ] || show or; [[ -z $N || x == y ]] && show and; ! [ a = a ] || show not',
    "malformed tests": """for A in '' x 5; do [ $U = 1 ] || show a; [ $U = 1 -o 1 = 1 ] || show b
        [ $U -gt 1 ] || show c
        [ "$A" -eq 5 ] && show d; [ ! "$A" -lt 4 ] && show e; [ 1 = 1 -o "$A" -eq 1 ] && show f; done
        [[ $U -eq 1 ]] || show g; [[ "" -eq 0 && ' ' -lt 1 ]] && show h; if [ $U = 1 ]; then :; else show i; fi""",
    "case": "for m in 7b 70b x; do case $m in 7b|8b) show small;; 70*) show large ;; *) show other; esac; done",
    "functions": 'f() { local x=$1; shift; show "$x" $# "$@"; return; show no; }; f "a b" c; function g { f z; }; g',
    "loops": "for i in 1 2 3; do [ $i = 2 ] && continue; show $i; [ $i = 3 ] && break; done; show end",
    "words": "CMD='show a  b'; $CMD c; eval \"$CMD 'd e'\"; X=show; $X y",
    "comments": "show a#b # c\nshow d \\\n  e # f \\\nshow g",
    "comments between lines": 'show a `# b c` \\\n  d`# e`f `#`g "`# h $U`" i` `',
    "continued lines": "A='a '; B='b\n'; show $A\\\n c $B\\\n  d e\\\nf $U\\\n \"$A\\\n\"g \"\\\n\"",
    "heredoc": "cat >/dev/null <<E\nshow it's\nE\nshow b",
    "redirections": "show a 2>/dev/null 2>&1; { show b; } 2> /dev/null; show c 3 2>&1",
    "exit": "show a; exit 0; show b",
    "exec": "A=1; export B=2; ( exec bash -c 'show ${A-a} $B'; show ); exec 2>/dev/null; exec bash -c 'show b'; show",
    "classes": "for x in a1 8 '[:'; do if [[ $x =~ ^[[:alpha:]]?[[:digit:]]+$ ]]; then show $x; else show no; fi; done",
    "arguments": 'set -eo pipefail; set -- a "b c" "$@" -d; show "$@" "$*" $#; shift 9 || show "$1"; set -o nounset x',
    "unset": "A=1; B=(2 3); unset A B; show ${A-a} ${B-b}",
    "subshell": "A=1; ( A=2; show $A; exit 3; show no ); show $A; (( A == 1 )) && show one",
    "local": "A=1; f() { local A=$A$A B=3; show $A $B; g; }; g() { A=4; local B; show ${B-n}; }; f; show $A ${B-n}",
    "joined": 'A=(1 "2 3"); show "${A[*]}" x"${A[*]}"y "${#A[*]}"; IFS=,; show "${A[*]}"',
    "while": "set -- --t 2 -x --p 4; while [ $# -gt 0 ]; do case $1 in --*) show $1 $2; shift 2;; *) shift; esac; done",
    "until": "i=3; until (( i == 0 )); do (( i -= 1 )); [[ $i == 1 ]] && continue; show $i; done; show end",
    "for ever": "i=0; while true; do i=$((i + 1)); [ $i = 4 ] && break; done; show $i",
    "counted": "for ((i = 0, j = 9; i < 3; i++)); do ((j -= i)); show $i $j; done; show $i; for ((;;)); do break; done",
    "assignments": "let 'A = 2 * 3' A+=1; ((++A)); ((B = A % 5, C = B << 2, A--)); show $A $B $C; ((A > 7)) || show",
    "shells": "A=1; export B=2; C=3 bash -c 'show ${A-a} $B $C $0 \"$@\"; B=4; A=5' me x 'y z'; show $A $B ${C-c}",
    "text of shells": "A=1; B='2 3'; bash -ec \"show $A '$B' \\${A-x}; exit; show\"; env D=4 bash -c 'show $D'; show e",
    "options of shells": "bash -e -o pipefail -c 'show a'; bash --norc -c 'show b'; bash -uo pipefail -c 'show $1' x c",
    "exports": 'A=1; B=2; set -a; C=3; set +a; D=4; export A; export "E=5 6"; declare -x F=7; export -n A; G=8; '
    "bash -c 'show ${A-a} ${B-b} $C ${D-d} \"$E\" $F'; f() { show f $1; }; bash -c 'f 1 2>/dev/null'; export -f f; "
    "bash -c 'f 2'",
    "functions and shells": "f() { local -x A=2; bash -c 'declare A=3; show $A'; show $A; }; A=1; f; show $A",
    "documents": "A=1; bash <<E\nA=2; show $A \\$A '$A' \"x\"\nE\nbash -s b c <<-'E'\n\tshow ${A-a} $2\n\tE\nshow $A",
    "reading": 'read -r A B <<< \'x y z\'; show "$A" "$B"; read -r -d \'\' C <<E\nshow a \\\n  b\nE\neval "$C"; '
    "read -ra D <<< '1 2'; show ${D[1]}; mapfile -t L <<< $'u v'; show \"${L[0]}\"",
    "append": 'A=x; A+=y; A+=\' z\'; B=(1); B+=(2 3); show "$A" ${B[*]}; export C=$A D=4; show "$C" $D',
    "precedence": "A=3; show $((-A ** 2)) $((!A == 0)) $((2 ** 3 ** 2)) $((010 + 0x1f)) $((A > 2 ? 5 : 6)) $((~A));"
    "show $((A++ + ++A)) $A $((A & 6 | 8 ^ 1)) $((0 && (A = 9))) $((B = 4, A -= B)) $A $B; ((A == 1 || B++)); show $B",
    "all words first": "A=1; export A=2 B=$A; show $B; f() { local A=3 B=$A; show $B; }; f; A=5 C=$A; show $C",
    "statuses": "f() { return 1; }; f && show a; f || show b; ! f && show $?; (exit 3) || show c; [ a = b ]; "
    "[ $? = 0 ] || show d; g() { [ a = a ]; }; g && show e; if false; then show f; fi && show g",
    "pipelines": "A=1; A=2 | cat; show $A; { A=3; } | cat; A=4 & wait; show $A; echo x | read A; show $A",
    "patterns": """for x in 'a*' ab '[b' a; do case $x in "a*") show literal;; [^a]*) show not;; [[:alpha:]]) show one;;
        *) show $x; esac; [[ $x == "a*" ]] && show y; [[ $x =~ "a*" ]] && show z; show "${x%"*"}" "${x#[^b]}"; done""",
    "braces": "show {1..3} a{b,c}d '{1,2}' {3..1} {x}; for i in x{1..2}; do show $i; done; "
    "A={1,2}; show $A; export A={1,2}; show $A",
    "dropped words": """f() { show $# "$*" x"$@"y; }; f $U a "$U"; set -- $U b; show $1 $#;
        for x in $U d; do show $x; done; [ -n $U ] && show e; [ "$A" != $U ] || show f; V=$U; show ${V:-g} "$V" "$U"$U;
        show a "${A[@]}" b; B="${A[@]}"; show "$B" """,
    "escapes": r"""show $'a\tb' $'it\'s' "$'x'" "\a" a\\b""",
    "slices": "A=abcdef N=2; show ${A:N} ${A:$N:2} ${A: -2} ${A:1+1:N} ${A:N++} $N",
    "leaving": "for i in 1 2; do for j in 1 2; do [ $j = 2 ] && continue 2; show $i $j; done; show no; done; "
    "for i in 1 2; do for j in 1; do break 9; done; show no; done; return; break; show end",
    "function's variables": "A=1; f() { show $A; A=3; }; A=2 f; show $A; g() { local A; export A=5; }; g; "
    "bash -c 'show ${A-x}'; show $A; h() { f() { show new; }; }; h; f; unset -f f; A=4 eval 'show $A'; show $A",
    "words of shells": """B='x  y'; bash -c "show $U $B '$B' $U '$U'";
        bash -c 'show "$@"' me $U 'a b'; eval 'show $B'""",
    "arithmetic in documents": 'N=1; bash <<E\nshow $((N++)) "a\\"b"\nE\nshow $N; read A <<< $((N++)); show $A $N',
    "scalars and arrays": 'A=(1 2); A=x; show "${A[@]}" "${A[1]}"; B=y; show ${B[0]} "${B[1]}"; show "${C:-"d e"}"',
    "words as text": """A=(1 $U '2  3' 4); B="${A[@]}"; show "$B" "${A[*]}"; C="show ${A[@]}"; eval $C; $C
        eval show $U a "$U"; set -- $U 5; B="$*"; show "$B" "$*" x"$*"y""",
    "separators": "IFS=,; A='1 2'; show $A; unset IFS; show $A",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", SNIPPETS)
def test_as_bash_does_it(name: str):
    """bash runs the same text, with a function that prints its words."""
    printing = 'show() { printf "(%s)" "$@"; printf "\\n"; }\nexport -f show\n'
    result = subprocess.run(
        ["bash", "-c", printing + SNIPPETS[name]],
        capture_output=True,
        text=True,
        timeout=30,
        env={"PATH": "/usr/bin:/bin"},
    )
    found = followed(SNIPPETS[name], file=Path("run.sh"), environment={}).commands
    shows = [words[words.index("show") + 1 :] for words in found if "show" in words]
    shows = [[settled(word) for word in words if not is_gone(word)] for words in shows]
    ours = ["".join(f"({word})" for word in words or [""]) for words in shows]
    assert ours == result.stdout.splitlines()
    assert ours


STUB = """#!/bin/sh
printf '%s\\0' "$(printf '\\036')${0##*/}" "$@" >> "$TRACE"
while [ $# -gt 1 ]; do
    case $1 in
        --export=ALL,*) export "${1#--export=ALL,}" ;;
        bash | sh) shell=$1; shift 2; exec "$shell" -c "$@" ;;
    esac
    shift
done
"""
"""Keeps its name and arguments, in one write, as others of a pipeline write too; starts what a launcher would, but no
login shell."""
PROGRAMS = "tool train torchrun python python3 srun mpirun mpiexec deepspeed hostname nvidia-smi scontrol head date "
PROGRAMS += "mktemp tee cp wc cores hosts"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a bash that can start nothing but stubs, shells, cat and dirname."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "stub").write_text(STUB)
    (folder / "stub").chmod(0o755)
    for program in PROGRAMS.split():
        (folder / program).symlink_to("stub")
    for program in ("bash", "sh", "cat", "dirname"):
        (folder / program).symlink_to(shutil.which(program) or pytest.skip(f"needs {program}"))
    return {"PATH": str(folder), "HOME": "/home/x", "TRACE": str(folder / "trace")}


def started_by_bash(text: str, folder: Path, environment: dict[str, str]) -> list[list[str]]:
    """Commands that really start."""
    trace = Path(environment["TRACE"])
    trace.write_text("")
    subprocess.run(
        ["bash", "-c", text, str(folder / "run.sh")],
        cwd=folder,
        env=environment,
        capture_output=True,
        timeout=10,
        stdin=subprocess.DEVNULL,
    )
    return [record.removesuffix("\0").split("\0") for record in trace.read_text().split("\036")[1:]]


def empty_where_not_known(words: Sequence[str]) -> list[str]:
    """As stubs write nothing, what is unknown is empty, and may be no word at all."""
    return [text for word in words if (text := re.sub("[\1\2][^\3]*\3|\5", "", word))]


TEXTS = {name: (SCRIPTS / name).read_text().replace("<a file>", "vocab") for name in EXPECTED}
TEXTS |= {
    launcher: launcher.replace("{}", TRAINING) for launcher in ('srun -N2 sh -c "{}"', "A=1; mpirun bash -c '{}'")
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_trainer_gets_the_words_that_bash_gives_it(name: str, world: dict[str, str], tmp_path: Path):
    file = tmp_path / "run.sh"
    file.write_text(TEXTS[name])
    environment = world | {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "HEAD_NODE": "h", "SLURM_JOB_NODELIST": "h"}
    (launch,) = read_script(file, environment=environment)
    ours = empty_where_not_known(launch.words)
    (theirs,) = [words for words in started_by_bash(TEXTS[name], tmp_path, environment) if "--num-layers" in words]
    theirs = list(filter(None, theirs))
    assert ours[-len(theirs) :] == theirs


WORDS = r"""a 7 $A "$B" ${C:-d} "${D:-$A}" ${L[@]} "${L[@]}" "${L[*]}" ${L[1]} ${L[-1]} $L x$A'y'z ${A%b*}
    ${B##*x} ${A/a/b} ${A//x/} ${#L[@]} ${#A} $1 "$@" $* $# {1..3} {a,$N}z ~/d $'t\tu' \$A "\$A" $(tool) ${A:1:2}
    $A$B ${A^^} ${B:+y$A} ${E:=e} "'$A'" --f=$N $? "" "${L[@]:1}" ${L[N]} "${B%'x'*}" "it's" a#b "$A"$B x"$@"y
    $((N)) $N '*' "a*" "${A:-"$B"}" "${*}" ${A:$N} `tool` ${L} "${#B}" ${M[*]} \\ "\\" "\a" $((@number))
    $((@number))"""
TESTS = r"""[ "$A" = 7 ]; [ "$A" != $B ]; [ $N -gt 2 ]; [ $N -le 7 -a -n "$B" ]; [[ $A == @pattern ]];
    [[ $A != @pattern ]]; [[ $A =~ ^a ]]; [[ $B =~ "x".* && -n $C ]]; [[ -z $C || ! $N -lt 4 ]]; ((@number));
    tool; f; true; false; [ -n "$B" ]; [ -f x ]; [ ! -d x ]; f a b"""
SIMPLE = r"""((@number)); set -- @words; shift; unset @name; unset L; f @words; A=v f @words; @test && @assignment;
    IFS=x; @condition || @train; read -r A B <<< @word; eval 'train "$A" '$B; IFS=,; unset IFS; @train & wait;
    @assignment & wait"""
GRAMMAR = {
    "script": [
        r"""A=ab B='x  y' N=3 L=(1 '2 3' b); f() { train "$@" "$A"; }\n@body\n@body\ntrain "$A" "$B" $N "${L[@]}" """
    ],
    "word": [*WORDS.split(), "'q r'", '"p  q"', r"a\ b", "${D-'q r'}"],
    "words": ["", "@word", "@word @word", "@word @word @word"],
    "pattern": r"""a* *b "a*" $A [^a]* ?x a "$A" \* [[:digit:]] *""".split(),
    "value": "N A 0 1 2 3 07 0x1f $N ${#A} N++ --N (N=4) (N+=2) !N -N ~N".split(),
    "operator": "+ - * < <= > >= == != & | ^ && || ,".split(),
    "number": [
        "@value",
        "@value @operator @number",
        "(@number) @operator @value",
        "@value ? @value : @value",
        "@value @power",
        "(@number) @power",
    ],
    "power": ["** 2", "/ 2", "% 3", "<< 1", ">> 2"],
    "test": TESTS.split(";"),
    "condition": ["@test", "@test", "! @test", "@test && @test", "@test || [ $N = 2 ]"],
    "name": list("ABCDE"),
    "assignment": [
        *["@name=@word"] * 3,
        "@name+=@word",
        *"L=(@words);L+=(@words);N=$((@number));N=5;N=-4;N=07;L[2]=@word;export @name=@word F=$@name".split(";"),
    ],
    "train": ["train @words", "A=w train @words", "srun train @words", "train @words >/dev/null 2>&1"],
    "simple": SIMPLE.split(";"),
    "leave": "break;continue;return;exit;break 2;@test && break;@test && continue;@test && return;@train".split(";"),
    "rest": ["@train", r"@train\n@assignment", "@leave"],
    "compound": [
        r"if @condition; then\n@body\nelif @condition; then @body\nelse @body\nfi",
        r"if @condition\nthen @body\n@leave\nfi",
        r"for @name in @words; do @body\n@rest\ndone",
        r"k@depth=0; while [ $k@depth -lt 3 ]; do k@depth=$((k@depth + 1)); @body\n@rest\ndone",
        r"for ((k@depth = 0; k@depth < 3; k@depth++)); do @rest\n@train; done",
        r"case @word in @pattern) @body;;\n@pattern|@pattern) @body\nesac",
        r"f() { local A=@word B; local -x D=2 C=$A; @body\n@leave\n}",
        r"( @body\nexit 3\n)",
        r"{ @body\n} | cat",
        r"{ @body\n} && @train",
        r"""bash <<E\ntrain @word "\"$A" \$B\nE\n""",
        r"bash <<'E'\ntrain @word \"$A \$B\nE\n",
        r"bash -c @quoted me @words",
        r"srun bash -c " "\"train $A '$B' \\$F $1\"",
    ],
    "body": ["@simple", "@assignment", "@train", "@compound", "@compound", r"@assignment\n@train", r"@simple\n@train"],
}
"""What a script may be, by symbol. All that matters in it is the words of ``train``."""


def written(symbol: str, chance: random.Random, depth: int = 0) -> str:
    if symbol == "depth":
        return str(depth)
    if symbol == "quoted":
        return shlex.quote(written("body", chance, depth))
    symbol, deeper = "train" if depth > 3 and symbol == "body" else symbol, depth + (symbol == "body")
    text = chance.choice(GRAMMAR[symbol]).strip().replace(r"\n", "\n")
    return re.sub("@([a-z]+)", lambda found: written(found[1], chance, deeper), text)


def trained(of: list[list[str]]) -> list[list[str]]:
    return [words[words.index("train") + 1 :] for words in of if "train" in words]


@pytest.mark.parametrize("seed", range(10))
def test_any_script_is_read_as_bash_runs_it_or_refused(
    seed: int, world: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answered, conditions, decide = 0, [], Flow.either
    monkeypatch.setattr(Flow, "either", lambda flow, *args: conditions.append(args[0]) or decide(flow, *args))
    for number in range(30):
        conditions.clear()
        text = written("script", random.Random(30 * seed + number))
        try:
            found = trained(followed(text, file=Path("run.sh"), environment=world).commands)
        except PlanError:
            continue
        ours = [[settled(word) for word in words if not is_gone(word)] for words in found]
        theirs = trained(started_by_bash(text, tmp_path, world))
        assert agree(ours, theirs, both_ways=None in conditions), text
        answered += not any(None in words for words in ours)
    assert answered > 5


def agree(ours: list[list[str | None]], theirs: list[list[str]], *, both_ways: bool) -> bool:
    """Where the reader followed ``both_ways``, some of its commands do not run; nor does one with an error in it."""
    is_known = not any(None in words for words in ours)
    if both_ways or len(ours) != len(theirs):
        return not is_known or (both_ways and all(words in ours for words in theirs))
    return all(our == their for our, their in zip(ours, theirs, strict=True) if None not in our)


def test_a_file_is_looked_for_where_the_script_has_gone(tmp_path: Path):
    """Not beside the script, where there is one of that name, too; relative or absolute."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "env.sh").write_text("MBS=4")
    (tmp_path / "scripts" / "env.sh").write_text("MBS=1")
    file = tmp_path / "scripts" / "run.sh"
    for going, name, microbatch in (
        ('cd "$(dirname "$0")/.."', "./env.sh", 4),
        ('cd "$(dirname "$0")/.."', "$PWD/env.sh", 4),
        ("true", "./env.sh", 1),
        ("true", "$PWD/env.sh", 1),
    ):
        file.write_text(f"{going}; source {name}; {ALONE} --micro-batch-size $MBS")
        assert configuration(file).layout.microbatch == microbatch, (going, name)


@pytest.mark.parametrize("ends", ["(if [ -z $NO_SUCH ]; then exit; fi)", "bash -c 'exit' | cat", "bash exits.sh"])
def test_a_script_goes_on_where_another_shell_exits(ends: str, tmp_path: Path):
    (tmp_path / "exits.sh").write_text("if [ -z $A ]; then exit 1; fi")
    script = tmp_path / "run.sh"
    script.write_text(f"{ends}\npython report.py")
    with pytest.raises(PlanError, match="such as --num-layers; give another file"):
        configuration(script)
