"""From the training thread to the sinks: a bounded queue, one writer thread, counted drops.

Nothing the training thread calls here waits for a lock, the disk or a device.
"""
