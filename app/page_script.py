"""The script that every page runs once: history, reloads, and keyboard shortcuts."""

from __future__ import annotations

import json
from functools import cache

import streamlit as st

from .endpoint import HERE, module_address


def base_path() -> str:
    """Return the URL path below which the server serves the dashboard, "" for the root."""
    path = str(st.get_option("server.baseUrlPath") or "").strip("/")
    return f"/{path}" if path else ""


@cache
def page_script() -> str:
    """Return the JavaScript of every page, which goes before the script of a component."""
    keys = json.dumps(module_address("keys.js", base_path()))
    page = (HERE / "page.js").read_text(encoding="utf-8")
    return f"{page}\nglobalThis.rlwatchKeys ??= import(location.origin + {keys}).catch(() => {{}});\n"
