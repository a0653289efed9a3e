"""How many collectives of torch this process has begun, whoever called them: a model may have some of its own.

Ranks that are threads of one process call none of them: what these begin, ``Trace.begun`` counts, rank by rank.
"""

from typing import Any

from torch.distributed import distributed_c10d as c10d


def said() -> int:
    """Return a number that grows with each collective of this process, on any group of ranks.

    Those that a recording does again are not counted, nor those on groups of a back end that does not count.
    """
    groups: Any = c10d._world.pg_map
    return sum(map(_count, groups))


def _count(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0
