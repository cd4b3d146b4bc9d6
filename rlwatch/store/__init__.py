"""Where runs are kept: ``open_store(url)`` in :mod:`rlwatch.store.url`, the contract in :mod:`rlwatch.store.base`."""
