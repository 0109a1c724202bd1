"""The page's looks: system fonts, aligned numbers, one accent; light, dark and paper; from 320 pixels up.

Colours are named by meaning. The pairs of ink and ground keep a contrast of 4.5 to 1 in both themes, shaded cells of
the confusion matrix included: a browser test measures them.
"""


def _shades(name: str, colour: str, alphas: tuple[float, ...], flipped: int) -> str:
    """Returns classes `name1` to `name9`; from `flipped` on, the ground is so strong that the ink is the page's."""
    rules = []
    for level, alpha in enumerate(alphas, start=1):
        ink = ";color:var(--ground)" if level >= flipped else ""
        rules.append(f".{name}{level}{{background:rgba({colour},{alpha}){ink}}}")
    return "".join(rules)


_LIGHT_SHADES = (0.08, 0.15, 0.22, 0.30, 0.38, 0.46, 0.88, 0.94, 1)
_DARK_SHADES = (0.16, 0.20, 0.24, 0.29, 0.34, 0.39, 0.86, 0.93, 1)

_LIGHT = """\
--ground:#fff;--raised:#f5f7f9;--ink:#15191e;--soft:#57606a;--line:#dfe4e9;--plain:#7b8590;
--accent:#0c5fa8;--good:#11703f;--bad:#ae3518;--faint:#b9c2cb;"""

_DARK = """\
--ground:#0f1317;--raised:#171c22;--ink:#e7ebef;--soft:#a1abb6;--line:#2b333c;--plain:#8b96a2;
--accent:#6fb4f6;--good:#62cb92;--bad:#f3937a;--faint:#46505b;"""

STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT}}}"
    + _shades("h", "12,95,168", _LIGHT_SHADES, 7)
    + _shades("m", "174,53,24", _LIGHT_SHADES, 7)
    + f"@media (prefers-color-scheme:dark){{:root{{{_DARK}}}"
    + _shades("h", "111,180,246", _DARK_SHADES, 7)
    + _shades("m", "243,147,122", _DARK_SHADES, 7)
    + "}"
    + """
*{box-sizing:border-box}
html{background:var(--ground);color:var(--ink);-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0 auto;max-width:76rem;padding:clamp(1.5rem,5vw,4rem) clamp(1rem,4vw,3rem) 3rem;
  font:400 1rem/1.6 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
  font-variant-numeric:tabular-nums lining-nums;overflow-wrap:anywhere}
p,ul,dl,dd,figure,blockquote{margin:0;padding:0}
ul{list-style:none}
svg{display:block;overflow:visible}
small{font-size:.8125rem;color:var(--soft)}
:focus-visible{outline:2px solid var(--accent);outline-offset:3px;border-radius:4px}
h1,h2,h3{font-weight:600;line-height:1.2;letter-spacing:-.015em;margin:0;text-wrap:balance}
h2:focus,h1:focus{outline:none}

header{padding-bottom:clamp(2rem,5vw,3.5rem)}
.eyebrow{color:var(--soft);font-size:.875rem;margin-bottom:1rem}
h1{font-size:clamp(2rem,6vw,3.25rem);letter-spacing:-.03em;line-height:1.1}
.decision{font-weight:600}
.sign{display:inline-block;width:1em;height:1em;vertical-align:-.12em;fill:none;stroke:currentColor;stroke-width:2.5;
  stroke-linecap:round;stroke-linejoin:round}
h1 .sign{width:.8em;height:.8em;vertical-align:-.04em;stroke-width:3}
.good{color:var(--good)}.bad{color:var(--bad)}.unknown{color:var(--soft)}
.stated{margin-top:.75rem;font-weight:600}
.lead{margin-top:1rem;font-size:1.125rem;color:var(--soft);max-width:44rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(7.75rem,100%),1fr));gap:1.75rem 1.5rem;
  margin-top:clamp(2rem,4vw,3rem);padding-top:1.5rem;border-top:1px solid var(--line)}
.figures dt{font-size:.875rem;color:var(--soft)}
.figures dd{font-size:1.75rem;line-height:1.3;letter-spacing:-.02em;font-weight:500}
.figures dd.note,.figures .change{white-space:normal;font-size:.875rem;letter-spacing:0;font-weight:400}
.figures dd.note{color:var(--soft)}
.figures .change{display:inline-block;font-size:1.125rem;font-weight:500;line-height:1.4;padding:.35rem 0 .3rem}

section+section{margin-top:clamp(3rem,7vw,5rem)}
h2{font-size:1.5rem;padding-bottom:1rem;scroll-margin-top:1.5rem}
h3{font-size:1rem;letter-spacing:0}
section>p{max-width:44rem;color:var(--soft);margin-bottom:1.25rem}
section>p:last-child{margin:1rem 0 0}
.scroll+.scroll,.scroll+figure,figure+.scroll,section>details,.pair+details{margin-top:2rem}
section>details+details{margin-top:0}
section>h2+details{margin-top:.5rem}
.reasons{margin-bottom:2rem;max-width:44rem}
.reasons li{padding-left:1.25rem;position:relative}
.reasons li+li{margin-top:.5rem}
.reasons li:before{content:"";position:absolute;left:0;top:.7em;width:.5rem;border-top:1px solid var(--soft)}

.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;width:100%;font-size:.9375rem;line-height:1.45}
caption{text-align:left;color:var(--soft);font-size:.875rem;padding-bottom:.625rem}
th,td{text-align:left;vertical-align:top;padding:.625rem 1.25rem .625rem 0;font-weight:400;overflow-wrap:break-word;
  border-bottom:1px solid var(--line)}
th:last-child,td:last-child{padding-right:0}
thead th{color:var(--soft);font-size:.8125rem;vertical-align:bottom;border-bottom-color:var(--soft)}
tbody th{font-weight:500}
.n{text-align:right;white-space:nowrap}
td small,th small{display:block;line-height:1.4;font-weight:400}
.outcome,.change,.whole{white-space:nowrap}
.outcome .sign{margin-right:.4em}
.rules td:last-child,.rules th:last-child{padding-left:1.5rem;width:9rem}
.gap{width:11rem}
.name{min-width:4.75rem;max-width:20rem;overflow-wrap:anywhere}
.values{table-layout:fixed}
.values .name{width:38%;max-width:none;font-weight:400;color:var(--soft)}
.values td{white-space:pre-wrap;overflow-wrap:anywhere}
.bar{width:100%;min-width:4rem;height:12px;margin-top:.125rem}
.track{fill:var(--line)}.fill{fill:var(--accent)}.tick{fill:var(--ink);stroke:var(--ground);stroke-width:1.5;paint-order:stroke}.behind{fill:var(--bad)}.ahead{fill:var(--plain)}
.classes .n{width:21%}
.classes .n:nth-child(n+4){width:13%}
.strip{width:12rem;padding-left:1rem}
.ends{display:flex;justify-content:space-between}
.whiskers{width:100%;height:auto;max-height:1.5rem}
.whiskers .grid{stroke:var(--line)}
.whisker{stroke:var(--accent);stroke-width:2}.before{stroke:var(--soft);stroke-width:2}.now{fill:var(--accent)}

.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(20rem,100%),1fr));gap:2.5rem 3rem;align-items:start}
figcaption{margin-bottom:.75rem}
figcaption p{color:var(--soft);font-size:.875rem;margin-top:.25rem}
.chart{width:100%;max-width:36rem;height:auto;font-size:12px}
.chart text{fill:var(--soft)}
.chart path{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round;vector-effect:non-scaling-stroke}
.end{text-anchor:end}.mid{text-anchor:middle}
.chart .grid{stroke:var(--line)}.axis{stroke:var(--soft)}
.diagonal{stroke:var(--soft);stroke-dasharray:2 5}
.mark{stroke:var(--accent);stroke-dasharray:3 4}
.ring{fill:var(--ground);stroke:var(--accent);stroke-width:2.5}
path.plain{stroke:var(--plain);stroke-dasharray:6 5}path.strong{stroke:var(--accent)}
path.fine{stroke:var(--plain);stroke-width:1}
path.dashed{stroke:var(--ink);stroke-dasharray:7 5}path.dotted{stroke:var(--ink);stroke-dasharray:1.5 5}
.chart path.fine{stroke-width:1.25}
.chart path.faint,path.faint{stroke:var(--faint);stroke-width:1}
.chart path.cross{stroke:var(--bad)}
.dot.plain{fill:var(--plain)}.dot.strong{fill:var(--accent)}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;font-size:.875rem;margin-bottom:.75rem}
.legend li{display:flex;align-items:center;gap:.5rem}
.legend svg{width:28px;height:12px;flex:none}
.legend path{fill:none;stroke-width:2;stroke-linecap:round}

.matrix{width:auto;border-collapse:separate;border-spacing:2px;font-size:.875rem;line-height:1.2}
.beside{display:flex;flex-wrap:wrap;gap:2.5rem 3rem;align-items:flex-start}
.beside>.scroll{margin:0}
.beside>.scroll:last-child{flex:1 1 18rem}
.beside .name{min-width:0}
.matrix caption{position:sticky;left:0;max-width:min(32rem,calc(100vw - 2rem))}
.matrix th,.matrix td{border:0;padding:.25rem;text-align:center;vertical-align:middle;border-radius:3px}
.matrix thead th{color:var(--ink);vertical-align:bottom;font-size:inherit}
.matrix tbody th{text-align:right;padding-right:.625rem;white-space:nowrap;background:var(--ground);
  position:sticky;left:0}
.matrix tbody td{min-width:2.5rem;height:2.5rem}
.matrix td:not([class]){background:var(--raised)}
.matrix .corner{color:var(--soft);font-size:.75rem;vertical-align:bottom;text-align:right;padding-right:.625rem}
.corner span{display:block;white-space:nowrap}
.matrix.dense{font-size:.75rem;border-spacing:1px}
.matrix.dense tbody td{min-width:1.75rem;height:1.75rem;padding:0}
.upright thead th span{writing-mode:vertical-rl;transform:rotate(180deg);display:inline-block;white-space:nowrap}
.picture{border:1px solid var(--line);border-radius:4px;padding:4px;max-width:48rem}
.picture img{display:block;width:100%;height:auto}
.axes{display:block;color:var(--soft);font-size:.8125rem;margin-bottom:.375rem}
.crisp,.crisp img{image-rendering:pixelated}

.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(8.5rem,100%),1fr));gap:2rem 1.5rem}
.cards img{display:block;width:100%;aspect-ratio:1;object-fit:contain;background:var(--raised);border-radius:6px}
.cards figcaption{margin:.625rem 0 0;line-height:1.4}
.cards dl{font-size:.875rem;margin-bottom:.25rem;overflow-wrap:anywhere}
.cards dl div{display:flex;gap:.5rem;align-items:baseline}
.cards dt{color:var(--soft);flex:none}.cards dd{font-weight:600}
.cards dd+dd{margin-left:auto;font-weight:400;white-space:nowrap}
.cards .long div{flex-wrap:wrap;row-gap:0}.cards .long div+div{margin-top:.375rem}
.cards .long dd:first-of-type{order:3;flex-basis:100%}
.cards small{display:block}
.cards .row div{display:block;margin-top:.25rem}.cards .row div:first-child{margin-top:0}
.cards .row dt{font-size:.75rem;line-height:1.3}.cards .row dd{font-weight:400;line-height:1.35}
.absent,blockquote,.cards .row{background:var(--raised);border-radius:6px;padding:.75rem;font-size:.875rem}

details{border-bottom:1px solid var(--line)}
details:first-of-type{border-top:1px solid var(--line)}
summary{cursor:pointer;padding:.875rem 0;font-weight:500}
summary::marker{color:var(--soft);font-size:.8em}
summary:hover{color:var(--accent)}
summary small{margin-left:.5rem}
.folded{padding:.5rem 0 1.75rem}
.folded caption{position:absolute;width:1px;height:1px;padding:0;overflow:hidden;clip-path:inset(50%)}
footer{margin-top:clamp(3rem,7vw,5rem);color:var(--soft);font-size:.875rem}

nav ul{display:flex;flex-wrap:wrap;gap:.125rem 1.25rem;margin-bottom:3rem}
nav button{font:inherit;font-size:.9375rem;color:var(--soft);background:none;border:0;padding:.3rem 0;text-align:left;
  cursor:pointer}
nav button:hover{color:var(--ink)}
nav [aria-current]{color:var(--accent);font-weight:500}
@media (min-width:64rem){
  .columns{display:grid;grid-template-columns:minmax(0,1fr) 11rem;gap:4rem}
  main{grid-area:1/1;min-width:0}
  nav{grid-area:1/2;position:sticky;top:2rem;align-self:start}
  nav ul{display:block;border-left:1px solid var(--line);padding-left:1.25rem}
}
@media (max-width:40rem){
  .wide{display:none}
  .n,.change{white-space:normal}
  .n:has(+.wide){padding-right:0}
  .rules td:last-child,.rules th:last-child{padding-left:0;width:auto}
  .rules small{display:none}
  th,td{padding-right:.75rem}
  table{font-size:.875rem}
  .bar{min-width:2.5rem}
  .name{min-width:6.5rem}
  .gap{width:auto}.gap .bar{display:none}
  .cards{grid-template-columns:repeat(2,minmax(0,1fr))}
}
@media (max-width:28rem){.chart{font-size:16px}}
@media (prefers-reduced-motion:no-preference){nav button,summary{transition:color .15s}}
@media print{
  body{padding:0;font-size:10pt;max-width:none}
  nav{display:none}
  .columns{display:block}
  section+section{margin-top:2rem}
  .chart{font-size:15px}
  h2,h3,caption,summary,section>p{break-after:avoid}
  figure,tr,.cards li,.figures div{break-inside:avoid}
  .scroll{overflow:visible}
  .track,.fill,.tick,.behind,.ahead,.matrix td{print-color-adjust:exact;-webkit-print-color-adjust:exact}
}
@media print and (prefers-color-scheme:dark){:root{"""
    + _LIGHT
    + "}"
    + _shades("h", "12,95,168", _LIGHT_SHADES, 7)
    + _shades("m", "174,53,24", _LIGHT_SHADES, 7)
    + "}\n"
)
