"""Start of ``rlwatch ui``, and the script that Streamlit runs: loads its directory as ``rlwatch_app`` and calls it.

With the gate's settings it starts the server; Streamlit then runs it again for every draw of a page. Both run this file
as a script, so it belongs to no package; and the directory is called ``app`` in a checkout and ``rlwatch/_app`` in a
wheel. Loading it under one fixed name makes relative imports work in both, without adding its directory to
``sys.path``, where ``format`` or ``table`` would become top-level modules.
"""

import os
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

PACKAGE = "rlwatch_app"


def load_package(directory: Path) -> None:
    """Load ``directory`` as the importable package :data:`PACKAGE`, once per process."""
    if PACKAGE in sys.modules:
        return
    spec = spec_from_file_location(PACKAGE, directory / "__init__.py", submodule_search_locations=[str(directory)])
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the dashboard from {directory}")
    package = module_from_spec(spec)
    spec.loader.exec_module(package)
    sys.modules[PACKAGE] = package


if __name__ == "__main__":
    load_package(Path(__file__).resolve().parent)
    if "RLWATCH_UI_SETTINGS" in os.environ:
        import_module(f"{PACKAGE}.gate").serve()
    else:
        import_module(f"{PACKAGE}.navigation").show()
