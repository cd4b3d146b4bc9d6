"""Distributions that look installed: a directory with their metadata, first on the path."""

import sys


class Installations:
    """``installed(name, version)``; an empty version takes back what was pretended before."""

    def __init__(self, root, monkeypatch):
        self._root, self._monkeypatch, self._sites = root, monkeypatch, []

    def __call__(self, name, version, **modules):
        """``modules``: the source of each import package that comes with it."""
        for site in self._sites:
            sys.path.remove(site)
        self._sites.clear()
        if not version:
            return
        site = self._root / f"{name}-{version}"
        about = site / f"{name}-{version}.dist-info" / "METADATA"
        about.parent.mkdir(parents=True, exist_ok=True)
        about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for module, source in modules.items():
            (site / module).mkdir(exist_ok=True)
            (site / module / "__init__.py").write_text(source)
        self._monkeypatch.syspath_prepend(str(site))
        self._sites.append(str(site))
