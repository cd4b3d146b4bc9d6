"""Contract suites for stores, detectors, importers and notifiers, and a webhook receiver for tests.

They ship with the package: subclass a suite, provide your implementation through its fixture, and pytest checks it as
it checks rlwatch's own. The suites need pytest and hypothesis; the receiver needs neither.
"""
