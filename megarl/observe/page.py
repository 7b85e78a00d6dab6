"""The report's HTML: its style sheet and the few elements that it is put together from. Everything that is text gets escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from megarl.observe.plots import COLOURS

DARK_COLOURS = ("#6aa5ff", "#ff9465", "#45cfa0", "#cf92ee", "#e3b341", "#ff7fa6", "#4cc4dd", "#b3c46a", "#c9a088", "#9fb0c6")

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1d2530; --muted: #657183; --grid: #e2e6eb; --good: #0f7a54; --bad: #b3402a;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --mono: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161c; --card: #1b2129; --ink: #e6eaf0; --muted: #9aa7b8; --grid: #303945;
    --good: #4fd1a1; --bad: #ff8f73; DARK }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 var(--sans); }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 44px 0 12px; }
h3 { font-size: 1rem; margin: 0; }
p { margin: 0; }
.muted, .look { color: var(--muted); }
.card { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; padding: 14px 16px; min-width: 0; }
.grid { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); }
.head { display: flex; flex-wrap: wrap; gap: 14px; margin-top: 18px; }
.headline { flex: 1 1 300px; } .facts { flex: 3 1 480px; }
.big { font-size: 2.3rem; line-height: 1.15; font-weight: 650; font-variant-numeric: tabular-nums; margin: 4px 0; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(210px, 100%), 1fr)); gap: 10px 18px; margin: 0; }
dl .wide { grid-column: 1 / -1; }
dt { color: var(--muted); font-size: .8rem; } dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 0; display: flex; flex-direction: column; }
figure svg { width: 100%; height: auto; margin: 8px 0 6px; overflow: visible; }
svg text { font-family: var(--sans) !important; }
.unit { color: var(--muted); font-weight: 400; font-size: .85rem; }
.look { font-size: .85rem; line-height: 1.4; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: .82rem; margin: 0 0 6px; padding: 0; list-style: none; }
.legend { overflow-wrap: anywhere; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
.runs { position: sticky; top: 0; background: var(--page); border-bottom: 1px solid var(--grid); padding: 8px 0;
  margin: 14px 0 0; z-index: 1; }
.samples { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); align-items: start; }
.samples h3 { margin-bottom: 8px; }
pre { font: .8rem/1.45 var(--mono);
  white-space: pre-wrap; overflow-wrap: anywhere; margin: 6px 0 0; max-height: 15rem; overflow-y: auto; }
.response { border-top: 1px solid var(--grid); margin-top: 10px; padding-top: 8px; }
.group + .group { margin-top: 18px; }
.tags { font-size: .8rem; color: var(--muted); overflow-wrap: anywhere; } .tags b { margin-right: 6px; }
.right { color: var(--good); } .wrong { color: var(--bad); }
.browser label { margin: 0 12px 0 3px; font-size: .88rem; } .browser input { margin: 0 0 0 10px; accent-color: var(--s0); }
.browser .samples, details .samples { margin-top: 10px; }
.scale { display: none; font-size: .82rem; font-variant-numeric: tabular-nums; margin-top: 6px; }
.scale i { display: inline-block; width: 16px; height: 12px; border: 1px solid var(--grid); margin-left: -1px; vertical-align: -1px; }
.browser pre span { border-radius: 2px; }
WORTH
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; }
th { text-align: left; color: var(--muted); font-weight: 500; }
td, th { padding: 3px 14px 3px 0; border-bottom: 1px solid var(--grid); vertical-align: top; overflow-wrap: anywhere; }
td:first-child { font-family: var(--mono); font-size: .8rem; min-width: 10.5rem; } td + td { min-width: 5.5rem; }
tr.differs td { font-weight: 650; }
details { margin-top: 10px; } summary { cursor: pointer; font-weight: 600; }
.note { margin-top: 14px; font-size: .88rem; }
@media (max-width: 600px) {
  dl { grid-template-columns: 1fr 1fr; } main { padding: 20px 12px 40px; } .card { padding: 12px; } h2 { margin-top: 34px; }
  .browser > span { display: block; } .browser input:first-of-type { margin-left: 0; }
}
@media print { .card { break-inside: avoid; } .runs { position: static; } }
"""


def document(title: str, body: Iterable[str]) -> str:
    """The whole page, which refers to nothing outside itself."""
    style = STYLE.replace("LIGHT", _variables(COLOURS)).replace("DARK", _variables(DARK_COLOURS)).replace("WORTH", _worth())
    content = "\n".join(part for part in body if part)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n{content}\n</main>\n</body>\n</html>\n"
    )


def _variables(colours: Sequence[str]) -> str:
    return " ".join(f"--s{i}: {colour};" for i, colour in enumerate(colours))


def _worth() -> str:
    """Rules for the tokens of the sample browser: classes an4 ... ap4 where advantages are chosen, vn4 ... vp4 where values are. Blue above
    0 and orange below it differ for colour-blind eyes too; both are thin enough for the ink on them."""
    rules = []
    for name in ("advantage", "value"):
        for sign, colour in (("n", 1), ("p", 0)):
            for n in range(1, 5):
                step = f".{name[0]}{sign}{n}"
                shade = f"background: color-mix(in srgb, var(--s{colour}) {5 + 12 * n}%, transparent);"
                rules.append(f".by-{name}:checked ~ .samples {step}, .scale {step} {{ {shade} }}")
        rules.append(f".by-{name}:checked ~ .scale.{name} {{ display: block; }}")
    return "\n".join(rules)


def swatch(colour: str) -> str:
    """A small square in a series colour of the light palette (dark mode swaps it)."""
    return f'<i style="background: var(--s{COLOURS.index(colour)})"></i>'


def legend(entries: Iterable[tuple[str, str]], kind: str = "legend") -> str:
    """(colour, text) pairs in a row; empty without entries."""
    items = "".join(f"<li>{swatch(colour)}{escape(text)}</li>" for colour, text in entries)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def section(title: str, *parts: str) -> str:
    """A headed section; empty where it has nothing to say."""
    content = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """A list of named facts; those without a value are left out."""
    items = "".join(
        f"<div{' class=wide' if len(str(value)) > 40 else ''}><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in pairs
        if value not in (None, "")
    )
    return f"<dl>{items}</dl>" if items else ""


def figure(title: str, unit: str, svg: str, entries: Iterable[tuple[str, str]], look: str) -> str:
    """A card with a figure and the sentence that says what to look for."""
    named = svg.replace('role="img"', f'role="img" aria-label="{escape(title)}"', 1)
    small = f' <span class="unit">{escape(unit)}</span>' if unit else ""
    return (
        f'<figure class="card">\n<h3>{escape(title)}{small}</h3>\n{named}\n{legend(entries)}<p class="look">{escape(look)}</p>\n</figure>'
    )


def table(heads: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]]) -> str:
    """A table; each row comes with whether it is to stand out."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(
        f"<tr{' class=differs' if marked else ''}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for cells, marked in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
