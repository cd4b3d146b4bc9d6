"""How the HTML report looks: on a screen, light or dark, and on paper."""

STYLE = """
:root { --ink:#1b1b1b; --soft:#626262; --paper:#ffffff; --card:#f6f7f8; --rule:#dfe2e5; --line:#0072B2; --warn:#B36B00;
  --bad:#C2410C; --good:#00704f; --link:#0b5cad; }
@media (prefers-color-scheme: dark) { :root { --ink:#e8e8e8; --soft:#a3a3a3; --paper:#141618; --card:#1d2023;
  --rule:#33373b; --line:#56B4E9; --warn:#E69F00; --bad:#ff7a45; --good:#3ecf9f; --link:#7ab8ff; } }
* { box-sizing:border-box; }
body { margin:0 auto; max-width:1080px; padding:2rem 1.25rem 4rem; background:var(--paper); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif; font-variant-numeric:tabular-nums; }
h1 { font-size:1.6rem; line-height:1.25; margin:0; overflow-wrap:anywhere; }
h2 { font-size:1.1rem; margin:2.4rem 0 .7rem; padding-bottom:.25rem; border-bottom:1px solid var(--rule); }
h3 { font-size:1rem; margin:1.2rem 0 .3rem; }
p { margin:.4rem 0; max-width:80ch; }
.soft { color:var(--soft); font-size:.87rem; } .status { font-weight:600; }
.critical { color:var(--bad); } .warning { color:var(--warn); } .good { color:var(--good); }
dl.head { display:grid; grid-template-columns:max-content 1fr; gap:.1rem 1rem; margin:.9rem 0 0; font-size:.9rem; }
dl.head dt { color:var(--soft); } dl.head dd { margin:0; overflow-wrap:anywhere; }
.cause { background:var(--card); border-left:4px solid var(--line); padding:.8rem 1rem; border-radius:4px; }
.cause.strong { border-color:var(--bad); } .cause.plausible { border-color:var(--warn); }
.cause .name { font-size:1.1rem; font-weight:600; }
ol.do { padding-left:1.4rem; } ol.do > li { margin:.7rem 0; } ol.do b { font-weight:600; }
.badge { font-size:.75rem; border:1px solid var(--rule); border-radius:3px; padding:0 .35rem; margin-left:.4rem;
  color:var(--soft); white-space:nowrap; }
.badge.measured { color:var(--good); border-color:currentColor; }
.opt { display:block; font-size:.87rem; margin-top:.15rem; } .opt .who { color:var(--soft); margin-right:.4rem; }
code, .token { font:.85em/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace; background:var(--card);
  padding:.05em .3em; border-radius:3px; overflow-wrap:anywhere; white-space:pre-wrap; }
.cause code { background:var(--paper); }
.scroll { overflow-x:auto; }
table { border-collapse:collapse; width:100%; font-size:.87rem; }
th { text-align:left; color:var(--soft); font-weight:500; }
th, td { padding:.28rem .7rem .28rem 0; border-bottom:1px solid var(--rule); vertical-align:top; }
td { overflow-wrap:anywhere; } td.n, th.n { text-align:right; white-space:nowrap; overflow-wrap:normal; }
td.w { overflow-wrap:normal; } td.what { min-width:16rem; }
.charts { display:grid; grid-template-columns:repeat(auto-fill,minmax(320px,1fr)); gap:1rem 1.4rem; }
figure { margin:0; } figcaption { font-size:.9rem; font-weight:600; overflow-wrap:anywhere; }
figcaption span { font-weight:400; color:var(--soft); font-size:.8rem; margin-left:.4rem; }
svg { width:100%; height:auto; display:block; }
svg text { font:10px system-ui,sans-serif; fill:var(--soft); }
svg .grid { stroke:var(--rule); stroke-width:1; }
svg .line { fill:none; stroke:var(--line); stroke-width:1.4; stroke-linejoin:round; }
svg .dot { fill:var(--line); } svg .level { stroke:var(--soft); stroke-dasharray:2 3; }
svg .bad { stroke:var(--bad); stroke-width:2; } svg .badword { fill:var(--bad); }
svg .mark { stroke:var(--soft); stroke-dasharray:4 3; } svg .mark.critical { stroke:var(--bad); }
svg .mark.warning { stroke:var(--warn); } svg .markno { font-weight:600; fill:var(--ink); }
.no { display:inline-block; min-width:1.35em; text-align:center; border:1px solid currentColor; border-radius:50%;
  font-size:.75rem; line-height:1.3em; font-weight:600; }
details > summary { cursor:pointer; color:var(--link); margin:.5rem 0; }
footer { margin-top:3rem; color:var(--soft); font-size:.8rem; }
@media print { body { max-width:none; padding:0; font-size:11px; } h2 { break-after:avoid; }
  figure, li { break-inside:avoid; } }
"""
