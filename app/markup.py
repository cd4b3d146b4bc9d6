"""HTML built by one function that escapes all data, and the style sheet of its classes."""

from __future__ import annotations

from rlwatch.wording import Markup, el, joined

__all__ = ["DARK_STYLE", "STYLE", "Markup", "el", "joined"]

STYLE = """<style>
[data-testid="stMainBlockContainer"] { padding-top: 4.2rem; padding-bottom: 3rem; max-width: 1760px; margin: 0; }
@media (min-width: 641px) { [data-testid="stMainBlockContainer"] { padding-left: 1.5rem; padding-right: 1.5rem; } }
[data-testid="stLayoutWrapper"]:has(> [data-testid="stVerticalBlock"]:empty) { display: none; }
[data-testid="stElementContainer"]:is(:has(.rl-who), .st-key-board-library) { position: absolute; left: 0; width: 1px; }
[data-testid="stStatusWidget"] { margin-right: 18rem; }
.rl-who { position: fixed; top: 0; right: 1.5rem; height: 3.75rem; display: flex; align-items: center; gap: .35em;
  z-index: 999991; font-size: .8rem; opacity: .75; white-space: nowrap; }
.rl-who span { max-width: 14rem; overflow: hidden; text-overflow: ellipsis; }
.rl-who a { color: inherit; }
@media (max-width: 640px) { .rl-who { right: 1rem; } .rl-who span { max-width: 7rem; } }
@media (max-width: 640px) {
  .st-key-search, .st-key-run-head > [data-testid="stElementContainer"]:first-child { flex: 1 0 100% !important; }
  .st-key-filters [data-testid="stColumn"]:not(:nth-child(3)) {
    min-width: calc(50% - .5rem) !important; flex: 1 1 calc(50% - .5rem) !important; }
  .st-key-filters [data-testid="stColumn"]:nth-child(3) { min-width: 100% !important; }
}
/* a menu opens above or below its button, and one of the two has nearly half of the screen */
[data-testid="stMenuButtonBody"] { max-height: 45vh; overflow-y: auto; }
/* all that is chosen is in sight */
[data-testid="stMultiSelect"] [role="group"]:has(> [data-testid="stMultiSelectTagsContainer"]) {
  height: auto !important; max-height: 10rem !important; }
[data-testid="stMultiSelectTagsContainer"] { flex-wrap: wrap !important; height: auto !important;
  overflow: hidden auto !important; mask-image: none !important; }
.rl-store { text-align: right; font-size: .75rem; opacity: .75; overflow-wrap: anywhere; }
.rl-name { font-size: 1.5rem; font-weight: 600; line-height: 1.3; overflow-wrap: anywhere; }
@media (max-width: 640px) {  /* a name of 200 characters fills no phone */
.rl-name { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 3; overflow: hidden; } }
.rl-project { font-weight: 400; opacity: .75; }
.rl-head { font-size: 1.5rem; font-weight: 600; line-height: 1.3; }
.rl-facts { font-size: .875rem; display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; font-variant-numeric: tabular-nums; }
.rl-facts .label { opacity: .75; }
.rl-word { font-weight: 600; white-space: nowrap; }
.rl-verdict { font-size: 1rem; font-weight: 600; overflow-wrap: anywhere; }
.rl-verdict .label { font-weight: 400; }
.rl-why { font-size: .95rem; margin-top: .5rem; overflow-wrap: anywhere; }
.rl-verdict .label, .rl-why .label { opacity: .75; margin-right: .75rem; }
.rl-why a { color: inherit; }
.rl-why .arrow { opacity: .5; padding: 0 .4rem; }
.rl-do { font-size: .9rem; margin: .4rem 0; padding-left: 1.3rem; }
.rl-do code { font-size: .85em; }
.rl-do li { margin: .45rem 0; overflow-wrap: anywhere; }
ul.rl-plain { list-style: none; padding-left: 0; margin: .2rem 0 .4rem; }
ul.rl-plain li { margin: .35rem 0; padding: 0; overflow-wrap: anywhere; font-size: .9rem; }
.rl-step { margin-top: .4rem; }
.rl-token { font-family: monospace; font-size: .95em; font-weight: 700; overflow-wrap: anywhere;
  unicode-bidi: isolate; }
.rl-context { font-family: monospace; font-size: .85rem; overflow-wrap: anywhere; }
.rl-layers { display: flex; height: .9rem; margin: .25rem 0; border-radius: 2px; overflow: hidden; gap: 1px; }
.rl-stages { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0 .8rem; align-items: center; }
.rl-legend { font-size: .8rem; display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; align-items: center; }
.rl-legend .label { opacity: .75; }
.rl-legend .swatch { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
.rl-scale { display: inline-block; width: 9rem; height: .8em; margin: 0 .4em; vertical-align: -1px; border-radius: 2px;
  box-shadow: 0 0 0 1px color-mix(in srgb, currentColor 20%, transparent); }
.rl-culprit { outline: 1.5px solid currentColor; font-weight: 700; font-family: monospace; padding: 0 2px;
  margin-right: .4em; }
.rl-missing { text-decoration: underline dotted; font-family: monospace; opacity: .75; margin-right: .4em; }
.rl-family { font-size: 1rem; font-weight: 600; margin: .9rem 0 .1rem; }
.rl-bars { display: grid; grid-template-columns: minmax(0, 1fr) auto; gap: .1rem .6rem; align-items: center;
  font-size: .8rem; line-height: 1.2; font-variant-numeric: tabular-nums; margin-top: .35rem; }
.rl-bars .name { overflow-wrap: anywhere; }
.rl-bars .share { text-align: right; opacity: .75; }
.rl-bars .bar { grid-column: 1 / -1; height: .4rem; border-radius: 2px; min-width: 2px; margin: .15rem 0 .25rem; }
.rl-soft { font-size: .8rem; opacity: .75; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.rl-text { font-size: .875rem; line-height: 1.5; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 40rem;
  overflow: auto; unicode-bidi: plaintext; padding: .4rem .6rem; margin: .15rem 0 .5rem;
  border-left: 3px solid color-mix(in srgb, currentColor 25%, transparent); }
.rl-text:focus-visible, .rl-fold summary:focus-visible { outline: 2px solid currentColor; outline-offset: 1px; }
.rl-text mark { background: color-mix(in srgb, #E69F00 55%, transparent); color: inherit; font-weight: 700;
  outline: 1.5px solid currentColor; }
.rl-fold summary { cursor: pointer; font-weight: 600; white-space: normal; margin: .3rem 0; }
.rl-fold[open] summary { opacity: .75; font-weight: 400; }
.rl-rollout { margin: .3rem 0 .9rem; }
.rl-numbers { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
.rl-numbers th { font-weight: 400; opacity: .75; }
.rl-numbers th, .rl-numbers td { text-align: right; padding: .15rem .9rem .15rem 0; border: 0; }
.rl-panel { font-size: .8125rem; font-weight: 600; line-height: 1rem; margin-top: .25rem; }
.rl-quiet { font-size: .8rem; opacity: .75; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
@media (max-width: 640px) {  /* on a phone the strip comes first: the containers of the strip dissolve */
  [data-testid="stMainBlockContainer"] > [data-testid="stVerticalBlock"] :is([data-testid="stVerticalBlock"],
    [data-testid="stHorizontalBlock"], [data-testid="stColumn"], [data-testid="stLayoutWrapper"]
    ):has(.st-key-board-strip) { display: contents; }
  .st-key-board-strip { order: 1; }
  [data-testid="stLayoutWrapper"]:has(> .st-key-controls) { order: 2; }
  .st-key-board-strip ~ * { order: 4; }
  :has(.st-key-board-strip) ~ [data-testid] { order: 5; }
  [data-testid="stColumn"]:has(.st-key-drawer), [data-testid="stLayoutWrapper"]:has(> .st-key-culprits) { order: 3; }
  [data-testid="stColumn"]:has(.st-key-drawer) { min-width: 100% !important; }
  .st-key-controls { gap: .5rem 1rem !important; }
}
[data-testid="stLayoutWrapper"]:has(> .st-key-verdict) { position: sticky; top: 3.75rem; z-index: 990;
  background: var(--rl-ground, #fff); padding: .35rem 0; border-bottom: 1px solid
  color-mix(in srgb, currentColor 15%, transparent); }
.st-key-verdict { gap: .4rem !important; }
@media (min-width: 641px) { .rl-narrow { display: none; } }
.st-key-verdict-buttons { gap: .5rem !important; }
.st-key-verdict-buttons button { min-height: 2.25rem; padding: .1rem .75rem; white-space: nowrap; }
@media (max-width: 640px) { [data-testid="stButtonGroup"] button { padding-left: .6rem; padding-right: .6rem; } }
@media (max-width: 640px) { .st-key-verdict-buttons { gap: .35rem !important; }
  .st-key-verdict-buttons button { min-height: 2.75rem; padding: .1rem .5rem; }
  .st-key-verdict-buttons button p { font-size: .8rem; } }
@media (min-width: 900px) {
  .st-key-verdict { flex-direction: row !important; align-items: center; gap: 1.5rem !important; }
  .st-key-verdict > :first-child { flex: 1 1 0; width: auto; min-width: 0; }
  .st-key-verdict > :last-child { flex: none; width: auto; }
  [data-testid="stColumn"]:has(.st-key-drawer) {
    position: sticky; top: 8.5rem; align-self: flex-start; max-height: calc(100vh - 9.5rem); overflow-y: auto;
    scrollbar-width: thin; }
}
.rl-since { font-weight: 400; opacity: .75; margin-left: .6rem; white-space: nowrap; font-size: .875rem; }
[data-rl-side="shut"] [data-testid="stColumn"]:has(.st-key-drawer) { display: none; }
.rl-keys { border: 1px solid color-mix(in srgb, currentColor 25%, transparent); border-radius: 8px;
  padding: 1.2rem 1.5rem; background: var(--rl-ground, #fff); color: inherit; font-size: .9rem; }
.rl-keys::backdrop { background: rgb(0 0 0 / .35); }
.rl-keys dl { display: grid; grid-template-columns: auto 1fr; gap: .35rem 1.2rem; margin: 0 0 1rem;
  align-items: baseline; }
.rl-keys dd { margin: 0; }
.rl-keys kbd { font: inherit; font-weight: 600; }
.rl-keys button { font: inherit; color: inherit; background: none; border-radius: 6px; padding: .3rem .9rem;
  min-height: 2.25rem; border: 1px solid color-mix(in srgb, currentColor 35%, transparent); }
.rl-pairs { font-size: .8rem; margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.rl-pairs dt { opacity: .75; margin-top: .3rem; }
.rl-pairs dd { margin: 0; font-family: monospace; }
[data-testid="stTopNavLink"]:focus-visible, [data-testid="stMain"]:focus-visible {
  outline: 2px solid currentColor !important; outline-offset: -2px; }
[data-testid="stCaptionContainer"] { color: inherit !important; opacity: .75; }
[data-testid="stCaptionContainer"] :is(p, code) { color: inherit !important; }
[data-testid="stElementContainer"][data-stale="true"] { opacity: 1 !important; transition: none !important; }
</style>"""
DARK_STYLE = """<style>
:root { --rl-ground: rgb(23, 22, 20); }
[data-testid="stBaseButton-primary"]:not(:disabled), [data-tag] * { color: #0b1a24 !important; }
</style>"""
"""Styles for the dark theme, where buttons are light and white text on them would be illegible."""
