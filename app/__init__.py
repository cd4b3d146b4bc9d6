"""The dashboard: Streamlit pages over the store, nothing the trainer imports.

This directory is a package that does not know its own name: inside, imports are relative. Streamlit runs
``main.py`` as a script, which loads the directory it lies in as the package ``rlwatch_app`` (see
:mod:`rlwatch_app.main`), so the same files work from a checkout (``app/``) and from a wheel
(``rlwatch/_app``).

Pages live in ``views/``: a directory called ``pages`` beside the main script means something else to
Streamlit.
"""
