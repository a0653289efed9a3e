"""What tests share: a warm pool of ranks, a look at what they leave behind, and folders of their own."""

import gc
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.commands import forking_commands
from tests.forked import ForkedRanks, Zygotes, fork_servers_from, forking

from kway.launch.local import Ranks
from kway.report.curves import draw

MARK = "KWAY_TEST_MARK"
GONE_WITHIN_S = 10.0
# What would make a test see the launcher, or the data, of whoever runs the tests.
FOREIGN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("KWAY_DATA", "KWAY_INIT_METHOD"),
)


class Pool:
    """CPU ranks of one thread each, there when first needed and new after a test that broke them.

    Two of them for what asks for no more, four for the rest: where they cannot be forked, a start costs as many
    imports of torch as there are ranks.
    """

    def __init__(self, zygotes: Zygotes) -> None:
        self._zygotes = zygotes
        self._ranks: dict[int, Ranks] = {}

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        size: int = 2,
        limit: float = 60,
        **options: Any,
    ) -> list[Any]:
        """Call ``function(context, *arguments)`` in ``size`` ranks, for ``limit`` seconds; results by rank."""
        seconds = timedelta(seconds=limit)
        return self.of(size).run(function, *arguments, size=size, limit=seconds, **options)

    def of(self, size: int) -> Ranks:
        """Return living ranks, ``size`` at least."""
        count = 2 if size <= 2 else 4
        found = self._ranks.get(count)
        if found is None or not found.alive:
            found = self._ranks[count] = ForkedRanks(self._zygotes, count)
        return found

    def close(self) -> None:
        for found in self._ranks.values():
            found.close()


@pytest.fixture(scope="session")
def zygotes() -> Iterator[Zygotes]:
    with Zygotes() as found:
        start_servers = fork_servers_from(found)
        yield found
        start_servers()


@pytest.fixture
def forks(zygotes: Zygotes) -> Iterator[None]:
    """Fork the ranks that the test has kway start in this process, where how they start is not its point."""
    with forking(zygotes):
        yield


@pytest.fixture
def forked_commands(zygotes: Zygotes) -> Iterator[None]:
    """Fork the commands that the test starts, and their ranks, where how they start is not its point."""
    with forking_commands(zygotes):
        yield


@pytest.fixture(scope="session")
def ranks(zygotes: Zygotes) -> Iterator[Pool]:
    pool = Pool(zygotes)
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def _own_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background of a shell; what tests start would ignore Ctrl-C as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        # Under nohup they are ignored, and so they would be in what the tests start.
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for name in FOREIGN:
            patch.delenv(name, raising=False)
        # To draw takes longer than to train for some steps, and few tests look at the picture.
        patch.setattr("kway.report.curves.draw", _undrawn)
        # The suite keeps the processors busy itself.
        patch.setattr("kway.devices.busy.taken", lambda usable: "")
        yield


def _undrawn(training: Any, path: Path) -> Path:
    path.touch()
    return path


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the curves drawn of runs in this process. Commands draw in any case."""
    monkeypatch.setattr("kway.report.curves.draw", draw)


def marked(mark: str) -> dict[int, str]:
    """Map the id of each living process that inherited ``mark`` to its command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it ended, or it belongs to somebody else
            continue
    found.pop(os.getpid(), None)
    return found


@pytest.fixture
def leftovers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], dict[int, str]]]:
    """Fail the test if a process that was started in it is alive 10 s after it.

    Gives a function that lists those which live now. Not together with ``ranks``, whose processes stay.
    """
    if sys.platform != "linux":
        pytest.skip("looks for processes in /proc")
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield lambda: marked(mark)
    deadline = time.monotonic() + GONE_WITHIN_S
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"processes that outlived the test: {left}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what imports and collection make, a million objects for the whole session, out of each look for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # A rank has no way to import a test file: what tests define travels by value.
        if isinstance(item, pytest.Function):
            item.module.__kway_by_value__ = True
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
