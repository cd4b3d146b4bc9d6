"""The published shape of a message: JSON Schema, draft 2020-12, beside this file."""

from __future__ import annotations

import json
from importlib.resources import files

from rlwatch.records import JSON

FILE = "alert.schema.json"


def alert_schema() -> dict[str, JSON]:
    """The schema that every body of a webhook keeps.

    >>> alert_schema()["properties"]["schema_version"]["const"]
    1
    """
    schema: dict[str, JSON] = json.loads((files("rlwatch.notify") / FILE).read_text(encoding="utf-8"))
    return schema
