"""Style of all pages: one column, one accent colour, light and dark mode, for screen and print."""

LIGHT = {
    "ink": "#1d2733", "soft": "#5b6774", "line": "#c9d1d9", "hair": "#e3e8ec", "wash": "#f4f6f7", "paper": "#ffffff",
    "accent": "#b3452c", "second": "#2f6690", "bar": "#b9c4ce",
}  # fmt: skip
"""Colours of light mode by the name of the CSS variable."""
DARK = {
    "ink": "#e4e8ec", "soft": "#9ba7b3", "line": "#46515c", "hair": "#313a43", "wash": "#12171c", "paper": "#1a2027",
    "accent": "#ea8b6f", "second": "#74aede", "bar": "#4c5966",
}  # fmt: skip


def _variables(colors: dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


STYLE = """
:root {
  $light
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    $dark
  }
  /* Heat maps, and the scales beside them: nothing is the page's colour, much stands out from it, hues stay. */
  figure svg image, figure svg [id*="QuadMesh"], figure svg [id$="heat-end"] { filter: invert(.89) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--wash); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 50rem; margin: 0 auto; padding: 3rem 2.5rem 4rem; background: var(--paper); min-height: 100vh; }

h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .4rem; font-weight: 650; letter-spacing: -.015em;
  overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; line-height: 1.3; font-weight: 650; margin: 3.2rem 0 .9rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }
p { margin: .6rem 0; max-width: 42rem; }
header p { color: var(--soft); margin: 0; }
.note, figcaption, caption { color: var(--soft); font-size: .875rem; line-height: 1.5; }
.warning { border-left: 3px solid var(--accent); padding: .15rem 0 .15rem .9rem; margin: 1.2rem 0; }
.lead { color: var(--ink); }
header .warning { color: var(--ink); margin-top: 1.2rem; }
footer { margin-top: 3.2rem; padding-top: 1rem; border-top: 1px solid var(--line); color: var(--soft);
  font-size: .875rem; }

.result { display: flex; flex-wrap: wrap; gap: 1.2rem 3rem; margin: 2rem 0 1.4rem; }
.result div { min-width: 8rem; }
.result b { display: block; font-size: 2.6rem; line-height: 1.1; font-weight: 600; letter-spacing: -.02em; }
.result div:first-child b { color: var(--accent); }
.result span { color: var(--soft); font-size: .9rem; }

figure { margin: 1.4rem 0 2rem; break-inside: avoid; }
figure svg, figure img { display: block; width: 100%; height: auto; }
figure svg text { font-family: inherit; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
.narrow { display: none; }
figcaption { max-width: 42rem; margin-top: .3rem; }

/* A shadow at an edge says that there is more beyond it; it is covered where the table ends. */
.scroll { overflow-x: auto; margin: 1.2rem 0; background:
  linear-gradient(to right, var(--paper) 30%, transparent) left / 2.4rem 100% no-repeat local,
  linear-gradient(to left, var(--paper) 30%, transparent) right / 2.4rem 100% no-repeat local,
  linear-gradient(to right, var(--line), transparent) left / .7rem 100% no-repeat scroll,
  linear-gradient(to left, var(--line), transparent) right / .7rem 100% no-repeat scroll; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; line-height: 1.4; }
caption { text-align: left; padding-bottom: .5rem; }
th, td { text-align: left; padding: .34rem 1rem .34rem 0; border-bottom: 1px solid var(--hair);
  vertical-align: baseline; font-weight: 400; }
thead th, thead td { border-bottom-color: var(--line); color: var(--soft); font-size: .82rem; vertical-align: bottom; }
th:last-child, td:last-child { padding-right: 0; }
.number { text-align: right; white-space: nowrap; }
.strong th, .strong .number, .strong td { font-weight: 650; }
.bars { margin: 1.2rem 0; }
.bars .bar { width: 48%; padding-right: 0; vertical-align: middle; }
.bars svg { display: block; width: 100%; height: .8rem; }
.bars rect { fill: var(--bar); }
.bars .strong rect { fill: var(--accent); }
.pairs { margin: 1.2rem 0; }
.pairs th { color: var(--soft); white-space: nowrap; width: 1%; padding-right: 1.4rem; }
.pairs td { overflow-wrap: anywhere; }
.columns { columns: 2; column-gap: 3rem; margin-top: 1.2rem; }
.columns table { break-inside: avoid; margin: 0 0 1.6rem; }
.columns td { text-align: right; }
.columns th { padding-right: .8rem; }
.columns caption { color: var(--ink); font-weight: 650; }

pre, code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace; }
code { font-size: .86em; }
pre { font-size: .8125rem; line-height: 1.5; background: var(--wash); padding: .9rem 1.1rem; margin: .4rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4; border-radius: 3px; }
.sample { break-inside: auto; }
.prose { font: inherit; font-size: .9rem; }
.beside { display: grid; grid-template-columns: 1fr 1fr; gap: 1.2rem; margin-top: 1.2rem; }
.beside > div { min-width: 0; }
mark { background: none; color: inherit; text-decoration: underline; text-decoration-color: var(--accent);
  text-decoration-thickness: 2px; text-underline-offset: .2em; }
summary { cursor: pointer; color: var(--soft); font-size: .875rem; margin-top: 1.2rem; }
pre .prompt { font-weight: 700; color: var(--accent); }
pre mark { background: none; color: var(--accent); font-weight: 700; }
.attended mark { background: rgb(179 69 44 / 18%); font-weight: inherit; text-decoration: none; }
pre .target { border-bottom: 2px solid var(--second); }
pre .control { color: var(--soft); border: 1px solid var(--line); border-radius: 2px; padding: 0 .1em;
  font-size: .9em; }

@media screen and (max-width: 42rem) {
  main { padding: 1.6rem 1.1rem 3rem; }
  h1 { font-size: 1.6rem; }
  h2 { margin-top: 2.4rem; }
  .result { gap: 1rem 2rem; }
  .result b { font-size: 2.1rem; }
  .columns, .beside { columns: 1; grid-template-columns: 1fr; }
  .bars .bar { width: 30%; }
  .scroll table { font-size: .78rem; }
  .scroll th, .scroll td { padding-right: .5rem; }
  .scroll thead .number { white-space: normal; }
}
@media screen and (max-width: 36rem) {
  .wide { display: none; }
  .narrow { display: block; max-width: 30rem; }
}
@page { margin: 18mm 16mm; }
@media print {
  body { background: #fff; font-size: 10.5pt; }
  main { max-width: none; padding: 0; min-height: 0; }
  h2 { break-after: avoid; margin-top: 1.8rem; }
  .scroll { overflow: visible; }
  p, pre { orphans: 3; widows: 3; }
  table { font-size: 9pt; }
  th, td { padding-top: .15rem; padding-bottom: .15rem; }
  .columns { font-size: 8.5pt; columns: 3; column-gap: 2rem; }
  .columns table { font-size: 8pt; }
  pre { font-size: 8.5pt; }
  tr, .result, .bars, caption { break-inside: avoid; }
  thead { display: table-header-group; }
  pre { border: 1px solid var(--hair); background: none; }
  rect, svg *, mark { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
""".replace("$light", _variables(LIGHT)).replace("$dark", _variables(DARK))
