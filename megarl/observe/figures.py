"""Which figures a report has: the training-dynamics curves of the DAPO and VAPO papers, and what tells whether a run is healthy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarl.observe.distribution_figures import draw_lambda, draw_mismatch, draw_value_error
from megarl.observe.plots import COLOURS, Band, Drawing, Line, draw_bars, draw_lines, draw_stack, run_colour, value_text
from megarl.observe.runs import Points, Run, families, kept_share, mean_course

BLUE, ORANGE, GREEN, PURPLE, GOLD, PINK = COLOURS[:6]
# Every phase keeps its colour in every report; phases unknown here take the colours that are left.
PHASES = ("rollout", "old_logprobs", "values", "advantages", "critic_update", "actor_update", "weight_transfer", "rewards")


@dataclass(frozen=True)
class Curve:
    """A metric of a figure: its name, what it is called there, and its colour where only one run is shown."""

    key: str
    label: str = ""
    colour: str = BLUE


@dataclass(frozen=True)
class Spec:
    """A figure: where its curves are found and the sentence that says what to look for.

    draw: for figures that are more than curves; gives None where the runs lack the data."""

    title: str
    look: str
    stage: str = "train"
    curves: tuple[Curve, ...] = ()
    unit: str = ""
    limits: tuple[float | None, float | None] = (None, None)
    log: bool = False
    noisy: bool = True
    xlabel: str = "step"
    draw: Callable[[Sequence[Run]], Drawing | None] | None = None

    def points(self, run: Run, key: str) -> Points:
        """What is drawn of a metric. With one sample a problem pass and majority are avg again, and are left out."""
        if key in ("eval/pass", "eval/majority") and max(run.points("eval", "eval/k").values(), default=1) <= 1:
            return {}
        return run.points(self.stage, key)


def draw(spec: Spec, runs: Sequence[Run]) -> Drawing | None:
    """The figure for these runs; None where none of them has its data."""
    return spec.draw(runs) if spec.draw else draw_curves(spec, runs)


def draw_curves(spec: Spec, runs: Sequence[Run]) -> Drawing | None:
    """One run: a colour per curve. Several: a colour per run, and where there are several curves a line style per curve. Runs that
    differ in their seed only are one, drawn as their mean within the band of all of them."""
    related = families(runs)
    found = []
    for r, family in enumerate(related):
        for c, curve in enumerate(spec.curves):
            mean, band = mean_course([points for run in family if (points := spec.points(run, curve.key))] or [{}])
            if mean:
                found.append((r, c, mean, band))
    if not found:
        return None
    several = len({c for _, c, _, _ in found}) > 1
    lines = []
    for r, c, points, band in found:
        curve = spec.curves[c]
        overlay = len(related) > 1
        lines.append(
            Line(
                points,
                colour=run_colour(r) if overlay else curve.colour,
                label=curve.label if several else "",
                style=c if overlay and several else 0,
                markers=spec.stage == "eval" or len(points) <= 12,
                noisy=spec.noisy,
                band=band,
            )
        )
    return Drawing(draw_lines(lines, spec.xlabel, spec.limits, spec.log))


def draw_groups(runs: Sequence[Run]) -> Drawing | None:
    """One run: kept, all wrong and all right groups as shares of those sampled. Several: the kept share of each."""
    shares = [{step: s for step, record in run.by_stage.get("train", {}).items() if (s := kept_share(record))} for run in runs]
    if not any(shares):
        return None
    if len(runs) > 1:
        lines = []
        for r, family in enumerate(families(runs)):
            kept = [{t: s["kept"] for t, s in found.items()} for run, found in zip(runs, shares, strict=True) if found and run in family]
            mean, band = mean_course(kept or [{}])
            lines += [Line(mean, run_colour(r), band=band)] if mean else []
        return Drawing(draw_lines(lines, "step", (0, 1)))
    layers = (("kept", "kept: right and wrong answers", BLUE), ("all_wrong", "all wrong", ORANGE), ("all_right", "all right", GREEN))
    bands = [Band({t: s[name] for t, s in shares[0].items()}, colour, label) for name, label, colour in layers]
    return Drawing(draw_stack(bands, "step", (0, 1)), tuple((band.colour, band.label) for band in bands))


def draw_waste(runs: Sequence[Run]) -> Drawing | None:
    """The share of the generated tokens that were thrown away; None where none ever was."""
    thrown = any(any(run.points("train", "rollout/waste").values()) for run in runs)
    return draw_curves(Spec("", "", curves=(Curve("rollout/waste"),), limits=(0, None)), runs) if thrown else None


def phase_colours(phases: Sequence[str]) -> dict[str, str]:
    """phase -> colour: fixed ones for the phases known here, the remaining ones for others."""
    fixed = {phase: COLOURS[i] for i, phase in enumerate(PHASES)}
    rest = COLOURS[len(PHASES) :]
    others = [phase for phase in phases if phase not in fixed]
    return {phase: fixed.get(phase) or rest[others.index(phase) % len(rest)] for phase in phases}


def _phases(runs: Sequence[Run], prefix: str) -> list[str]:
    """The phases that the runs' training steps (else warm-start steps) recorded, known ones first."""
    names = {key.removeprefix(prefix) for run in runs for key in run.keys(_main_stage(run), prefix)} - {"step"}
    return [phase for phase in PHASES if phase in names] + sorted(names - set(PHASES))


