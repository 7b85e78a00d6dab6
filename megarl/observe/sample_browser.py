"""The report's sample browser: prompts, the responses of a group, their rewards, and each token coloured by what it was worth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from megarl.observe import page
from megarl.observe.runs import Run
from megarl.observe.samples import Sample, shorten

GROUPS_SHOWN, RESPONSES_SHOWN, MORE_STEPS, MORE_CHARACTERS, ANSWER_CHARACTERS = 2, 4, 6, 1500, 200
LEVELS = 4  # of colour on either side of 0
WORTHS = ("advantage", "value")
Scales = dict[str, float]


def pick_steps(samples: Sequence[Sample]) -> dict[str, int]:
    """The first, the middle and the last step of training (else of any stage) that have samples; only those with tokens, if any has."""
    steps = _steps(samples)
    if not steps:
        return {}
    picked = {"Early": steps[0], "Middle": steps[len(steps) // 2], "Late": steps[-1]}
    return {name: step for i, (name, step) in enumerate(picked.items()) if step not in list(picked.values())[:i]}


def _steps(samples: Sequence[Sample]) -> list[int]:
    trained = [s for s in samples if s.stage == "train"] or samples
    return sorted({s.step for s in [s for s in trained if s.tokens] or trained})


def browser(run: Run, number: int, named: bool) -> str:
    """The section of one run, the `number`-th of the page; empty where it has no samples."""
    picked = pick_steps(run.samples)
    if not picked:
        return ""
    stage = "train" if any(s.stage == "train" for s in run.samples) else None
    by_step: dict[int, list[Sample]] = {}
    for sample in run.samples:
        if stage in (None, sample.stage):
            by_step.setdefault(sample.step, []).append(sample)
    scales = _scales([sample for step in picked.values() for sample in by_step[step]])
    cards = [_card(name, step, by_step[step], scales) for name, step in picked.items()]
    rest = [step for step in _steps(run.samples) if step not in picked.values()]
    more = [rest[i * len(rest) // MORE_STEPS] for i in range(MORE_STEPS)] if len(rest) > MORE_STEPS else rest
    fold = "\n".join(_card("Samples", step, [_plain(sample) for sample in by_step[step]], {}) for step in more)
    title = f"Samples of {run.name}" if named else "Samples"
    return page.section(
        title,
        f'<div class="browser">\n{_choice(scales, number)}<div class="samples">\n' + "\n".join(cards) + "\n</div>\n</div>",
        f'<details><summary>{len(more)} more steps</summary>\n<div class="samples">\n{fold}\n</div></details>' if more else "",
    )


def _plain(sample: Sample) -> Sample:
    return Sample(**{**vars(sample), "tokens": None, "response": shorten(sample.response, MORE_CHARACTERS)})


def _card(name: str, step: int, samples: Sequence[Sample], scales: Scales) -> str:
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample)
    shown = "\n".join(_group(prompt, group, scales) for prompt, group in list(groups.items())[:GROUPS_SHOWN])
    return f'<div class="card"><h3>{name} <span class="unit">step {step}</span></h3>\n{shown}</div>'


def _group(prompt: str, group: Sequence[Sample], scales: Scales) -> str:
    tags = ["Prompt", *([f"answer {shorten(str(group[0].answer), ANSWER_CHARACTERS)}"] if group[0].answer else [])]
    if group[0].group_size:
        tags.append(f"{group[0].group_right} of its {group[0].group_size} responses right")
    responses = "\n".join(_response(sample, scales) for sample in group[:RESPONSES_SHOWN])
    return f'<div class="group"><p class="tags">{escape(" · ".join(tags))}</p><pre>{escape(prompt)}</pre>\n{responses}</div>'


def _response(sample: Sample, scales: Scales) -> str:
    verdict = '<b class="right">✓ right</b>' if sample.correct else '<b class="wrong">✗ wrong</b>'
    tags = [f"{sample.length} tokens"]
    if sample.reward is not None:
        tags.insert(0, f"reward {sample.reward:+.3g}")
    if sample.truncated:
        tags.append("truncated")
    if sample.advantage_mean is not None:
        tags.append(f"mean advantage {sample.advantage_mean:+.2g}")
    text = "".join(_tokens(sample, scales)) if sample.tokens else escape(sample.response)
    return f'<div class="response"><p class="tags">{verdict}{escape(" · ".join(tags))}</p><pre>{text}</pre></div>'


def _numbers(sample: Sample) -> dict[str, Sequence[float | None]]:
    return {name: found for name, found in zip(WORTHS, (sample.advantages, sample.values), strict=True) if found}


def _scales(samples: Sequence[Sample]) -> Scales:
    """worth -> its size at which the colour is strongest: that of all shown tokens but the largest two per cent."""
    scales = {}
    for name in WORTHS:
        sizes = sorted(abs(x) for sample in samples for x in _numbers(sample).get(name, ()) if x is not None)
        if sizes and sizes[-1] > 0:
            scales[name] = sizes[int(0.98 * (len(sizes) - 1))] or sizes[-1]
    return scales


def level(number: float, scale: float) -> int:
    """The colour of a number, from -LEVELS to LEVELS."""
    return max(-LEVELS, min(LEVELS, round(LEVELS * number / scale)))


def _tokens(sample: Sample, scales: Scales) -> Iterable[str]:
    """The tokens as spans; neighbours that are worth the same are one."""
    numbers = {name: found for name, found in _numbers(sample).items() if name in scales}
    texts, before = "", None
    for at, token in enumerate(sample.tokens or ()):
        worth = tuple(found[at] if at < len(found) else None for found in numbers.values())
        if worth != before:
            yield _span(texts, dict(zip(numbers, before or (), strict=False)), scales)
            texts, before = "", worth
        texts += token
    yield _span(texts, dict(zip(numbers, before or (), strict=False)), scales)


def _span(text: str, worth: dict[str, float | None], scales: Scales) -> str:
    known = {name: x for name, x in worth.items() if x is not None}
    if not text or not known:
        return escape(text)
    levels = {name: level(x, scales[name]) for name, x in known.items()}
    classes = " ".join(f"{name[0]}{'p' if n > 0 else 'n'}{abs(n)}" for name, n in levels.items() if n)
    title = ", ".join(f"{name} {x:+.3g}" for name, x in known.items())
    shown = escape(text).replace("\n", "↵\n")  # a line's end has no width that could be coloured
    return f'<span class="{classes}" title="{title}">{shown}</span>'


def _choice(scales: Scales, number: int) -> str:
    """Which worth colours the tokens, and what the colours mean; nothing where there are none."""
    if not scales:
        return ""
    names = [*scales, "none"]
    buttons = "".join(
        f'<input type="radio" name="worth-{number}" id="worth-{number}-{name}" class="by-{name}"{" checked" if not i else ""}>'
        f'<label for="worth-{number}-{name}">{"no colours" if name == "none" else name}</label>'
        for i, name in enumerate(names)
    )
    return f'<span class="muted">Tokens coloured by</span>\n{buttons}\n' + "".join(_scale(name, scale) for name, scale in scales.items())


def _scale(name: str, scale: float) -> str:
    steps = [f"{name[0]}n{n}" for n in range(LEVELS, 0, -1)] + [""] + [f"{name[0]}p{n}" for n in range(1, LEVELS + 1)]
    swatches = "".join(f'<i class="{step}"></i>' if step else "<i></i>" for step in steps)
    return f'<p class="scale {name}">{-scale:+.2g} {swatches} {scale:+.2g} <span class="muted">and beyond</span></p>\n'
