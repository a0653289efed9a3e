"""What others measure of GPT-2's sizes, without what is not held against anything: prints JSON rows.

    torchrun --nproc-per-node K yardstick_part.py DIR --sizes 124m,774m

The script is read from DIR/gpt.py and never copied: sizes and ways that are not wanted are taken out from outside.
"""

import argparse
import ast
import sys
from collections.abc import Collection
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

# The folder of this file comes first, and holds a script of the same name.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from speed.yardstick_part import Rows


class Only(ast.NodeTransformer):
    """Leaves of loops over constant pairs (size, modes) those that are wanted. ``found``: how many loops there were."""

    def __init__(self, sizes: Collection[str], modes: Collection[str]) -> None:
        self._sizes, self._modes, self.found = sizes, modes, 0

    def visit_For(self, node: ast.For) -> Any:
        """Narrow the loop, where it is one of these."""
        self.generic_visit(node)
        try:
            pairs = [
                (str(size), [str(mode) for mode in modes]) for size, modes in ast.literal_eval(node.iter)
            ]
        except (ValueError, TypeError):
            return node
        self.found += 1
        kept = [
            (size, [mode for mode in modes if mode in self._modes])
            for size, modes in pairs
            if size.lower() in self._sizes
        ]
        node.iter = ast.copy_location(ast.parse(repr(kept), mode="eval").body, node.iter)
        return node


def narrowed(text: str, sizes: Collection[str], modes: Collection[str]) -> ast.Module:
    """Return the script with these sizes and modes alone. Raises ``LookupError`` where it has no such loop."""
    only = Only(sizes, modes)
    tree = ast.fix_missing_locations(only.visit(ast.parse(text)))
    if only.found != 1:
        raise LookupError(f"{only.found} loops over sizes and their modes, where there should be one")
    return tree


def main() -> None:
    """Run what was asked for, in the ranks that are there; the script ends the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", default="124m,774m")
    parser.add_argument("--modes", default="ddp")
    options = parser.parse_args()
    file = options.folder / "gpt.py"
    script = narrowed(file.read_text(), options.sizes.split(","), options.modes.split(","))
    # torch.compile reads the source of what it compiles from the file that the code names.
    code = compile(script, str(file), "exec")
    names = {"__name__": "__main__", "__file__": str(file)}
    with redirect_stdout(Rows(sys.stdout, file="gpt")):
        exec(code, names)


if __name__ == "__main__":
    main()