def _main_stage(run: Run) -> str:
    return next((stage for stage in ("train", "sft", "value_pretraining") if stage in run.by_stage), "train")


def _course(run: Run, phases: Sequence[str], rest: str) -> dict[str, Points]:
    """phase -> step -> seconds, with what the phases leave of time/step as `rest`."""
    stage = _main_stage(run)
    course = {phase: run.points(stage, f"time/{phase}") for phase in phases}
    total = run.points(stage, "time/step")
    return {**course, rest: {step: max(0.0, seconds - sum(c.get(step, 0.0) for c in course.values())) for step, seconds in total.items()}}


def draw_times(runs: Sequence[Run]) -> Drawing | None:
    """One run: seconds per phase over the steps, and what the phases leave of time/step. Several: a bar of means for each."""
    phases = _phases(runs, "time/")
    rest = "other" if phases else "whole step"
    colours = {**phase_colours(phases), rest: COLOURS[-1] if phases else BLUE}
    courses = [_course(run, phases, rest) for run in runs]
    steps = [max(1, len(run.by_stage.get(_main_stage(run), ()))) for run in runs]
    means = [{p: sum(c.values()) / n for p, c in course.items()} for n, course in zip(steps, courses, strict=True)]
    shown = [phase for phase in colours if any(mean[phase] for mean in means)]
    if not shown:
        return None
    if len(runs) > 1:
        bars = {run.name: [(p, mean[p], colours[p]) for p in shown] for run, mean in zip(runs, means, strict=True)}
        return Drawing(draw_bars(bars, "s"), tuple((colours[p], _words(p)) for p in shown))
    whole = sum(means[0].values())
    bands = [Band(courses[0][p], colours[p], p) for p in shown]
    legend = tuple((colours[p], f"{_words(p)} {value_text(means[0][p])} s, {means[0][p] / whole:.0%}") for p in shown)
    return Drawing(draw_stack(bands, "step"), legend)


def draw_memory(runs: Sequence[Run]) -> Drawing | None:
    """One run: the highest memory/<phase> (bytes) of each phase, as GiB. Several: of each the phase that takes most."""
    highest: dict[str, Sequence[tuple[str, float, str]]] = {}
    for run in runs:
        peaks = {
            p: max(points.values())
            for p in _phases([run], "memory/")
            if any((points := run.points(_main_stage(run), f"memory/{p}")).values())
        }
        colours = phase_colours(list(peaks))
        bars = {p: [(p, peak / 2**30, colours[p])] for p, peak in peaks.items()}
        if peaks and len(runs) > 1:
            most = max(peaks, key=peaks.__getitem__)
            highest[f"{run.name}: {_words(most)}"] = bars[most]
        elif peaks:
            highest = {_words(p): bar for p, bar in bars.items()}
    return Drawing(draw_bars(highest, "GiB")) if highest else None


def _words(name: str) -> str:
    return name.replace("_", " ")


def _two(prefix: str) -> tuple[Curve, ...]:
    return (Curve(f"policy/{prefix}", "actor", BLUE), Curve(f"value/{prefix}", "critic", ORANGE))


