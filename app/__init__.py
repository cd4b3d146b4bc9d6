"""The dashboard: Streamlit pages that show the runs of a store. The trainer imports none of this package.

Imports inside this package are relative, because its name depends on how it is loaded. Streamlit runs ``main.py`` as a
script, which loads its own directory as the package ``rlwatch_app`` (see :mod:`rlwatch_app.main`), so the files work
from a checkout (``app/``) and from a wheel (``rlwatch/_app``).

Pages live in ``views/``, because Streamlit treats a directory called ``pages`` next to the main script specially.
"""
