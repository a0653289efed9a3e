"""Three ways to do tasks over a list: in this process, in a pool that is there, in one new process for each task."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from kway.measuring.tasks import TASKS, Task, answer, cut, end_with_parent
from kway.measuring.timer import Work
from kway.measuring.work import Call, lazily, waited

SERIAL, POOL, EACH = "serial", "pool", "one process a task"
# How many elements could be done in the time that a way takes to begin: what a few cost tells of many only with these.
BEGIN = {SERIAL: 0, POOL: 1_000, EACH: 50_000}


class Processes:
    """``count`` tasks at a time, in processes that a fork server starts: it has imported torch, as loader workers'.

    What was opened is closed with ``opened``.
    """

    def __init__(self, context: Any, count: int, opened: ExitStack) -> None:
        self._context, self.count = context, count
        self._opened = opened
        self._pool: Any = None

    @property
    def pool(self) -> Any:
        """The pool, started when first needed."""
        if self._pool is None:
            self._pool = self._opened.enter_context(self._context.Pool(self.count, end_with_parent))
        return self._pool

    def in_pool(self, task: Task, values: Sequence[float]) -> list[float]:
        """Do a task over values, one part of them in each process of the pool."""
        parts = self.pool.map(task, cut(values, self.count), chunksize=1)
        return [value for part in parts for value in part]

    def in_new_ones(self, task: Task, values: Sequence[float]) -> list[float]:
        """Do a task over values, each part of them in a process that is started for it, and gone after it."""
        running = []
        for part in cut(values, self.count):
            here, there = self._context.Pipe(duplex=False)
            process = self._context.Process(target=answer, args=(task, part, there), daemon=True)
            process.start()
            there.close()
            running.append((process, here))
        found: list[float] = []
        for process, here in running:
            found += here.recv()
            here.close()
            process.join()
        return found

    def start_one(self) -> None:
        """Start one process that does nothing, and wait for its end."""
        process = self._context.Process(target=end_with_parent, daemon=True)
        process.start()
        process.join()

    def start_pool(self) -> None:
        """Start a pool, wait until all its processes answer, and end it."""
        with self._context.Pool(self.count, end_with_parent) as pool:
            pool.map(abs, range(self.count), chunksize=1)
            pool.close()
            pool.join()

    def work(self, way: str, kind: str, elements: int) -> Work:
        """Return the work of a way over so many elements."""
        task = TASKS[kind]

        def make() -> Work:
            values = [float(index) for index in range(elements)]
            calls: dict[str, Call] = {
                SERIAL: lambda: task(values),
                POOL: lambda: self.in_pool(task, values),
                EACH: lambda: self.in_new_ones(task, values),
            }
            return waited(calls[way], lambda: None)

        return lazily(make)
