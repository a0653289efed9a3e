"""What a product of two matrices reaches on this device: prints a row. All shares are of this."""

import argparse
import json
import sys
import time

import torch
from settings import PRODUCT

PRODUCTS, BLOCKS = 20, 5


def measure(device: torch.device, length: int = PRODUCT) -> dict[str, object]:
    """Time BLOCKS times 20 products in bfloat16 after one that is not counted; operations a second of each block."""
    a = torch.randn(length, length, device=device, dtype=torch.bfloat16)
    a @ a
    found = []
    for _ in range(BLOCKS):
        wait(device)
        begun = time.perf_counter()
        for _ in range(PRODUCTS):
            a @ a
        wait(device)
        found.append(PRODUCTS * 2 * length**3 / (time.perf_counter() - begun))
    return {"kind": "peak", "length": length, "flops_of_blocks": found}


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="a small product, which says nothing")
    options = parser.parse_args()
    device = torch.device("cpu" if options.cpu else "cuda:0")
    print(json.dumps(measure(device, 64 if options.cpu else PRODUCT)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
