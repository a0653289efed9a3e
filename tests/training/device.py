"""A double of a device that works through what it was given in its own time."""


class Device:
    """Its clock and the host's are one: ``now``. It is busy until ``busy``."""

    def __init__(self):
        self.now = self.busy = 0.0
        self.points = self.waits = 0

    def point(self):
        self.points += 1
        return Point(self)

    def work(self, seconds):
        self.busy = max(self.busy, self.now) + seconds


class Point:
    def __init__(self, device):
        self.device, self.at = device, None

    def record(self):
        self.at = max(self.device.now, self.device.busy)

    def query(self):
        return self.at <= self.device.now

    def synchronize(self):
        self.device.waits += 1
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, other):
        assert self.query()
        assert other.query()
        return (other.at - self.at) * 1000