DYNAMICS = (
    Spec(
        "Evaluation accuracy",
        "Should rise and then level off; a fall while training accuracy rises is overfitting.",
        "eval",
        (Curve("eval/avg", "avg", BLUE), Curve("eval/pass", "pass", GREEN), Curve("eval/majority", "maj", PURPLE)),
        limits=(0, 1),
    ),
    Spec(
        "Training accuracy",
        "Share of right responses to training prompts; its slope shows whether there is still something to learn.",
        curves=(Curve("reward/accuracy"),),
        limits=(0, 1),
    ),
    Spec(
        "Reward",
        "Includes penalties: a rise without a rise of accuracy means that only length or format is being learnt.",
        curves=(Curve("reward/mean"),),
    ),
    Spec(
        "Response length",
        "Growing length goes with longer reasoning; a collapse or a run into the limit is the first sign of trouble.",
        curves=(Curve("response/length_mean"),),
        unit="tokens",
        limits=(0, None),
    ),
    Spec(
        "Generation entropy",
        "A slow decline is normal; near zero exploration has ended, a rise means that the text falls apart.",
        curves=(Curve("policy/entropy"),),
        unit="nats",
        limits=(0, None),
    ),
    Spec(
        "Mean probability",
        "The mirror of entropy: close to 1 the policy no longer tries alternatives.",
        curves=(Curve("policy/mean_prob"),),
        limits=(None, 1),
    ),
    Spec(
        "Truncated responses",
        "Share that hit the length limit; more than a few per cent distorts the rewards.",
        curves=(Curve("reward/truncated"),),
        limits=(0, None),
    ),
)
CRITIC = (
    Spec(
        "Explained variance",
        "The share of the returns' variance that the critic predicts; below 0 it is worse than a constant.",
        curves=(Curve("value/explained_variance", colour=ORANGE),),
    ),
    Spec(
        "Value loss",
        "Should fall or stay level; a jump means that the critic has lost the policy.",
        curves=(Curve("value/loss", colour=ORANGE),),
        limits=(0, None),
    ),
    Spec(
        "Length-adaptive lambda",
        "Mean over responses: longer responses raise it towards 1.",
        curves=(Curve("gae/lambda_mean", colour=ORANGE),),
    ),
    Spec(
        "Lambda by response length",
        "The curve is lambda, the area the share of responses of that length: where most of them are, what lambda do they get?",
        draw=draw_lambda,
    ),
    Spec(
        "Value error by position",
        "Distance of value and return from a response's first token to its last; high at the start is normal, at the end it is bias.",
        draw=draw_value_error,
    ),
)
UPDATE = (
    Spec(
        "Clipped tokens",
        "Share of tokens whose ratio left the trust region below and above; more than a few per cent calls for smaller updates.",
        curves=(Curve("policy/clip_fraction_low", "low", BLUE), Curve("policy/clip_fraction_high", "high", GREEN)),
        limits=(0, None),
    ),
    Spec(
        "Gradient norm",
        "Before clipping. Spikes are single bad batches, a steady climb announces divergence.",
        curves=_two("grad_norm"),
        limits=(0, None),
    ),
    Spec("Learning rate", "The schedule as it was applied.", curves=_two("lr"), limits=(0, None), noisy=False),
    Spec(
        "Trainer against engine",
        "Absolute difference of log-probabilities (log scale): a step up means stale or wrongly transferred weights.",
        curves=(Curve("mismatch/logprob_abs_mean", "mean", BLUE), Curve("mismatch/logprob_abs_max", "max", PINK)),
        log=True,
        unit="nats",
    ),
    Spec(
        "Trainer minus engine by token",
        "Share of tokens by their difference (both scales logarithmic): a narrow hill is rounding, wide wings are other weights.",
        draw=draw_mismatch,
    ),
    Spec(
        "Groups sampled",
        "Only groups with right and wrong answers carry a signal; the kept share falls as the task is learnt.",
        draw=draw_groups,
    ),
    Spec(
        "Filter waste",
        "Share of the generated tokens that dynamic sampling threw away. Much waste calls for other prompts.",
        draw=draw_waste,
    ),
    Spec(
        "Positive-example loss",
        "Mean negative log-likelihood of right responses; falls as the policy settles on them.",
        curves=(Curve("policy/nll_loss"),),
        limits=(0, None),
    ),
)
SPEED = (
    Spec("Time per phase", "Where a step's time goes; the largest area is what to speed up.", draw=draw_times, unit="seconds"),
    Spec(
        "Throughput",
        "Falls as responses grow longer; a sudden drop is the machine, not the algorithm.",
        curves=(Curve("throughput/rollout_tokens", "rollout", BLUE), Curve("throughput/train_tokens", "train", ORANGE)),
        unit="tokens/s",
        limits=(0, None),
    ),
    Spec("Peak memory per phase", "The phase with the longest bar decides what fits on the device.", draw=draw_memory, unit="GiB"),
)
PRETRAINING = (
    Spec(
        "Explained variance on fresh rollouts",
        "Should have left 0 before the policy starts to move, else its first updates follow noise.",
        "value_pretraining",
        (Curve("value/explained_variance", colour=ORANGE),),
        xlabel="rollout",
    ),
    Spec(
        "Value loss in pretraining",
        "Falls steeply and flattens out: then the critic is ready.",
        "value_pretraining",
        (Curve("value/loss", colour=ORANGE),),
        limits=(0, None),
        xlabel="rollout",
    ),
)
WARM_START = (
    Spec(
        "Supervised loss",
        "Negative log-likelihood of the example responses; should fall smoothly and flatten out.",
        "sft",
        (Curve("policy/nll_loss"),),
        limits=(0, None),
    ),
    Spec("Supervised learning rate", "The schedule as it was applied.", "sft", (Curve("policy/lr"),), limits=(0, None), noisy=False),
    Spec(
        "Supervised gradient norm",
        "Before clipping; should calm down within the warm-up.",
        "sft",
        (Curve("policy/grad_norm"),),
        limits=(0, None),
    ),
)
SECTIONS: tuple[tuple[str, tuple[Spec, ...]], ...] = (
    ("Training dynamics", DYNAMICS),
    ("Critic", CRITIC),
    ("Policy update and sampling", UPDATE),
    ("Time and memory", SPEED),
    ("Value pretraining", PRETRAINING),
    ("Warm start", WARM_START),
)
