"""Environment variables whose names look like misspellings of ones that matter here.

Nothing reads a misspelled variable, so nothing complains: a run then uses every GPU, or every core. A name is
suspected only where it is no real variable itself, and close to one of ``WATCHED``.
"""

from collections.abc import Iterable

WATCHED = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "KWAY_DATA",
    "KWAY_INIT_METHOD",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_DEBUG",
    "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_IB_DISABLE",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_IB_TIMEOUT",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_FAMILY",
    "NCCL_SOCKET_IFNAME",
    "NCCL_TIMEOUT",
    "NCCL_TOPO_FILE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_SHOW_CPP_STACKTRACES",
    "WORLD_SIZE",
)

# Real variables of other programs that stand close to a watched name.
OTHERS = frozenset(
    (
        "BLIS_NUM_THREADS",
        "CUDA_DEVICE",
        "CUDA_DEVICES",
        "CUDA_HOME",
        "CUDA_PATH",
        "CUDA_VERSION",
        "GOTO_NUM_THREADS",
        "GPU_DEVICE_ORDINAL",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "HIP_VISIBLE_DEVICES",
        "LOCAL_SIZE",
        "MKL_NUM_STRIPES",
        "MUSA_VISIBLE_DEVICES",
        "NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_BLOCKING_WAIT",
        "NCCL_IB_ADDR_FAMILY",
        "NCCL_IB_ADDR_RANGE",
        "NCCL_IB_CUDA_SUPPORT",
        "NCCL_IB_MERGE_NICS",
        "NCCL_MAX_CTAS",
        "NCCL_MAX_NRINGS",
        "NCCL_MIN_CTAS",
        "NCCL_MIN_NRINGS",
        "NCCL_NET_GDR_READ",
        "NCCL_NETS_DISABLE",
        "NCCL_P2P_DIRECT_DISABLE",
        "NCCL_TOPO_DUMP_FILE",
        "NODE_RANK",
        "NUMEXPR_NUM_THREADS",
        "NVIDIA_VISIBLE_DEVICES",
        "OMP_NUM_TEAMS",
        "OPENBLAS_NUM_THREADS",
        "PYTORCH_HIP_ALLOC_CONF",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "ROCR_VISIBLE_DEVICES",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "TORCH_NCCL_USE_COMM_NONBLOCKING",
        "ZE_AFFINITY_MASK",
    )
)


def _beginning(name: str) -> str:
    """Return the first two letters, in either order the same."""
    return "".join(sorted(name[:2]))


# Families such as NCCL and RCCL differ in their first letter alone, so that one has to agree. To compare all names of
# an environment with all of these at each start would take milliseconds.
BY_BEGINNING = {
    start: tuple(name for name in WATCHED if _beginning(name) == start)
    for start in set(map(_beginning, WATCHED))
}

# Nobody means anything else by a name that begins so.
TELLING_START = "CUDA_VIS"
# In a short name one wrong letter makes another word; a long one stays recognisable with two.
LONG = 14


def misspelled(names: Iterable[str]) -> list[str]:
    """Return one line for each name in ``names`` that looks like a misspelling, in sorted order."""
    lines = []
    for name in sorted(names):
        right = meant(name)
        if right is not None:
            lines.append(f"{name} is set, but nothing reads it: {right} is what it looks like")
    return lines


def meant(name: str) -> str | None:
    """Return the watched name that ``name`` misspells, or ``None``."""
    if name in WATCHED or name in OTHERS:
        return None
    plain = name.upper().replace("-", "_").strip("_ ")
    if plain in WATCHED:
        return plain
    if plain in OTHERS:
        return None
    if plain.startswith(TELLING_START):
        return "CUDA_VISIBLE_DEVICES"
    near = []
    for right in BY_BEGINNING.get(_beginning(plain), ()):
        allowed = 2 if len(right) >= LONG else 1
        if abs(len(plain) - len(right)) > allowed:
            continue
        distance = edits(plain, right)
        if distance <= allowed and not _numbered(plain, right):
            near.append((distance, right))
    return min(near)[1] if near else None


def _numbered(name: str, right: str) -> bool:
    """Tell whether ``name`` is ``right`` with a number, as scripts name their own copies."""
    return name.rstrip("0123456789_") == right


def edits(first: str, second: str) -> int:
    """Count the letters to insert, drop, replace or swap with a neighbour to get from one to the other."""
    before: list[int] = []
    above = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        row = [i]
        for j, other in enumerate(second, 1):
            cost = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, above = above, row
    return above[-1]
