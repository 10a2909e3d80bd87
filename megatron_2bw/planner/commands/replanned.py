"""A plan for a launch script: what it takes from the script, and what of that does not go with it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_2bw.planner.commands.arguments import check_words
from megatron_2bw.planner.commands.launched import IN_FP32, given, note_of_strange, of_script, reading_on
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.spelling import attribute

if TYPE_CHECKING:
    from megatron_2bw.planner.flags.options import Options
    from megatron_2bw.planner.search.search import Plan
    from megatron_2bw.planner.specs.model import Kind, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a plan takes from a launch script."""

    model: Model
    kind: Kind
    options: Options
    """Of its training command, or of one that agrees with the others."""
    notes: list[str]


def planned(args: argparse.Namespace, words: Sequence[str]) -> Script:
    """What the script describes; of its other settings ``args`` takes over those that it does not have.

    Raises:
        PlanError: training commands that differ, or flags that cannot be priced.
    """
    from megatron_2bw.planner.flags.accepted import RECEIVES
    from megatron_2bw.planner.flags.flags import DECIDED, described
    from megatron_2bw.planner.flags.launch import check_agreed, values_of
    from megatron_2bw.planner.rules import CHANGING_KERNELS
    from megatron_2bw.planner.specs.model import Kind

    if args.model:
        raise PlanError(f"--model {args.model} and --from-script both describe the model; give one of them")
    check_words(words)
    scripts, settings = [], []
    for options, kind, gpus, strange in given(args, words):
        kind = Kind(args.model_kind) if args.model_kind else kind
        # A plan decides the others, but for what the precision-aware optimizer needs.
        kept = options.without(DECIDED - {"--use-distributed-optimizer"})
        try:
            model, priced = described(kept, kind=kind)
            settings.append(_settings(args, options, model, gpus))
        except PlanError as error:
            raise of_script(error, args) from error
        notes = [*options.notes, *priced]
        notes += note_of_strange(strange, notes)
        scripts.append(Script(model=model, kind=kind, options=options, notes=notes))
    if settings[0].get("pipeline_receives") == "early":
        for flag in ("--sft", "--dataloader-inter-document-masking"):
            if any(flag in script.options for script in scripts):
                raise PlanError(
                    f"{RECEIVES} early beside {flag} of the script: {CHANGING_KERNELS}; give {RECEIVES} late"
                )
    check_agreed(
        [values_of(script.model) | of_script for script, of_script in zip(scripts, settings, strict=True)],
        file=args.from_script,
    )
    notes = [note for script in scripts for note in script.notes]
    if settings[0].get("gpus", 0) is None:
        notes.append("the script does not say how many GPUs it uses: planned for the cluster's; give --gpus")
    if settings[0].get("precision") == "fp32" and args.precision is None:
        notes.append(IN_FP32)
    for name, value in settings[0].items():
        setattr(args, name, value)
    return replace(scripts[0], notes=list(dict.fromkeys(notes)))


def _settings(args: argparse.Namespace, options: Options, model: Model, gpus: int | None) -> dict[str, Any]:
    """Of ``plan``'s arguments: what is given, or else what a script says that a search leaves as it is."""
    from megatron_2bw.planner.flags.accepted import BACKEND, FLEX, PRECISION_AWARE, RECEIVES, SETTINGS, STORED_IN
    from megatron_2bw.planner.flags.flags import fp8_of, fuses, global_batch_of
    from megatron_2bw.planner.flags.unpriced import optimizer_of
    from megatron_2bw.planner.specs.layout import Fp8

    fused, fp8 = fuses(options, None), fp8_of(options)
    is_flexible = model.num_experts > 0 and options.text("--moe-token-dispatcher-type") == FLEX
    unmeasured = ()
    if args.profile is not None:
        unmeasured = ("--tp-comm-overlap", "--fp8-param-gather", "--no-bias-swiglu-fusion")
    settings: dict[str, Any] = {"global_batch_size": global_batch_of(options, None)}
    if args.nodes is None and args.gpus is None:
        settings["gpus"] = gpus
    if args.cost_model == "default":  # Others have no more settings.
        settings |= {
            "optimizer": optimizer_of(options.text("--optimizer", "adam")),
            "use_precision_aware_optimizer": PRECISION_AWARE in options,
            **{attribute(flag): options.text(flag) if flag in options else None for flag in STORED_IN},
            "pipeline_receives": options.text(RECEIVES) if RECEIVES in options else None,
            "moe_token_dispatcher_type": FLEX if is_flexible else None,
            "moe_flex_dispatcher_backend": options.text(BACKEND) if is_flexible and BACKEND in options else None,
            **{attribute(flag): flag in options for flag in SETTINGS if flag not in unmeasured},
        }
    if args.cost_model == "default" and args.profile is None:  # Which says in what precision it was measured.
        settings |= {
            "precision": next((name for name in ("bf16", "fp16") if f"--{name}" in options), "fp32"),
            "fp8_recipe": None if fp8 is Fp8.NONE else fp8,
            "attention_backend": None if fused is None else "flash" if fused else "unfused",
        }
    commanded = {name: getattr(args, name) for name in settings}
    return settings | {name: value for name, value in commanded.items() if value is not None and value is not False}


