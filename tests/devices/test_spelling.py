import pytest

from kway.devices.spelling import OTHERS, WATCHED, edits, meant, misspelled

UNRELATED = """
PATH HOME RANK rank BANK DEBUG MASTER WORKER PORT SIZE LOCAL_RANK_2 WORLD_SIZES_ALL
OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK PMI_RANK SLURM_PROCID CUDA_HOME CUDA_PATH
RCCL_DEBUG KWAY_DATA_2 CUDA_CACHE_PATH CUDA_MPS_PIPE_DIRECTORY NCCL_IB_TC NCCL_IB_SL
NCCL_NTHREADS NCCL_CROSS_NIC NCCL_LAUNCH_MODE NCCL_GRAPH_FILE NCCL_CHECKS_DISABLE
TORCHELASTIC_RUN_ID TORCH_HOME TORCH_LOGS XDG_CACHE_HOME MASTER_KEY MKL_DYNAMIC
OMP_PROC_BIND OMP_PLACES OMP_DYNAMIC KMP_AFFINITY NUMEXPR_MAX_THREADS VECLIB_MAXIMUM_THREADS
"""


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("CUDA_VISBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("CUDA_VISBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        ("CUDA_VISIBLE_DEVICES_", "CUDA_VISIBLE_DEVICES"),
        ("cuda_visible_devices", "CUDA_VISIBLE_DEVICES"),
        ("CUDA-VISIBLE-DEVICES", "CUDA_VISIBLE_DEVICES"),
        ("CUDA_VISIBLE_GPUS", "CUDA_VISIBLE_DEVICES"),
        ("CUDA_VISIBILE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        ("UCDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        ("CUDA_DEVICES_ORDER", "CUDA_DEVICE_ORDER"),
        ("OMP_NUM_THREAD", "OMP_NUM_THREADS"),
        ("OMP_NUM_THREDS", "OMP_NUM_THREADS"),
        ("MASTER_ADR", "MASTER_ADDR"),
        ("MASTER_PROT", "MASTER_PORT"),
        ("WORLDSIZE", "WORLD_SIZE"),
        ("world_size", "WORLD_SIZE"),
        ("LOCAL_RNAK", "LOCAL_RANK"),
        ("KWAY_DATTA", "KWAY_DATA"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("NCCL_P2P_DISABLED", "NCCL_P2P_DISABLE"),
        ("NCCL_DEBG", "NCCL_DEBUG"),
        ("PYTORCH_CUDA_ALOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        ("PYTORCH_CUDA_ALLOC_CONFIG", "PYTORCH_CUDA_ALLOC_CONF"),
        ("TORCH_DISTRIBUTED_DEBGU", "TORCH_DISTRIBUTED_DEBUG"),
    ],
)
def test_misspellings_are_named(wrong, right):
    assert meant(wrong) == right


@pytest.mark.parametrize("name", sorted([*WATCHED, *OTHERS]))
def test_real_names_are_left_alone(name):
    assert meant(name) is None


@pytest.mark.parametrize("name", UNRELATED.split())
def test_other_programs_variables_are_left_alone(name):
    assert meant(name) is None


def test_one_sorted_line_each():
    lines = misspelled(["PATH", "OMP_NUM_THREAD", "CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"])
    assert len(lines) == 2
    assert lines[0].startswith("CUDA_VISIBLE_DEVICE is set")
    assert "OMP_NUM_THREADS" in lines[1]


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ("", "", 0),
        ("abc", "abc", 0),
        ("abc", "acb", 1),
        ("abc", "ab", 1),
        ("", "ab", 2),
        ("kitten", "sitting", 3),
    ],
)
def test_edits(first, second, count):
    assert edits(first, second) == edits(second, first) == count
