"""The frame of pages: one file each, both colour schemes, no network."""

from string import Template

from memplan.estimator import Verdict

VERDICT_CLASSES = {
    Verdict.FITS: "fits", Verdict.TIGHT: "tight", Verdict.OOM: "oom",
    Verdict.STATES_FIT: "states",
}  # fmt: skip
VERDICT_MARKS = {"fits": "✓", "tight": "~", "oom": "✗", "states": "?", "": ""}
"""A verdict without its colour, for print."""

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
$head
$sections</main>
</body>
</html>
""")
STYLE = Template("""
:root{color-scheme:light dark;$light}
@media screen and (prefers-color-scheme:dark){:root{$dark}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:1.25rem}
h1{display:inline-block;font-size:1.7rem;margin:0 .7rem 0 0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2rem 0 .6rem;border-bottom:1px solid var(--edge);padding-bottom:.25rem}
header .fix{color:var(--ink);font-weight:600;overflow-wrap:anywhere}
header p,small,.note,figcaption{color:var(--soft)}
.note{font-size:.85rem;margin:.3rem 0;overflow-wrap:anywhere}
.badge{display:inline-block;padding:.05rem .6rem;border-radius:1rem;font-weight:600;white-space:nowrap}
.fits{background:var(--fits)}.tight{background:var(--tight)}.oom{background:var(--oom)}
.states{background:var(--states)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:.6rem}
.card{background:var(--panel);border:1px solid var(--edge);border-radius:.5rem;padding:.5rem .7rem}
.card span,.card small{display:block;font-size:.8rem;color:var(--soft)}
.card b{font-size:1.15rem}
figure{margin:1.6rem 0 1rem}
.swatch{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.35em}
.swatch.long{background:var(--long)}.swatch.medium{background:var(--medium)}
.swatch.short{background:var(--short)}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;font-size:.8rem;margin:.4rem 0}
.stage{display:flex;width:14rem;height:1rem}.stage .long{background:var(--long)}
.stage .medium{background:var(--medium)}.stage .short{background:var(--short)}
.scroll{overflow-x:auto;margin:.6rem 0;background:linear-gradient(to right,var(--back),transparent)
0 0/2rem 100% no-repeat local,linear-gradient(to left,var(--back),transparent) 100% 0/2rem 100%
no-repeat local,linear-gradient(to right,var(--edge),transparent) 0 0/.7rem 100% no-repeat scroll,
linear-gradient(to left,var(--edge),transparent) 100% 0/.7rem 100% no-repeat scroll}
.scroll:focus-visible{outline:2px solid var(--long)}
caption{caption-side:top;text-align:left;color:var(--soft);padding-bottom:.2rem}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums;min-width:50%}
th,td{padding:.25rem .9rem .25rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--edge)}
th{color:var(--soft);font-weight:600}
.figure{text-align:right;white-space:nowrap}
.total td{font-weight:700}
.heat th,.heat td{text-align:right;padding:.3rem .5rem;border:1px solid var(--edge)}
.heat .own{outline:2px solid var(--ink);outline-offset:-2px;font-weight:700}
details{margin:.15rem 0 .15rem .2rem}
details>*:not(summary){margin-left:1.1rem}
summary{cursor:pointer}
.leaf{padding-left:1.05rem;overflow-wrap:anywhere}
li{margin:.2rem 0}
@media (max-width:600px){main{padding:.8rem}}
@media print{body{font-size:11px}main{max-width:none;padding:0}section{break-inside:auto}
figure,.heat,.cards,tr{break-inside:avoid}h2{break-after:avoid}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
.scroll{overflow:visible}details::details-content{content-visibility:visible;block-size:auto}}
""")