def changes(script: Script, plan: Plan, flags: Sequence[str]) -> list[str]:
    """The notes of ``script``, but on those of its flags that do not go with ``flags``; and which ones these are.

    Found by reading both as a training would, without one flag after the other.

    Args:
        script: that is planned for.
        plan: with layouts for it.
        flags: those of the best one.
    """
    from megatron_2bw.planner.flags.flags import in_flags
    from megatron_2bw.planner.flags.options import Options

    of_plan = Options.parse(flags).values
    out, silent = decided_otherwise(script, flags), []
    rest = {flag: words for flag, words in script.options.values.items() if flag not in out}
    found = _read(script, plan, rest | of_plan)
    while isinstance(found, PlanError) or found:
        is_refused = isinstance(found, PlanError)
        tried = {
            flag: _read(script, plan, {name: words for name, words in rest.items() if name != flag} | of_plan)
            for flag in rest.keys() - of_plan.keys()
            if not is_refused or flag in str(found)
        }
        if is_refused:
            better = next((flag for flag in sorted(tried) if str(tried[flag]) != str(found)), None)
        else:
            fewer = (flag for flag in sorted(tried) if not isinstance(tried[flag], PlanError))
            better = next((flag for flag in fewer if tried[flag] < found), None)
        if better is None:
            break
        (out if is_refused else silent).append(better)
        found = tried[better]
        del rest[better]
    notes = [note for note in script.notes if note.partition(":")[0] not in (*out, *silent)]
    notes += to_take_out(out)
    if silent:
        notes.append(f"{', '.join(silent)}: planned without; take that out of the script, too, or expect other times")
    if isinstance(found, PlanError):
        notes.append(f"beside the script's other flags: {in_flags(str(found))}")
    return notes


def decided_otherwise(script: Script, flags: Sequence[str]) -> list[str]:
    """Flags of ``script`` that are a plan's to decide, and not among ``flags``, which it prints."""
    from megatron_2bw.planner.flags.flags import DECIDED
    from megatron_2bw.planner.flags.options import Options

    return sorted(script.options.values.keys() & (DECIDED - Options.parse(flags).values.keys()))


def to_take_out(flags: Sequence[str]) -> list[str]:
    """The note on them, if there are any."""
    return [f"take {', '.join(flags)} out of the script: the plan has another layout"] if flags else []


def _read(script: Script, plan: Plan, values: dict[str, list[str]]) -> set[str] | PlanError:
    """In which fields a Layout by ``values`` is not the best of ``plan``; or why there is none."""
    from megatron_2bw.planner.flags.flags import read
    from megatron_2bw.planner.flags.launch import values_of

    best, how = plan.best.layout, reading_on(plan.cluster, script.model)
    try:
        found = read(replace(script.options, values=values), gpus=best.gpus, kind=script.kind, **how)
    except PlanError as error:
        return error
    wanted, got = values_of(best), values_of(found.layout)
    return {name for name in wanted if wanted[name] != got[name]}
