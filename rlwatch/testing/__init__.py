"""Contract suites for stores, detectors, importers and notifiers, and a webhook receiver.

They ship with the package: subclass a suite, give it your implementation through its fixture, and pytest
holds it to what ours are held to. The suites need pytest and hypothesis; the receiver needs neither.
"""
