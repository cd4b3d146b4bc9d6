"""From the training thread to the store: a bounded queue, one writer thread, counted drops.

Nothing that the training thread calls here waits for a lock, the disk or a device.
"""
