"""Part of the stand-in."""

import uuid


def random_uuid():
    return uuid.uuid4().hex
